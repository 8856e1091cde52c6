"""A1 and A2: which features and how many trees at a time."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from dp_components.batched_updates import batch_sizes, tree_scale
from dp_components.feature_interactions import FeatureGains, alternating_features, cyclical_features, random_features
from dp_components.split_methods.totally_random import grow_totally_random, weighted_choice
from dp_components.split_methods.tree import TreeBuilder


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


def stump(feature: int):
    builder = TreeBuilder()
    builder.split(0, feature, 0)
    return builder.build()


def test_gains_are_those_of_the_released_sums_less_the_noises_share() -> None:
    """By hand: G of 6 and -4, H of 3 and 1, ridge 1: 36/4 + 16/2 - 4/5, less 2^2 (1/4 + 1/2 - 2/5)."""
    gains = FeatureGains(2)
    gains.add(stump(1), np.array([[6.0, 3.0], [-4.0, 1.0]]), noise_std=2.0, ridge=1.0)
    of_split = 36 / 4 + 16 / 2 - 4 / 5 - 4 * (1 / 4 + 1 / 2 - 2 / 5)
    seen, unseen = (of_split + 3 * of_split) / (1 + 3), 3 * of_split / 3
    assert gains.weights() == pytest.approx([(unseen / seen) ** 0.5, 1.0])


def test_a_feature_without_gain_keeps_a_tenth_and_noise_alone_prefers_none() -> None:
    gains, rng = FeatureGains(3), np.random.default_rng(0)
    for _ in range(400):
        for feature, signal in enumerate((40.0, 0.0, 10.0)):
            sums = np.array([[signal, 9.0], [-signal, 9.0]]) + rng.normal(size=(2, 2)) * 10.0
            gains.add(stump(feature), sums, noise_std=10.0, ridge=30.0)
    best, useless, weak = gains.weights()
    assert best == 1.0 and useless == 0.1 and 0.15 < weak < 0.35
    assert FeatureGains(4).weights() == [1.0] * 4
    nothing = FeatureGains(2)
    nothing.add(stump(0), np.zeros((2, 2)), noise_std=5.0, ridge=1.0)
    assert nothing.weights() == [1.0, 1.0], "a gain below that of the noise is none"


def test_a_weighted_choice_keeps_to_its_weights() -> None:
    draws, weights = random.Random(3), [1.0, 0.1, 0.1]
    drawn = Counter(weighted_choice([0, 2], weights, draws) for _ in range(2000))
    assert set(drawn) == {0, 2} and 0.87 < drawn[0] / 2000 < 0.95


def test_trees_split_by_weight_and_as_ever_without() -> None:
    grown = [grow_totally_random([9] * 3, range(3), 4, random.Random(i), [1.0, 0.1, 0.1]) for i in range(200)]
    roots = Counter(int(tree.feature[0]) for tree in grown)
    assert roots[0] > 140 and sum(roots.values()) == 200
    plain = grow_totally_random([9] * 3, range(3), 2, random.Random(5))
    assert (plain.feature[:3].tolist(), plain.candidate[:3].tolist()) == ([2, 2, 2], [4, 2, 5]), (
        "the trees of older defaults must not change"
    )


def test_batches_hold_every_tree_once() -> None:
    assert batch_sizes(10, 4) == [4, 4, 2]
    assert batch_sizes(8, 4) == [4, 4]
    assert batch_sizes(3, 10) == [3]
    with pytest.raises(ValueError, match="at least one"):
        batch_sizes(3, 0)


def test_a_batch_answers_with_its_mean() -> None:
    assert tree_scale(0.3, 10) == pytest.approx(0.03)
