"""Regression and several classes: how rows are clipped, what their sensitivity is, and what leaves answer."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_components.events import NeighbouringRelation
from dp_components.feature_interactions import FeatureGains
from dp_components.leaf_weights import (
    CLASS_HESSIAN_WEIGHT,
    CLASSES_CLIPPED_AT,
    COUNT_WEIGHT,
    RESIDUAL_CLIPPED_AT,
    UNIT,
    AveragingWeights,
    ClassShares,
    GradientWeights,
    LeafQuery,
    MeanLabels,
    NewtonWeights,
    Number,
    PairBounds,
    SeveralClasses,
    SoftmaxGradientWeights,
    SoftmaxWeights,
    SquaredWeights,
    Times,
    TimesWeights,
    class_probabilities,
    clip_pairs,
    leaf_outputs,
    noise_proportional_ridge,
    probability,
    real_noise_std,
    residual_unit,
)
from dp_components.sensitivity import GRID_BITS, Norm, Sensitivity, clip_class_rows
from dp_components.split_candidates.candidates import FeatureBounds
from dp_components.split_methods.tree import TreeBuilder

LABEL, REPLACE = NeighbouringRelation.CHANGE_LABEL, NeighbouringRelation.REPLACE_ROW
QUERIES = [LeafQuery.VECTOR, LeafQuery.JOINT, LeafQuery.CLIPPED, LeafQuery.PURE]
TEMPERATURE = Number(FeatureBounds(-20.0, 60.0))
STEP = 2.0**-GRID_BITS


def exceeds(row: np.ndarray, of: Sensitivity) -> bool:
    """Say exactly, in rational arithmetic, whether a row is longer than the bound."""
    parts = [abs(int(v)) * Fraction(w) for v, w in zip(row, of.weights, strict=True)]
    return sum(parts) > of.bound if of.norm is Norm.L1 else sum(p * p for p in parts) > Fraction(of.bound) ** 2


# -- several classes --------------------------------------------------------------------------------------------------

VALUE = st.floats(-1e300, 1e300)


@given(
    st.integers(1, 6).flatmap(lambda k: st.lists(st.tuples(*[VALUE] * (2 * k)), min_size=1, max_size=6)),
    st.floats(1e-3, 4.0),
    st.floats(0.1, 5.0),
    st.sampled_from([Norm.L1, Norm.L2]),
)
def test_rows_of_classes_stay_within_their_bound_for_any_floats(
    rows: list, c: float, weight: float, norm: Norm
) -> None:
    both = np.array(rows)
    k = both.shape[1] // 2
    clipped = clip_class_rows(both[:, :k], both[:, k:], c, weight, norm=norm)
    assert clipped.sensitivity.bound == math.floor(c * 2**GRID_BITS)
    assert clipped.sensitivity.weights == (1.0,) * k + (weight,) * k
    assert not any(exceeds(row, clipped.sensitivity) for row in clipped.values)
    assert np.all(clipped.values[:, k:] >= 0)


def test_a_long_row_is_shortened_as_a_whole_and_no_more_than_it_must_be() -> None:
    rows = clip_class_rows([[3.0, -4.0], [0.3, -0.4]], [[0.0], [0.0]], 1.0, 2.0)
    assert (rows.values / UNIT)[0] == pytest.approx([0.6, -0.8, 0.0], abs=2 * STEP)
    assert (rows.values / UNIT)[1] == pytest.approx([0.3, -0.4, 0.0], abs=STEP)
    assert np.linalg.norm(rows.values[0]) > rows.sensitivity.bound - 3


def test_two_labels_of_one_row_are_less_than_two_bounds_apart() -> None:
    """Where nothing is shortened, sqrt(2) of the softmax; shortened at 0.85, more than once the bound, never twice."""
    scores = np.random.default_rng(0).normal(0, 4, (2000, 4)).astype(np.float32)
    labels = [np.full(2000, k, dtype=np.float32) for k in (0, 1)]
    weights = SoftmaxWeights(4)
    moved = np.subtract(*(weights.row_statistics(scores, label, LeafQuery.CLIPPED).values for label in labels))
    of = weights.sensitivity(LeafQuery.CLIPPED)
    lengths = np.linalg.norm(moved * np.array(of.weights), axis=1)
    assert 1.5 * of.bound < lengths.max() <= 2 * of.bound
    for relation in (LABEL, REPLACE):
        assert clip_class_rows([[0.1]], [[0.1]], 0.85, 1.5, relation=relation).sensitivity.bound == 2 * of.bound
    with pytest.raises(ValueError, match="change_value"):
        clip_class_rows([[0.1]], [[0.1]], 0.85, 1.5, relation=NeighbouringRelation.CHANGE_VALUE)


@pytest.mark.parametrize("bad", [([[math.nan]], [[0.1]], 1.0), ([[1.0]], [[0.1], [0.2]], 1.0), ([[0.1]], [[0.1]], 0.0)])
def test_rows_that_cannot_be_clipped_are_refused(bad: tuple) -> None:
    with pytest.raises(ValueError):
        clip_class_rows(*bad, 2.0)


@pytest.mark.parametrize(
    ("make", "query"),
    [(make, query) for make in (SoftmaxWeights, SoftmaxGradientWeights, ClassShares) for query in QUERIES],
)
def test_no_row_of_several_classes_exceeds_its_sensitivity(make, query: LeafQuery) -> None:
    rng = np.random.default_rng(1)
    scores = np.concatenate([rng.normal(0, 6, (500, 5)), np.zeros((5, 5)), 1e30 * np.eye(5)]).astype(np.float32)
    label = rng.integers(0, 5, len(scores)).astype(np.float32)
    rows = make(5).row_statistics(scores, label, query)
    assert rows.sensitivity == make(5).sensitivity(query)
    assert not any(exceeds(row, rows.sensitivity) for row in rows.values)
    curvature = make(5).curvature(rows.values)
    assert curvature.min() >= 0 and curvature.max() <= make(5).largest_curvature * 2**GRID_BITS
    far = make(5).curvature(np.full((1, rows.values.shape[1]), 2**40))
    assert abs(int(far[0])) <= make(5).largest_curvature * 2**GRID_BITS


def test_sums_are_expanded_before_or_after_they_are_added() -> None:
    rng = np.random.default_rng(4)
    for weights, width in ((SoftmaxWeights(3), 6), (SoftmaxGradientWeights(3), 4), (ClassShares(3), 3)):
        bins = rng.normal(0, 9, (7, 5, width))
        assert weights.expanded(bins).shape == (7, 5, 6)
        assert np.allclose(weights.expanded(bins).sum(axis=1), weights.expanded(bins.sum(axis=1)))


def test_shares_of_classes() -> None:
    """Known answers: three rows; noise that left a class, or all, without rows."""
    weights = ClassShares(3)
    rows = weights.row_statistics(np.zeros((3, 3), np.float32), np.array([0.0, 2.0, 2.0], np.float32), LeafQuery.VECTOR)
    assert (rows.values / UNIT).sum(axis=0) == pytest.approx([-1.0, 0.0, -2.0], abs=2 * STEP)
    assert rows.sensitivity.bound == 2**GRID_BITS and weights.sensitivity(LeafQuery.VECTOR) == rows.sensitivity
    repaired = weights.repaired(np.array([[-1.0, 0.5, -3.0], [2.0, 1.0, 0.5]]))
    assert leaf_outputs(repaired, 0.0, 1.0, 1.0) == pytest.approx(np.array([[0.25, 0.0, 0.75], [1 / 3] * 3]))
    assert weights.expanded(np.array([-1.0, 0.0, -2.0])).tolist() == [-1.0, 0.0, -2.0, 3.0, 3.0, 3.0]
    assert weights.curvature(rows.values) == pytest.approx(2**GRID_BITS, abs=1)


def test_statistics_of_the_softmax_are_those_of_its_loss() -> None:
    """Known answers: equal scores of three classes; the first row's length is sqrt(2/3 + 2.25 x 3 x 4/81) > 0.85."""
    rows = SoftmaxWeights(3).row_statistics(np.zeros((1, 3), np.float32), np.array([2.0], np.float32), LeafQuery.VECTOR)
    assert (rows.values / UNIT)[0] == pytest.approx([1 / 3, 1 / 3, -2 / 3, 2 / 9, 2 / 9, 2 / 9], abs=STEP)
    cut = SoftmaxWeights(3).row_statistics(np.zeros((1, 3), np.float32), np.array([2.0], np.float32), LeafQuery.CLIPPED)
    length = math.sqrt(2 / 3 + CLASS_HESSIAN_WEIGHT**2 * 3 * 4 / 81)
    assert (cut.values / UNIT)[0] == pytest.approx((rows.values / UNIT)[0] * CLASSES_CLIPPED_AT / length, abs=2 * STEP)
    assert class_probabilities(np.array([[1e30, 0, -1e30]], np.float32)).tolist() == [[1.0, 0.0, 0.0]]


