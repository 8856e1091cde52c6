"""Geometric leaf clipping (GLC), and the leaves' noise."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dp_components.sensitivity import GRID_BITS, Norm, Sensitivity

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
