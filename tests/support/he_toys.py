"""Toy keys and helpers for the tests of the homomorphic layer. The keys protect nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache, reduce
from itertools import pairwise

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


def pair_secrets(rank: int, world: int) -> dict[int, bytes]:
    """Return a site's secrets with each of the others, the same at both."""
    return {peer: bytes([min(rank, peer), max(rank, peer)]) * 16 for peer in range(world) if peer != rank}


def segment_products(
    values: Sequence[int], order: NDArray[np.int32], starts: NDArray[np.int64], modulus: int
) -> list[int]:
    """Return the product of each segment of an order of rows."""
    times = lambda so_far, row: so_far * values[row] % modulus  # noqa: E731 - no number grows long
    return [reduce(times, order[a:b], 1 % modulus) for a, b in pairwise(starts)]


def signed_rows(values: Iterable[int], width: int = 16) -> NDArray[np.uint8]:
    """Write signed integers as plaintext rows. Shapes: result: uint8[n, width]."""
    joined = b"".join(int(value).to_bytes(width, "little", signed=True) for value in values)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, width)