def test_more_classes_do_not_mean_more_noise() -> None:
    """One query of one sensitivity; one query a class would have each at the root of their number."""
    std = {k: real_noise_std(SoftmaxWeights(k).sensitivity(LeafQuery.CLIPPED), 10.0)[0] for k in (3, 10, 64)}
    assert set(std.values()) == {std[3]} and std[3] == pytest.approx(10 * CLASSES_CLIPPED_AT, rel=1e-5)


def test_the_mean_over_classes_is_noise_and_is_taken_away() -> None:
    rng = np.random.default_rng(2)
    exact = rng.normal(0, 5, (4000, 4))
    exact -= exact.mean(axis=1, keepdims=True)
    noisy = exact + rng.normal(0, 1, exact.shape)
    weights = SoftmaxWeights(4)
    mended = weights.repaired(np.concatenate([noisy, np.ones((4000, 4))], axis=1))
    assert np.abs(mended[:, :4].sum(axis=1)).max() < 1e-12 and np.all(mended[:, 4:] == 1.0)
    # 16,000 values: their standard deviation is known to about half a percent.
    assert np.std(mended[:, :4] - exact) == pytest.approx(weights.noise_kept, rel=0.03)
    assert weights.noise_kept == math.sqrt(3 / 4)


def test_all_classes_share_a_leafs_number_of_rows_in_gradient_updates() -> None:
    sums = np.array([[3.0, -1.0, -2.0, 10.0]])
    assert SoftmaxGradientWeights(3).repaired(sums).tolist() == [[3.0, -1.0, -2.0, 10.0, 10.0, 10.0]]


