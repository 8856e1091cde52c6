"""Deterministic randomness for tests of noise: the same seed gives the same draws, so no test fails by chance."""

from __future__ import annotations

import numpy as np


class SeededRandomness:
    """A ``RandomSource`` that repeats itself. Never for noise that protects anything."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def bytes(self, n: int) -> bytes:
        return self._generator.bytes(n)


class ListedRandomness:
    """A ``RandomSource`` that yields given 64-bit words, then fails."""

    def __init__(self, *words: int) -> None:
        self._bytes = b"".join(word.to_bytes(8, "little") for word in words)

    def bytes(self, n: int) -> bytes:
        if n > len(self._bytes):
            raise AssertionError("more randomness was drawn than the test expected")
        head, self._bytes = self._bytes[:n], self._bytes[n:]
        return head
