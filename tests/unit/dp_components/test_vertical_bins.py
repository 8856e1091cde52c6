"""Sensitivity of noised sums per bin against a naive twin, and cut points found by a noisy descent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_components.accounting import compose
from dp_components.events import NeighbouringRelation
from dp_components.split_candidates import dp_quantiles
from dp_components.split_candidates.dp_quantiles import descent_event, descent_sensitivity, quantile_cuts
from dp_components.vertical_bins import HESSIAN_WEIGHT, bin_scales, draw_bin_noise, tree_event, tree_sensitivity
from tests.support.audit import noise_p_value
from tests.support.seeded_randomness import SeededRandomness

U = 1 << 10


def naive_sums(codes, g, h, nodes, n_bins):
    """Return weighted sums of every node, feature and bin, one row at a time."""
    sums = {}
    for number, rows in enumerate(nodes):
        for row in rows:
            for feature in range(len(codes)):
                key = number, feature, int(codes[feature, row])
                old = sums.get(key, (0.0, 0.0))
                sums[key] = old[0] + g[row], old[1] + HESSIAN_WEIGHT * h[row]
    return sums


def distance(one, other):
    keys = set(one) | set(other)
    pairs = [(one.get(key, (0.0, 0.0)), other.get(key, (0.0, 0.0))) for key in keys]
    return math.sqrt(sum((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 for a, b in pairs))


@pytest.mark.parametrize(("n_features", "depth"), [(1, 1), (3, 2), (2, 4)])
def test_no_change_of_one_row_moves_a_tree_further_than_the_bound_and_the_worst_one_does(n_features, depth):
    rng = np.random.default_rng(depth)
    n_rows, n_bins = 24, 4
    bound = tree_sensitivity(n_features, depth, U).bound
    furthest = 0.0
    for trial in range(60):
        g, h = rng.integers(-U, U, n_rows, endpoint=True), rng.integers(0, U, n_rows, endpoint=True)
        codes = rng.integers(0, n_bins + 1, (n_features, n_rows))
        # A tree: every level divides all rows anew among its nodes; both children of each node are asked for.
        levels = [rng.integers(0, 2**level, n_rows) for level in range(depth)]
        nodes = [np.flatnonzero(level == node) for i, level in enumerate(levels) for node in range(2**i)]
        row = int(rng.integers(n_rows))
        changed = codes.copy()
        changed[:, row] = (codes[:, row] + rng.integers(1, n_bins + 1, n_features)) % (n_bins + 1)
        if trial == 0:
            g[row], h[row] = -U, U
        found = distance(naive_sums(codes, g, h, nodes, n_bins), naive_sums(changed, g, h, nodes, n_bins))
        assert found <= bound
        furthest = max(furthest, found)
    assert furthest > bound * (1 - 1e-9)


def test_a_tree_has_the_events_price():
    sensitivity = tree_sensitivity(6, 4, U)
    assert sensitivity.relation is NeighbouringRelation.REPLACE_ROW
    event = tree_event(1000, sensitivity, 5.0)
    assert compose(event).mu_squared == pytest.approx(1 / 25, rel=1e-6)
    g, h = bin_scales(sensitivity, 5.0)
    assert g == pytest.approx(5 * U * math.sqrt(2 * 4 * 6 * 1.25)) and h == pytest.approx(2 * g)
    with pytest.raises(ValueError, match="features"):
        tree_sensitivity(0, 4, U)


@pytest.mark.parametrize(("wrong", "is_right"), [(1.0, True), (2 / 3, False), (3 / 2, False)])
def test_noise_has_the_scales_that_are_accounted_and_no_others(wrong, is_right):
    scales = (900.0, 1800.0)
    drawn = draw_bin_noise(4000, (scales[0] * wrong, scales[1] * wrong), SeededRandomness(1))
    for values, scale in zip(drawn, scales, strict=True):
        assert (1e-5 < noise_p_value(values / scale) < 1 - 1e-5) == is_right


def test_cut_points_divide_rows_evenly_whatever_their_scale():
    rng = np.random.default_rng(0)
    columns = np.array([rng.normal(size=20000), rng.lognormal(10, 4, 20000), -rng.lognormal(-20, 2, 20000)], np.float32)
    columns[0, ::5] = np.nan
    for column, cuts in zip(columns, quantile_cuts(columns, 8, 3.0, SeededRandomness(2)), strict=True):
        assert (np.diff(cuts) > 0).all() and 5 <= cuts.size <= 7
        counts = np.bincount(np.searchsorted(cuts, column[~np.isnan(column)], side="right"))
        assert counts.min() > 0.06 * counts.sum() and counts.max() < 0.25 * counts.sum()


def test_values_that_come_often_have_a_bin_of_their_own():
    column = np.repeat(np.array([0, 1, 2, 3], np.float32), 5000)
    [cuts] = quantile_cuts(column[None], 16, 3.0, SeededRandomness(3))
    bins = np.searchsorted(cuts, np.array([0, 1, 2, 3], np.float32), side="right")
    assert len(set(bins)) == 4


def test_columns_without_rows_give_cuts_that_say_nothing():
    empty = np.full((2, 0), np.nan, np.float32)
    assert all(np.isfinite(cuts).all() for cuts in quantile_cuts(empty, 8, 3.0, SeededRandomness(4)))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_cells_keep_the_order_of_numbers(values):
    numbers = np.sort(np.array(values, np.float32))
    keys = dp_quantiles._keys(numbers)
    assert (np.diff(keys) >= 0).all()
    assert (dp_quantiles._values(keys) <= numbers).all()
    after = dp_quantiles._values(keys + 1)
    assert ((after > numbers) | ~np.isfinite(after)).all()


def test_a_descent_counts_each_row_once_a_level_and_pays_for_it(monkeypatch):
    counted = []
    monkeypatch.setattr(dp_quantiles, "draw_noise", lambda shape, scales, source: counted.append(shape) or 0)
    rng = np.random.default_rng(1)
    quantile_cuts(rng.normal(size=(3, 5000)).astype(np.float32), 8, 1e-9)
    event = descent_event(3, 8, 2.0)
    assert sum(math.prod(shape) for shape in counted) <= sum(n for _, n in event.scales)
    assert descent_sensitivity(3).bound == pytest.approx((1 << 10) * math.sqrt(2 * 16 * 3))
    assert compose(event).mu_squared == pytest.approx(1 / 4, rel=1e-6)
