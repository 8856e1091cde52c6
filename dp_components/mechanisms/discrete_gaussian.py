"""The discrete Gaussian: P(y) proportional to exp(-y^2 / (2 s^2)) on the integers."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal

import numpy as np
from numpy.typing import NDArray

from dp_components.mechanisms.symmetric_sampler import block_bits_of, require_scale, sample_symmetric
from dp_components.randomness import OS_RANDOMNESS, RandomSource


def sample_discrete_gaussian(scale: float, n: int, randomness: RandomSource = OS_RANDOMNESS) -> NDArray[np.int64]:
    """Draw ``n`` independent discrete Gaussians, exactly.

    Shapes:   result: int64[n].
    Units:    ``scale`` is the parameter s in grid units; the double itself is the parameter, not something near it.
    Capacity: s up to 2^44.

    Raises:
        ValueError: ``scale`` is out of range or ``n`` is negative.
    """
    if n < 0:
        raise ValueError("n must not be negative")
    return sample_symmetric(_DiscreteGaussian(require_scale(scale)), n, randomness)


@dataclass(frozen=True, slots=True)
class _DiscreteGaussian:
    """Energy y^2 / (2 s^2).

    With w >= s, exp(-(j w)^2 / (2 s^2)) 2^j is largest at j = 1, where it is 2 / sqrt(e) = 1.2131, and 13/16 of that is
    below 1.
    """

    scale: float
    envelope: float = 13 / 16

    @property
    def block_bits(self) -> int:
        return block_bits_of(self.scale)

    def energy(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        ratio = magnitude / self.scale
        return ratio * ratio / 2

    def exact_energy(self, magnitude: int, context: Context) -> Decimal:
        # A double is a decimal fraction, so Decimal(scale) is the very parameter.
        ratio = context.divide(Decimal(magnitude), Decimal(self.scale))
        return context.divide(context.multiply(ratio, ratio), Decimal(2))
