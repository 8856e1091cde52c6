"""Trees that are grown from integers against centralized XGBoost's, in every field, of each release.

The installed release grows live, the others' trees are stored (``growth_trees.py``; ``make oracle`` grows them anew).
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.growth._native import NUMPY, variants
from nvflare_plugins.growth.arithmetic import ARITHMETICS, arithmetic_of
from tests.oracle import growth_trees
from tests.oracle.growth_trees import SETTINGS
from tests.support.examples import quick, slow
from tests.support.growth import Recorder, as_float32, fields, grow

STORED = Path(os.environ.get("VEILBOOST_ORACLE") or Path(__file__).parent)
INSTALLED = arithmetic_of(xgb.__version__).name


@cache
def stored(release: str) -> dict[str, list[dict[str, Any]]]:
    with gzip.open(STORED / f"growth_trees_{release}.json.gz") as file:
        document = json.load(file)
    assert document["xgboost"].startswith(f"{release}.")
    return document["trees"]


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [
        (number, name)
        for number, (one, other) in enumerate(zip(found, map(as_float32, expected), strict=True))
        for name in (*growth_trees.FIELDS, *growth_trees.CATEGORY_FIELDS)
        if one[name] != other[name]
    ]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("release", ARITHMETICS)
def test_every_field_of_stored_trees(release: str, name: str) -> None:
    trees = [fields(tree) for tree in grow(SETTINGS[name], ARITHMETICS[release])]
    assert differences(trees, stored(release)[name]) == []


@pytest.mark.parametrize("name", SETTINGS)
def test_every_field_of_the_installed_release(name: str) -> None:
    trees = [fields(tree) for tree in grow(SETTINGS[name], ARITHMETICS[INSTALLED])]
    assert differences(trees, list(growth_trees.grow(SETTINGS[name]))) == []


# The newest arithmetic meets all settings; of an earlier one those whose formulas, cuts or draws are its own.
OF_EARLIER = [
    *(("3.2", name) for name in ("default", "logistic", "lossguide", "few_rows", "bins_256", "max_delta_step_alpha")),
    *(("3.2", name) for name in ("monotone_lossguide", "one_hot", "partition", "categories_missing", "interactions")),
    *(("3.3", name) for name in ("some_columns_missing", "columns_of_nodes")),
]


@pytest.mark.parametrize(
    ("release", "name"),
    quick(itertools.product(ARITHMETICS, SETTINGS), *(("3.4", name) for name in SETTINGS), *OF_EARLIER),
)
def test_every_way_to_compute(release: str, name: str) -> None:
    expected = [fields(tree) for tree in grow(SETTINGS[name], ARITHMETICS[release], NUMPY)]
    for variant in variants():
        assert [fields(tree) for tree in grow(SETTINGS[name], ARITHMETICS[release], variant)] == expected


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "bins_65536"] + slow("bins_65536"))
def test_any_number_of_sites_and_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, arithmetic = SETTINGS[name], ARITHMETICS["3.4"]
    if "subsample" in setting.params or not setting.n_rows:
        return  # rows are drawn by the site
    expected = [fields(tree) for tree in grow(setting, arithmetic)]
    order = np.random.default_rng(5).permutation(setting.n_rows)
    three = [order[: setting.n_rows // 5], order[setting.n_rows // 5 :], order[:0]]
    monkeypatch.setattr("nvflare_plugins.growth.rows._LEAST_WORK", 1)
    monkeypatch.setattr("nvflare_plugins.growth.splits._LEAST_WORK", 1)
    for threads in (1, 3):
        monkeypatch.setenv("VEILBOOST_THREADS", str(threads))
        assert [fields(tree) for tree in grow(setting, arithmetic, parts=three)] == expected


def test_releases_differ_and_trees_are_no_stumps() -> None:
    """The control: what is compared tells the releases apart, and most trees have splits."""
    assert stored("3.2")["default"] != stored("3.4")["default"]
    assert stored("3.2")["columns_of_nodes"] != stored("3.3")["columns_of_nodes"]
    for release in ARITHMETICS:
        sizes = [len(tree["parents"]) for trees in stored(release).values() for tree in trees]
        assert np.mean(np.array(sizes) >= 7) > 0.8
        directions = [set(trees[0]["default_left"]) for trees in stored(release).values()]
        assert sum(one == {0, 1} for one in directions) > 10


def test_exchanges() -> None:
    """Level by level one exchange a level, with the root's sum on the first; under lossguide one a split."""
    sums = Recorder()
    tree = next(iter(grow(SETTINGS["default"], ARITHMETICS["3.4"], sums=sums)))
    n_bins = 16 * 4
    assert sums.sizes[0] == 2 * n_bins + 2 and len(sums.sizes) == 4
    assert tree.n_nodes == 31 and sums.sizes[1:] == [2 * n_bins * n for n in (1, 2, 4)]
    sums = Recorder()
    tree = next(iter(grow(SETTINGS["lossguide"], ARITHMETICS["3.4"], sums=sums)))
    assert len(tree.leaves) == 20 and sums.sizes[1:] == [2 * n_bins] * 18  # the last split's children are leaves
