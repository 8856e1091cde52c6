"""How good a split is, from noisy sums (equation 5, with clipped weights)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIN_GAIN = 1e-7


Totals = NDArray[np.float64]
"""Noisy sums of one node, in the coordinates of rows. Shapes: float64[n_coordinates]."""


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
    left: NDArray[np.float64], right: NDArray[np.float64], parent: NDArray[np.float64], ridge: float, clip: float
) -> NDArray[np.float64]:
    """Return half of what each split gains.

    Several classes are our extension: gains of the classes are added, as for XGBoost's trees of vectors.

    Shapes: left, right: float64[..., 2 K], all G before all H; parent: float64[2 K]; result: float64[...].
    """
    return 0.5 * (_gain_of(left, ridge, clip) + _gain_of(right, ridge, clip) - _gain_of(parent, ridge, clip))


def _gain_of(sums: NDArray[np.float64], ridge: float, clip: float) -> NDArray[np.float64]:
    n = sums.shape[-1] // 2
    result: NDArray[np.float64] = gain(sums[..., :n], sums[..., n:], ridge, clip).sum(axis=-1)
    return result
