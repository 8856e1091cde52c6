"""C1: how the splits of a tree are chosen: drawn, the best of drawn ones, or the best of a noised histogram."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights import UNIT
from dp_components.split_methods.tree import GreedyQuery, OpenNode, Split, Totals, Tree, TreeBuilder

# Totally random trees (C1): feature and candidate of every split are drawn, no data is asked.
#
# Only the leaves cost privacy: one query per tree, since a row lies in one leaf.


def grow_totally_random(
    candidate_counts: Sequence[int],
    features: Sequence[int],
    depth: int,
    draws: random.Random,
    weights: Sequence[float] | None = None,
) -> Tree:
    """Draw a tree's structure.

    At each node a feature is drawn among those that can still be split there, then one of its candidates that lie
    inside the node. A branch ends at ``depth``, or where no feature has a candidate left.

    Privacy: touches no data. ``draws`` and ``weights`` are public: every site draws the same trees.

    Args:
        candidate_counts: number of candidates of each feature.
        features: the features this tree may use.
        weights: how often each feature is drawn, all above 0; None for all alike.

    Reference: Maddock et al., section 4.3.2.
    """
    builder = TreeBuilder()
    open_nodes = [(0, {f: (0, candidate_counts[f]) for f in features})]
    for _ in range(depth):
        below = []
        for node, ranges in open_nodes:
            splittable = [f for f, (low, high) in ranges.items() if low < high]
            if not splittable:
                continue
            feature = (
                splittable[draws.randrange(len(splittable))]
                if weights is None
                else weighted_choice(splittable, weights, draws)
            )
            low, high = ranges[feature]
            candidate = draws.randrange(low, high)
            left, right = builder.split(node, feature, candidate)
            below.append((left, {**ranges, feature: (low, candidate)}))
            below.append((right, {**ranges, feature: (candidate + 1, high)}))
        open_nodes = below
    return builder.build()


def weighted_choice(items: Sequence[int], weights: Sequence[float], draws: random.Random) -> int:
    """Draw one of the items in proportion to ``weights[item]``, which are above 0: alike on every machine."""
    left = draws.random() * math.fsum(weights[item] for item in items)
    for item in items:
        left -= weights[item]
        if left < 0:
            return item
    return items[-1]


# Partially random trees (C1): one drawn candidate per feature, the best of them wins on noisy sums.
#
# A tree costs one query per level and feature, as greedy trees do, and one for the root's sums; but a query is a single
# sum and not a histogram, so the noise on what a split decides by is smaller.


@dataclass(slots=True)
class PartiallyRandomQuery(GreedyQuery):
    """Noisy left sums of a level's nodes; see ``greedy.grow``.

    Privacy: ``draws``, the source of candidates, is public. Adding or removing a row changes the left sum of each
        feature in one node of a level.
    Reference: Maddock et al., section 4.3.2.
    """

    draws: random.Random

    def root(self, rows: NDArray[np.intp]) -> Totals:
        """Release the sums over all rows."""
        totals: Totals = self.add_noise(self.pairs[rows].sum(axis=0, keepdims=True))[0] / UNIT
        return totals

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Release one left sum per node and feature that can still divide it, and return each node's best split."""
        drawn = [self._draw(node) for node in nodes]
        noisy = np.empty((0, self.pairs.shape[1]))
        if any(drawn):
            asked = [(node.rows, cuts) for node, cuts in zip(nodes, drawn, strict=True) if cuts]
            sums = self.histograms([rows for rows, _ in asked])
            exact = [self._left_sums(of_node, cuts) for of_node, (_, cuts) in zip(sums, asked, strict=True)]
            noisy = self.add_noise(np.concatenate(exact)) / UNIT
        of_node = np.split(noisy, np.cumsum([len(cuts) for cuts in drawn])[:-1])
        return [self._best_of_node(*parts) for parts in zip(nodes, drawn, of_node, strict=True)]

    def _draw(self, node: OpenNode) -> list[tuple[int, int]]:
        """Draw one candidate of each feature that can still divide the node."""
        ranges = node.ranges
        return [
            (f, self.draws.randrange(int(ranges[f, 0]), int(ranges[f, 1])))
            for f in self.features
            if ranges[f, 0] < ranges[f, 1]
        ]

    def _left_sums(self, sums: NDArray[np.int64], cuts: list[tuple[int, int]]) -> NDArray[np.int64]:
        places = [self.features.index(feature) for feature, _ in cuts]
        reached: NDArray[np.int64] = np.cumsum(sums, axis=1)[places, [candidate for _, candidate in cuts]]
        return reached

    def _best_of_node(
        self, node: OpenNode, cuts: list[tuple[int, int]], left: NDArray[np.float64]
    ) -> tuple[Totals, Split | None]:
        totals = node.totals
        if totals is None:
            raise ValueError("partially random trees start from released root sums")
        right = totals - left
        scores = self.rule.scores(left, right, totals) if cuts else None
        if scores is None:
            return totals, None
        i = int(np.argmax(scores))
        return totals, Split(float(scores[i]), *cuts[i], left[i], right[i])


