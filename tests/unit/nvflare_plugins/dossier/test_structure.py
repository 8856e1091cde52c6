"""What a model's structure tells: known answers, a naive twin, planted groups, and what the rules make of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.table import Table
from nvflare_plugins.dossier.structure import (
    Groups,
    Trained,
    enough_child_weight,
    group_rows,
    judge,
    judge_privacy,
    leaves_reached,
    n_parameters,
)
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.site.policy_values import ReleaseRules

NAMES = ("a", "b", "c")
LOGISTIC = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1, "seed": 0}
KINDS = [
    LOGISTIC,
    {**LOGISTIC, "objective": "binary:hinge"},
    {**LOGISTIC, "objective": "multi:softprob", "num_class": 3},
    {**LOGISTIC, "objective": "multi:softmax", "num_class": 3, "num_parallel_tree": 2},
    {**LOGISTIC, "objective": "multi:softprob", "num_class": 3, "multi_strategy": "multi_output_tree"},
    {**LOGISTIC, "objective": "reg:squarederror"},
    {**LOGISTIC, "booster": "dart"},
]


def rows(n: int, n_classes: int = 2, seed: int = 0) -> Table:
    random = np.random.default_rng(seed)
    features = random.integers(0, 4, (n, 3)).astype(np.float32)
    noise = np.where(features[:, 0] == 0, 0, random.integers(0, 3, n))  # where a is 0, so is the class
    label = ((features[:, 0] + noise) % n_classes).astype(np.float32)
    return Table(features, NAMES, ("float",) * 3, label, "y")


def model_of(table: Table, params: dict = LOGISTIC, n_rounds: int = 3) -> FinishedModel:
    matrix = xgb.DMatrix(table.features, table.label, feature_names=list(NAMES))
    return FinishedModel(bytes(xgb.train(params, matrix, n_rounds).save_raw("json")), "model.json")


def judged(model: FinishedModel, table: Table, rules: ReleaseRules = ReleaseRules(), **params: float) -> dict:  # noqa: B008
    trained = Trained(model.n_rounds, {**LOGISTIC, **params}, covers_are_of_rows=True, weighs_rows=False)
    return {one.rule: one for one in judge(model, table, trained, rules)}


@pytest.mark.parametrize("params", KINDS, ids=lambda one: one["objective"] + one.get("booster", ""))
def test_groups_and_leaves_are_those_of_a_walk_row_by_row(params: dict) -> None:
    table = rows(300, int(params.get("num_class", 2)))
    model = model_of(table, params)
    by_answer: dict[bytes, list[int]] = defaultdict(list)
    for row in range(table.n_rows):
        one = table.features[row : row + 1]
        answer = model.probabilities(one) if model.has_probabilities else model.predict(one, output_margin=True)
        by_answer[answer.tobytes()].append(row)
    found = group_rows(model, table, 12)
    sizes = [len(group) for group in by_answer.values()]
    assert (found.n_groups, found.smallest) == (len(sizes), min(sizes))
    assert found.in_small == sum(size for size in sizes if size < 12)
    if model.classes is not None:
        large = [group for group in by_answer.values() if len(group) >= 12 and len(set(table.label[group])) == 1]
        assert found.in_one_class == sum(map(len, large))
    if model.has_probabilities:
        cells = 0
        for group in by_answer.values():
            stated = model.probabilities(table.features[group[:1]])[0].astype(float) * len(group)
            cells += len(group) * any(0 < one < 12 for one in stated)
        assert found.in_small_cells == cells
    booster = xgb.Booster(model_file=bytearray(model.content))
    reached = booster.predict(xgb.DMatrix(table.features, feature_names=list(NAMES)), pred_leaf=True)
    places = Counter((tree, leaf) for row in reached.reshape(300, -1) for tree, leaf in enumerate(row))
    leaves = leaves_reached(model, table, 30, None)
    assert (leaves.n_leaves, leaves.smallest) == (len(places), min(places.values()))
    assert leaves.n_small == sum(n < 30 for n in places.values())


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows(300)
    model = model_of(table)
    whole = leaves_reached(model, table, 30, None)
    monkeypatch.setattr("nvflare_plugins.dossier.structure._BLOCK_VALUES", 50)
    assert leaves_reached(model, table, 30, None) == whole and whole.n_small > 0


def test_a_planted_lonely_row_is_found_and_two_hundred_alike_are_not() -> None:
    features = np.repeat(np.float32([[0, 0, 0], [1, 0, 0], [2, 0, 0]]), [200, 200, 1], axis=0)
    label = np.repeat(np.float32([0, 1, 0]), [200, 200, 1])
    label[:60] = 1
    label[200:260] = 0
    table = Table(features, NAMES, ("float",) * 3, label, "y")
    lonely = {**LOGISTIC, "min_child_weight": 0}
    found = group_rows(model_of(table, lonely, 1), table, 10)
    assert found == Groups(3, 1, 1, in_small_cells=1, certain=0, in_one_class=0)
    alike = replace(table, features=features[:400], label=label[:400])
    found = group_rows(model_of(alike, lonely, 1), alike, 10)
    assert found == Groups(2, 200, 0, in_small_cells=0, certain=0, in_one_class=0)
    one_class = replace(alike, label=np.repeat(np.float32([0, 1]), 200))
    assert group_rows(model_of(one_class, lonely, 1), one_class, 10).in_one_class == 400
    sure = model_of(one_class, {**lonely, "eta": 1, "lambda": 0}, 40)
    assert group_rows(sure, one_class, 10).certain == 400


def test_a_leaf_of_others_rows_is_known_by_its_cover() -> None:
    pooled = rows(1000)
    own = replace(pooled, features=pooled.features[:8], label=pooled.label[:8])
    squares = model_of(pooled, {**LOGISTIC, "objective": "reg:squarederror"}, 1)  # a hessian of 1: covers are rows
    booster = xgb.Booster(model_file=bytearray(squares.content))
    places = booster.predict(xgb.DMatrix(pooled.features, feature_names=list(NAMES)), pred_leaf=True)
    reached = {leaf: int((places == leaf).sum()) for leaf in places[:8].ravel()}
    found = leaves_reached(squares, own, 10, 1.0)
    assert (found.smallest, found.n_rows) == (min(reached.values()), 1000)
    found = leaves_reached(squares, own, 10, None)
    assert found.smallest <= 8 and found.n_rows == 8
    logistic = model_of(pooled, LOGISTIC, 1)
    found = leaves_reached(logistic, own, 10, 0.25)
    places = xgb.Booster(model_file=bytearray(logistic.content)).predict(
        xgb.DMatrix(pooled.features, feature_names=list(NAMES)), pred_leaf=True
    )
    assert 8 < found.smallest <= min(int((places == leaf).sum()) for leaf in places[:8].ravel())
    assert 900 < found.n_rows <= 1000
    trained = Trained(1, LOGISTIC, covers_are_of_rows=True, weighs_rows=False)
    assert trained.hessian_bound() == 0.25
    for other in ({"covers_are_of_rows": False}, {"weighs_rows": True}, {"params": {"objective": "count:poisson"}}):
        assert replace(trained, **other).hessian_bound() is None


def test_numbers_are_counted_by_hand() -> None:
    table = rows(400, 3)
    for params, of_leaf, n_trees in ((LOGISTIC, 1, 2), (KINDS[2], 2, 6), (KINDS[5], 1, 2)):
        model = model_of(replace(table, label=table.label % 2) if params is LOGISTIC else table, params, 2)
        frame = xgb.Booster(model_file=bytearray(model.content)).trees_to_dataframe()
        leaves = int((frame.Feature == "Leaf").sum())
        assert n_parameters(model) == 2 * (len(frame) - leaves) + of_leaf * leaves + n_trees


@pytest.mark.parametrize(
    ("depth", "rounds", "weight", "at_risk"),
    [  # SACRO-ML 2.0.1 on XGBClassifier(max_depth, n_estimators, min_child_weight)
        (3, 500, 0, False),
        (4, 3, 0, False),
        (4, 4, 1.5, True),
        (4, 12, 1.6, False),
        (4, 13, 3, True),
        (4, 62, 3.1, False),
        (4, 63, 6, True),
        (6, 500, 6.1, False),
        (0, 100, 1, True),
    ],
)
def test_settings_are_judged_as_sacro_does(depth: int, rounds: int, weight: float, at_risk: bool) -> None:
    table = rows(200)
    trained = Trained(rounds, {"max_depth": depth, "min_child_weight": str(weight)}, False, False)
    for rules in (ReleaseRules(), ReleaseRules(allow_unnecessary_risk=True)):
        found = {one.rule: one for one in judge(model_of(table), table, trained, rules)}["allow_unnecessary_risk"]
        assert found.holds is (rules.allow_unnecessary_risk or not at_risk)
        assert ("not among" not in found.measured) is at_risk
    assert weight > enough_child_weight(rounds) or at_risk or depth == 3


def test_each_rule_is_kept_up_to_its_limit_and_broken_beyond() -> None:
    table = rows(300)
    model = model_of(table, n_rounds=6)
    groups, leaves = group_rows(model, table, 10), leaves_reached(model, table, 10, 0.25)
    free = 300 - n_parameters(model)
    kept = ReleaseRules(
        max_share_in_small_groups=groups.in_small / 300,
        max_share_in_small_cells=groups.in_small_cells / 300,
        max_share_in_one_class_groups=groups.in_one_class / 300,
        min_leaf_rows=leaves.smallest,
        min_degrees_of_freedom=free,
    )
    assert all(one.holds for one in judged(model, table, kept, max_depth=3).values())
    for rule, limit in {
        "max_share_in_small_groups": (groups.in_small - 1) / 300,
        "max_share_in_small_cells": (groups.in_small_cells - 1) / 300,
        "max_share_in_one_class_groups": (groups.in_one_class - 1) / 300,
        "min_leaf_rows": leaves.smallest + 1,
        "min_degrees_of_freedom": free + 1,
    }.items():
        assert limit >= 0, "the rows show each of them"
        found = judged(model, table, replace(kept, **{rule: limit}), max_depth=3)
        assert [name for name, one in found.items() if not one.holds] == [rule]
        assert found[rule].remedy and found[rule].words and found[rule].limit != kept


def test_what_is_not_judged_says_so_and_a_regression_has_no_classes() -> None:
    table = rows(200)
    off = ReleaseRules(max_share_in_small_groups=1, max_share_in_small_cells=1, max_share_certain=1, min_leaf_rows=0)
    found = judged(model_of(table), table, off)
    for rule in ("max_share_in_small_groups", "max_share_in_small_cells", "max_share_certain", "min_leaf_rows"):
        assert (found[rule].limit, found[rule].holds) == ("not judged", True)
    squares = judged(model_of(table, KINDS[5]), table)
    assert not set(squares) & {"max_share_in_small_cells", "max_share_certain", "max_share_in_one_class_groups"}


def test_rows_without_labels_do_not_count_and_none_at_all_are_refused() -> None:
    table = rows(200)
    model = model_of(table)
    label = np.concatenate([table.label, np.float32([np.nan, 7])])
    more = replace(table, features=np.concatenate([table.features, table.features[:2]]), label=label)
    assert judged(model, more) == judged(model, table)
    with pytest.raises(ConfigurationError, match="no labelled rows"):
        judged(model, replace(table, features=table.features[:0], label=table.label[:0]))


def test_times_that_are_censored_are_labels() -> None:
    table = rows(200)
    bounds = np.stack([table.label + 1, np.where(table.label > 0, np.inf, table.label + 1)], axis=1).astype(np.float32)
    bounds[0] = np.nan
    matrix = xgb.DMatrix(table.features[1:], feature_names=list(NAMES))
    matrix.set_float_info("label_lower_bound", bounds[1:, 0])
    matrix.set_float_info("label_upper_bound", bounds[1:, 1])
    booster = xgb.train({"objective": "survival:aft", "max_depth": 3, "nthread": 1}, matrix, 3)
    model = FinishedModel(bytes(booster.save_raw("json")), "model.json")
    found = judged(model, replace(table, label=bounds))
    assert " of 199 rows in groups" in found["max_share_in_small_groups"].measured
    assert not set(found) & {"max_share_in_small_cells", "max_share_certain", "max_share_in_one_class_groups"}


@pytest.mark.parametrize(
    ("spent", "holds"),
    [((10.0, 1e-5), True), ((10.1, 1e-5), False), ((1.0, 1e-4), False), ((float("inf"), 0), False), (None, False)],
)
def test_a_private_model_is_judged_by_what_was_spent(spent: tuple[float, float] | None, holds: bool) -> None:
    (found,) = judge_privacy(spent, "as the site's ledger adds it up", ReleaseRules())
    assert found.holds is holds
