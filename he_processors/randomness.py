"""The one source of secret randomness: the operating system.

Every function that needs secret random bytes takes a ``RandomSource`` whose default is ``OS_RANDOMNESS``.
Tests inject a deterministic source for known answers; no production signature takes a seed.
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


def random_below(bound: int, source: RandomSource = OS_RANDOMNESS) -> int:
    """Draw an integer uniformly from [0, bound) by rejection.

    Raises:
        ValueError: bound < 1.
    """
    if bound < 1:
        raise ValueError("bound must be at least 1")
    n_bits = (bound - 1).bit_length()
    n_bytes = (n_bits + 7) // 8
    excess = 8 * n_bytes - n_bits
    while True:
        value = int.from_bytes(source.bytes(n_bytes), "little") >> excess
        if value < bound:
            return value


def random_uint64(n: int, source: RandomSource = OS_RANDOMNESS) -> NDArray[np.uint64]:
    """Draw ``n`` independent uniform 64-bit integers.

    Shapes: result: uint64[n], writable.
    """
    return np.frombuffer(bytearray(source.bytes(8 * n)), dtype="<u8")
