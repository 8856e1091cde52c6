"""FederBoost's buckets: edges, ties, prices, the mechanism's probabilities, refusals. Draws: tests/statistical."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_components.accounting import compose
from dp_components.bucket_ldp import (
    PublicValues,
    count_cells,
    equal_count_ends,
    paid_edges,
    public_edges,
    release_buckets,
    release_cell_counts,
    transition_probabilities,
    wrong_bucket_rate,
)
from dp_components.events import LaplaceEvent, LocalRandomisedResponseEvent, NeighbouringRelation
from dp_components.split_candidates.candidates import FeatureBounds
from tests.support.seeded_randomness import SeededRandomness

VALUE, WHOLE_ROW = NeighbouringRelation.CHANGE_VALUE, NeighbouringRelation.REPLACE_ROW
FEATURES = [FeatureBounds(0, 100), PublicValues((1.0, 2.0, 5.0)), PublicValues(tuple(float(v) for v in range(40)))]
NO_NOISE = 1e12


def columns(n: int = 4000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    skewed = np.minimum(rng.exponential(8, n), 100)
    return np.stack([skewed, rng.choice([1.0, 2.0, 5.0], n), rng.integers(0, 40, n)]).astype(np.float32)


def test_discrete_features_have_one_bucket_per_value() -> None:
    edges = public_edges(FEATURES, 16)
    assert edges.counts == [15, 2, 15]
    np.testing.assert_array_equal(edges.of_feature[1], [1, 2])
    np.testing.assert_allclose(edges.of_feature[0], np.arange(1, 16) * 6.25)
    assert edges.bin_rows(np.array([[0], [5], [0]], np.float32))[1, 0] == 2
    assert public_edges([PublicValues((3.0,))], 16).counts == [0]


def test_equal_counts_where_nothing_ties() -> None:
    assert equal_count_ends(np.full(160, 5), 16).tolist() == list(range(9, 159, 10))


def test_empty_cells_end_no_bucket() -> None:
    """Columns of whole numbers leave most of the fine cells between them empty."""
    counts = np.zeros(640, dtype=np.int64)
    counts[::4] = 5
    held = [part.sum() for part in np.split(counts, equal_count_ends(counts, 16) + 1)]
    assert held == [50] * 16
    whole = np.random.default_rng(1).integers(18, 96, (1, 30_000)).astype(np.float32)
    bounds = [FeatureBounds(0, 100)]
    released = release_cell_counts(whole, bounds, 16, 0.4, randomness=SeededRandomness(1))
    held = np.bincount(paid_edges(released.value, 0.4, bounds, 16).bin_rows(whole)[0], minlength=16)
    assert held.min() > 0.5 * 30_000 / 16 and held.max() < 2 * 30_000 / 16


def test_a_heavy_value_gets_one_bucket_and_the_others_share_the_rest() -> None:
    counts = np.full(31, 10)
    counts[4] = 100_000
    ends = equal_count_ends(counts, 16)
    assert ends.size == 15 and 4 in ends
    # Plain quantiles of these counts would all fall onto the heavy value.
    assert np.unique(np.searchsorted(np.cumsum(counts), counts.sum() * np.arange(1, 16) / 16)).tolist() == [4]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(2, 20))
def test_bucket_ends_are_always_possible(counts: list[int], n_buckets: int) -> None:
    ends = equal_count_ends(np.array(counts), n_buckets)
    assert ends.size < n_buckets and np.all(np.diff(ends) > 0) and np.all(ends < len(counts) - 1)
    held = [part.sum() for part in np.split(np.array(counts), ends + 1)]
    assert sum(held) == sum(counts) and (sum(counts) == 0 or min(held) > 0)


def test_paid_edges_hold_equal_counts() -> None:
    x = columns()
    released = release_cell_counts(x, FEATURES, 16, NO_NOISE)
    edges = paid_edges(released.value, NO_NOISE, FEATURES, 16)
    assert edges.counts == [15, 2, 15]
    for feature in (0, 2):
        held = np.bincount(edges.bin_rows(x)[feature], minlength=16)
        assert held.max() < 2 * 4000 / 16
    uneven = np.bincount(public_edges(FEATURES, 16).bin_rows(x)[0], minlength=16)
    assert uneven.max() > 2000


def test_a_changed_value_moves_two_counts_and_a_changed_row_two_of_each_counted_feature() -> None:
    x = columns()
    value, row = x.copy(), x.copy()
    value[0, 7] = 99.0
    row[:, 7] = (99.0, 5.0 if x[1, 7] == 1 else 1.0, (x[2, 7] + 1) % 40)
    cells, _ = count_cells(x, FEATURES, 16)
    for other, relation in ((value, VALUE), (row, WHOLE_ROW)):
        moved = np.abs(count_cells(other, FEATURES, 16)[0] - cells).sum()
        assert moved == count_cells(x, FEATURES, 16, relation)[1].bound
    assert cells.sum() == 2 * 4000
    missing = x.copy()
    missing[0, 3] = np.nan
    assert count_cells(missing, FEATURES, 16)[0].sum() == 2 * 4000


def test_edges_and_buckets_are_priced_together() -> None:
    x = columns(200)
    counts = release_cell_counts(x, FEATURES, 16, 0.5)
    edges = paid_edges(counts.value, 0.5, FEATURES, 16)
    buckets = release_buckets(x, edges, 4.0)
    assert counts.event == LaplaceEvent(0.5, VALUE) and buckets.event == LocalRandomisedResponseEvent(4.0, 3, VALUE)
    assert compose([counts.event, buckets.event]).pure_epsilon == 4.5
    of_row = release_buckets(x, edges, 4.0, WHOLE_ROW)
    assert compose(of_row.event).pure_epsilon == 12.0
    assert buckets.value.shape == (200, 3) and np.all(buckets.value <= np.array(edges.counts))


def test_without_noise_the_true_buckets_are_sent() -> None:
    x = columns(300)
    edges = public_edges(FEATURES, 16)
    sent = release_buckets(x, edges, 500.0, randomness=SeededRandomness(1)).value
    np.testing.assert_array_equal(sent, edges.bin_rows(x).T)


@given(st.integers(1, 255), st.floats(1e-3, 60))
def test_probabilities_add_up_and_differ_by_e_to_the_epsilon(n_buckets: int, epsilon: float) -> None:
    matrix = transition_probabilities(n_buckets, epsilon)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-12)
    if n_buckets > 1:
        np.testing.assert_allclose(matrix.max(axis=0) / matrix.min(axis=0), math.exp(epsilon), rtol=1e-12)


def test_known_probabilities() -> None:
    assert wrong_bucket_rate(16, 4.0) == pytest.approx(0.2155, abs=5e-5)
    three = transition_probabilities(3, math.log(2))
    assert three[1, 1] == pytest.approx(float(Fraction(2, 4))) and three[1, 2] == pytest.approx(float(Fraction(1, 4)))
    assert wrong_bucket_rate(3, 4.0) < wrong_bucket_rate(16, 4.0)
    for q, epsilon in ((0, 1.0), (4, 0.0), (4, math.inf), (4, math.nan)):
        with pytest.raises(ValueError):
            transition_probabilities(q, epsilon)


def test_refusals() -> None:
    x, edges = columns(20), public_edges(FEATURES, 16)
    for relation in (NeighbouringRelation.ADD_OR_REMOVE_ROW, NeighbouringRelation.CHANGE_LABEL):
        with pytest.raises(ValueError, match=relation.value):
            release_buckets(x, edges, 1.0, relation)
        with pytest.raises(ValueError, match=relation.value):
            release_cell_counts(x, FEATURES, 16, 1.0, relation)
    with pytest.raises(ValueError, match="columns"):
        release_buckets(x[:2], edges, 1.0)
    with pytest.raises(ValueError, match="columns"):
        count_cells(x[:2], FEATURES, 16)
    with pytest.raises(ValueError, match="cost nothing"):
        count_cells(x[1:2], FEATURES[1:2], 16)
    with pytest.raises(ValueError, match="belong"):
        paid_edges(np.zeros(5, int), 1.0, FEATURES, 16)
    for n_buckets in (1, 256, True):
        with pytest.raises(ValueError, match="buckets"):
            public_edges(FEATURES, n_buckets)
    with pytest.raises(ValueError, match="feature"):
        public_edges([], 16)
    for values in ((), (2.0, 1.0), (1.0, 1.0), (math.nan,)):
        with pytest.raises(ValueError, match="ascending"):
            PublicValues(values)
    for epsilon in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError):
            release_buckets(x, edges, epsilon)
