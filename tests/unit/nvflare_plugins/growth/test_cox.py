"""Gradients of Cox regression by their definition, sums of risks to the last bit, and where XGBoost differs."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth import survival
from nvflare_plugins.growth.metrics import Metric, curve_parts, without_empty_curves
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.xgb.parameters import check_parameters
from tests.support import breslow

N_BINS = 7


def rows(seed: int, n: int = 60, *, weighted: bool = True, tied: bool = True):
    rng = np.random.default_rng(seed)
    places = rng.integers(1, N_BINS + 1, n) if tied else rng.permutation(n) + 1
    events = rng.random(n) < 0.6
    weights = rng.gamma(1.0, size=n).astype(np.float32) if weighted else np.ones(n, np.float32)
    return rng.normal(size=n).astype(np.float32), np.where(events, places, -places).astype(np.float32), weights


def own(margins, labels, weights, n_bins=N_BINS):
    at_bins = survival.sums_at_bins(survival.weighted_risks(margins, weights), labels, n_bins)
    events = survival.sums_at_bins(survival.event_weights(labels, weights), labels, n_bins)
    return np.array(survival.pairs(margins, labels, weights, survival.hazards(at_bins, events))), events


def defined(margins, labels, weights, of=breslow.derivatives):
    return np.array(of(margins.astype(np.float64), np.abs(labels), labels > 0, weights.astype(np.float64)))


@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_derivatives_of_the_partial_likelihood(seed: int) -> None:
    margins, labels, weights = rows(seed)
    found, events = own(margins, labels, weights)
    assert np.abs(found - defined(margins, labels, weights)).max() < 1e-6
    args = np.abs(labels), labels > 0, weights.astype(np.float64)
    for i in (0, 7):
        step = np.zeros(margins.size)
        step[i] = 1e-4
        here = [breslow.partial_likelihood(margins.astype(np.float64) + s * step, *args) for s in (-1, 0, 1)]
        assert (here[2] - here[0]) / 2e-4 == pytest.approx(found[0][i], abs=1e-6)
        assert (here[2] - 2 * here[1] + here[0]) / 1e-8 == pytest.approx(found[1][i], abs=1e-4)
    # What bounds every sum of rows (survival.py).
    assert abs(found[0].sum()) < 1e-5
    assert np.abs(found[0]).sum() <= 2 * events.sum() + 1e-5 and found[1].min() >= 0
    assert found[1].sum() <= events.sum() + 1e-5


def test_the_last_rows_at_risk_have_no_hessian_below_0() -> None:
    found, _ = own(*(np.array(x, np.float32) for x in ([0.1, 3.7], [-1, 2], [1, 0.3])))
    assert found[1][1] == 0


@pytest.mark.parametrize("seed", range(3))
def test_without_tied_events_and_weights_they_are_those_of_xgboost(seed: int) -> None:
    margins, labels, weights = rows(seed, weighted=False, tied=False)
    found, _ = own(margins, labels, weights, 60)
    assert np.abs(found - defined(margins, labels, weights, breslow.of_xgboost)).max() < 1e-6
    tied = rows(seed, weighted=False)
    assert np.abs(own(*tied)[0] - defined(*tied, breslow.of_xgboost)).max() > 0.01  # the control
    heavy = margins, labels, np.float32(2) * weights
    heavy[2][::2] = 1
    assert np.abs(own(*heavy, 60)[0] - defined(*heavy, breslow.of_xgboost)).max() > 0.01


def test_tied_events_have_one_leaf_here_and_leaves_by_their_order_in_xgboost() -> None:
    """Four events at one time and two rows watched longer; each row is a leaf of its own."""
    labels, place = np.array([3, 3, 3, 3, -5, -5], np.float32), np.arange(6, dtype=np.float32)[:, None]
    params = {"objective": "survival:cox", "lambda": 0, "min_child_weight": 0, "eta": 1, "base_score": 1.0}

    def theirs(weight: list[int] | None = None) -> list[float]:
        model = xgb.train(params, xgb.DMatrix(place, labels, weight=weight), 1)
        found: list[float] = model.predict(xgb.DMatrix(place), output_margin=True)[:4].tolist()
        return found

    def leaves(weights: list[int]) -> list[float]:
        (g, h), _ = own(np.zeros(6, np.float32), np.sign(labels), np.array(weights, np.float32), 1)
        found: list[float] = (-g / h)[:4].tolist()
        return found

    assert theirs() == pytest.approx([6.0, 2.4, 1.2, 0.6], rel=1e-6)
    assert theirs([1, 1, 1, 1, 9, 9]) == theirs()  # weights of others change nothing
    assert leaves([1] * 6) == pytest.approx([0.6] * 4, rel=1e-6)
    assert leaves([1, 1, 1, 1, 9, 9]) == pytest.approx([(1 - 4 / 22) / (4 / 22 - 4 / 22**2)] * 4, rel=1e-6)


# -- sums of risks ----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(2.0**-60, 2.0**40), min_size=1, max_size=30), st.sampled_from([30, 10**6, 2**31 - 1]))
def test_words_carry_sums_exactly(values: list[float], n_rows: int) -> None:
    array, labels = np.array(values), np.where(np.arange(len(values)) % 2, 1, -2).astype(np.float32)
    halves = [survival.to_words(array[part], labels[part], 2, n_rows) for part in (slice(0, 7), slice(7, None))]
    found = survival.from_words(np.add(*halves), n_rows)
    for place in (1, 2):
        exact = sum((Fraction(v) for v, at in zip(values, np.abs(labels), strict=True) if at == place), Fraction(0))
        assert abs(Fraction(found[place - 1]) - exact) <= exact / 2**52 + len(values) * Fraction(2) ** survival.FINEST
    assert max(abs(half).max() for half in halves) * n_rows < len(values) * 2**59


def test_risks_that_lose_digits_end_the_training_before_they_do() -> None:
    n_rows, events = 1000, np.array([3.0, 5.0])
    known = survival.RiskRange(n_rows, 1.0, 0.0)
    known.check()
    for _ in range(3):
        known.grown(np.array([-40.0, 40.0], np.float32))
    with pytest.raises(ConfigurationError, match="hazard ratios"):
        known.check()
    known.opened(np.array([900.0, 80.0]), events)  # no row is above the sum of its bin
    known.check()
    with pytest.raises(ConfigurationError, match="hazard ratios"):
        known.opened(np.array([900.0, 2.0**-40]), events)
    with pytest.raises(ConfigurationError, match="hazard ratios"):
        survival.to_words(np.array([2.0**200]), np.ones(1, np.float32), 1, n_rows)


def test_exp_is_that_of_the_c_library_to_two_last_places() -> None:
    x = np.random.default_rng(0).normal(scale=20, size=20_000).astype(np.float32)
    expected = np.array([math.exp(v) for v in x.tolist()])
    assert (np.abs(survival.exp(x) - expected) / np.spacing(expected)).max() <= 2
    ends = survival.exp(np.array([0, -800, 800, np.inf, np.nan], np.float32))
    assert ends[:2].tolist() == [1, 0] and not np.isfinite(ends[2:]).any()


# -- metric -----------------------------------------------------------------------------------------------------------


def metric(n_times: int) -> Metric:
    parameters = check_parameters({"objective": "survival:cox"}, ["a"], label={"time": "t", "event": "e"})
    return Metric("cox-nloglik", replace(Objective.of_job(parameters, "3.3"), n_times=n_times))


@pytest.mark.parametrize("tied", [False, True])
def test_the_metric_is_xgboosts_own_on_the_grid_where_rows_weigh_alike(tied: bool) -> None:
    margins, labels, _ = rows(3, weighted=False, tied=tied)
    matrix = xgb.DMatrix(np.zeros((60, 1)), labels, base_margin=margins)
    empty = xgb.train({"objective": "survival:cox", "eval_metric": "cox-nloglik"}, matrix, 0)
    theirs = float(empty.eval(matrix).split(":")[1])
    one = metric(60)
    halves = [one.parts(margins[s], labels[s], None) for s in (slice(0, 25), slice(25, None), slice(0, 0))]
    assert all(part.size == one.n_parts for part in halves)
    assert one.value(sum(halves)) == pytest.approx(theirs, abs=2e-6)
    exact = breslow.partial_likelihood(margins.astype(np.float64), np.abs(labels), labels > 0, np.ones(60))
    assert one.value(sum(halves)) == pytest.approx(exact / (labels > 0).sum(), rel=1e-12)


def test_the_metric_weighs_rows() -> None:
    margins, labels, weights = rows(4)
    exact = breslow.partial_likelihood(
        margins.astype(np.float64), np.abs(labels), labels > 0, weights.astype(np.float64)
    )
    found = metric(N_BINS).value(metric(N_BINS).parts(margins, labels, weights))
    assert found == pytest.approx(exact / weights[labels > 0].sum(dtype=np.float64), rel=1e-12)


# -- metrics -----------------------------------------------------------------------------------------------------------


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
