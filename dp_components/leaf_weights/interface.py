"""What every weight update offers."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.query import LeafQuery, PairBounds
from dp_components.sensitivity import ClippedRows, Sensitivity

Sums = NDArray[np.float64]


class LeafWeights(Protocol):
    """Row statistics, and the leaf sums as XGBoost's weight formula shall see them.

    Attributes:
        bounds: of one output's g and h.
        n_outputs: scores of a row.
        noise_kept: the part of the noise on a G that is left after ``repaired``.
    """

    bounds: PairBounds
    n_outputs: int
    noise_kept: float

    @property
    def largest_curvature(self) -> float:
        """What ``curvature`` gives for a row at most, in real units."""

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return what each row adds to its leaf.

        Shapes: margin: float32[n_rows], or float32[n_rows, n_outputs] for several; label: float32[n_rows]; values:
            int64[n_rows, 2], or one column for each coordinate of the sensitivity.
        """

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return the sensitivity that ``row_statistics`` guarantees, before there are rows."""

    def repaired(self, sums: Sums) -> Sums:
        """Return noisy sums in which impossible values are mended: G of each output, then H of each. Post-processing.

        Shapes: float64[n_leaves, n_coordinates] -> float64[n_leaves, 2 n_outputs].
        """

    def expanded(self, sums: Sums) -> Sums:
        """Return noisy sums as gains of splits take them: G of each output, then H of each. Post-processing.

        Linear: sums of bins may be expanded before or after they are added up.

        Shapes: float64[..., n_coordinates] -> float64[..., 2 n_outputs].
        """

    def curvature(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what each row adds to the Hessian histograms by which candidates are refined (iterative Hessian).

        Privacy: between 0 and ``largest_curvature``, whatever the values are.

        Shapes: values: as ``row_statistics`` gives them; result: int64[n_rows]. Units: grid steps.
        """


class OneOutput:
    """What all updates of one output share: rows are pairs (g, h)."""

    n_outputs = 1
    noise_kept = 1.0
    bounds: PairBounds

    @property
    def largest_curvature(self) -> float:
        """The bound of h."""
        return self.bounds.hessian

    def expanded(self, sums: Sums) -> Sums:
        """Return the pairs as they are."""
        return sums

    def curvature(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return h."""
        return values[:, 1]


def leaf_outputs(sums: Sums, ridge: float, clip: float, scale: float) -> NDArray[np.float32]:
    """Return what the leaves answer: -scale * clip(G / (H + ridge)), and 0 where H is not positive.

    The same formula as XGBoost's ``CalcWeight`` with ``lambda``, ``max_delta_step`` and ``learning_rate``, including
    its float32 roundings.

    Shapes: sums: float64[n_leaves, 2] of (G, H), or float64[n_leaves, 2 K], all G before all H; result:
        float32[n_leaves], or float32[n_leaves, K].
    Privacy: post-processing of noisy sums.
    Reference: Maddock et al., equations (3) and (4).
    """
    if sums.shape[1] > 2:
        n = sums.shape[1] // 2
        return np.stack([leaf_outputs(sums[:, [k, n + k]], ridge, clip, scale) for k in range(n)], axis=1)
    gradient, hessian = sums[:, 0] + 0.0, sums[:, 1]  # XGBoost knows no negative zero
    positive = hessian > 0
    weight = -gradient / np.where(positive, hessian + np.float64(np.float32(ridge)), 1.0)
    if clip:
        weight = np.clip(weight, -np.float64(np.float32(clip)), np.float64(np.float32(clip)))
    return np.where(positive, weight, 0.0).astype(np.float32) * np.float32(scale)
