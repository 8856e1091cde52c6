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
from nvflare_plugins.growth.metrics import Metric
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