def test_leaves_answer_class_by_class() -> None:
    sums = np.array([[-4.0, 40.0, 3.0, 3.0], [5.0, 5.0, 0.0, -2.0]])
    assert leaf_outputs(sums, 1.0, 2.0, 0.5).tolist() == [[0.5, -1.0], [0.0, 0.0]]


def test_gains_of_several_classes_add_up() -> None:
    builder = TreeBuilder()
    builder.split(0, 1, 0)
    tree, rng = builder.build(), np.random.default_rng(3)
    gradients, hessians = rng.normal(0, 9, (2, 3)), rng.random((2, 3)) + 5
    together, alone = FeatureGains(2), [FeatureGains(2) for _ in range(3)]
    together.add(tree, np.concatenate([gradients, hessians], axis=1), 0.5, 1.0)
    for k, one in enumerate(alone):
        one.add(tree, np.stack([gradients[:, k], hessians[:, k]], axis=1), 0.5, 1.0)
    assert together._gains[1] == pytest.approx(sum(one._gains[1] for one in alone))
    assert together._n_splits == [0, 1]


# -- numbers ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), VALUE), min_size=1, max_size=8))
def test_residuals_stay_within_their_sensitivity_for_any_score_and_label(pairs: list) -> None:
    margin, label = (np.array(column) for column in zip(*pairs, strict=True))
    label = np.clip(label, -3e38, 3e38).astype(np.float32)
    for query in LeafQuery:
        for weights in (SquaredWeights(TEMPERATURE), MeanLabels(TEMPERATURE)):
            rows = weights.row_statistics(margin.astype(np.float32), label, query)
            assert rows.sensitivity == weights.sensitivity(query)
            assert not any(exceeds(row, rows.sensitivity) for row in rows.values)
            assert np.all(rows.values[:, 1] == UNIT)


