"""The Laplace mechanism on integers: a sum plus discrete Laplace noise, for pure epsilon."""

from __future__ import annotations

import math
from fractions import Fraction

from numpy.typing import ArrayLike

from dp_components.events import LaplaceEvent, Release
from dp_components.mechanisms.discrete_laplace import sample_discrete_laplace
from dp_components.mechanisms.gaussian import require_integers
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.sensitivity import Norm, Sensitivity


def add_laplace_noise(
    sums: ArrayLike, sensitivity: Sensitivity, epsilon: float, randomness: RandomSource = OS_RANDOMNESS
) -> Release:
    """Add fresh discrete Laplace noise with parameter b = sensitivity / epsilon to each coordinate of one query.

    Shapes:  sums: int64[...].
    Units:   grid units, as the sensitivity.
    Privacy: exactly ``epsilon``, delta 0: the likelihood ratio of any output is at most exp(|difference|_1 / b).

    Raises:
        ValueError: not an L1 sensitivity with one weight, not integers, or ``epsilon`` is out of range.
    Reference: Ghosh, Roughgarden and Sundararajan, Universally utility-maximizing privacy mechanisms.
    """
    if sensitivity.norm is not Norm.L1 or sensitivity.weights not in ((1.0,), (1.0,) * len(sensitivity.weights)):
        raise ValueError("Laplace noise needs an L1 sensitivity with weights 1")
    event = LaplaceEvent(epsilon, sensitivity.relation)
    exact = require_integers(sums, sensitivity)
    scale = sensitivity.bound / epsilon
    while Fraction(sensitivity.bound) > Fraction(scale) * Fraction(epsilon):
        scale = math.nextafter(scale, math.inf)
    noise = sample_discrete_laplace(scale, exact.size, randomness)
    return Release(exact + noise.reshape(exact.shape), event)
