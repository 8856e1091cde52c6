"""Sensitivities hold on the integers that are really summed, for hostile floats too."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_components.events import NeighbouringRelation
from dp_components.sensitivity import (
    GRID_BITS,
    HESSIAN_WEIGHT,
    Norm,
    clip_class_rows,
    clip_gradients,
    clip_logistic_rows,
    clip_rows,
    count_sensitivity,
    grid_integers,
)

ROW, REPLACE = NeighbouringRelation.ADD_OR_REMOVE_ROW, NeighbouringRelation.REPLACE_ROW
LABEL = NeighbouringRelation.CHANGE_LABEL
UNIT = 2**GRID_BITS


def norm_exceeds(g: int, h: int, bound: float, weight: float = HESSIAN_WEIGHT) -> bool:
    """Say exactly, in rational arithmetic, whether |(g, weight h)| > bound."""
    return g**2 + Fraction(weight) ** 2 * h**2 > Fraction(bound) ** 2


def test_the_hessian_weight_is_the_largest_that_keeps_the_norm_at_one() -> None:
    q = np.linspace(0, 1, 200_001)
    assert np.max(q**2 + (HESSIAN_WEIGHT * q * (1 - q)) ** 2) <= 1 + 1e-12
    assert np.max(q**2 + (3.331 * q * (1 - q)) ** 2) > 1
    assert pytest.approx(3.330, abs=5e-4) == HESSIAN_WEIGHT


def test_honest_logistic_rows_lose_less_than_a_grid_unit() -> None:
    rng = np.random.default_rng(0)
    p = np.concatenate([1 / (1 + np.exp(-rng.normal(0, 4, 5000))), [0.0, 1.0, 0.5, 0.6180339887498949]])
    y = rng.integers(0, 2, p.size)
    rows = clip_logistic_rows(p - y, p * (1 - p))
    error = np.stack([p - y, p * (1 - p)], axis=1) - rows.values / UNIT
    # One unit for truncation, a second one for h where the bound cuts it.
    assert np.all(np.abs(error) < 2 / UNIT)
    assert np.all(np.abs(rows.values / UNIT) <= np.abs(np.stack([p - y, p * (1 - p)], axis=1)))
    assert rows.sensitivity.bound == UNIT and rows.sensitivity.weights == (1.0, HESSIAN_WEIGHT)
    np.testing.assert_array_equal((rows.values / UNIT).astype(np.float32).astype(np.float64), rows.values / UNIT)


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), min_size=1, max_size=20),
)
def test_the_bound_holds_for_any_floats(rows: list[tuple[float, float]]) -> None:
    clipped = clip_logistic_rows(*(np.array(column) for column in zip(*rows, strict=True)))
    assert not any(norm_exceeds(int(a), int(b), clipped.sensitivity.bound) for a, b in clipped.values)
    assert np.all(clipped.values[:, 1] >= 0)


@given(st.integers(0, UNIT), st.integers(0, 1))
def test_the_bound_holds_with_equality_nearby_on_the_worst_curve(g: int, sign: int) -> None:
    """H far above its bound for every g: the clip leaves the largest integer that is allowed, or one less."""
    values = clip_logistic_rows([(-1) ** sign * g / UNIT], [1.0]).values[0]
    assert not norm_exceeds(int(values[0]), int(values[1]), UNIT)
    assert norm_exceeds(int(values[0]), int(values[1]) + 2, UNIT)


def test_factors_of_the_adjacency_table() -> None:
    bounds = {r: clip_logistic_rows([0.5], [0.25], relation=r).sensitivity.bound for r in (ROW, LABEL, REPLACE)}
    assert {r: bound / UNIT for r, bound in bounds.items()} == {ROW: 1, LABEL: 1, REPLACE: 2}
    with pytest.raises(ValueError, match="change_value"):
        clip_logistic_rows([0.5], [0.25], relation=NeighbouringRelation.CHANGE_VALUE)


def test_a_changed_label_moves_a_row_by_no_more_than_its_sensitivity() -> None:
    p = np.random.default_rng(1).random(2000)
    zero, one = (clip_logistic_rows(p - y, p * (1 - p), relation=LABEL) for y in (0, 1))
    moved = zero.values - one.values
    assert not any(norm_exceeds(int(a), int(b), zero.sensitivity.bound) for a, b in moved)


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), min_size=1, max_size=20),
    st.sampled_from([0.6, 0.25, 1.0]),
    st.sampled_from([Norm.L1, Norm.L2]),
)
def test_clipped_gradients_stay_within_their_bound_for_any_floats(
    rows: list[tuple[float, float]], c: float, norm: Norm
) -> None:
    g, h = (np.array(column) for column in zip(*rows, strict=True))
    clipped = clip_gradients(g, h, c, norm=norm)
    assert clipped.sensitivity.bound == math.floor(c * UNIT) and clipped.sensitivity.norm is norm
    assert not any(pair_exceeds(norm, a, b, clipped.sensitivity.bound) for a, b in clipped.values.tolist())
    assert np.all(clipped.values[:, 1] >= 0)


def pair_exceeds(norm: Norm, g: int, h: int, bound: float) -> bool:
    return abs(g) + 2 * h > bound if norm is Norm.L1 else norm_exceeds(g, h, bound, 2.0)


@given(st.integers(0, math.floor(0.6 * UNIT)), st.integers(0, 1), st.sampled_from([Norm.L1, Norm.L2]))
def test_clipping_takes_no_more_of_h_than_it_must(g: int, sign: int, norm: Norm) -> None:
    """Two-sided: with h far above its bound a row fills the sensitivity, so that less noise would not do."""
    bound = math.floor(0.6 * UNIT)
    values = clip_gradients([(-1) ** sign * g / UNIT], [1.0], 0.6, norm=norm).values[0].tolist()
    assert abs(values[0]) == g and not pair_exceeds(norm, *values, bound)
    assert pair_exceeds(norm, values[0], values[1] + 2, bound)


def test_clipping_leaves_small_gradients_alone_and_cuts_large_ones() -> None:
    p = np.array([0.1, 0.2, 0.3, 0.9, 1.0])
    rows = clip_gradients(p, p * (1 - p), 0.6).values / UNIT
    assert rows[:3, 0] == pytest.approx(p[:3], abs=1 / UNIT) and rows[3:, 0] == pytest.approx(0.6, abs=1e-6)
    assert rows[:3, 1] == pytest.approx(p[:3] * (1 - p[:3]), abs=1 / UNIT) and not rows[3:, 1].any()


def test_a_changed_label_moves_a_clipped_row_by_more_than_one_bound_and_never_by_two() -> None:
    """0.6 on the one side, -0.6 on the other: the 1 of the unclipped loss does not hold for (g, 2 h) of this one."""
    p = np.random.default_rng(1).random(2000)
    zero, one = (clip_gradients(p - y, p * (1 - p), 0.6, relation=LABEL) for y in (0, 1))
    moved = zero.values - one.values
    unit = clip_gradients([0.5], [0.25], 0.6).sensitivity.bound
    assert zero.sensitivity.bound == 2 * unit
    assert not any(norm_exceeds(int(a), int(b), zero.sensitivity.bound, 2.0) for a, b in moved)
    assert any(norm_exceeds(int(a), int(b), 1.6 * unit, 2.0) for a, b in moved)
    assert clip_gradients([0.5], [0.25], 0.6, relation=REPLACE).sensitivity.bound == 2 * unit
    with pytest.raises(ValueError, match="change_value"):
        clip_gradients([0.5], [0.25], 0.6, relation=NeighbouringRelation.CHANGE_VALUE)


@pytest.mark.parametrize("bad", [([math.nan], [0.1]), ([0.1], [math.inf]), ([0.1, 0.2], [0.1])])
def test_rows_that_cannot_be_clipped_are_refused(bad: tuple[list[float], list[float]]) -> None:
    for clip in (clip_logistic_rows, partial(clip_gradients, max_gradient=0.6)):
        with pytest.raises(ValueError, match=r"finite|length"):
            clip(*bad)
    for bound in (0.0, 1e6, math.inf):
        with pytest.raises(ValueError, match="bound"):
            clip_gradients([0.1], [0.1], bound)


@given(st.lists(st.tuples(*[st.floats(-100, 100)] * 3), min_size=1, max_size=10), st.sampled_from([Norm.L1, Norm.L2]))
def test_clipped_rows_stay_within_their_norm(rows: list[tuple[float, ...]], norm: Norm) -> None:
    weights = (1.0, 0.7, 3.3)
    clipped = clip_rows(rows, (20.0, 1.0, 0.3), norm=norm, weights=weights)
    for row in clipped.values:
        parts = [abs(int(v)) * Fraction(w) for v, w in zip(row, weights, strict=True)]
        bound = Fraction(clipped.sensitivity.bound)
        assert sum(parts) <= bound if norm is Norm.L1 else sum(p * p for p in parts) <= bound**2
    double = clip_rows(rows, (20.0, 1.0, 0.3), norm=norm, weights=weights, relation=REPLACE).sensitivity.bound
    assert double == 2 * clipped.sensitivity.bound


def test_a_row_that_lies_outside_by_less_than_doubles_tell_is_shortened() -> None:
    bound = 256 * UNIT
    ((g, other),) = clip_class_rows([[512.0, 2 / UNIT]], np.zeros((1, 0)), 256.0, 1.0).values.tolist()
    assert bound - 2 <= g and g**2 + other**2 <= bound**2


def test_counts() -> None:
    assert count_sensitivity(9).bound == 3 * UNIT
    assert count_sensitivity(23).bound == pytest.approx(math.sqrt(23) * UNIT)
    assert count_sensitivity(23).bound ** 2 >= 23 * UNIT**2
    assert count_sensitivity(23, norm=Norm.L1).bound == 23 * UNIT
    assert count_sensitivity(2, relation=REPLACE).bound == 2 * UNIT
    with pytest.raises(ValueError, match="label"):
        count_sensitivity(1, relation=LABEL)


def test_grid_integers_are_exact_or_refused() -> None:
    values = clip_logistic_rows(np.linspace(-1, 1, 999), np.full(999, 0.1))
    np.testing.assert_array_equal(grid_integers(values.values / UNIT), values.values)
    np.testing.assert_array_equal(grid_integers((values.values / UNIT).sum(axis=0)), values.values.sum(axis=0))
    for bad in ([0.1], [math.nan], [math.inf], [2.0**40]):
        with pytest.raises(ValueError, match="grid"):
            grid_integers(bad)
