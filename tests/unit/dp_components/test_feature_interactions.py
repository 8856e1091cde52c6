"""A1 and A2: which features and how many trees at a time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dp_components.batched_updates.batches import batch_sizes, tree_scale
from dp_components.feature_interactions.alternating import alternating_features
from dp_components.feature_interactions.cyclical import cyclical_features
from dp_components.feature_interactions.random_k_way import random_features


def test_cyclical_takes_the_next_k_features_in_turn() -> None:
    assert [cyclical_features(t, 5, 2) for t in range(6)] == [[0, 1], [2, 3], [0, 4], [1, 2], [3, 4], [0, 1]]
    assert [cyclical_features(t, 6, 3) for t in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert [cyclical_features(t, 3, 1) for t in range(4)] == [[0], [1], [2], [0]]
    assert cyclical_features(7, 4, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(("n", "k"), [(5, 1), (5, 2), (14, 3), (23, 7), (4, 4)])
@pytest.mark.parametrize("n_trees", [1, 9, 100])
def test_cyclical_favours_no_column_for_its_place(n: int, k: int, n_trees: int) -> None:
    used = Counter(feature for t in range(n_trees) for feature in cyclical_features(t, n, k))
    counts = [used[feature] for feature in range(n)]
    assert max(counts) - min(counts) <= 1


def test_random_subsets_have_k_distinct_features() -> None:
    draws = random.Random(1)
    subsets = [random_features(8, 3, draws) for _ in range(300)]
    assert all(len(set(s)) == 3 and s == sorted(s) for s in subsets)
    assert {f for s in subsets for f in s} == set(range(8))


@pytest.mark.parametrize("k", [0, 4])
def test_k_is_between_one_and_all(k: int) -> None:
    with pytest.raises(ValueError, match="k must"):
        cyclical_features(0, 3, k)
    with pytest.raises(ValueError, match="k must"):
        random_features(3, k, random.Random(0))


def test_alternating_takes_one_and_all_by_turns() -> None:
    assert [alternating_features(t, 3) for t in range(6)] == [[0], [0, 1, 2], [1], [0, 1, 2], [2], [0, 1, 2]]


def test_batches_hold_every_tree_once() -> None:
    assert batch_sizes(10, 4) == [4, 4, 2]
    assert batch_sizes(8, 4) == [4, 4]
    assert batch_sizes(3, 10) == [3]
    with pytest.raises(ValueError, match="at least one"):
        batch_sizes(3, 0)


def test_a_batch_answers_with_its_mean() -> None:
    assert tree_scale(0.3, 10) == pytest.approx(0.03)
