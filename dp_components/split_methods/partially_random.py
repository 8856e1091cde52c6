"""Partially random trees (C1): one drawn candidate per feature, the best of them wins on noisy sums.

A tree costs one query per level and feature, as greedy trees do, and one for the root's sums; but a query is a single
sum and not a histogram, so the noise on what a split decides by is smaller.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights import UNIT
from dp_components.split_methods.tree import GreedyQuery, OpenNode, Split, Totals

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
        return np.cumsum(sums, axis=1)[places, [candidate for _, candidate in cuts]]

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
