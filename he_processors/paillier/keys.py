"""Paillier keys, and primes whose group of units has a known generator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import gmpy2

from he_processors.additive_schemes import DEFAULT_KEY_BITS, Scheme, StaysInProcess, check_key_bits, fingerprint
from he_processors.errors import ConfigurationError
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below

# Primes whose group of units has a known generator.
#
# p = 2 k q' + 1 with q' prime and k small, so that p - 1 is factored and a generator of Z_p* can be checked. Powers of
# the generator with a uniform exponent below p - 1 are then uniform over the whole group: the key owner draws exactly
# the textbook distribution of randomisers, by table.


_COFACTOR_BITS = 16
# Enough Miller-Rabin rounds, after GMP's Baillie-PSW, for an error far below 2^-100 on a random candidate.
_PRIMALITY_ROUNDS = 40


@dataclass(frozen=True, slots=True, repr=False)
class StructuredPrime(StaysInProcess):
    """A prime with the full factorisation of p - 1 behind its generator. Secret."""

    p: int
    generator: int

    def __repr__(self) -> str:
        return f"StructuredPrime({self.p.bit_length()} bits)"


def generate_structured_prime(bits: int, source: RandomSource = OS_RANDOMNESS) -> StructuredPrime:
    """Generate p = 2 k q' + 1 = 3 (mod 4) of exactly ``bits`` bits, its two top bits set, and a generator.

    Args:
        bits: length of the prime, at least 64.
        source: randomness for q', k and the generator.
    """
    if bits < 64:
        raise ValueError("a structured prime has at least 64 bits")
    low, high = 3 << (bits - 2), 1 << bits
    while True:
        q_prime = _random_prime(bits - _COFACTOR_BITS, source)
        # k odd makes p = 3 (mod 4); every k from k_low gives p in [low, high), and k < 2^16.
        k_low, k_high = -(-(low - 1) // (2 * q_prime)), (high - 2) // (2 * q_prime)
        for _ in range(k_high - k_low):
            k = (k_low + random_below(k_high - k_low + 1, source)) | 1
            p = 2 * k * q_prime + 1
            if low <= p < high and gmpy2.is_prime(p, _PRIMALITY_ROUNDS):
                return StructuredPrime(p, _find_generator(p, _prime_factors(k) | {2, q_prime}, source))


def is_generator(candidate: int, p: int, prime_factors: set[int]) -> bool:
    """Tell whether ``candidate`` generates Z_p*, given every prime factor of p - 1."""
    return all(gmpy2.powmod(candidate, (p - 1) // factor, p) != 1 for factor in prime_factors)


def _random_prime(bits: int, source: RandomSource) -> int:
    while True:
        candidate = random_below(1 << bits, source) | (1 << (bits - 1)) | 1
        if gmpy2.is_prime(candidate, _PRIMALITY_ROUNDS):
            return candidate


def _find_generator(p: int, prime_factors: set[int], source: RandomSource) -> int:
    while True:
        candidate = 2 + random_below(p - 3, source)
        if is_generator(candidate, p, prime_factors):
            return candidate


def _prime_factors(k: int) -> set[int]:
    """Return the prime factors of a small number by trial division."""
    factors, divisor = set(), 2
    while divisor * divisor <= k:
        while k % divisor == 0:
            factors.add(divisor)
            k //= divisor
        divisor += 1
    if k > 1:
        factors.add(k)
    return factors


# Paillier keys.
#
# Security: decisional composite residuosity. 3072 bits are the default (128-bit strength); 2048 must be asked for
# (112-bit strength); shorter keys are refused outside tests.


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