@dataclasses.dataclass(frozen=True)
class Given:
    """A loss that answers whatever a test says: clipping must not rely on any of it."""

    g: float
    h: float
    scale: float = 0.5

    def pairs(self, margins: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.seen.append(bounds)
        return np.full(margins.size, self.g, np.float32), np.full(margins.size, self.h, np.float32)

    seen: list[np.ndarray] = dataclasses.field(default_factory=list, compare=False)


@given(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 2, st.booleans())
def test_gradients_of_times_stay_within_their_sensitivity_for_any_loss(g: float, h: float, counts_rows: bool) -> None:
    weights = TimesWeights(Times(FeatureBounds(1.0, 100.0), Given(g, h)), counts_rows=counts_rows)
    for query in LeafQuery:
        rows = weights.row_statistics(np.zeros(2, np.float32), np.ones((2, 2), np.float32), query)
        assert rows.sensitivity == weights.sensitivity(query)
        assert not any(exceeds(row, rows.sensitivity) for row in rows.values)


def test_statistics_of_times() -> None:
    """Known answers: in units of the scale, 0.5; the clipped query cuts at 1, others at log(100) / 2 / 0.5."""
    of_query = {LeafQuery.CLIPPED: (-1.0, 0.75), LeafQuery.VECTOR: (-1.5 / math.log(100), 0.75)}
    for query, (g, h) in of_query.items():
        weights = TimesWeights(Times(FeatureBounds(1.0, 100.0), Given(-3.0, 3.0)), counts_rows=False)
        rows = weights.row_statistics(np.zeros(1, np.float32), np.ones((1, 2), np.float32), query)
        assert rows.values[0] / UNIT == pytest.approx([g, h], abs=STEP)
    counted = TimesWeights(Times(FeatureBounds(1.0, 100.0), Given(-3.0, 3.0)), counts_rows=True)
    assert counted.row_statistics(np.zeros(1, np.float32), np.ones((1, 2), np.float32), query).values[0, 1] == UNIT


def test_times_count_as_the_bound_they_lie_beyond_and_what_says_that_there_is_none_stays() -> None:
    loss = Given(0.0, 0.0)
    times = np.array([[0, 0], [0, 500], [0.5, 0.5], [700, np.inf], [2, 900]], np.float32)
    weights = TimesWeights(Times(FeatureBounds(1.0, 100.0), loss), counts_rows=False)
    weights.row_statistics(np.zeros(5, np.float32), times, LeafQuery.CLIPPED)
    assert loss.seen[-1].tolist() == [[1, 1], [0, 100], [1, 1], [100, np.inf], [2, 100]]


def test_statistics_of_a_regression() -> None:
    """Known answers: half of the distance is 40 degrees, so that residuals are cut at 6."""
    margin = np.array([20.0, 20.0, 20.0, 20.0], np.float32)
    label = np.array([17.0, 26.0, 60.0, 1e9], np.float32)
    assert residual_unit(TEMPERATURE, LeafQuery.CLIPPED) == 40 * RESIDUAL_CLIPPED_AT == pytest.approx(6.0)
    rows = SquaredWeights(TEMPERATURE).row_statistics(margin, label, LeafQuery.CLIPPED).values / UNIT
    assert rows[:, 0] == pytest.approx([0.5, -1.0, -1.0, -1.0], abs=STEP)
    rows = SquaredWeights(TEMPERATURE).row_statistics(margin, label, LeafQuery.VECTOR).values / UNIT
    assert rows[:, 0] == pytest.approx([3 / 40, -6 / 40, -1.0, -1.0], abs=STEP)
    assert COUNT_WEIGHT < 1


@pytest.mark.parametrize("scale", [1e6, 1e-9])
def test_the_scale_of_a_label_changes_nothing(scale: float) -> None:
    rng = np.random.default_rng(4)
    margin, label = rng.normal(20, 9, (2, 300))
    scaled = Number(FeatureBounds(-20 * scale, 60 * scale))
    for make in (SquaredWeights, MeanLabels):
        plain = make(TEMPERATURE).row_statistics(*np.float32([margin, label]), LeafQuery.CLIPPED).values
        other = make(scaled).row_statistics(*np.float32([margin * scale, label * scale]), LeafQuery.CLIPPED).values
        assert np.abs(plain - other).max() <= 8  # grid steps: float32 has 24 bits


def test_mean_labels_lie_within_the_bounds() -> None:
    sums = np.array([[-3.0, 4.0], [-9.0, 4.0], [2.0, 4.0], [-1.0, -2.0]])
    repaired = MeanLabels(TEMPERATURE).repaired(sums)
    assert leaf_outputs(repaired, 0.0, 1.0, 40.0).tolist() == [30.0, 40.0, -20.0, 0.0]


def test_a_label_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        SquaredWeights(TEMPERATURE).row_statistics(np.zeros(1, np.float32), np.float32([np.nan]), LeafQuery.CLIPPED)


@pytest.mark.parametrize(
    ("low", "high", "match"),
    [(1.0, 1.0, "lower one first"), (0.0, 1e39, "float32"), (1e9, 1e9 + 1, "too close"), (0.0, 1e-31, "too close")],
)
def test_bounds_that_float32_cannot_hold_are_refused(low: float, high: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Number(FeatureBounds(low, high))


def test_kinds_of_labels() -> None:
    assert Number(FeatureBounds(-3e38, 3e38)).start == 0.0 and Number(FeatureBounds(-3e38, 3e38)).unit == 3e38
    assert SeveralClasses(3).n_outputs == 3
    with pytest.raises(ValueError, match="three at least"):
        SeveralClasses(2)


# -- statistics on the grid, forms of the query, and XGBoost's weight formula ------------------------------------------


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
