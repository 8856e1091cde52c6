"""Partially random trees (C1): one drawn candidate per feature, the best of them wins on noisy sums.

A tree costs one query per level and feature, as greedy trees do, and one for the root's sums; but a query is a single
sum and not a histogram, so the noise on what a split decides by is smaller.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights import UNIT
from dp_components.split_methods.greedy import Expand, Histograms, OpenNode, Split, as_pairs, in_numpy, may_be_split
from dp_components.split_methods.histogram import AddNoise
from dp_components.split_methods.tree import Totals, split_scores


class PartiallyRandomQuery:
    """Noisy left sums of a level's nodes; see ``greedy.grow``.

    Privacy: ``draws`` is public. Adding or removing a row changes the left sum of each feature in one node of a level.
    Reference: Maddock et al., section 4.3.2.
    """

    def __init__(
        self,
        bins: NDArray[np.uint8],
        pairs: NDArray[np.int64],
        features: Sequence[int],
        candidate_counts: Sequence[int],
        ridge: float,
        clip: float,
        add_noise: AddNoise,
        draws: random.Random,
        expand: Expand = as_pairs,
        histograms: Histograms | None = None,
    ):
        self._pairs, self._features = pairs, list(features)
        self.candidate_counts, self._draws = candidate_counts, draws
        self._ridge, self._clip, self._add_noise, self._expand = ridge, clip, add_noise, expand
        width = max(candidate_counts[f] for f in features) + 1
        self._histograms = histograms or in_numpy(bins, pairs, self._features, width)

    def root(self, rows: NDArray[np.intp]) -> Totals:
        """Release the sums over all rows."""
        totals: Totals = self._add_noise(self._pairs[rows].sum(axis=0, keepdims=True))[0] / UNIT
        return totals

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Release one left sum per node and feature that can still divide it, and return each node's best split."""
        drawn = [self._draw(node) for node in nodes]
        noisy = np.empty((0, self._pairs.shape[1]))
        if any(drawn):
            asked = [(node.rows, cuts) for node, cuts in zip(nodes, drawn, strict=True) if cuts]
            sums = self._histograms([rows for rows, _ in asked])
            exact = [self._left_sums(of_node, cuts) for of_node, (_, cuts) in zip(sums, asked, strict=True)]
            noisy = self._add_noise(np.concatenate(exact)) / UNIT
        of_node = np.split(noisy, np.cumsum([len(cuts) for cuts in drawn])[:-1])
        return [self._best_of_node(*parts) for parts in zip(nodes, drawn, of_node, strict=True)]

    def _draw(self, node: OpenNode) -> list[tuple[int, int]]:
        """Draw one candidate of each feature that can still divide the node."""
        ranges = node.ranges
        return [
            (f, self._draws.randrange(int(ranges[f, 0]), int(ranges[f, 1])))
            for f in self._features
            if ranges[f, 0] < ranges[f, 1]
        ]

    def _left_sums(self, sums: NDArray[np.int64], cuts: list[tuple[int, int]]) -> NDArray[np.int64]:
        places = [self._features.index(feature) for feature, _ in cuts]
        reached: NDArray[np.int64] = np.cumsum(sums, axis=1)[places, [candidate for _, candidate in cuts]]
        return reached

    def _best_of_node(
        self, node: OpenNode, cuts: list[tuple[int, int]], left: NDArray[np.float64]
    ) -> tuple[Totals, Split | None]:
        totals = node.totals
        if totals is None:
            raise ValueError("partially random trees start from released root sums")
        parent = self._expand(totals)
        if not cuts or not may_be_split(parent):
            return totals, None
        right = totals - left
        scores = split_scores(self._expand(left), self._expand(right), parent, self._ridge, self._clip)
        i = int(np.argmax(scores))
        return totals, Split(float(scores[i]), *cuts[i], left[i], right[i])
