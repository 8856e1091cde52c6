"""Gradient weight updates (C2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import OneOutput, Sums
from dp_components.leaf_weights.newton import probability
from dp_components.leaf_weights.query import LeafQuery, PairBounds, clip_pairs, pair_sensitivity
from dp_components.sensitivity import ClippedRows, Sensitivity


class GradientWeights(OneOutput):
    """Leaf weight -G / (n + lambda): the gradient step of a leaf with n rows.

    Privacy: one row moves (G, n) by at most (1, 1).
    Reference: Maddock et al., section 4.4.2, equation (3).
    """

    bounds = PairBounds(gradient=1.0, hessian=1.0)

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return g = p - y and 1."""
        return clip_pairs(query, probability(margin) - label, np.ones(margin.size), self.bounds)

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return what the clipping guarantees."""
        return pair_sensitivity(query, self.bounds)

    def repaired(self, sums: Sums) -> Sums:
        """Return the sums as they are."""
        return sums
