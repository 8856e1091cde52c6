"""How good a split is, from noisy sums (equation 5, with clipped weights)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIN_GAIN = 1e-7


def gain(gradient: NDArray[np.float64], hessian: NDArray[np.float64], ridge: float, clip: float) -> NDArray[np.float64]:
    """Return a node's gain; where the weight would exceed the clip, that of the clipped weight; 0 without curvature.

    Shapes: float64 of any shape.
    Reference: Maddock et al., equation (5); XGBoost's ``max_delta_step``.
    """
    positive = hessian > 0
    curvature = np.where(positive, hessian + ridge, 1.0)
    weight = np.where(positive, np.clip(-gradient / curvature, -clip, clip), 0.0)
    return -(2.0 * gradient * weight + curvature * weight**2)


def split_scores(
    left_g: NDArray[np.float64], left_h: NDArray[np.float64], total_g: float, total_h: float, ridge: float, clip: float
) -> NDArray[np.float64]:
    """Return half the gain of each split. Shapes: left sums and result: float64 of one shape."""
    right_g, right_h = total_g - left_g, total_h - left_h
    parent = gain(np.float64(total_g), np.float64(total_h), ridge, clip)
    return 0.5 * (gain(left_g, left_h, ridge, clip) + gain(right_g, right_h, ridge, clip) - parent)
