"""A paid start: the score from which a regression's trees begin, released once with a share of the budget.

Not in the paper, whose code starts regressions from the exact mean of the labels, which is a release that nobody pays
for. With two classes it would do harm: geometric clipping keeps the sum of all trees of an ensemble below g*, which
could not outweigh a start far from 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS
from dp_components.dpboost.gradient_based_data_filtering import filter_by_gradient, gradient_sensitivity
from dp_components.events import Release
from dp_components.mechanisms.laplace import add_laplace_noise
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.sensitivity import GRID_BITS, Norm, Sensitivity


def start_sums(grad: ArrayLike) -> NDArray[np.int64]:
    """Return one site's sum of gradients at score 0, and its number of rows.

    Shapes: grad: float[n_rows]; result: int64[2].
    Units:  2^-GRID_BITS, of rows too.
    """
    values = filter_by_gradient(grad).clipped.values
    return np.array([values.sum(), values.shape[0] << GRID_BITS], dtype=np.int64)


def release_start(sums: NDArray[np.int64], epsilon: float, randomness: RandomSource = OS_RANDOMNESS) -> Release:
    """Release the score that the mean gradient asks for: minus G / n, within [-1, 1].

    Shapes:  sums: int64[2], over all sites; value: int64[1].
    Units:   value: 2^-LEAF_BITS.
    Privacy: exactly ``epsilon``; a row moves G by at most g* and n by 1.
    """
    gradients = gradient_sensitivity()
    moved = Sensitivity(gradients.bound + (1 << GRID_BITS), Norm.L1, gradients.relation)
    noised = add_laplace_noise(sums, moved, epsilon, randomness)
    grad_sum, n_rows = (int(value) for value in noised.value)
    one = 1 << LEAF_BITS
    start = max(-one, min(one, -(grad_sum << LEAF_BITS) // n_rows)) if n_rows > 0 else 0
    return Release(np.array([start], dtype=np.int64), noised.event)
