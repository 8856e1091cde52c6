"""Paillier keys.

Security: decisional composite residuosity. 3072 bits are the default (128-bit strength); 2048 must be asked for
(112-bit strength); shorter keys are refused outside tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import gmpy2

from he_processors.additive.scheme import DEFAULT_KEY_BITS, Scheme, StaysInProcess, check_key_bits, fingerprint
from he_processors.additive.structured_primes import generate_structured_prime
from he_processors.errors import ConfigurationError
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# Prime factors closer than 2^(|n|/2 - 100) would let Fermat's method find them.
_MIN_DISTANCE_SLACK_BITS = 100


@dataclass(frozen=True)
class PaillierPublicKey:
    """The public key: n. Ciphertexts are units modulo n^2."""

    n: int

    @property
    def scheme(self) -> Scheme:
        """Return Paillier."""
        return Scheme.PAILLIER

    @cached_property
    def modulus(self) -> int:
        """Return n^2, the ciphertext modulus."""
        return self.n * self.n

    @property
    def key_bits(self) -> int:
        """Return the length of n."""
        return self.n.bit_length()

    @property
    def plaintext_bits(self) -> int:
        """Return the capacity: full decryption returns every |plaintext| < 2^plaintext_bits."""
        return self.key_bits - 2

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 that names this key."""
        return fingerprint(self.scheme, self.n)

    def __repr__(self) -> str:
        return f"PaillierPublicKey({self.key_bits} bits, {self.fingerprint[:16]})"


@dataclass(frozen=True, repr=False)
class PaillierPrivateKey(StaysInProcess):
    """The private key: the factors of n, the larger first, and generators of their unit groups where known.

    Security: stays with its owner. It prints as a fingerprint and refuses to be pickled.
    """

    p: int
    q: int
    p_generator: int | None = None
    q_generator: int | None = None

    def __post_init__(self) -> None:
        if self.p <= self.q:
            raise ValueError("the larger prime comes first")

    @classmethod
    def from_primes(cls, p: int, q: int, *, allow_toy_keys: bool = False) -> PaillierPrivateKey:
        """Take over a key made elsewhere, from ``phe`` for one.

        The structure of its primes is unknown, so encryption draws s^p instead of powers of a generator.

        Args:
            p, q: the primes, in either order.
            allow_toy_keys: accept short keys; True in tests only.

        Raises:
            ConfigurationError: the length is refused, or these are not two primes that make a usable key.
        """
        p, q = max(p, q), min(p, q)
        key_bits = (p * q).bit_length()
        check_key_bits(key_bits, allow_toy_keys)
        is_balanced = p.bit_length() == q.bit_length() and _is_far_apart(p, q, key_bits)
        if not is_balanced or not (gmpy2.is_prime(p, 40) and gmpy2.is_prime(q, 40)) or not _is_invertible(p, q):
            raise ConfigurationError("an imported Paillier key is not the product of two suitable primes")
        return cls(p, q)

    @cached_property
    def public_key(self) -> PaillierPublicKey:
        """Return the public half."""
        return PaillierPublicKey(self.p * self.q)

    def __repr__(self) -> str:
        return f"PaillierPrivateKey({self.public_key.key_bits} bits, {self.public_key.fingerprint[:16]})"


def generate_paillier_key(
    key_bits: int = DEFAULT_KEY_BITS, source: RandomSource = OS_RANDOMNESS, *, allow_toy_keys: bool = False
) -> PaillierPrivateKey:
    """Generate a key whose owner can draw randomisers by table.

    Args:
        key_bits: length of n; 3072 (128-bit strength) or 2048 (112-bit strength) or more.
        source: randomness.
        allow_toy_keys: accept shorter keys; True in tests only.

    Raises:
        ConfigurationError: the length is refused.
    """
    check_key_bits(key_bits, allow_toy_keys)
    while True:
        halves = [generate_structured_prime(key_bits // 2, source) for _ in range(2)]
        larger, smaller = sorted(halves, key=lambda prime: prime.p, reverse=True)
        p, q = larger.p, smaller.p
        if _is_far_apart(p, q, key_bits) and math.gcd(p - 1, q - 1) == 2 and _is_invertible(p, q):
            return PaillierPrivateKey(p, q, larger.generator, smaller.generator)


def _is_far_apart(p: int, q: int, key_bits: int) -> bool:
    return p - q > 1 << max(key_bits // 2 - _MIN_DISTANCE_SLACK_BITS, key_bits // 4)


def _is_invertible(p: int, q: int) -> bool:
    """Tell whether gcd(n, phi(n)) = 1, which decryption and the distribution of n-th powers rest on."""
    return math.gcd(p * q, (p - 1) * (q - 1)) == 1
