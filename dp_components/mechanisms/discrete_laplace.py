"""The discrete Laplace distribution: P(y) proportional to exp(-|y| / b) on the integers."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal

import numpy as np
from numpy.typing import NDArray

from dp_components.mechanisms.symmetric_sampler import block_bits_of, require_scale, sample_symmetric
from dp_components.randomness import OS_RANDOMNESS, RandomSource


def sample_discrete_laplace(scale: float, n: int, randomness: RandomSource = OS_RANDOMNESS) -> NDArray[np.int64]:
    """Draw ``n`` independent discrete Laplace values, exactly and without a cut tail: pure epsilon would not bear one.

    Shapes:   result: int64[n].
    Units:    ``scale`` is the parameter b in grid units.
    Capacity: b up to 2^44.

    Raises:
        ValueError: ``scale`` is out of range or ``n`` is negative.
    """
    if n < 0:
        raise ValueError("n must not be negative")
    return sample_symmetric(_DiscreteLaplace(require_scale(scale)), n, randomness)


@dataclass(frozen=True, slots=True)
class _DiscreteLaplace:
    """Energy |y| / b. With w >= b, exp(-j w / b) 2^j <= (2 / e)^j <= 1."""

    scale: float
    envelope: float = 1.0

    @property
    def block_bits(self) -> int:
        return block_bits_of(self.scale)

    def energy(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        return magnitude / self.scale

    def exact_energy(self, magnitude: int, context: Context) -> Decimal:
        return context.divide(Decimal(magnitude), Decimal(self.scale))
