"""Histogram-based trees (C1): every candidate of every feature competes, on noisy histograms.

A tree costs one query per level and feature; its leaves follow from the last histograms. A tree of one feature costs
one query in all (``one_feature_histogram``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.query import UNIT
from dp_components.split_methods.greedy import OpenNode, Split, histograms
from dp_components.split_methods.split_score import NodeTotals, split_scores

AddNoise = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Adds this query's noise to sums (G, H) along the last axis. Units: grid steps."""


class HistogramQuery:
    """Noisy histograms of a level's nodes; see ``greedy.grow``.

    Privacy: every bin is noised, empty ones too; adding or removing a row changes one bin of each feature.

    Attributes:
        root_histograms: the root's, once they are released. Shapes: float64[n_features used, n_bins, 2].

    Reference: Maddock et al., section 4.3.1.
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
    ):
        self._bins, self._pairs = bins, pairs
        self._features, self.candidate_counts = list(features), candidate_counts
        self._ridge, self._clip, self._add_noise = ridge, clip, add_noise
        self._width = max(candidate_counts[f] for f in features) + 1
        self.root_histograms: NDArray[np.float64] | None = None

    def root(self, rows: NDArray[np.intp]) -> NodeTotals | None:
        """Return None: the root's sums are the mean over features of the first histogram's totals."""
        return None

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[NodeTotals, Split | None]]:
        """Release the nodes' histograms and return each one's best split.

        Bins outside a node hold no rows, only noise: they are left out. Both sides of a split are summed over the
        feature's own bins, so that neither carries the noise of the node's sums, which grows from level to level.
        """
        exact = [histograms(self._bins, self._pairs, node.rows, self._features, self._width) for node in nodes]
        noisy = self._add_noise(np.stack(exact)) / UNIT
        if self.root_histograms is None:
            self.root_histograms = noisy[0]
        return [self._best_of_node(of_node, node) for of_node, node in zip(noisy, nodes, strict=True)]

    def _best_of_node(self, noisy: NDArray[np.float64], node: OpenNode) -> tuple[NodeTotals, Split | None]:
        low, high = node.ranges[self._features, 0, None], node.ranges[self._features, 1, None]
        bins, totals = np.arange(self._width), node.totals
        inside = np.where(((low <= bins) & (bins <= high))[..., None], noisy, 0.0)
        reached = np.cumsum(inside, axis=1)
        if totals is None:
            mean = reached[:, -1].mean(axis=0)
            totals = NodeTotals(float(mean[0]), float(mean[1]))
        divides = (low <= bins[:-1]) & (bins[:-1] < high)
        return totals, self._choose(reached[:, :-1], reached[:, -1:] - reached[:, :-1], divides, totals)

    def _choose(
        self, left: NDArray[np.float64], right: NDArray[np.float64], divides: NDArray[np.bool_], totals: NodeTotals
    ) -> Split | None:
        if not divides.any():
            return None
        scores = np.where(divides, split_scores(left, right, totals, self._ridge, self._clip), -np.inf)
        i, candidate = np.unravel_index(int(np.argmax(scores)), scores.shape)
        sides = [NodeTotals(*(float(x) for x in side[i, candidate])) for side in (left, right)]
        return Split(float(scores[i, candidate]), self._features[i], int(candidate), *sides)
