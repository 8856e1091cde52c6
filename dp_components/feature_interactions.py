"""A1: which features a tree may use."""

from __future__ import annotations

import math
import random

import numpy as np
from numpy.typing import NDArray

from dp_components.split_methods.tree import LEAF, Tree

# Cyclical k-way feature interactions (A1).


def cyclical_features(tree: int, n_features: int, k: int) -> list[int]:
    """Return the features of a tree when each takes the next k after those of the one before, round and round.

    k = 1 is the explainable boosting machine (tree t uses feature t mod m), k = m ordinary boosting. After any number
    of trees every feature has been used equally often, or once more than another: the order of the columns decides
    which features meet in a tree, but favours none.

    Privacy: touches no data.

    Raises:
        ValueError: unless 1 <= k <= n_features.
    Reference: Maddock et al., section 5.1, item 1.
    """
    if not 1 <= k <= n_features:
        raise ValueError(f"k must lie between 1 and the number of features, {n_features}")
    return sorted((tree * k + place) % n_features for place in range(k))


# Alternate trees of one feature with trees of all features (ours).
#
# One-feature trees learn each feature's own effect with the least noise, trees over all features learn what features do
# together. Which of them helps depends on the data; taking turns makes no choice that would have to look.


def alternating_features(tree: int, n_features: int) -> list[int]:
    """Return one feature for even trees (cyclical) and all features for odd ones. Privacy: touches no data."""
    if tree % 2:
        return list(range(n_features))
    return cyclical_features(tree // 2, n_features, 1)


# Trees over all features that draw them by what earlier trees have released (ours).
#
# Sums of noised leaves tell which features have split rows of different gradients. Drawing those features more often
# spends the noise where there is something to learn, and costs nothing: it reads what everybody has received already.


_FLOOR = 0.1
"""No feature is drawn less than so many times as often as the best one."""
_PRIOR_SPLITS = 3.0
"""Each feature counts as having had so many splits more, of average gain."""


class FeatureGains:
    """The gains of all splits so far, by feature, less what the noise alone would add to them.

    Privacy: post-processing of released sums.
    """

    def __init__(self, n_features: int) -> None:
        self._gains, self._n_splits = [0.0] * n_features, [0] * n_features

    def add(self, tree: Tree, leaf_sums: NDArray[np.float64], noise_std: float, ridge: float) -> None:
        """Take note of a finished tree.

        Sums and square roots of single doubles alone, one after the other: every site gets the same numbers, whatever
        its processor.

        Shapes: leaf_sums: float64[n_leaves, 2 K], released: G of each of K outputs, then H of each. The gain of a split
            is that of all outputs.

        Args:
            noise_std: standard deviation of the noise on a leaf's G.
        """
        n_outputs = leaf_sums.shape[1] // 2
        for k in range(n_outputs):
            self._add_gains(tree, leaf_sums[:, [k, n_outputs + k]], noise_std, ridge)
        for feature in tree.feature.tolist():
            if feature != LEAF:
                self._n_splits[feature] += 1

    def _add_gains(self, tree: Tree, leaf_sums: NDArray[np.float64], noise_std: float, ridge: float) -> None:
        sums: dict[int, tuple[float, float, int]] = {}
        for leaf, (g, h) in zip(tree.leaves.tolist(), leaf_sums.tolist(), strict=True):
            sums[leaf] = (g, h, 1)
        score = {node: _score(*of_node, noise_std, ridge) for node, of_node in sums.items()}
        feature, left, right = tree.feature.tolist(), tree.left.tolist(), tree.right.tolist()
        for node in range(len(feature) - 1, -1, -1):  # children follow their parent
            if feature[node] == LEAF:
                continue
            a, b = sums[left[node]], sums[right[node]]
            sums[node] = (a[0] + b[0], a[1] + b[1], a[2] + b[2])
            score[node] = _score(*sums[node], noise_std, ridge)
            self._gains[feature[node]] += score[left[node]] + score[right[node]] - score[node]

    def weights(self) -> list[float]:
        """Return how often each feature is to be drawn, 1 for the best: by the root of its mean gain."""
        average = max(0.0, math.fsum(self._gains) / max(1, sum(self._n_splits)))
        roots = [
            math.sqrt(max(0.0, (gain + _PRIOR_SPLITS * average) / (n_splits + _PRIOR_SPLITS)))
            for gain, n_splits in zip(self._gains, self._n_splits, strict=True)
        ]
        best = max(roots)
        return [max(_FLOOR, root / best) for root in roots] if best > 0 else [1.0] * len(roots)


def _score(gradient: float, hessian: float, n_leaves: int, noise_std: float, ridge: float) -> float:
    """Return G^2 / (H + lambda) of a node, less the noise's share of G^2: its leaves bring one each."""
    return (gradient * gradient - n_leaves * (noise_std * noise_std)) / (max(hessian, 0.0) + ridge)


# Random k-way feature interactions (A1).


def random_features(n_features: int, k: int, draws: random.Random) -> list[int]:
    """Draw the k features of one tree without replacement.

    Privacy: touches no data; ``draws`` is public, every site makes the same ones.

    Raises:
        ValueError: unless 1 <= k <= n_features.
    Reference: Maddock et al., section 5.1, item 2.
    """
    if not 1 <= k <= n_features:
        raise ValueError(f"k must lie between 1 and the number of features, {n_features}")
    return sorted(draws.sample(range(n_features), k))
