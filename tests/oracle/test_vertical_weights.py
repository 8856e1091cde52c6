"""Sample weights in vertical training against centralized XGBoost on the same cut points: every bit, no tolerance.

Passive parties do not know the weights, so that the cut points of their columns are those of unweighted rows; the
active party's are its XGBoost's, which weighs them. Centralized training gets both by a reference matrix.
"""

from __future__ import annotations

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.kinds.vertical.job import check_vertical_parameters
from nvflare_plugins.kinds.vertical.key_owner import (
    ClearGradientOwner,
    check_weights,
    gradient_owner,
    pair_format,
)
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.he_toys import toy_paillier
from tests.support.vertical_federation import Joined, announced, central, federate, first_difference, on_the_curve

LOGISTIC = {"objective": "binary:logistic", "max_depth": 4, "max_bin": 32}
NO_FLOOR = {"min_child_weight": 0, "lambda": 0}
WIDTHS = (3, 3, 2)
LISTS = {1: list("abcde"), 6: list("äöüß東")}


def over(low: float, high: float):
    """Return weights that are uniform over orders of magnitude."""
    return lambda rng, n: 10.0 ** rng.uniform(low, high, n)


WEIGHTS = {
    "near_one": lambda rng, n: rng.random(n) * 5,
    "counts": lambda rng, n: rng.integers(1, 9, n),
    "some_zero": lambda rng, n: rng.integers(0, 3, n),
    "twelve_orders": over(-6, 6),
    "twelve_orders_below_one": over(-12, 0),
}


def joined(weight, n_rows: int = 1_500) -> Joined:
    rng = np.random.default_rng(8)
    features = rng.normal(size=(n_rows, 8)).astype(np.float32)
    for column in LISTS:
        features[:, column] = rng.integers(0, 5, n_rows)
    features[rng.random(features.shape) < 0.05] = np.nan
    x = np.nan_to_num(features)
    label = (x[:, 0] * x[:, 4] + np.isin(x[:, 1], [1, 4]) - np.isin(x[:, 6], [0, 3]) + x[:, 7] > 0).astype(np.float32)
    return Joined(features, label, WIDTHS, weight=weight(rng, n_rows).astype(np.float32), categories=LISTS)


def on_these_cuts(data: Joined, params: dict, num_rounds: int) -> xgb.Booster:
    """Train centralized on weighted cut points of the active party's columns, and unweighted ones of the others'."""
    common = {"max_bin": params.get("max_bin", 256), "feature_types": data.types, "enable_categorical": True}
    columns = []
    for i in range(data.features.shape[1]):
        column = data.features[:, [i]]
        if i in data.categories:
            columns.append(np.arange(np.nanmax(column) + 1))
            continue
        weight = data.weight if i < data.widths[0] else None
        cuts = xgb.QuantileDMatrix(column, weight=weight, max_bin=common["max_bin"], nthread=1).get_quantile_cut()[1]
        columns.append(np.concatenate([[np.nanmin(column)], cuts[1:-1], [np.nanmax(column)]]))
    table = np.full((max(map(len, columns)), len(columns)), np.nan, dtype=np.float32)
    for i, column in enumerate(columns):
        table[: len(column), i] = column
    reference = xgb.QuantileDMatrix(table, **common)
    matrix = xgb.QuantileDMatrix(data.features, label=data.label, weight=data.weight, ref=reference, **common)
    return xgb.train({"tree_method": "hist", "nthread": 1, **params}, matrix, num_rounds)


def clear(n_rows: int):
    """Return the stand-in with the number format of weighted jobs."""
    pairs = pair_format(n_rows, weighted=True)
    return ClearGradientOwner(pairs), lambda: ClearHistogramMaker(n_words=pairs.n_words)


def in_toy_paillier(n_rows: int):
    return gradient_owner(toy_paillier(1024), pair_format(n_rows, weighted=True))


def check_equal(data: Joined, params: dict, num_rounds: int = 3, scheme=clear) -> None:
    outcome = federate(data, params, num_rounds, scheme=scheme)
    expected = on_these_cuts(data, params, num_rounds)
    assert first_difference(outcome.merged(), bytes(expected.save_raw("json"))) == ""


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("n_rows", [1_500, pytest.param(9_000, marks=pytest.mark.slow)])
def test_any_weights(name, n_rows):
    """9,000 rows need sums of two words."""
    check_equal(joined(WEIGHTS[name], n_rows), LOGISTIC)


@pytest.mark.parametrize("name", ["near_one", "some_zero"])
def test_without_regularisation(name):
    check_equal(joined(WEIGHTS[name]), {**LOGISTIC, **NO_FLOOR})


def test_regression():
    data = joined(WEIGHTS["near_one"])
    label = np.nan_to_num(data.features[:, 0]) * 1_000
    values = Joined(data.features, label.astype(np.float32), WIDTHS, weight=data.weight, categories=LISTS)
    check_equal(values, {**LOGISTIC, "objective": "reg:squarederror"})


@pytest.mark.parametrize(("owner_of", "name"), [(in_toy_paillier, "twelve_orders"), (on_the_curve, "near_one")])
def test_with_encryption(owner_of, name):
    check_equal(joined(WEIGHTS[name], 300), {**LOGISTIC, "max_depth": 3, "max_bin": 16}, 2, announced(owner_of))


def test_columns_of_few_values_have_the_cut_points_of_weighted_training_too():
    data = joined(WEIGHTS["counts"])
    coarse = Joined(np.round(data.features), data.label, WIDTHS, weight=data.weight, categories=LISTS)
    outcome, expected = federate(coarse, LOGISTIC, 3, scheme=clear), central(coarse, LOGISTIC, 3)
    assert first_difference(outcome.merged(), bytes(expected.save_raw("json"))) == ""


@pytest.mark.parametrize(
    ("weight", "params", "bits", "is_refused"),
    [
        (over(-6, 6), {}, 52, False),
        (over(-12, 0), {}, 52, False),
        (over(-12, 0), {}, 40, False),
        (over(0, 12), {}, 52, True),
        (over(-6, 6), {}, 40, True),
        (over(-6, 6), NO_FLOOR, 52, True),
        (over(-3, 3), NO_FLOOR, 52, False),
        (over(0, 12), {"min_child_weight": 1e9}, 52, False),
        (WEIGHTS["some_zero"], NO_FLOOR, 40, False),
    ],
)
def test_weights_that_the_format_cannot_hold_are_refused_with_the_remedy(weight, params, bits, is_refused):
    weights = weight(np.random.default_rng(0), 2_000).astype(np.float32)
    checked = check_vertical_parameters({"objective": "binary:logistic", **params}, ["a"])
    bounds = checked.objective.gradient_bound, checked.objective.hessian_bound
    if not is_refused:
        check_weights(weights, bounds, checked.effective, bits)
        return
    with pytest.raises(DataRefusal) as refused:
        check_weights(weights, bounds, checked.effective, bits)
    assert refused.value.reason.startswith("weight: ") and "clip" in refused.value.reason
    assert "weight" not in str(refused.value)  # others read the fixed text


@pytest.mark.parametrize("n_rows", [1, 1_000, 1 << 20, (1 << 31) - 1])
def test_the_format_of_weighted_jobs_holds_all_rows(n_rows):
    found, plain = pair_format(n_rows, weighted=True), pair_format(n_rows)
    assert 40 <= plain.fraction_bits <= found.fraction_bits <= 52 and found.max_additions == n_rows
    assert found.fraction_bits == 52 or n_rows > 1 << 19
