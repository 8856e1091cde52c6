"""Averaging weight updates (C2): each leaf answers with its share of positive rows, as in a random forest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import OneOutput, Sums
from dp_components.leaf_weights.query import LeafQuery, PairBounds, clip_pairs, pair_sensitivity
from dp_components.sensitivity import ClippedRows, Sensitivity


class AveragingWeights(OneOutput):
    """Leaf weight: positive rows over rows, between 0 and 1.

    Written as a weight update: g = -y and h = 1 give -G / H without a ridge. All trees form one batch with learning
    rate 1, so the model answers with the mean over trees.

    Privacy: one row moves (G, n) by at most (1, 1).
    Reference: Maddock et al., section 4.4.1.
    """

    bounds = PairBounds(gradient=1.0, hessian=1.0)

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return -y and 1; the margin has no part in it."""
        return clip_pairs(query, -label.astype(np.float64), np.ones(label.size), self.bounds)

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return what the clipping guarantees."""
        return pair_sensitivity(query, self.bounds)

    def repaired(self, sums: Sums) -> Sums:
        """Answer 1/2 where noise left no rows, 0 where it left no positive ones, at most 1 elsewhere."""
        rows = sums[:, 1]
        positives = np.clip(-sums[:, 0], 0.0, np.maximum(rows, 0.0))
        empty = rows <= 0
        return np.stack([np.where(empty, -0.5, -positives), np.where(empty, 1.0, rows)], axis=1)
