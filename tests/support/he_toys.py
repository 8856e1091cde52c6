"""Toy keys and helpers for the tests of the homomorphic layer. The keys protect nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from he_processors.paillier import PaillierPrivateKey, generate_paillier_key

TOY_BITS = 768


class SeededRandomness:
    """A reproducible source for known answers and statistical tests."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._n_calls = 0

    def bytes(self, n: int) -> bytes:
        """Return the next ``n`` bytes of the stream."""
        self._n_calls += 1
        return hashlib.shake_256(f"{self._seed}/{self._n_calls}".encode()).digest(n)


@cache
def toy_paillier(bits: int = TOY_BITS, seed: int = 1) -> PaillierPrivateKey:
    """Return a small Paillier key, the same in every run."""
    return generate_paillier_key(bits, SeededRandomness(seed), allow_toy_keys=True)


def signed_rows(values: Iterable[int], width: int = 16) -> NDArray[np.uint8]:
    """Write signed integers as plaintext rows. Shapes: result: uint8[n, width]."""
    joined = b"".join(int(value).to_bytes(width, "little", signed=True) for value in values)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, width)
