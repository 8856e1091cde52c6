"""A discrete staircase: the mass falls by a fixed ratio once a step, and is equal within one.

A shift by d crosses ceil(d / width) edges at most, and each edge costs the same. Reference: Geng and Viswanath, The
Optimal Noise-Adding Mechanism in Differential Privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dp_components.integer_noise import MassFunction, NoiseMechanism
from dp_components.mechanisms import toss
from he_processors.randomness import RandomSource, random_integers_below

WIDTH = 8
FALL_BITS = 40
DIGITS = 56  # of the number of a step; a further one would be set with a probability below e^-65536


@dataclass(frozen=True)
class Staircase:
    """|k| = width j + i: the step j is geometric of ratio 1 - fall / 2^40, the place i uniform in it, the sign fair."""

    fall: int
    width: int

    @property
    def mass(self) -> MassFunction:
        """Zero is one of the places of the first step, and has one sign only."""
        fall = Fraction(self.fall, 1 << FALL_BITS)
        return MassFunction((1 / (2 * self.width / fall - 1),) * self.width, self.width, 1 - fall)

    def draw(self, n: int, randomness: RandomSource) -> NDArray[np.int64]:
        """Draw exactly: -0 is thrown away. Shapes: int64[n]."""
        drawn = np.zeros(0, dtype=np.int64)
        while drawn.size < n:
            m = 2 * (n - drawn.size) + 16
            magnitude = self._steps(m, randomness) * self.width + random_integers_below(self.width, m, randomness)
            sign = 1 - 2 * random_integers_below(2, m, randomness)
            drawn = np.concatenate([drawn, (magnitude * sign)[(magnitude > 0) | (sign > 0)]])
        return drawn[:n]

    def _steps(self, n: int, randomness: RandomSource) -> NDArray[np.int64]:
        """Binary digits of a geometric number are independent: that of 2^i has the odds ratio^(2^i)."""
        steps = np.zeros(n, dtype=np.int64)
        falls = math.log1p(-math.ldexp(self.fall, -FALL_BITS))
        for digit in range(DIGITS):

            def exact(_: int, context: Context, digit: int = digit) -> Decimal:
                ratio = context.divide(Decimal((1 << FALL_BITS) - self.fall), Decimal(1 << FALL_BITS))
                odds = context.power(ratio, Decimal(1 << digit))
                return context.divide(odds, context.add(odds, Decimal(1)))

            odds = math.exp(math.ldexp(falls, digit))
            steps += toss(np.full(n, odds / (1 + odds)), exact, randomness).astype(np.int64) << digit
        return steps


def calibrate(epsilon: float, shift: int, coordinates: int) -> Staircase:
    """Return noise of this epsilon: so many edges are crossed at most, the first of each coordinate by a shift of 1."""
    edges = (shift - coordinates) // WIDTH + coordinates
    return Staircase(math.floor(-math.expm1(-epsilon / edges) * (1 << FALL_BITS)), WIDTH)


MECHANISM = NoiseMechanism("acme_staircase", calibrate)
