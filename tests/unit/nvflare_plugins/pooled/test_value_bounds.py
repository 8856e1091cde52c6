"""Bounds behind the scales: what XGBoost really sends stays below them, and they are not far above it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.data.table import Table
from nvflare_plugins.pooled.value_bounds import coarsest_pairs, label_sum, value_bounds
from nvflare_plugins.wire.sums import Family, metric_quantity
from nvflare_plugins.xgb.parameters import check_parameters

ROWS = 400
SCALES = (1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9)


def table(label: np.ndarray, weight: np.ndarray | None = None) -> Table:
    features = np.random.default_rng(0).normal(size=(label.size, 2)).astype(np.float32)
    return Table(
        features,
        ("a", "b"),
        ("float", "float"),
        label.astype(np.float32),
        "y",
        weight,
        n_missing=(),
        categories={},
        label_classes=None,
        notes=(),
    )


def skewed(scale: float) -> np.ndarray:
    return np.exp(np.random.default_rng(1).normal(size=ROWS)) * scale


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "objective", ["reg:squarederror", "count:poisson", "reg:gamma", "reg:tweedie", "reg:pseudohubererror"]
)
def test_sums_of_first_gradients_lie_below_the_bounds_and_not_far(objective, scale):
    label = skewed(scale).astype(np.float32)
    bounds = value_bounds(check_parameters({"objective": objective}, ["a", "b"]), [table(label)])
    g, h = first_pairs(objective, label.astype(np.float64))
    assert np.abs(g).sum() <= bounds[Family.GRADIENTS] <= 2.0**10 * np.abs(g).sum()
    assert np.abs(h).sum() <= bounds[Family.HESSIANS] <= 2.0**10 * np.abs(h).sum()


def first_pairs(objective: str, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients and hessians where all predictions are the mean, or 0 where XGBoost begins with a Newton step."""
    mean, power, ones = label.mean(), 1.5, np.ones(label.size)
    return {
        "reg:squarederror": (mean - label, ones),
        "count:poisson": (mean - label, ones * mean * np.exp(0.7)),
        "reg:gamma": (1 - label / mean, label / mean),
        "reg:tweedie": (
            mean ** (2 - power) - label * mean ** (1 - power),
            label * (power - 1) * mean ** (1 - power) + (2 - power) * mean ** (2 - power),
        ),
        "reg:pseudohubererror": (label / np.sqrt(1 + np.square(label)), ones),
    }[objective]


@pytest.mark.parametrize("weighted", [False, True])
def test_the_pooled_mean_is_xgboosts_to_the_last_bit(weighted):
    """Parts in float64 add up to it; XGBoost's own parts, in float32, do in two runs of three."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        label = (rng.normal(size=ROWS) + 10.0 ** rng.uniform(-2, 5)).astype(np.float32)
        weight = (3 * rng.random(ROWS)).astype(np.float32) if weighted else None
        matrix = xgb.DMatrix(np.zeros((ROWS, 1), np.float32), label=label, weight=weight)
        booster = xgb.train({"objective": "reg:squarederror", "max_depth": 1, "nthread": 1}, matrix, 1)
        model = json.loads(booster.save_config())["learner"]["learner_model_param"]
        total = float(ROWS if weight is None else weight.sum(dtype=np.float64))
        parts = [
            label_sum(table(label[rows], None if weight is None else weight[rows])) / total
            for rows in np.array_split(np.arange(ROWS), 3)
        ]
        assert np.float32(sum(parts)) == np.float32(model["base_score"].strip("[]"))


@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_of_its_own_for_each_metric(scale):
    metrics = ["rmse", "mae", "rmsle", "mape"]
    params = check_parameters({"objective": "reg:squarederror", "eval_metric": metrics}, ["a", "b"])
    label = skewed(scale)
    bounds = value_bounds(params, [table(label)])
    at_mean = label.mean()
    sums = {
        "rmse": np.square(label - at_mean).sum(),
        "mae": np.abs(label - at_mean).sum(),
        "rmsle": np.square(np.log1p(label) - np.log1p(at_mean)).sum(),
        "mape": (np.abs(label - at_mean) / label).sum(),
    }
    assert all(sums[name] <= bounds[metric_quantity(name)] for name in metrics)
    assert ROWS <= bounds[Family.WEIGHTS] < 8 * ROWS


def test_the_evaluation_set_counts_too():
    params = check_parameters({"objective": "reg:squarederror", "eval_metric": "rmse"}, ["a", "b"])
    small, large = table(skewed(1.0)), table(skewed(1e6))
    assert value_bounds(params, [small, large])[metric_quantity("rmse")] == pytest.approx(
        value_bounds(params, [large])[metric_quantity("rmse")]
    )


def test_labels_of_zero_and_a_given_base_score():
    params = check_parameters({"objective": "reg:squarederror", "base_score": 0.5}, ["a", "b"])
    bounds = value_bounds(params, [table(np.zeros(ROWS))])
    assert bounds[Family.GRADIENTS] >= ROWS * 0.5


@pytest.mark.parametrize(
    ("params", "weighted", "finest"),
    [
        ({"objective": "binary:logistic"}, False, False),
        ({"objective": "binary:logistic"}, True, True),
        ({"objective": "binary:logistic", "scale_pos_weight": 1000.0}, False, True),
        ({"objective": "reg:squarederror"}, False, True),
        ({"objective": "reg:pseudohubererror", "huber_slope": 1e6}, False, True),
        ({"objective": "multi:softprob", "num_class": 3}, False, False),
    ],
)
def test_only_bounded_gradients_of_unweighted_rows_make_do_with_fewer_bits(params, weighted, finest):
    assert (coarsest_pairs(check_parameters(params, ["a", "b"]), weighted=weighted) == 0.0) is finest
