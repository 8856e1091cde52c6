"""Exact coin tosses with irrational probabilities, fast.

A coin with probability p is a uniform number U in [0, 1) with infinitely many bits, and the question whether U < p. The
first 64 bits of U and p in double precision answer it unless the two are closer than the error of p, which happens
about once in 10^11 tosses. Only then p is computed in decimal arithmetic with a proven error, and further bits of U are
drawn, until the question is settled. So each outcome has exactly the probability p; floating point decides nothing by
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np
from numpy.typing import NDArray

from dp_components.randomness import RandomSource, random_words

RELATIVE_ERROR = 2.0**-36
"""Callers promise that their double probabilities are this near, or that probability and value are below 2^-64."""

ExactProbability = Callable[[int, Context], Decimal]
"""(index of the toss, context) -> p, with a relative error below 10^(10 - precision of the context)."""


def toss(probabilities: NDArray[np.float64], exact: ExactProbability, randomness: RandomSource) -> NDArray[np.bool_]:
    """Toss one independent coin for each probability.

    Shapes:   probabilities: float64[n] in [0, 1]; result: bool[n].
    Security: takes a number of steps that depends on the outcome; timing is outside the threat model.

    Args:
        probabilities: approximate probabilities, as near as ``RELATIVE_ERROR`` says.
        exact: the exact ones, asked for only where the approximation does not decide.
        randomness: source of the bits.
    """
    words = random_words(probabilities.size, randomness)
    uniform = np.ldexp(words.astype(np.float64), -64)
    # The absolute part covers the 64 bits of U, and probabilities so small that they round to nothing.
    margin = probabilities * (2 * RELATIVE_ERROR) + 2.0**-62
    heads = uniform < probabilities
    for i in np.flatnonzero(np.abs(uniform - probabilities) <= margin):
        heads[i] = _settle(int(i), int(words[i]), exact, randomness)
    return heads


def _settle(i: int, word: int, exact: ExactProbability, randomness: RandomSource) -> bool:
    """Decide U < p, where ``word`` holds the first 64 bits of U, with as many digits and bits as it takes."""
    n_bits = 64
    while True:
        # The precision is always well beyond 2^-n_bits, so that 2^n_bits is held exactly.
        context = Context(prec=n_bits // 2 + 30, rounding=ROUND_HALF_EVEN, Emin=-999_999_999, Emax=999_999_999)
        p = exact(i, context)
        error = context.multiply(p, Decimal(10) ** (11 - context.prec))
        one = context.power(Decimal(2), n_bits)
        low, high = context.multiply(context.subtract(p, error), one), context.multiply(context.add(p, error), one)
        if word + 1 <= low:
            return True
        if word >= high:
            return False
        word = (word << 64) | int.from_bytes(randomness.bytes(8), "little")
        n_bits += 64
