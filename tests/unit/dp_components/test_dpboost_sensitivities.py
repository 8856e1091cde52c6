"""DPBoost's filtering, clipping and choice of splits: bounds that hold, and the published ones that do not."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS, clip_bound, leaf_sensitivity
from dp_components.dpboost.gradient_based_data_filtering import filter_by_gradient, gain_bound, gradient_sensitivity
from dp_components.dpboost.single_tree import SplitTable, TreeSettings, choose_splits, gains, release_leaves
from dp_components.events import ExponentialEvent, LaplaceEvent, NeighbouringRelation
from dp_components.sensitivity import GRID_BITS
from dp_components.split_candidates.candidates import Candidates
from tests.support.seeded_randomness import SeededRandomness

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
GRADIENTS = gradient_sensitivity()
ONE = 1 << GRID_BITS
RIDGE = math.floor(0.1 * ONE)
TABLE = SplitTable.of(Candidates((np.array([0.0, 1.0], np.float32), np.array([5.0], np.float32))))
ALPHA = 1e-5


def term(total: Fraction, n: int, ridge: Fraction) -> Fraction:
    return total**2 / (n + ridge)


def published_gain_bound(ridge: float) -> float:
    return (3 * ridge + 2) / ((ridge + 1) * (ridge + 2))


def test_filtering_drops_large_gradients_and_nothing_else() -> None:
    is_kept, clipped = filter_by_gradient([0.25, -1.0, 1.0000001, 1.0, -7.0])
    assert is_kept.tolist() == [True, True, False, True, False]
    assert clipped.values[:, 0].tolist() == [ONE // 4, -ONE, ONE]
    assert clipped.sensitivity == GRADIENTS and GRADIENTS.bound == ONE
    with pytest.raises(ValueError, match="finite"):
        filter_by_gradient([math.nan])


@given(st.lists(st.integers(-ONE, ONE), max_size=30), st.integers(-ONE, ONE), st.sampled_from([1e-6, 0.1, 1.0, 50.0]))
def test_no_row_changes_a_gain_by_more_than_the_bound(rows: list[int], row: int, ridge: float) -> None:
    exact = Fraction(ridge)
    before = term(Fraction(sum(rows), ONE), len(rows), exact)
    after = term(Fraction(sum(rows) + row, ONE), len(rows) + 1, exact)
    assert abs(after - before) < gain_bound(GRADIENTS) == 3


def test_the_published_gain_bound_is_too_small_and_ours_is_nearly_reached() -> None:
    ridge = Fraction(1, 10)
    change = {n: float(term(Fraction(n), n, ridge) - term(Fraction(n - 1), n + 1, ridge)) for n in (1, 100, 10_000)}
    assert published_gain_bound(0.1) == pytest.approx(0.996, abs=1e-3)
    assert change[1] < published_gain_bound(0.1) < change[100]
    assert change[100] == pytest.approx(2.95, abs=0.02) and change[10_000] == pytest.approx(3, abs=1e-3)


def exact_leaf(rows: list[int], ridge: int, bound: int) -> int:
    """The leaf weight that ``release_leaves`` noises, in whole numbers."""
    weight = (-sum(rows) << LEAF_BITS) // (len(rows) * ONE + ridge)
    return min(max(weight, -bound), bound)


@given(
    st.lists(st.integers(-ONE, ONE), max_size=6), st.integers(-ONE, ONE), st.integers(1, 3 * ONE), st.integers(0, 80)
)
def test_no_row_moves_a_leaf_by_more_than_its_sensitivity(rows: list[int], row: int, ridge: int, tree: int) -> None:
    bound = clip_bound(GRADIENTS, 0.1, tree)
    moved = exact_leaf([*rows, row], ridge, bound) - exact_leaf(rows, ridge, bound)
    assert abs(moved) <= leaf_sensitivity(GRADIENTS, ridge, bound).bound


def test_the_leaf_sensitivity_is_reached() -> None:
    bound = clip_bound(GRADIENTS, 0.1, 0)
    moved = exact_leaf([-ONE], RIDGE, bound) - exact_leaf([], RIDGE, bound)
    assert moved >= leaf_sensitivity(GRADIENTS, RIDGE, bound).bound - 1
    late = clip_bound(GRADIENTS, 0.1, 40)
    assert leaf_sensitivity(GRADIENTS, RIDGE, late).bound == 2 * late
    assert exact_leaf([-ONE] * 9, RIDGE, late) - exact_leaf([ONE] * 9, RIDGE, late) == 2 * late


def test_clipping_falls_geometrically_until_nothing_is_left() -> None:
    bounds = [math.ldexp(clip_bound(GRADIENTS, 0.1, t), -LEAF_BITS) for t in range(50)]
    np.testing.assert_allclose(bounds, 0.9 ** np.arange(50), rtol=1e-6)
    with pytest.raises(ValueError, match="smaller ensembles"):
        clip_bound(GRADIENTS, 0.1, 300)


def test_leaves_carry_exactly_the_noise_of_the_leaf_budget() -> None:
    """20,000 leaves; KS, false alarm below 1e-5 on either side; 2/3 and 3/2 of the noise must be rejected."""
    epsilon, n = 0.5, 20_000
    bound = clip_bound(GRADIENTS, 0.1, 0)
    release = release_leaves(
        TreeSettings(1, RIDGE, bound, epsilon, epsilon), (np.zeros(n, int), np.zeros(n, int)), SeededRandomness(1)
    )
    assert release.event == LaplaceEvent(epsilon, ROW)
    scale = 1 / (1 + RIDGE / ONE) / epsilon
    values = np.ldexp(release.value.astype(float), -LEAF_BITS)
    for wrong, is_right in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        assert (stats.kstest(values, stats.laplace(scale=wrong * scale).cdf).pvalue > ALPHA) == is_right


def test_leaf_weights_are_the_papers() -> None:
    sums, counts = np.array([-3 * ONE, 5 * ONE, 0]), np.array([4, 9, 0])
    bound = clip_bound(GRADIENTS, 0.1, 0)
    value = release_leaves(TreeSettings(1, RIDGE, bound, 1e9, 1e9), (sums, counts)).value
    np.testing.assert_allclose(np.ldexp(value.astype(float), -LEAF_BITS), [3 / 4.1, -5 / 9.1, 0], atol=1e-6)


def level() -> tuple[np.ndarray, np.ndarray]:
    """Two nodes of two features with three and two bins: every feature's bins hold the same rows."""
    grads = np.array([[-4, 1, 2, -3, 2], [0, 0, 0, 0, 0]]) * ONE
    counts = np.array([[5, 2, 3, 6, 4], [0, 0, 0, 0, 0]])
    return grads, counts


