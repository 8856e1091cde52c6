"""How good a split is, from noisy sums (equation 5, with clipped weights)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_GAIN = 1e-7


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """Noisy sums of one node."""

    gradient: float
    hessian: float


def gain(gradient: NDArray[np.float64], hessian: NDArray[np.float64], ridge: float, clip: float) -> NDArray[np.float64]:
    """Return a node's gain; where the weight would exceed the clip, that of the clipped weight; 0 without curvature.

    Shapes: float64 of any shape.
    Reference: Maddock et al., equation (5); XGBoost's ``max_delta_step``.
    """
    positive = hessian > 0
    curvature = np.where(positive, hessian + ridge, 1.0)
    weight = np.where(positive, np.clip(-gradient / curvature, -clip, clip), 0.0)
    result: NDArray[np.float64] = -(2.0 * gradient * weight + curvature * weight**2)
    return result


def split_scores(
    left: NDArray[np.float64], right: NDArray[np.float64], totals: NodeTotals, ridge: float, clip: float
) -> NDArray[np.float64]:
    """Return half of what each split gains. Shapes: left, right: float64[..., 2] of (G, H); result: float64[...]."""
    parent = gain(np.array(totals.gradient), np.array(totals.hessian), ridge, clip)
    sides = gain(left[..., 0], left[..., 1], ridge, clip) + gain(right[..., 0], right[..., 1], ridge, clip)
    return 0.5 * (sides - parent)
