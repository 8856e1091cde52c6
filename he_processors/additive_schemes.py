"""What an additive scheme over big numbers is, as Paillier and others implement it; the codes of all schemes.

A ciphertext of m is E(m) * z modulo one number, where E is a homomorphism from the integers and z a random encryption
of 0 (Paillier: x^n); adding plaintexts is multiplying ciphertexts, and 1 is an (unhidden) encryption of 0.
"""

from __future__ import annotations

import enum
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import ModBatch, Residues
from he_processors.errors import ConfigurationError
from he_processors.randomness import BULK_RANDOMNESS, RandomSource

DEFAULT_KEY_BITS = 3072
MIN_KEY_BITS = 2048
# NIST SP 800-57 part 1, table 2: comparable strength of factoring-based keys.
_STRENGTH_BITS = {2048: 112, 3072: 128, 7680: 192, 15360: 256}


class Scheme(enum.Enum):
    """The additively homomorphic schemes; the value is the code on the wire."""

    PAILLIER = 1
    ELGAMAL = 3  # 2 was Okamoto-Uchiyama
    PLUGIN = 4  # of a package of others: any whose public key is one number


class StaysInProcess:
    """Base of everything that holds a secret: it is never pickled, and so never copied to another process either."""

    __slots__ = ()

    def __reduce__(self) -> str:
        raise TypeError(f"a {type(self).__name__} is not pickled: it stays in the process that made it")


class RandomiserSource(Protocol):
    """Yields random encryptions of 0. Security: each one is drawn afresh and handed out once."""

    def draw(self, n: int) -> Residues: ...


class Decryptor(Protocol):
    """Decrypts batches, here or on workers; held by the key owner only.

    Capacity: every |plaintext| < 2^plaintext_bits decrypts to itself, so that both sides fit one packing layout to it.
    """

    plaintext_bits: int

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> Sequence[int]:
        """Decrypt. Shapes: ciphertexts: uint8[n, width] in wire form; result: n signed integers."""


@dataclass(frozen=True, repr=False)
class PublicKey(ABC):
    """A public key that is one odd number n. Ciphertexts are units modulo ``modulus``, which n alone decides.

    Security: a receiver checks what can be seen of a peer's n (``ciphertext_wire.public_key_from_bytes``), whatever the
        scheme. No encryption of 0 may have an order of more than ``key_bits`` bits: re-randomisation rests on it.
    """

    scheme: ClassVar[Scheme] = Scheme.PLUGIN
    """The code on the wire."""
    n: int

    @property
    @abstractmethod
    def modulus(self) -> int:
        """Return the odd number modulo which ciphertexts are multiplied; a unit modulo n is one of it."""

    @property
    @abstractmethod
    def plaintext_bits(self) -> int:
        """Return the capacity: decryption returns every |plaintext| < 2^plaintext_bits. ``key_bits`` decides it."""

    @abstractmethod
    def embed(self, arithmetic: ModBatch, plaintexts: NDArray[np.uint8]) -> Residues:
        """Encrypt without hiding: E(m). Sums that leave, and fresh encryptions, are multiplied by encryptions of 0.

        Shapes: plaintexts: uint8[n, any width], two's complement, little-endian; result: Residues[n].

        Raises:
            CapacityExceeded: a plaintext is larger than decryption returns.
            ValueError: another dtype or shape.
        """

    @abstractmethod
    def randomisers(self, arithmetic: ModBatch, source: RandomSource = BULK_RANDOMNESS) -> RandomiserSource:
        """Open random encryptions of 0 for whoever has this key."""

    @property
    def key_bits(self) -> int:
        """Return the length of n."""
        return self.n.bit_length()

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 that names this key."""
        return fingerprint(self.scheme, self.n)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key_bits} bits, {self.fingerprint[:16]})"


class PrivateKey(StaysInProcess, ABC):
    """A private key. Security: stays with its owner. It prints as a fingerprint and refuses to be pickled."""

    @property
    @abstractmethod
    def public_key(self) -> PublicKey:
        """Return the public half."""

    @abstractmethod
    def decryptor(self, backend: str) -> Decryptor:
        """Open decryption."""

    def randomisers(self, arithmetic: ModBatch, backend: str, source: RandomSource) -> RandomiserSource:
        """Open random encryptions of 0; the owner may have a faster way than the public one, to the same distribution.

        Args:
            arithmetic: modulo ``public_key.modulus``.
            backend: for arithmetic modulo other numbers.
        """
        return self.public_key.randomisers(arithmetic, source)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.public_key.key_bits} bits, {self.public_key.fingerprint[:16]})"


class KeyMaker(Protocol):
    """Generates a key whose n has so many bits; ``check_key_bits`` refuses what is too short."""

    def __call__(self, key_bits: int, *, allow_toy_keys: bool = False) -> PrivateKey: ...


@dataclass(frozen=True)
class AdditiveScheme:
    """One additive scheme over big numbers: all that vertical training needs of it.

    Attributes:
        name: as jobs call it; of a package of others the name of its entry point.
        assumption: on what its security rests, in a sentence that evidence and report carry.
        public_key: makes the public key of n.
        generate: makes a fresh key.
    """

    name: str
    assumption: str
    public_key: type[PublicKey]
    generate: KeyMaker


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
