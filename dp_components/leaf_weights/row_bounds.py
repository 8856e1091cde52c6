"""Row statistics on an integer grid, with bounds that are enforced and not assumed.

Noise is calibrated to what one row can add to a sum. XGBoost's own float32 gradients exceed their mathematical bounds
by rounding (1 + 6e-8 for the logistic loss), so gradients are computed here: truncated toward zero to multiples of
2^-20, which float32 holds exactly, and then cut back where a bound would still be broken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GRID_EXPONENT = -20
UNIT = 1 << -GRID_EXPONENT  # grid steps in 1.0
JOINT_HESSIAN_FACTOR = 3.330
"""Largest c (three decimals) with g^2 + (c h)^2 <= 1 for every logistic row: c^2 = phi^5 with the golden ratio phi."""


@dataclass(frozen=True, slots=True)
class RowBounds:
    """What one row of weight 1 may contribute to a leaf sum: |g| <= gradient, 0 <= h <= hessian.

    ``is_joint`` adds g^2 + (JOINT_HESSIAN_FACTOR h)^2 <= 1, which holds for the logistic loss with its Hessian.
    """

    gradient: float
    hessian: float
    is_joint: bool = False


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """First and second statistic of each row. Shapes: gradients, hessians: int32[n_rows]. Units: 2^-20."""

    gradients: NDArray[np.int32]
    hessians: NDArray[np.int32]


def enforce(g: NDArray[np.float64], h: NDArray[np.float64], bounds: RowBounds) -> RowStatistics:
    """Truncate row statistics toward zero and cut them back to their bounds.

    Shapes: g, h: float64[n_rows].
    Privacy: the result obeys ``bounds`` exactly, in integers, whatever came in.
    Raises: ValueError, if a value is not finite.
    """
    if not (np.isfinite(g).all() and np.isfinite(h).all()):
        raise ValueError("a row statistic is not finite: check labels and the model that training continues from")
    g_units = np.clip((g * UNIT).astype(np.int64), -int(bounds.gradient * UNIT), int(bounds.gradient * UNIT))
    h_units = np.clip((h * UNIT).astype(np.int64), 0, int(bounds.hessian * UNIT))
    if bounds.is_joint:
        room = np.sqrt((UNIT * UNIT - g_units * g_units).astype(np.float64)) / JOINT_HESSIAN_FACTOR
        h_units = np.minimum(h_units, room.astype(np.int64))
    return RowStatistics(g_units.astype(np.int32), h_units.astype(np.int32))
