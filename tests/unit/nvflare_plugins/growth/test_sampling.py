"""Random numbers against the C++ standard's known answers and against XGBoost itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.growth.sampling import ColumnSampler, XGBoostRandom, sampled_rows
from nvflare_plugins.xgb.versions import installed_release
from tests.unit.nvflare_plugins.vertical.test_split_evaluation import parameters

F = np.float32


def test_the_ten_thousandth_draw_is_the_one_in_the_standard():
    twister = XGBoostRandom(5489)
    assert [twister.draw() for _ in range(10_000)][-1] == 4123659995  # ISO C++, rand.predef


def test_first_draw_of_seed_0_is_the_column_seed_on_the_wire():
    assert XGBoostRandom(0).draw().to_bytes(4, "little").hex() == "ac0a7f8c"


@pytest.mark.parametrize("seed", [1, 7, 2**32 - 1, 0])
def test_rows_follow_the_linear_congruential_sequence(seed):
    state, expected = seed or 1, []
    for _ in range(50):
        state = state * 16807 % 2**63
        expected.append((state - 1) / 2.0**63 < float(F(0.7)))
    assert sampled_rows(50, F(0.7), seed).tolist() == expected


def generator_of(seed: int) -> Callable[[], XGBoostRandom]:
    """Return what gives a training's column sampler its generator, as the installed XGBoost has it."""
    shared = XGBoostRandom(seed)
    if installed_release().sends_column_seed:
        own = XGBoostRandom(shared.draw())
        return lambda: own
    return lambda: XGBoostRandom(shared.draw())


def used_columns(params: dict, n_columns: int, n_trees: int) -> list[set[int]]:
    """Return the columns that each tree of a central training may split on: deep trees on noise use nearly all."""
    rng = np.random.default_rng(0)
    matrix = xgb.DMatrix(rng.normal(size=(3_000, n_columns)).astype(F), label=rng.normal(size=3_000))
    booster = xgb.train({"tree_method": "hist", "max_depth": 9, "nthread": 1, **params}, matrix, n_trees)
    frame = booster.trees_to_dataframe()
    return [{int(name[1:]) for name in tree.Feature if name != "Leaf"} for _, tree in frame.groupby("Tree", sort=True)]


@pytest.mark.parametrize("n_columns", [7, 8, 20, 33])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.77])
def test_tree_columns_are_those_of_xgboost(n_columns, share):
    used = used_columns({"colsample_bytree": share, "seed": 5}, n_columns, 4)
    params = dataclasses.replace(parameters(), colsample_bytree=F(share))
    sampler = ColumnSampler(params, n_columns, generator_of(5))
    if installed_release().sends_column_seed:
        sampler.begin_tree()  # which samples once more when it sets itself up
    for columns in used:
        sampler.begin_tree()
        allowed = set(np.flatnonzero(sampler.tree_columns()))
        assert columns <= allowed and len(columns) > 0.9 * len(allowed)


def test_level_columns_are_kept_and_node_columns_drawn_anew():
    params = dataclasses.replace(parameters(), colsample_bylevel=F(0.5), colsample_bynode=F(0.5))
    sampler = ColumnSampler(params, 40, generator_of(3))
    sampler.begin_tree()
    nodes = [sampler.node_columns(1) for _ in range(30)]
    level = np.any(nodes, axis=0)
    assert level.sum() == 20 and all(node.sum() == 10 for node in nodes)
    assert len({node.tobytes() for node in nodes}) > 20
