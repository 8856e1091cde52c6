"""Primes whose group of units has a known generator.

p = 2 k q' + 1 with q' prime and k small, so that p - 1 is factored and a generator of Z_p* can be checked. Powers of
the generator with a uniform exponent below p - 1 are then uniform over the whole group: the key owner draws exactly
the textbook distribution of randomisers, by table.
"""

from __future__ import annotations

from dataclasses import dataclass

import gmpy2

from he_processors.additive.scheme import StaysInProcess
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below

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
