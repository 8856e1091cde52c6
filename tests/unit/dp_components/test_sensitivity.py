"""Sensitivities hold on the integers that are really summed, for hostile floats too."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_components.neighbouring import NeighbouringRelation
from dp_components.sensitivity import (
    GRID_BITS,
    HESSIAN_WEIGHT,
    Norm,
    clip_logistic_rows,
    clip_rows,
    count_sensitivity,
    grid_integers,
)

ROW, REPLACE = NeighbouringRelation.ADD_OR_REMOVE_ROW, NeighbouringRelation.REPLACE_ROW
LABEL = NeighbouringRelation.CHANGE_LABEL


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
    error = np.stack([p - y, p * (1 - p)], axis=1) - rows.as_floats()
    # One unit for truncation, a second one for h where the bound cuts it.
    assert np.all(np.abs(error) < 2 * 2.0**-GRID_BITS)
    assert np.all(np.abs(rows.as_floats()) <= np.abs(np.stack([p - y, p * (1 - p)], axis=1)))
    assert rows.sensitivity.bound == 2**GRID_BITS and rows.sensitivity.weights == (1.0, HESSIAN_WEIGHT)
    np.testing.assert_array_equal(rows.as_floats().astype(np.float32).astype(np.float64), rows.as_floats())


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.floats(-5, 50)), min_size=1, max_size=20),
    st.sampled_from([1.0, 2.5, 1000.0]),
)
def test_the_bound_holds_for_any_floats(rows: list[tuple[float, float, float]], max_weight: float) -> None:
    g, h, w = (np.array(column) for column in zip(*rows, strict=True))
    clipped = clip_logistic_rows(g, h, row_weights=w, max_row_weight=max_weight)
    assert not any(norm_exceeds(int(a), int(b), clipped.sensitivity.bound) for a, b in clipped.values)
    assert np.all(clipped.values[:, 1] >= 0)


@given(st.integers(0, 2**GRID_BITS), st.integers(0, 1))
def test_the_bound_holds_with_equality_nearby_on_the_worst_curve(g: int, sign: int) -> None:
    """H far above its bound for every g: the clip leaves the largest integer that is allowed, or one less."""
    values = clip_logistic_rows([(-1) ** sign * g / 2**GRID_BITS], [1.0]).values[0]
    assert not norm_exceeds(int(values[0]), int(values[1]), 2**GRID_BITS)
    assert norm_exceeds(int(values[0]), int(values[1]) + 2, 2**GRID_BITS)


def test_factors_of_the_adjacency_table() -> None:
    bounds = {r: clip_logistic_rows([0.5], [0.25], relation=r).sensitivity.bound for r in (ROW, LABEL, REPLACE)}
    assert {r: bound / 2**GRID_BITS for r, bound in bounds.items()} == {ROW: 1, LABEL: 1, REPLACE: 2}
    with pytest.raises(ValueError, match="change_value"):
        clip_logistic_rows([0.5], [0.25], relation=NeighbouringRelation.CHANGE_VALUE)


def test_a_changed_label_moves_a_row_by_no_more_than_its_sensitivity() -> None:
    p = np.random.default_rng(1).random(2000)
    zero, one = (clip_logistic_rows(p - y, p * (1 - p), relation=LABEL) for y in (0, 1))
    moved = zero.values - one.values
    assert not any(norm_exceeds(int(a), int(b), zero.sensitivity.bound) for a, b in moved)


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


def test_counts() -> None:
    unit = 2**GRID_BITS
    assert count_sensitivity(9).bound == 3 * unit
    assert count_sensitivity(23).bound == pytest.approx(math.sqrt(23) * unit)
    assert count_sensitivity(23).bound ** 2 >= 23 * unit**2
    assert count_sensitivity(23, norm=Norm.L1, grid_bits=0).bound == 23
    assert count_sensitivity(2, relation=REPLACE).bound == 2 * unit
    with pytest.raises(ValueError, match="label"):
        count_sensitivity(1, relation=LABEL)


def test_grid_integers_are_exact_or_refused() -> None:
    values = clip_logistic_rows(np.linspace(-1, 1, 999), np.full(999, 0.1))
    np.testing.assert_array_equal(grid_integers(values.as_floats()), values.values)
    np.testing.assert_array_equal(grid_integers(values.as_floats().sum(axis=0)), values.values.sum(axis=0))
    for bad in ([0.1], [math.nan], [math.inf], [2.0**40]):
        with pytest.raises(ValueError, match="grid"):
            grid_integers(bad)


@pytest.mark.parametrize(
    "arguments",
    [
        {"grad": [math.nan], "hess": [0.1]},
        {"grad": [0.1, 0.2], "hess": [0.1]},
        {"grad": [0.1], "hess": [0.1], "max_row_weight": math.inf},
        {"grad": [0.1], "hess": [0.1], "max_row_weight": 1e6},
        {"grad": [0.1], "hess": [0.1], "row_weights": [math.inf]},
        {"grad": [0.1], "hess": [0.1], "max_row_weight": 0.0},
    ],
)
def test_rows_without_a_usable_bound_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        clip_logistic_rows(**arguments)  # type: ignore[arg-type]
