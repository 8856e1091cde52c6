"""The exponential mechanism, drawn exactly."""

from __future__ import annotations

from decimal import Context, Decimal

import numpy as np
from numpy.typing import ArrayLike

from dp_components.events import ExponentialEvent, Release
from dp_components.mechanisms.exact_bernoulli import toss
from dp_components.randomness import OS_RANDOMNESS, RandomSource, random_below
from dp_components.sensitivity import Norm, Sensitivity

_LARGEST_BLOCK = 1 << 16


def choose_exponentially(
    utilities: ArrayLike, sensitivity: Sensitivity, epsilon: float, randomness: RandomSource = OS_RANDOMNESS
) -> Release:
    """Choose candidate i with probability proportional to exp(epsilon * utility_i / (2 * sensitivity)).

    A candidate is proposed uniformly and kept with probability exp(epsilon (utility_i - largest) / (2 sensitivity)),
    tossed exactly. The best is always kept, so the expected number of proposals is at most that of candidates.

    Shapes:  utilities: int64[n_candidates], rounded onto a grid; the sensitivity holds after that rounding.
    Privacy: exactly ``epsilon``, delta 0. The list of candidates must not depend on the rows.

    Returns:
        The index of the chosen candidate, int64[1], with an ``ExponentialEvent``.

    Raises:
        ValueError: no candidates, no integers, not a utility sensitivity, or ``epsilon`` is out of range.
    Reference: McSherry and Talwar, Mechanism Design via Differential Privacy; DPBoost, Algorithm 1.
    """
    values = np.asarray(utilities)
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu" or np.any(np.abs(values) > 1 << 52):
        raise ValueError("utilities are a non-empty vector of integers up to 2^52")
    if sensitivity.norm is not Norm.UTILITY:
        raise ValueError("the exponential mechanism needs a utility sensitivity")
    event = ExponentialEvent(epsilon, sensitivity.relation)
    behind = int(values.max()) - values.astype(np.int64)
    rate = epsilon / (2 * sensitivity.bound)
    block = min(2 * values.size + 8, _LARGEST_BLOCK)
    while True:
        proposed = random_below(values.size, block, randomness)

        def exact(i: int, context: Context, proposed: np.ndarray = proposed) -> Decimal:
            product = context.multiply(Decimal(epsilon), Decimal(int(behind[proposed[i]])))
            return context.exp(context.minus(context.divide(product, Decimal(2 * sensitivity.bound))))

        kept = np.flatnonzero(toss(np.exp(-rate * behind[proposed]), exact, randomness))
        if kept.size:
            return Release(proposed[kept[:1]], event)


def utility_sensitivity(bound: float, grid: float, sensitivity: Sensitivity) -> Sensitivity:
    """Return the sensitivity of real utilities after ``grid_utilities``: rounding adds at most one grid unit.

    Args:
        bound: the most that one neighbouring step changes any real utility.
        grid: the grid's step.
        sensitivity: of the rows; its relation is taken over.
    """
    units = bound / grid * (1 + 2.0**-40) + 1
    return Sensitivity(units, Norm.UTILITY, sensitivity.relation)


def grid_utilities(utilities: ArrayLike, grid: float) -> np.ndarray:
    """Round real utilities down onto a grid.

    Shapes: utilities: float64[n]; result: int64[n], in units of ``grid``.

    Raises:
        ValueError: they are not finite, or too large for the grid.
    """
    scaled = np.floor(np.asarray(utilities, dtype=np.float64) / grid)
    if not np.all(np.abs(scaled) <= 2.0**52):
        raise ValueError("utilities must be finite and at most 2^52 grid units")
    return scaled.astype(np.int64)
