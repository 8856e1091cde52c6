"""Bulk secret randomness: the operating system's seed, expanded by AES-256 in counter mode.

A million randomisers need hundreds of megabytes, which the operating system yields at about 200 MB/s and AES at
several GB/s. Each request has a fresh 256-bit key from the operating system and forgets it: no state is kept, so
threads and forked processes cannot repeat each other.

Security: a distinguisher from uniform bytes would break AES-256 or the operating system's generator.
Reference: NIST SP 800-38A (CTR); the same construction as in SP 800-90A's CTR_DRBG, one request for each seed.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from he_processors.randomness import OS_RANDOMNESS, RandomSource

_MIN_BYTES = 4096


class _ExpandedRandomness:
    """A ``RandomSource`` for large requests."""

    def bytes(self, n: int) -> bytes:
        """Return ``n`` fresh bytes."""
        if n < _MIN_BYTES:
            return OS_RANDOMNESS.bytes(n)
        cipher = Cipher(algorithms.AES(OS_RANDOMNESS.bytes(32)), modes.CTR(bytes(16)))
        return cipher.encryptor().update(bytes(n))


BULK_RANDOMNESS: RandomSource = _ExpandedRandomness()
