"""The quantiles that XGBoost takes for absolute and quantile error, to the last bit.

Reference: XGBoost 3.2, src/common/stats.h (Quantile, WeightedQuantile) and src/objective/adaptive.cc.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float32]


def quantile(values: Column, weight: Column | None, alpha: float) -> np.float32:
    """Return the quantile of a column.

    Args:
        weight: of each value; None for 1 each, which XGBoost interpolates between.
        alpha: from 0 to 1; XGBoost holds it as float32.

    Shapes: values, weight: float32[n_rows]. Returns: not a number for no values.
    """
    n, level = values.size, float(np.float32(alpha))
    if not n:
        return np.float32(np.nan)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    if weight is not None:
        total = np.cumsum(weight[order], dtype=np.float32)
        found = np.searchsorted(total, np.float32(float(total[-1]) * level), side="left")
        return np.float32(ordered[min(int(found), n - 1)])
    if level <= 1 / (n + 1):
        return np.float32(ordered[0])
    if level >= n / (n + 1):
        return np.float32(ordered[-1])
    place = level * (n + 1)
    below = math.floor(place) - 1
    return np.float32(float(ordered[below]) + (place - 1 - below) * float(ordered[below + 1] - ordered[below]))


def leaf_quantiles(
    residuals: Column, weight: Column | None, leaf: NDArray[np.int32], n_leaves: int, alpha: float
) -> Column:
    """Return the quantile of the residuals in each leaf.

    Shapes: residuals, weight: float32[n_rows]; leaf: int32[n_rows], from 0 to n_leaves - 1; result: float32[n_leaves],
        not a number for a leaf without rows.
    """
    order = np.argsort(leaf, kind="stable")
    ends = np.searchsorted(leaf[order], np.arange(n_leaves + 1))
    runs = [order[ends[number] : ends[number + 1]] for number in range(n_leaves)]
    of_each = [quantile(residuals[run], None if weight is None else weight[run], alpha) for run in runs]
    return np.array(of_each, dtype=np.float32)
