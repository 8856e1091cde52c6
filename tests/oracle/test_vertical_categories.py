"""Categorical columns in vertical training against centralized XGBoost on the joined table: every bit, no tolerance."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvflare_plugins.kinds.vertical.key_owner import gradient_owner, pair_format
from nvflare_plugins.kinds.vertical_inference.explanations import Explainer, RowPositions
from tests.support.he_toys import toy_paillier
from tests.support.vertical_federation import (
    Joined,
    Outcome,
    announced,
    central,
    federate,
    first_difference,
    on_the_curve,
    trees,
)
from tests.support.vertical_parts import parts_of

DATA = Path(__file__).parents[3] / "shared" / "data"
SIZES = {0: 12, 2: 3, 4: 40, 5: 3, 7: 300, 9: 2}
WORDS = ["ärztlich", "Löhne", "groß", "naïve", "東京", "plain"]


def words(n: int) -> list[str]:
    return [f"{WORDS[i % len(WORDS)]} {i}" for i in range(n)]


@cache
def joined(widths: tuple[int, ...] = (4, 4, 3), n_rows: int = 2_000, seed: int = 0, missing: float = 0.07) -> Joined:
    """Columns of few, of many and of rare categories; the last ones of a list may be in no training row."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_rows, 11)).astype(np.float32)
    score = features[:, 1] * features[:, 6]
    for column, size in SIZES.items():
        codes = np.minimum(rng.geometric(3 / size, n_rows) - 1, size - 1) if size > 5 else rng.integers(0, size, n_rows)
        features[:, column] = codes
        score = score + rng.normal(size=size)[codes]
    features[rng.random(features.shape) < missing] = np.nan
    label = (score + rng.normal(size=n_rows) * 0.5 > 0).astype(np.float32)
    n = n_rows * 3 // 4
    lists = {column: words(size + 2) for column, size in SIZES.items()}
    return Joined(features[:n], label[:n], widths, (features[n:], label[n:]), categories=lists)


def check_equal(data: Joined, outcome: Outcome, reference) -> int:
    """Compare models and predictions; return the number of splits by categories."""
    merged = outcome.merged()
    assert first_difference(merged, bytes(reference.save_raw("json"))) == ""
    np.testing.assert_array_equal(outcome.predict(data, 0), reference.predict(data.matrix(data.features)))
    if data.valid is not None:
        np.testing.assert_array_equal(outcome.predict(data, 1), reference.predict(data.matrix(data.valid[0])))
    return sum(len(tree["categories_nodes"]) for tree in trees(merged))


def compare(data: Joined, params: dict, num_rounds: int = 3, **settings) -> Outcome:
    params = {"objective": "binary:logistic", "max_depth": 5, **params}
    outcome = federate(data, params, num_rounds, **settings)
    assert check_equal(data, outcome, central(data, params, num_rounds)) > 5
    return outcome


VARIANTS = {
    "plain": {"eval_metric": "logloss"},
    "one_against_others": {"max_cat_to_onehot": 1000},
    "sets_alone": {"max_cat_to_onehot": 1},
    "small_sets": {"max_cat_threshold": 3},
    "threshold_1": {"max_cat_threshold": 1, "max_cat_to_onehot": 5},
    "no_regularisation": {"lambda": 0, "min_child_weight": 0},
    "alpha": {"alpha": 1.0},
    "delta_step": {"max_delta_step": 0.5},
    "monotone": {"monotone_constraints": "(1,1,-1,0,1,-1,0,1,0,0,0)"},
    "interactions": {"interaction_constraints": "[[0,1,4,9],[2,5,7],[3,6,8,10]]"},
    "sampled": {"num_parallel_tree": 2, "subsample": 0.7, "colsample_bynode": 0.5},
    "lossguide": {"grow_policy": "lossguide", "max_leaves": 20, "max_depth": 0},
    "deep": {"max_depth": 10, "min_child_weight": 0},
    "few_bins": {"max_bin": 4},
}
IN_DEFAULT_SUITE = {"plain", "one_against_others", "monotone", "sampled"}


