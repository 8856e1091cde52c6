"""Paillier decryption in batches: modulo both primes, each by a logarithm in a subgroup."""

from __future__ import annotations

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import StaysInProcess
from he_processors.bignum import registry
from he_processors.bignum.rows import byte_width, ints_from_rows, less_than, rows_from_ints
from he_processors.errors import ProtocolError
from he_processors.paillier.keys import PaillierPrivateKey, PaillierPublicKey

# Decryption modulo one prime: the discrete logarithm in the subgroup of order p modulo p^2.
#
# For c = g^m x^n the power c^(p-1) keeps only m: L(c^(p-1) mod p^2) / L(g^(p-1) mod p^2) = m modulo p, where L(x) = (x
# - 1) / p.
#
# Security: the result is m modulo p. By itself it would reveal p to whoever knows a plaintext that is not below p.


REFUSED = "a ciphertext is not a unit of its modulus"


def check_ciphertexts(ciphertexts: NDArray[np.uint8], public_key: PaillierPublicKey) -> None:
    """Refuse what is no ciphertext, before any of it is decrypted.

    Shapes: ciphertexts: uint8[n, width].

    Raises:
        ProtocolError: with one fixed message, if one is zero, not below the modulus or not coprime to it.
    """
    if not np.all(less_than(ciphertexts, public_key.modulus)):
        raise ProtocolError(REFUSED)
    total, n = gmpy2.mpz(1), gmpy2.mpz(public_key.n)
    for ciphertext in ints_from_rows(ciphertexts):
        total = total * ciphertext % n
    if gmpy2.gcd(total, n) != 1:
        raise ProtocolError(REFUSED)


class OnePrimeLogarithm(StaysInProcess):
    """Recovers m modulo p from ciphertexts. Secret."""

    def __init__(self, p: int, g: int, backend: str = registry.AUTO) -> None:
        """Prepare the logarithm to base ``g``, an element whose order modulo p^2 is a multiple of p."""
        self.p = p
        self._p = gmpy2.mpz(p)
        self._square = gmpy2.mpz(p) ** 2
        self._arithmetic = registry.open_backend(backend, p * p)
        self._inverse = gmpy2.invert(self._logarithm(gmpy2.powmod(g, p - 1, self._square)), self._p)

    def recover(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Return m modulo p for each ciphertext.

        Shapes: ciphertexts: uint8[n, width]; result: n integers in [0, p).

        Raises:
            ProtocolError: a ciphertext is not a unit modulo p.
        """
        width = byte_width(int(self._square))
        reduced = rows_from_ints((gmpy2.mpz(c) % self._square for c in ints_from_rows(ciphertexts)), width)
        powers = self._arithmetic.pow_const(self._arithmetic.from_wire(reduced), self.p - 1)
        values = ints_from_rows(self._arithmetic.to_wire(powers))
        return [int(self._logarithm(gmpy2.mpz(value)) * self._inverse % self._p) for value in values]

    def _logarithm(self, value: int) -> int:
        quotient: int
        quotient, rest = gmpy2.f_divmod(value - 1, self._p)
        if rest:
            raise ProtocolError(REFUSED)
        return quotient


# Paillier decryption in batches, by Chinese remainder.


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
