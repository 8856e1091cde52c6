"""Geometric leaf clipping (GLC), and the leaves' noise."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dp_components.events import Release
from dp_components.mechanisms import add_laplace_noise
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.sensitivity import GRID_BITS, Norm, Sensitivity

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


def release_leaves(
    grad_sums: NDArray[np.int64],
    counts: NDArray[np.int64],
    gradients: Sensitivity,
    ridge: int,
    bound: int,
    epsilon: float,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Compute, clip and noise the weights of all leaves of a tree, empty leaves too.

    Shapes:  grad_sums, counts: int64[n_leaves]; value: int64[n_leaves].
    Units:   grad_sums, ridge: 2^-GRID_BITS; bound, value: 2^-LEAF_BITS.
    Privacy: exactly ``epsilon`` for all leaves together, because they are disjoint.

    Reference: DPBoost, Algorithm 1, lines 12 to 16, where the noise's budget must be that of the leaves.
    """
    weights = [
        (-int(total) << LEAF_BITS) // ((int(count) << GRID_BITS) + ridge)
        for total, count in zip(grad_sums, counts, strict=True)
    ]
    clipped = np.clip(np.array(weights, dtype=np.int64), -bound, bound)
    return add_laplace_noise(clipped, leaf_sensitivity(gradients, ridge, bound), epsilon, randomness)
