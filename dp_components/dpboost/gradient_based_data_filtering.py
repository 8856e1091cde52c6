"""Gradient-based data filtering (GDF): only rows with a gradient of at most g* take part in a tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.sensitivity import GRID_BITS, ClippedRows, Norm, Sensitivity, clip_rows

# Gradient-based data filtering (GDF): only rows with a gradient of at most g* take part in a tree.


GRADIENT_BOUND = 1.0
"""g*: the largest gradient at score 0, for square loss on labels in [-1, 1] and for logistic loss."""


def filter_by_gradient(grad: ArrayLike) -> tuple[NDArray[np.bool_], ClippedRows]:
    """Drop the rows whose gradient exceeds g*, and put the others on the integer grid.

    Shapes:  grad: float[n_rows]; results: bool[n_rows], which rows are kept, and int64[n_kept, 1], their gradients.
    Privacy: which rows are dropped depends on each row alone and on the trees that are out already. L1 sensitivity of
        a sum: g* when a row is added or removed.

    Raises:
        ValueError: a gradient is not finite.
    Reference: DPBoost, section "Gradient-based Data Filtering".
    """
    gradients = np.asarray(grad, dtype=np.float64)
    if not np.isfinite(gradients).all():
        raise ValueError("gradients must be finite")
    is_kept = np.abs(gradients) <= GRADIENT_BOUND
    return is_kept, clip_rows(gradients[is_kept, np.newaxis], [GRADIENT_BOUND], norm=Norm.L1)


def gradient_sensitivity() -> Sensitivity:
    """Return the L1 sensitivity that ``filter_by_gradient`` guarantees, for the side that sees sums only."""
    return filter_by_gradient(np.zeros(0))[1].sensitivity


def gain_bound(gradients: Sensitivity) -> float:
    """Return the most that adding or removing a row changes any candidate's gain: 3 g*^2, for every lambda > 0.

    The row enters one child. With G and n of that child without the row, its term changes by (2 G g + g^2) / (n + 1 +
    lambda) - G^2 / ((n + lambda)(n + 1 + lambda)). As |G| <= n g*, that is below 2 g*^2 and above -3 g*^2, and comes
    near the latter as n grows. The paper's (3 lambda + 2) / ((lambda + 1)(lambda + 2)) g*^2 holds for n <= 1 only.

    Units: of g squared.
    """
    return float(3 * (gradients.bound / 2**GRID_BITS) ** 2)
