"""Okamoto-Uchiyama encryption in batches: c = g^m x^n modulo n.

Reference: Okamoto and Uchiyama 1998, section 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.owner_randomisers import GeneratorPowers, OwnerRandomisers, generator_powers
from he_processors.additive.public_randomisers import PublicRandomisers
from he_processors.additive.randomiser_pool import RandomiserPool, default_block_rows
from he_processors.additive.scheme import RandomiserSource
from he_processors.bignum import registry
from he_processors.bignum.batch_ops import constant, scale
from he_processors.bignum.interface import ModBatch, Residues
from he_processors.bignum.rows import shift_signed
from he_processors.errors import CapacityExceeded
from he_processors.okamoto_uchiyama.keys import OkamotoUchiyamaPrivateKey, OkamotoUchiyamaPublicKey
from he_processors.randomness import BULK_RANDOMNESS, RandomSource

# A gradient pair takes 16 bytes (fixed_pairs.PairFormat.plaintext_rows).
DEFAULT_PLAINTEXT_BYTES = 16


class OkamotoUchiyamaEncryptor:
    """Encrypts signed integers of up to ``plaintext_bytes`` bytes.

    Security: one fresh randomiser for each plaintext; a failed batch loses the randomisers it took.
    """

    def __init__(
        self,
        public_key: OkamotoUchiyamaPublicKey,
        arithmetic: ModBatch,
        randomisers: RandomiserSource,
        plaintext_bytes: int = DEFAULT_PLAINTEXT_BYTES,
    ) -> None:
        # p has a third of the bits of n. One bit less leaves room for the sign.
        if 8 * plaintext_bytes > public_key.key_bits // 3 - 1:
            raise CapacityExceeded(f"plaintexts of {plaintext_bytes} bytes do not fit this key")
        self.public_key = public_key
        self.arithmetic = arithmetic
        self.randomisers = randomisers
        self._plaintext_bytes = plaintext_bytes
        self._powers = arithmetic.fixed_base(public_key.g, 8 * plaintext_bytes)
        # Exponents are shifted to be non-negative; this factor shifts them back.
        shift = pow(public_key.g, -(1 << (8 * plaintext_bytes - 1)), public_key.n)
        self._unshift = constant(arithmetic, shift)

    def encrypt(self, plaintexts: NDArray[np.uint8]) -> Residues:
        """Encrypt signed integers.

        Shapes: plaintexts: uint8[n, plaintext_bytes], two's complement, little-endian; result: Residues[n].

        Raises:
            CapacityExceeded: rows are not ``plaintext_bytes`` wide.
            ValueError: another dtype or shape; nothing is encrypted then.
        """
        shifted = shift_signed(plaintexts)
        if shifted.shape[1] != self._plaintext_bytes:
            raise CapacityExceeded(f"plaintexts must have {self._plaintext_bytes} bytes; nothing was encrypted")
        n_rows = default_block_rows(self.arithmetic)
        blocks = [self._encrypt_block(shifted[i : i + n_rows]) for i in range(0, max(1, len(shifted)), n_rows)]
        return blocks[0] if len(blocks) == 1 else self.arithmetic.concat(blocks)

    def _encrypt_block(self, shifted: NDArray[np.uint8]) -> Residues:
        opened = scale(self.arithmetic, self._powers.pow(shifted), self._unshift)
        return self.arithmetic.mul(opened, self.randomisers.draw(len(shifted)))


def owner_encryptor(
    private_key: OkamotoUchiyamaPrivateKey,
    backend: str = registry.AUTO,
    source: RandomSource = BULK_RANDOMNESS,
    block_rows: int | None = None,
) -> OkamotoUchiyamaEncryptor:
    """Open encryption by the key owner, with a pool that can be filled ahead (``encryptor.randomisers.fill``)."""
    arithmetic = registry.open_backend(backend, private_key.public_key.modulus)
    p, q = private_key.p, private_key.q
    p_half = generator_powers(p * p, pow(private_key.p_generator, p, p * p), p - 1, backend, source)
    q_half: GeneratorPowers = generator_powers(q, private_key.q_generator, q - 1, backend, source)
    pool = RandomiserPool(arithmetic, OwnerRandomisers(arithmetic, p_half, q_half), block_rows)
    return OkamotoUchiyamaEncryptor(private_key.public_key, arithmetic, pool)


def public_encryptor(
    public_key: OkamotoUchiyamaPublicKey, backend: str = registry.AUTO, source: RandomSource = BULK_RANDOMNESS
) -> OkamotoUchiyamaEncryptor:
    """Open encryption with the public key alone."""
    arithmetic = registry.open_backend(backend, public_key.modulus)
    randomisers = PublicRandomisers(public_key, arithmetic, source)
    return OkamotoUchiyamaEncryptor(public_key, arithmetic, RandomiserPool(arithmetic, randomisers))