@pytest.mark.parametrize(
    "name", [name if name in IN_DEFAULT_SUITE else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_parameters(name):
    compare(joined(), VARIANTS[name])


@pytest.mark.parametrize("widths", [(1, 10), (11 - 4, 4), (4, 1, 6)])
def test_any_party_may_have_them(widths):
    compare(joined(widths), {})


def test_at_the_active_party_alone():
    data = joined()
    lists = {column: listed for column, listed in data.categories.items() if column < 4}
    compare(Joined(data.features, data.label, (4, 4, 3), categories=lists), {})


def test_at_a_passive_party_alone_and_no_own_column():
    data = joined()
    compare(Joined(data.features, data.label, (0, 6, 5), categories=data.categories), {})


def test_several_classes_and_continuation():
    data = joined()
    label = np.random.default_rng(1).integers(0, 2, len(data.label)) + data.label
    classes = Joined(data.features, label.astype(np.float32), data.widths, categories=data.categories)
    params = {"objective": "multi:softprob", "num_class": 3, "max_depth": 4}
    first = federate(classes, params, 1)
    second = federate(classes, params, 2, initial=first)
    reference = central(classes, params, 1)
    reference = central(classes, params, 2, initial=bytes(reference.save_raw("json")))
    assert check_equal(classes, second, reference) > 5


@pytest.mark.parametrize("column", [0, 2])
@pytest.mark.parametrize("party", [0, 1])
def test_an_empty_column_and_one_of_one_category(column, party):
    """XGBoost gives a categorical column without values one bin."""
    data = joined()
    features = data.features.copy()
    features[:, column] = np.nan
    features[:, 4] = np.where(np.isnan(features[:, 4]), np.nan, 1)
    order = list(range(11)) if party == 0 else [*range(4, 11), *range(4)]
    lists = {place: data.categories[old] for place, old in enumerate(order) if old in data.categories}
    compare(Joined(np.ascontiguousarray(features[:, order]), data.label, (4, 7), categories=lists), {})


def in_toy_paillier(n_rows: int):
    return gradient_owner(toy_paillier(1024), pair_format(n_rows))


@pytest.mark.parametrize("owner_of", [in_toy_paillier, on_the_curve])
def test_with_encryption(owner_of):
    data = joined()
    small = Joined(data.features[:160], data.label[:160], data.widths, categories=data.categories)
    compare(small, {"max_depth": 3, "max_bin": 16}, 2, scheme=announced(owner_of))


def test_explanations_equal_centralized_ones():
    """Groups of categories in the place of categories, ranks in the place of thresholds."""
    data = joined()
    params = {"objective": "binary:logistic", "max_depth": 4}
    outcome, reference = federate(data, params, 3), central(data, params, 3)
    active, passive = parts_of(outcome, data)
    rows = data.valid[0]
    told = {}
    for i, party in enumerate(active.parties):
        positions = RowPositions.of(passive[party.site], data.part(i + 1, rows))
        told[party.site] = RowPositions.from_bytes(positions.to_bytes(), len(rows))
    assert sum(len(positions.groups) for positions in told.values()) > 5
    explainer = Explainer(active, data.part(0, rows), told)
    matrix = data.matrix(rows)
    np.testing.assert_array_equal(explainer.contributions(), reference.predict(matrix, pred_contribs=True))
    np.testing.assert_array_equal(
        explainer._booster.predict(explainer._matrix, pred_leaf=True), reference.predict(matrix, pred_leaf=True)
    )


def table_of(name: str) -> tuple[np.ndarray, np.ndarray, dict[int, list[str]]]:
    frame = pd.read_parquet(DATA / f"{name}.parquet").drop(columns="split", errors="ignore")
    label = pd.factorize(frame.pop("label"))[0] == 1 if name != "abalone" else frame.pop("label")
    lists, columns = {}, []
    for place, (_, column) in enumerate(frame.items()):
        if pd.api.types.is_numeric_dtype(column):
            columns.append(column.to_numpy(np.float32))
            continue
        kind = column.astype("category").cat
        lists[place] = [str(one) for one in kind.categories]
        columns.append(np.where(kind.codes < 0, np.nan, kind.codes).astype(np.float32))
    return np.column_stack(columns), np.asarray(label, dtype=np.float32), lists


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not here")
@pytest.mark.parametrize(
    ("name", "objective"),
    [("adult", "binary:logistic"), ("bank", "binary:logistic"), ("abalone", "reg:squarederror")],
)
def test_real_tables(name, objective):
    features, label, lists = table_of(name)
    n = features.shape[1]
    data = Joined(features, label, (n // 3, n // 3, n - 2 * (n // 3)), categories=lists)
    params = {"objective": objective, "max_depth": 6}
    outcome = federate(data, params, 5)
    assert check_equal(data, outcome, central(data, params, 5)) > 5
