"""Exact sampling from a symmetric distribution on the integers, by rejection from blocks of falling weight.

Proposal: |y| = j w + r with P(j) = 2^-(j + 1), r uniform below a power of two w, and a fair sign; -0 is thrown away.
All of that is bits of random words, hence exact. A proposal is kept with probability exp(-energy(y)) 2^j e, tossed
exactly (exact_bernoulli.py), where the envelope e makes this at most 1. Kept values have exactly the distribution
proportional to exp(-energy), without truncation; one proposal in two to four is kept.

Reference: rejection on the integers with exact coins as in Canonne, Kamath and Steinke, The Discrete Gaussian for
Differential Privacy, section 5; their coins are rational, ours are decided lazily, which works on whole arrays.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dp_components.mechanisms.exact_bernoulli import toss
from dp_components.randomness import RandomSource, random_words

LARGEST_SCALE = 2.0**44
"""Values stay below 2^53 but for probabilities that no run will ever meet, so that doubles hold them exactly."""

_SIGN_BIT = 46
_J_BITS = 64 - _SIGN_BIT - 1


class SymmetricTarget(Protocol):
    """A distribution with P(y) proportional to exp(-energy(|y|)), with an energy that never falls in |y|."""

    @property
    def block_bits(self) -> int:
        """log2 of the block width w."""

    @property
    def envelope(self) -> float:
        """A dyadic e with exp(-energy(j w)) 2^j e <= 1 for every j >= 0."""

    def energy(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the energy in doubles, with a relative error of at most 10 * 2^-53."""

    def exact_energy(self, magnitude: int, context: Context) -> Decimal:
        """Return the energy with the relative precision of the context, up to a factor of 100."""


def sample_symmetric(target: SymmetricTarget, n: int, randomness: RandomSource) -> NDArray[np.int64]:
    """Draw ``n`` independent integers.

    Shapes: result: int64[n].
    """
    parts: list[NDArray[np.int64]] = []
    missing = n
    while missing > 0:
        # Proposals are independent, so dropping surplus values by their position favours none.
        kept = _keep(target, 3 * missing + 16, randomness)[:missing]
        parts.append(kept)
        missing -= kept.size
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _keep(target: SymmetricTarget, n: int, randomness: RandomSource) -> NDArray[np.int64]:
    """Make ``n`` proposals and return those that are kept, in order."""
    words = random_words(n, randomness)
    j = _geometric(words >> np.uint64(_SIGN_BIT + 1), randomness)
    offset = (words & np.uint64((1 << target.block_bits) - 1)).astype(np.int64)
    magnitude = (j << target.block_bits) + offset
    is_negative = (words >> np.uint64(_SIGN_BIT) & np.uint64(1)).astype(bool)

    def exact(i: int, context: Context) -> Decimal:
        # exp is correctly rounded; an energy of up to 10^5 with relative error e makes a relative error of 10^5 e.
        falling = context.exp(context.minus(target.exact_energy(int(magnitude[i]), context)))
        return context.multiply(context.multiply(falling, Decimal(target.envelope)), Decimal(2 ** int(j[i])))

    probability = np.ldexp(np.exp(-target.energy(magnitude.astype(np.float64))) * target.envelope, j)
    is_kept = toss(probability, exact, randomness) & ~(is_negative & (magnitude == 0))
    result: NDArray[np.int64] = np.where(is_negative, -magnitude, magnitude)[is_kept]
    return result


def _geometric(fields: NDArray[np.uint64], randomness: RandomSource) -> NDArray[np.int64]:
    """Return the number of zeros before the first one in endless random bits that begin with ``fields``."""
    one, field_mask = np.uint64(1), np.uint64((1 << _J_BITS) - 1)
    zeros = np.zeros(fields.size, dtype=np.int64)
    fields = fields & field_mask
    while (empty := np.flatnonzero(fields == 0)).size:
        zeros[empty] += _J_BITS
        fields[empty] = random_words(empty.size, randomness) & field_mask
    # f & -f keeps the lowest one; one less than that has as many ones as there were zeros below it.
    return zeros + np.bitwise_count((fields & (~fields + one)) - one).astype(np.int64)


def block_bits_of(scale: float) -> int:
    """Return log2 of the least power of two that is at least ``scale``, and at least 1."""
    fraction, exponent = math.frexp(scale)
    return max(0, exponent - 1 if fraction == 0.5 else exponent)


def require_scale(scale: float) -> float:
    """Return a scale that the sampler can hold.

    Raises:
        ValueError: it is not in (0, 2^44] grid units.
    """
    if not 0 < scale <= LARGEST_SCALE:
        raise ValueError("the noise scale must be above 0 and at most 2^44 grid units: use a coarser grid")
    return float(scale)
