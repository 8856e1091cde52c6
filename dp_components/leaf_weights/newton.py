"""Newton weight updates (C2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import OneOutput, Sums
from dp_components.leaf_weights.query import LeafQuery, PairBounds, clip_pairs, pair_sensitivity
from dp_components.sensitivity import ClippedRows, Sensitivity


def probability(margin: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the logistic function. Shapes: float32[n] -> float64[n]."""
    return 1.0 / (1.0 + np.exp(-np.clip(margin.astype(np.float64), -80.0, 80.0)))


class NewtonWeights(OneOutput):
    """Leaf weight -G / (H + lambda) with the Hessian of the logistic loss.

    Privacy: one row moves (G, H) by at most (1, 1/4), and (G, 3.330 H) by at most 1 in L2 norm.
    Reference: Maddock et al., section 4.4.3, equation (4).
    """

    bounds = PairBounds(gradient=1.0, hessian=0.25, is_logistic=True)

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return g = p - y and h = p (1 - p)."""
        p = probability(margin)
        return clip_pairs(query, p - label, p * (1.0 - p), self.bounds)

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return what the clipping guarantees."""
        return pair_sensitivity(query, self.bounds)

    def repaired(self, sums: Sums) -> Sums:
        """Return the sums as they are."""
        return sums
