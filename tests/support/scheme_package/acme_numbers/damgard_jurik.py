"""The cryptosystem of Damgard and Jurik (PKC 2001) with s = 2: c = (1 + n)^m x^(n^2) modulo n^3.

A plaintext has twice the bits of one of Paillier's, and a ciphertext half as many again: more sums share one.
"""

from __future__ import annotations

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import AdditiveScheme, PrivateKey, PublicKey
from he_processors.bignum.interface import (
    ModBatch,
    Residues,
    add,
    byte_width,
    constant,
    from_wide,
    ints_from_rows,
    less_than,
    rows_from_ints,
    scale,
    shift_signed,
)
from he_processors.bignum.registry import open_backend
from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.paillier import (
    GeneratorPowers,
    OwnerRandomisers,
    PaillierPrivateKey,
    PublicRandomisers,
    centred,
    check_ciphertexts,
    generate_paillier_key,
)
from he_processors.randomness import BULK_RANDOMNESS, RandomSource


class DamgardJurikPublicKey(PublicKey):
    @property
    def modulus(self) -> int:
        return self.n**3

    @property
    def plaintext_bits(self) -> int:
        return 2 * self.key_bits - 3  # n^2 has at least 2 * key_bits - 1 bits, and plaintexts a sign

    def embed(self, arithmetic: ModBatch, plaintexts: NDArray[np.uint8]) -> Residues:
        """Return (1 + n)^m = 1 + m n + m (m - 1) / 2 n^2."""
        shifted = shift_signed(plaintexts)
        shift, most = 1 << (8 * shifted.shape[1] - 1), 1 << self.plaintext_bits
        if shift > most and not np.all(less_than(shifted, shift + most) & ~less_than(shifted, shift - most + 1)):
            raise CapacityExceeded("a plaintext is not in the range of this key; nothing was encrypted")
        half = self.n**2 * pow(2, -1, self.modulus)
        m = add(arithmetic, from_wide(arithmetic, shifted), constant(arithmetic, -shift))
        linear = scale(arithmetic, m, constant(arithmetic, self.n - half))
        square = scale(arithmetic, arithmetic.mul(m, m), constant(arithmetic, half))
        return add(arithmetic, add(arithmetic, linear, square), constant(arithmetic, 1))

    def randomisers(self, arithmetic: ModBatch, source: RandomSource = BULK_RANDOMNESS) -> PublicRandomisers:
        return PublicRandomisers(self, arithmetic, source, exponent=self.n**2)


class DamgardJurikPrivateKey(PrivateKey):
    """The primes are Paillier's: p - 1 is factored, so that the owner draws from tables of powers of a generator."""

    def __init__(self, primes: PaillierPrivateKey) -> None:
        self.primes = primes

    @property
    def public_key(self) -> DamgardJurikPublicKey:
        return DamgardJurikPublicKey(self.primes.p * self.primes.q)

    def decryptor(self, backend: str) -> DamgardJurikDecryptor:
        return DamgardJurikDecryptor(self, backend)

    def randomisers(self, arithmetic: ModBatch, backend: str, source: RandomSource) -> OwnerRandomisers:
        """Open x^(n^2): modulo p^3 uniform among the elements whose order divides p - 1."""
        halves = []
        for p, generator in (
            (self.primes.p, self.primes.p_generator),
            (self.primes.q, self.primes.q_generator),
        ):
            own = open_backend(backend, p**3)
            halves.append(GeneratorPowers(own, pow(generator, p * p, p**3), p - 1, source))
        return OwnerRandomisers(arithmetic, *halves)


class DamgardJurikDecryptor:
    def __init__(self, key: DamgardJurikPrivateKey, backend: str) -> None:
        self.plaintext_bits = key.public_key.plaintext_bits
        self._key, self._backend = key, backend

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        check_ciphertexts(ciphertexts, self._key.public_key)
        p, q = self._key.primes.p, self._key.primes.q
        inverse = pow(q * q, -1, p * p)
        in_p, in_q = self._modulo_square(ciphertexts, p, q), self._modulo_square(ciphertexts, q, p)
        joined = (b + q * q * ((a - b) * inverse % (p * p)) for a, b in zip(in_p, in_q, strict=True))
        return [centred(m, p * p * q * q) for m in joined]

    def _modulo_square(self, ciphertexts: NDArray[np.uint8], p: int, q: int) -> list[int]:
        """Return m modulo p^2, from c^(p - 1) = (1 + n)^i modulo p^3 with i = m (p - 1)."""
        cube, square = p**3, p * p
        arithmetic = open_backend(self._backend, cube)
        reduced = rows_from_ints((int(gmpy2.mpz(c) % cube) for c in ints_from_rows(ciphertexts)), byte_width(cube))
        powers = arithmetic.pow_const(arithmetic.from_wire(reduced), p - 1)
        to_i, to_m = pow(q, -1, square), pow(p - 1, -1, square)
        found = []
        for power in ints_from_rows(arithmetic.to_wire(powers)):
            value, rest = divmod(power - 1, p)  # i q + i (i - 1) / 2 p q^2 modulo p^2
            if rest:
                raise ProtocolError("a ciphertext is not a unit of its modulus")
            low = value * to_i % p
            i = (value - low * (low - 1) // 2 * p * q * q) * to_i
            found.append(int(i * to_m % square))
        return found


def generate(key_bits: int, *, allow_toy_keys: bool = False) -> DamgardJurikPrivateKey:
    return DamgardJurikPrivateKey(generate_paillier_key(key_bits, allow_toy_keys=allow_toy_keys))


SCHEME = AdditiveScheme(
    "acme_damgard_jurik", "Rests on decisional composite residuosity.", DamgardJurikPublicKey, generate
)