# A tree costs one query per level and feature; its leaves follow from the last histograms. A tree of one feature costs
# one query in all (``OneFeatureHistogramQuery``).


@dataclass(slots=True)
class HistogramQuery(GreedyQuery):
    """Noisy histograms of a level's nodes; see ``greedy.grow``.

    Privacy: every bin is noised, empty ones too; adding or removing a row changes one bin of each feature.

    Attributes:
        root_histograms: the root's, once they are released. Shapes: float64[n_features used, n_bins, n_coordinates].

    Reference: Maddock et al., section 4.3.1.
    """

    root_histograms: NDArray[np.float64] | None = None

    def root(self, rows: NDArray[np.intp]) -> Totals | None:
        """Return None: the root's sums are the mean over features of the first histogram's totals."""
        return None

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Release the nodes' histograms and return each one's best split.

        Bins outside a node hold no rows, only noise: they are left out. Both sides of a split are summed over the
        feature's own bins, so that neither carries the noise of the node's sums, which grows from level to level.
        """
        noisy = self.add_noise(self.histograms([node.rows for node in nodes])) / UNIT
        if self.root_histograms is None:
            self.root_histograms = noisy[0]
        return [self._best_of_node(of_node, node) for of_node, node in zip(noisy, nodes, strict=True)]

    def _best_of_node(self, noisy: NDArray[np.float64], node: OpenNode) -> tuple[Totals, Split | None]:
        low, high = node.ranges[self.features, 0, None], node.ranges[self.features, 1, None]
        bins, totals = np.arange(noisy.shape[1]), node.totals
        inside = np.where(((low <= bins) & (bins <= high))[..., None], noisy, 0.0)
        reached = np.cumsum(inside, axis=1)
        if totals is None:
            totals = reached[:, -1].mean(axis=0)
        divides = (low <= bins[:-1]) & (bins[:-1] < high)
        left, right = reached[:, :-1], reached[:, -1:] - reached[:, :-1]
        gained = self.rule.scores(left, right, totals) if divides.any() else None
        if gained is None:
            return totals, None
        scores = np.where(divides, gained, -np.inf)
        i, cut = np.unravel_index(int(np.argmax(scores)), scores.shape)
        return totals, Split(float(scores[i, cut]), self.features[int(i)], int(cut), left[i, cut], right[i, cut])


# Histogram trees of one feature (C1 with A1, k = 1): the root's histogram answers for the whole tree.
#
# Every node of such a tree is an interval of the feature's bins, so that its histogram is a part of the root's: all
# levels, and the leaves, are post-processing of one query. Only with one feature is this so; with two, a split by one
# divides the bins of the other.


class OneFeatureHistogramQuery(HistogramQuery):
    """The noisy histogram of a tree's one feature; see ``greedy.grow``.

    Privacy: one query a tree, whatever its depth; rows are not looked at again below the root.
    Reference: Maddock et al., section 5.1. Their code takes fresh histograms without noise below the root.

    Raises:
        ValueError: unless there is one feature.
    """

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Release the root's histogram at the first call; return each node's best split by its part of that."""
        if len(self.features) != 1:
            raise ValueError("the root's histogram answers for the whole tree only where the tree has one feature")
        of_root = self.root_histograms
        return super().best(nodes) if of_root is None else [self._best_of_node(of_root, node) for node in nodes]
