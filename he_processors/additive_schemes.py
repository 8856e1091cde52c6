"""What Paillier is made of; the codes of all schemes.

A ciphertext of m is E(m) * x^n modulo one number, where E is a homomorphism from the integers and x^n is a
uniformly random n-th residue; adding plaintexts is multiplying ciphertexts, and 1 is an (unhidden) encryption of 0.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import Residues
from he_processors.errors import ConfigurationError

DEFAULT_KEY_BITS = 3072
MIN_KEY_BITS = 2048
# NIST SP 800-57 part 1, table 2: comparable strength of factoring-based keys.
_STRENGTH_BITS = {2048: 112, 3072: 128, 7680: 192, 15360: 256}


class Scheme(enum.Enum):
    """The additively homomorphic schemes; the value is the code on the wire."""

    PAILLIER = 1
    ELGAMAL = 3  # 2 was Okamoto-Uchiyama


class StaysInProcess:
    """Base of everything that holds a secret: it is never pickled, and so never copied to another process either."""

    __slots__ = ()

    def __reduce__(self) -> str:
        raise TypeError(f"a {type(self).__name__} is not pickled: it stays in the process that made it")


class RandomiserSource(Protocol):
    """Yields random n-th residues. Security: each one is drawn afresh and handed out once."""

    def draw(self, n: int) -> Residues: ...


class Decryptor(Protocol):
    """Decrypts batches, here or on workers; held by the key owner only.

    Capacity: every |plaintext| < 2^plaintext_bits decrypts to itself, so that both sides fit one packing layout to it.
    """

    plaintext_bits: int

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> Sequence[int]:
        """Decrypt. Shapes: ciphertexts: uint8[n, width] in wire form; result: n signed integers."""


def fingerprint(scheme: Scheme, *numbers: int) -> str:
    """Return the SHA-256 of a public key's numbers, separated by scheme, in hexadecimal."""
    digest = hashlib.sha256(f"veilboost public key {scheme.name}".encode())
    for number in numbers:
        encoded = number.to_bytes((number.bit_length() + 7) // 8, "big")
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.hexdigest()


def security_bits(key_bits: int) -> int:
    """Return the comparable symmetric strength; 0 for keys shorter than 2048 bits."""
    return max((strength for bits, strength in _STRENGTH_BITS.items() if bits <= key_bits), default=0)


def check_key_bits(key_bits: int, *, allow_toy_keys: bool) -> None:
    """Refuse key lengths that protect nothing.

    Args:
        key_bits: length of the modulus n.
        allow_toy_keys: True in tests only.

    Raises:
        ConfigurationError: the length is below 2048 bits, or not a multiple of 64.
    """
    if key_bits < MIN_KEY_BITS and not allow_toy_keys:
        raise ConfigurationError(f"a key of {key_bits} bits is refused: at least {MIN_KEY_BITS} are needed")
    if key_bits < 256 or key_bits % 64:
        raise ConfigurationError(f"a key of {key_bits} bits is refused: the length must be a multiple of 64")
