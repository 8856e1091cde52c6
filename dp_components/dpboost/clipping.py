"""What one row can do in DPBoost: gradient-based data filtering (GDF), and geometric leaf clipping (GLC)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.sensitivity import GRID_BITS, ClippedRows, Norm, Sensitivity, clip_rows

# Geometric leaf clipping (GLC), and the leaves' noise.


LEAF_BITS = 32
"""Leaf weights are whole numbers of 2^-32, so that late trees, which are clipped to little, keep their digits."""


def clip_bound(gradients: Sensitivity, learning_rate: float, position: int) -> int:
    """Return the largest leaf weight of a tree: g* (1 - eta)^position, rounded down.

    Units: 2^-LEAF_BITS.

    Args:
        gradients: sensitivity of a sum of gradients, hence g*.
        learning_rate: eta.
        position: 0 for the first tree; counts as the plan says.

    Raises:
        ValueError: nothing is left of the weight after so many trees.
    """
    bound = math.floor(math.ldexp(gradients.bound * (1 - learning_rate) ** position, LEAF_BITS - GRID_BITS))
    if bound < 1:
        raise ValueError("geometric clipping leaves nothing after so many trees: use smaller ensembles")
    return bound


def leaf_sensitivity(gradients: Sensitivity, ridge: int, bound: int) -> Sensitivity:
    """Return the L1 sensitivity of all leaf weights of a tree: min(g* / (1 + lambda), 2 bound).

    A row lies in one leaf. With n >= 0 further rows there it moves G / (n + lambda) by at most
    (2 n + lambda) g* / ((n + lambda)(n + 1 + lambda)), which is largest for n = 0 and n = 1 alike. Weights are rounded
    down to integers; integers that differ by less than s + 1 before rounding up differ by at most ceil(s).

    Units: ridge: lambda in 2^-GRID_BITS; bound and result: 2^-LEAF_BITS.
    """
    numerator = int(gradients.bound) << LEAF_BITS
    without_clipping = -(-numerator // ((1 << GRID_BITS) + ridge))
    return Sensitivity(float(min(without_clipping, 2 * bound)), Norm.L1, gradients.relation)


def clip_released(weights: NDArray[np.int64], bound: int) -> NDArray[np.int64]:
    """Clip released weights to the bound that the weights obey without their noise.

    Not in the paper. Late trees have a bound far below their noise, so this takes most of the noise away.

    Shapes:  int64[n_leaves].
    Privacy: post-processing.
    """
    return np.clip(weights, -bound, bound)


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
