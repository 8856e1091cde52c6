"""The one source of the noise: the operating system.

Every function that draws takes a ``RandomSource`` whose default is ``OS_RANDOMNESS``. Tests inject a deterministic one;
no production signature takes a seed. Noise never comes from a public seed: whoever knows it could subtract the noise.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RandomSource(Protocol):
    """Anything that yields independent, uniform random bytes."""

    def bytes(self, n: int) -> bytes:
        """Return ``n`` fresh bytes."""


class _OsRandomness:
    def bytes(self, n: int) -> bytes:
        return os.urandom(n)


OS_RANDOMNESS: RandomSource = _OsRandomness()


def random_words(n: int, source: RandomSource) -> NDArray[np.uint64]:
    """Draw ``n`` independent uniform 64-bit integers.

    Shapes: result: uint64[n].
    """
    return np.frombuffer(source.bytes(8 * n), dtype="<u8").astype(np.uint64, copy=False)


def random_below(bound: int, n: int, source: RandomSource) -> NDArray[np.int64]:
    """Draw ``n`` integers uniformly from [0, bound) by rejection.

    Shapes: result: int64[n].

    Raises:
        ValueError: ``bound`` is not in [1, 2^62].
    """
    if not 1 <= bound <= 1 << 62:
        raise ValueError("bound must be in [1, 2^62]")
    mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
    drawn = random_words(n, source) & mask
    while (outside := np.flatnonzero(drawn >= np.uint64(bound))).size:
        drawn[outside] = random_words(outside.size, source) & mask
    return drawn.astype(np.int64)
