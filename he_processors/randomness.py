"""The one source of secrets and of noise, for dp_components too: the operating system. SEAL draws its own.

Every function that needs secret random bytes takes a ``RandomSource``. The default is ``OS_RANDOMNESS``, or
``BULK_RANDOMNESS`` where a million randomisers need hundreds of megabytes. Tests inject a deterministic source for
known answers; no production signature takes a seed. Noise never comes from a public seed: whoever knows it could
subtract the noise.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_MIN_EXPANDED_BYTES = 4096


class RandomSource(Protocol):
    """Anything that yields independent, uniform random bytes."""

    def bytes(self, n: int) -> bytes:
        """Return ``n`` fresh bytes."""


class _OsRandomness:
    def bytes(self, n: int) -> bytes:
        return os.urandom(n)


class _BulkRandomness:
    """The operating system's randomness, expanded by AES-256 in counter mode: some eight times as fast.

    Security: each large request has a fresh 256-bit key from the operating system and forgets it. No state is kept,
        so threads and forked processes cannot repeat each other. Whoever tells the result from uniform bytes breaks
        AES-256 or the operating system's generator, which expands a seed in the same way.
    Reference: NIST SP 800-38A (CTR); SP 800-90A, CTR_DRBG, with one seed for each request.
    """

    def bytes(self, n: int) -> bytes:
        if n < _MIN_EXPANDED_BYTES:
            return OS_RANDOMNESS.bytes(n)
        cipher = Cipher(algorithms.AES(OS_RANDOMNESS.bytes(32)), modes.CTR(bytes(16)))
        return cipher.encryptor().update(bytes(n))


OS_RANDOMNESS: RandomSource = _OsRandomness()
BULK_RANDOMNESS: RandomSource = _BulkRandomness()


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


def random_integers_below(bound: int, n: int, source: RandomSource = OS_RANDOMNESS) -> NDArray[np.int64]:
    """Draw ``n`` integers uniformly from [0, bound) by rejection.

    Shapes: result: int64[n].

    Raises:
        ValueError: ``bound`` is not in [1, 2^62].
    """
    if not 1 <= bound <= 1 << 62:
        raise ValueError("bound must be in [1, 2^62]")
    mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
    drawn = random_uint64(n, source) & mask
    while (outside := np.flatnonzero(drawn >= np.uint64(bound))).size:
        drawn[outside] = random_uint64(outside.size, source) & mask
    return drawn.astype(np.int64)
