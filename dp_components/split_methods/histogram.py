"""Histogram-based trees (C1): every candidate of every feature competes, on noisy histograms.

A tree costs one query per level and feature; its leaves follow from the last histograms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.query import UNIT
from dp_components.split_methods.greedy import NodeTotals, Split, histograms
from dp_components.split_methods.split_score import split_scores

AddNoise = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Adds this query's noise to sums (G, H) along the last axis. Units: grid steps."""


def queries(depth: int, n_features: int) -> int:
    """Return how many histograms a tree releases."""
    return depth * n_features


class HistogramQuery:
    """Noisy histograms of one node; see ``greedy.grow``.

    Privacy: every bin is noised, empty ones too; adding or removing a row changes one bin of each feature.
    Reference: Maddock et al., section 4.3.1.
    """

    def __init__(
        self, bins: NDArray[np.uint8], pairs: NDArray[np.int64], features: Sequence[int],
        candidate_counts: Sequence[int], ridge: float, clip: float, add_noise: AddNoise,
    ):  # fmt: skip
        self._bins, self._pairs = bins, pairs
        self._features, self._counts = list(features), candidate_counts
        self._ridge, self._clip, self._add_noise = ridge, clip, add_noise
        self._width = max(candidate_counts[f] for f in features) + 1

    def root(self, rows: NDArray[np.intp]) -> NodeTotals | None:
        """Return None: the root's sums are the mean over features of the first histogram's totals."""
        return None

    def best(self, rows: NDArray[np.intp], totals: NodeTotals | None) -> tuple[NodeTotals, Split | None]:
        """Release the node's histograms and return its best split."""
        exact = histograms(self._bins, self._pairs, rows, self._features, self._width)
        noisy = self._add_noise(exact) / UNIT
        for i, feature in enumerate(self._features):
            noisy[i, self._counts[feature] + 1 :] = 0.0  # bins that the feature does not have
        if totals is None:
            mean = noisy.sum(axis=1).mean(axis=0)
            totals = NodeTotals(float(mean[0]), float(mean[1]))
        return totals, self._choose(np.cumsum(noisy, axis=1)[:, :-1], totals)

    def _choose(self, left: NDArray[np.float64], totals: NodeTotals) -> Split | None:
        scores = split_scores(left[..., 0], left[..., 1], totals.gradient, totals.hessian, self._ridge, self._clip)
        for i, feature in enumerate(self._features):
            scores[i, self._counts[feature] :] = -np.inf
        if not scores.size:
            return None
        i, candidate = np.unravel_index(int(np.argmax(scores)), scores.shape)
        g, h = (float(x) for x in left[i, candidate])
        return Split(
            float(scores[i, candidate]), self._features[i], int(candidate), NodeTotals(g, h),
            NodeTotals(totals.gradient - g, totals.hessian - h),
        )  # fmt: skip
