"""Histogram-based trees (C1): every candidate of every feature competes, on noisy histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights import UNIT
from dp_components.split_methods.tree import GreedyQuery, OpenNode, Split, Totals

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
