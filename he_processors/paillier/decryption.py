"""Paillier decryption in batches, by Chinese remainder."""

from __future__ import annotations

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.additive.one_prime import OnePrimeLogarithm, check_ciphertexts
from he_processors.bignum import registry
from he_processors.paillier.keys import PaillierPrivateKey


class PaillierDecryptor:
    """Full decryption: every plaintext in (-n/2, n/2).

    Capacity: |plaintext| < 2^plaintext_bits.
    """

    def __init__(self, private_key: PaillierPrivateKey, backend: str = registry.AUTO) -> None:
        self.public_key = private_key.public_key
        self.plaintext_bits = self.public_key.plaintext_bits
        n = self.public_key.n
        self._p_half = OnePrimeLogarithm(private_key.p, n + 1, backend)
        self._q_half = OnePrimeLogarithm(private_key.q, n + 1, backend)
        self._q_inverse = int(gmpy2.invert(private_key.q, private_key.p))

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Decrypt.

        Shapes: ciphertexts: uint8[n, width] in wire form; result: n signed integers.

        Raises:
            ProtocolError: a ciphertext is not a unit below n^2.
        """
        check_ciphertexts(ciphertexts, self.public_key)
        p, q = self._p_half.p, self._q_half.p
        halves = zip(self._p_half.recover(ciphertexts), self._q_half.recover(ciphertexts), strict=True)
        joined = (in_q + q * ((in_p - in_q) * self._q_inverse % p) for in_p, in_q in halves)
        return [centred(plaintext, self.public_key.n) for plaintext in joined]


def centred(residue: int, modulus: int) -> int:
    """Return the representative of smallest magnitude."""
    return residue - modulus if residue > modulus // 2 else residue
