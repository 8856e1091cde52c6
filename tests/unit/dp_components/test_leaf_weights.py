"""C2: row statistics on the grid, forms of the query, and XGBoost's weight formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dp_components.leaf_weights import (
    UNIT,
    AveragingWeights,
    GradientWeights,
    LeafQuery,
    NewtonWeights,
    PairBounds,
    clip_pairs,
    leaf_outputs,
    noise_proportional_ridge,
    probability,
    real_noise_std,
)
from dp_components.sensitivity import Norm

MARGINS = np.linspace(-30, 30, 4001).astype(np.float32)
ALL_WEIGHTS = [NewtonWeights(), GradientWeights(), AveragingWeights()]


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("query", list(LeafQuery))
@pytest.mark.parametrize("weights", ALL_WEIGHTS, ids=lambda w: type(w).__name__)
def test_no_row_exceeds_the_sensitivity_that_comes_with_it(weights, query: LeafQuery, label: float) -> None:
    if query.is_for_newton and not weights.bounds.is_logistic:
        pytest.skip("joint and clipped queries are for Newton updates")
    rows = weights.row_statistics(MARGINS, np.full(MARGINS.size, label, dtype=np.float32), query)
    scaled = rows.values * np.array(rows.sensitivity.weights)
    order = {Norm.L1: 1, Norm.L2: 2}[rows.sensitivity.norm]
    assert np.linalg.norm(scaled, ord=order, axis=1).max() <= rows.sensitivity.bound
    assert (query is LeafQuery.PURE) == (order == 1)
    assert rows.sensitivity == weights.sensitivity(query)


def test_newton_statistics_are_those_of_the_logistic_loss() -> None:
    label = (np.arange(MARGINS.size) % 2).astype(np.float32)
    rows = NewtonWeights().row_statistics(MARGINS, label, LeafQuery.VECTOR).values / UNIT
    p = 1 / (1 + np.exp(-MARGINS.astype(np.float64)))
    assert rows[:, 0] == pytest.approx(p - label, abs=1 / UNIT)
    assert rows[:, 1] == pytest.approx(p * (1 - p), abs=1 / UNIT)


def test_statistics_are_exact_in_float32() -> None:
    rows = NewtonWeights().row_statistics(MARGINS, np.ones(MARGINS.size, dtype=np.float32), LeafQuery.JOINT).values
    assert np.array_equal((rows / UNIT).astype(np.float32).astype(np.float64) * UNIT, rows)


def test_probability_of_huge_margins_is_finite() -> None:
    assert probability(np.array([-1e30, 1e30], dtype=np.float32)).tolist() == pytest.approx([0.0, 1.0])


def test_a_margin_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        NewtonWeights().row_statistics(
            np.array([np.nan], dtype=np.float32), np.zeros(1, dtype=np.float32), LeafQuery.JOINT
        )


@pytest.mark.parametrize("query", [LeafQuery.JOINT, LeafQuery.CLIPPED, LeafQuery.PURE])
def test_queries_made_for_the_logistic_loss_are_refused_for_counts(query: LeafQuery) -> None:
    with pytest.raises(ValueError, match=f"the {query.name.lower()} query is for Newton"):
        clip_pairs(query, np.zeros(1), np.ones(1), PairBounds(1.0, 1.0))


def test_noise_by_form_of_the_query() -> None:
    """Newton: vector 1.0308 on both; joint 1 and 1/3.330; clipped .6 and .3; scalar sqrt(2) and sqrt(2)/4.

    The deviation of Laplace noise is the root of two of its parameter.
    """
    std = {query: real_noise_std(NewtonWeights().sensitivity(query), 10.0) for query in LeafQuery}
    assert std[LeafQuery.VECTOR] == pytest.approx((10.308, 10.308), rel=1e-4)
    assert std[LeafQuery.JOINT] == pytest.approx((10.0, 10.0 / 3.3302), rel=1e-4)
    assert std[LeafQuery.CLIPPED] == pytest.approx((6.0, 3.0), rel=1e-5)
    assert std[LeafQuery.PURE] == pytest.approx((6 * math.sqrt(2), 3 * math.sqrt(2)), rel=1e-5)
    assert std[LeafQuery.SCALAR] == pytest.approx((10 * math.sqrt(2), 10 * math.sqrt(2) / 4), rel=1e-9)


def test_leaf_outputs_follow_the_formula() -> None:
    sums = np.array([[-4.0, 3.0], [40.0, 3.0], [5.0, 0.0], [5.0, -2.0]])
    assert leaf_outputs(sums, ridge=1.0, clip=2.0, scale=0.5).tolist() == [0.5, -1.0, 0.0, 0.0]


def test_averaging_answers_shares_between_0_and_1() -> None:
    repaired = AveragingWeights().repaired(np.array([[-3.0, 4.0], [-9.0, 4.0], [2.0, 4.0], [-1.0, -2.0]]))
    assert leaf_outputs(repaired, 0.0, 1.0, 1.0).tolist() == [0.75, 1.0, 0.0, 0.5]


def test_the_ridge_grows_with_the_noise() -> None:
    assert noise_proportional_ridge(1.0, 3.0, 50.0) == 151.0
