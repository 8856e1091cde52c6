"""Metrics and areas under curves as XGBoost takes them: what it would send for the same rows, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.growth.metrics import Metric, curve_parts, without_empty_curves
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.xgb.parameters import check_parameters

N = 5_000


def _metric(name: str, objective: str = "binary:logistic", **more: object) -> Metric:
    return Metric(name, Objective.of_job(check_parameters({"objective": objective, **more}, ["a"], []), "3.2"))


def _rows(n_outputs: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    labels = rng.integers(0, max(n_outputs, 2), N).astype(np.float32)
    return rng.normal(size=(N, n_outputs)).astype(np.float32), labels, rng.random(N).astype(np.float32)


NUMBERS = [
    *("rmse", "mae", "rmsle", "mape", "poisson-nloglik", "gamma-nloglik", "gamma-deviance", "tweedie-nloglik@1.5"),
]


@pytest.mark.parametrize("name", ["logloss", "error", "error@0.3", *NUMBERS])
def test_parts_of_sites_add_up_to_those_of_all_rows(name: str) -> None:
    metric = _metric(name) if name.startswith(("log", "err")) else _metric(name, "reg:gamma")
    margins, labels, weights = _rows()
    labels = labels + np.float32(name in NUMBERS)
    sites = np.array_split(np.random.default_rng(1).permutation(N), 3)
    pooled = sum(metric.parts(margins[rows], labels[rows], weights[rows]) for rows in sites)
    whole = metric.value(metric.parts(margins, labels, weights))
    assert np.isfinite(whole) and metric.value(pooled) == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize("name", ["auc", "aucpr"])
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_curves_are_means_of_the_sites_by_what_they_could_be(name: str, n_outputs: int) -> None:
    metric = _metric(name) if n_outputs == 1 else _metric(name, "multi:softprob", num_class=n_outputs)
    margins, labels, weights = _rows(n_outputs)
    halves = [slice(0, 1500), slice(1500, N)]
    parts = [metric.parts(margins[half], labels[half], weights[half]) for half in halves]
    assert all(part.shape == (metric.n_parts,) for part in parts)
    values = [metric.value(part) for part in parts]
    assert min(values) < metric.value(parts[0] + parts[1]) < max(values)
    if name == "auc" and n_outputs == 1:
        areas = [part[1] for part in parts]
        assert metric.value(parts[0] + parts[1]) == pytest.approx(np.average(values, weights=areas))


@pytest.mark.parametrize("name", ["auc", "aucpr"])
def test_a_site_of_one_class_leaves_the_others_curves_as_they_are(name: str) -> None:
    metric, (margins, labels, weights) = _metric(name), _rows()
    whole = metric.parts(margins, labels, weights)
    for of_one in (np.zeros_like(labels), np.ones_like(labels)):
        alone = metric.parts(margins, of_one, weights)
        assert not alone.any() and metric.value(whole + alone) == metric.value(whole)
        assert math.isnan(metric.value(alone))


@pytest.mark.parametrize(
    ("name", "objective", "more", "nothing"),
    [
        ("logloss", "binary:logistic", {}, 0.0),
        ("auc", "binary:logistic", {}, math.nan),
        ("aucpr", "multi:softprob", {"num_class": 3}, math.nan),
        ("mlogloss", "multi:softprob", {"num_class": 3}, math.nan),
        ("rmse", "reg:squarederror", {}, 0.0),
        ("gamma-deviance", "reg:gamma", {}, 0.0),
        ("quantile", "reg:quantileerror", {"quantile_alpha": 0.3}, math.nan),
    ],
)
def test_a_site_without_rows_adds_nothing(name: str, objective: str, more: dict[str, object], nothing: float) -> None:
    metric = _metric(name, objective, **more)
    n_outputs = metric.objective.n_outputs
    empty = metric.parts(np.empty((0, n_outputs), np.float32), np.empty(0, np.float32), None)
    assert empty.shape == (metric.n_parts,) and not empty.any()
    assert metric.value(empty) == nothing or (math.isnan(nothing) and math.isnan(metric.value(empty)))


def test_curves_that_are_no_numbers_are_taken_out_class_by_class() -> None:
    parts = np.array([1.0, 1.0, np.nan, 2.0, 3.0, 4.0])
    assert without_empty_curves(parts).tolist() == [0, 0, 0, 2, 3, 4]
    assert without_empty_curves(np.array([np.nan, 1.0])).tolist() == [0, 0]


def test_a_class_that_nobody_has_makes_the_curve_of_classes_none() -> None:
    metric, (margins, labels, weights) = _metric("auc", "multi:softprob", num_class=3), _rows(3)
    assert math.isnan(metric.value(metric.parts(margins, np.minimum(labels, 1), weights)))


# Areas under curves as XGBoost takes them: what it would send for the same rows, and answers worked by hand.


ONE = {"nthread": 1, "objective": "binary:logistic", "eval_metric": ["auc", "aucpr"]}
CLASSES = {"nthread": 1, "objective": "multi:softprob", "num_class": 3, "eval_metric": ["auc", "aucpr"]}


def of_xgboost(params: dict[str, object], margins, label, weight) -> tuple[np.ndarray, list[float]]:
    matrix = xgb.DMatrix(np.zeros((label.size, 1)), label=label, weight=weight, base_margin=margins, nthread=1)
    booster = xgb.Booster(params, [matrix])
    said = booster.eval_set([(matrix, "rows")])
    return booster.predict(matrix), [float(one.split(":")[1]) for one in said.split()[1:]]


@pytest.mark.parametrize("seed", range(12))
def test_area_of_two_classes_is_xgboosts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_rows = int(rng.integers(4, 60))
    margins = rng.normal(size=n_rows).astype(np.float32).round(seed % 3)  # ties
    label = (rng.random(n_rows) if seed % 4 == 3 else rng.random(n_rows) < 0.5).astype(np.float32)
    label[:2] = 0, 1
    weight = rng.random(n_rows).astype(np.float32) if seed % 2 else None
    scores, found = of_xgboost(ONE, margins, label, weight)
    for metric, theirs in zip(("auc", "aucpr"), found, strict=True):
        area, whole = curve_parts(metric, scores, label, weight)
        assert area / whole == pytest.approx(theirs, abs=2e-6)  # XGBoost prints so many digits


def test_area_of_classes_is_xgboosts() -> None:
    rng = np.random.default_rng(5)
    label = rng.integers(0, 3, 50).astype(np.float32)
    scores, found = of_xgboost(CLASSES, rng.normal(size=(50, 3)).astype(np.float32), label, None)
    for metric, theirs in zip(("auc", "aucpr"), found, strict=True):
        whole, positives, area = curve_parts(metric, scores, label, None).reshape(3, 3).T
        assert (area / whole) @ positives / positives.sum() == pytest.approx(theirs, abs=2e-6)


def test_areas_by_hand() -> None:
    scores, label = np.array([0.9, 0.8, 0.8, 0.1], np.float32), np.array([1, 0, 1, 0], np.float32)
    assert curve_parts("auc", scores, label, None).tolist() == [3.5, 4.0]  # of four pairs one is a tie
    assert curve_parts("auc", scores, np.ones(4, np.float32), None).tolist() == [0.0, 0.0]
    assert np.isnan(curve_parts("aucpr", scores, np.ones(4, np.float32), None)[0])
    nothing = np.empty(0, np.float32)
    assert curve_parts("auc", nothing, nothing, None).tolist() == [0.0, 0.0]
    assert curve_parts("auc", np.empty((0, 3), np.float32), nothing, None).tolist() == [0.0] * 9
