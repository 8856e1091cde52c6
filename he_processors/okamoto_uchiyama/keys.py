"""Okamoto-Uchiyama keys: n = p^2 q."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import gmpy2

from he_processors.additive.scheme import DEFAULT_KEY_BITS, Scheme, StaysInProcess, check_key_bits, fingerprint
from he_processors.additive.structured_primes import generate_structured_prime
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below


@dataclass(frozen=True)
class OkamotoUchiyamaPublicKey:
    """The public key: n and g. Ciphertexts are units modulo n.

    The paper's h = g^n is not needed: randomisers are n-th powers of uniform units, of which the powers of h are a
    subgroup. Anyone can turn a ciphertext of the paper into one of ours by a factor x^n, so ours hide no less.
    """

    n: int
    g: int

    @property
    def scheme(self) -> Scheme:
        """Return Okamoto-Uchiyama."""
        return Scheme.OKAMOTO_UCHIYAMA

    @property
    def modulus(self) -> int:
        """Return n, the ciphertext modulus."""
        return self.n

    @property
    def key_bits(self) -> int:
        """Return the length of n."""
        return self.n.bit_length()

    @property
    def plaintext_bits(self) -> int:
        """Return the capacity: decryption returns every |plaintext| < 2^plaintext_bits. p has a third of the bits."""
        return -(-self.key_bits // 3) - 2

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 that names this key."""
        return fingerprint(self.scheme, self.n, self.g)

    def __repr__(self) -> str:
        return f"OkamotoUchiyamaPublicKey({self.key_bits} bits, {self.fingerprint[:16]})"


@dataclass(frozen=True, repr=False)
class OkamotoUchiyamaPrivateKey(StaysInProcess):
    """The private key: the primes, generators of their unit groups, and g.

    Security: stays with its owner. It prints as a fingerprint and refuses to be pickled.
    """

    p: int
    q: int
    p_generator: int
    q_generator: int
    g: int

    @cached_property
    def public_key(self) -> OkamotoUchiyamaPublicKey:
        """Return the public half."""
        return OkamotoUchiyamaPublicKey(self.p * self.p * self.q, self.g)

    def __repr__(self) -> str:
        return f"OkamotoUchiyamaPrivateKey({self.public_key.key_bits} bits, {self.public_key.fingerprint[:16]})"


def generate_okamoto_uchiyama_key(
    key_bits: int = DEFAULT_KEY_BITS, source: RandomSource = OS_RANDOMNESS, *, allow_toy_keys: bool = False
) -> OkamotoUchiyamaPrivateKey:
    """Generate a key.

    Args:
        key_bits: length of n = p^2 q.
        source: randomness.
        allow_toy_keys: accept keys below 2048 bits; True in tests only.

    Raises:
        ConfigurationError: the length is refused.
    """
    check_key_bits(key_bits, allow_toy_keys)
    p_bits = -(-key_bits // 3)
    while True:
        p_half = generate_structured_prime(p_bits, source)
        q_half = generate_structured_prime(key_bits - 2 * p_bits, source)
        p, q = p_half.p, q_half.p
        n = p * p * q
        if n.bit_length() == key_bits and p != q and math.gcd(n, (p - 1) * (q - 1)) == 1:
            g = _find_base(n, p, source)
            return OkamotoUchiyamaPrivateKey(p, q, p_half.generator, q_half.generator, g)


def _find_base(n: int, p: int, source: RandomSource) -> int:
    """Draw g whose (p-1)-th power has order p modulo p^2."""
    while True:
        g = 2 + random_below(n - 3, source)
        if math.gcd(g, n) == 1 and gmpy2.powmod(g, p - 1, p * p) != 1:
            return g