def test_gains_against_a_naive_twin() -> None:
    grads, counts = level()
    expected = [16 / 5.1 + 9 / 5.1, 9 / 7.1 + 4 / 3.1, 9 / 6.1 + 4 / 4.1]
    np.testing.assert_allclose(gains(TABLE, grads, counts, 0.1), [expected, [0, 0, 0]])


def splitting_at(epsilon: float) -> TreeSettings:
    return TreeSettings(1, RIDGE, 1, epsilon, epsilon)


def test_splits_are_drawn_with_the_corrected_sensitivity() -> None:
    """6,000 draws of each node; chi-square; the published sensitivity, and 2/3 and 3/2 of ours, must be rejected."""
    grads, counts = level()
    source, epsilon, copies = SeededRandomness(2), 4.0, 100
    many = np.tile(grads, (copies, 1)), np.tile(counts, (copies, 1))  # nodes of a level are drawn apart
    draws = np.concatenate(
        [
            np.reshape(choose_splits(TABLE, splitting_at(epsilon), many, source).value, (copies, 2))
            for _ in range(6_000 // copies)
        ]
    )
    utility = gains(TABLE, grads, counts, 0.1)

    def p_value(node: int, sensitivity: float) -> float:
        weight = np.exp(epsilon * utility[node] / (2 * sensitivity))
        return float(stats.chisquare(np.bincount(draws[:, node], minlength=3), 6_000 * weight / weight.sum()).pvalue)

    assert ALPHA < p_value(0, 3.0) < 1 - ALPHA and ALPHA < p_value(1, 3.0) < 1 - ALPHA
    assert all(p_value(0, wrong) < ALPHA for wrong in (2.0, 4.5, published_gain_bound(0.1)))


def test_a_level_is_one_event_and_large_levels_are_refused() -> None:
    grads, counts = level()
    assert choose_splits(TABLE, splitting_at(0.3), (grads, counts)).event == ExponentialEvent(0.3, ROW)
    with pytest.raises(ValueError, match="too many rows"):
        choose_splits(TABLE, splitting_at(0.3), (grads, counts << 28))
    with pytest.raises(ValueError, match="candidate"):
        SplitTable.of(Candidates((np.zeros(0, np.float32),)))
