"""Paillier encryption in batches: c = (1 + m n) r^n modulo n^2.

Reference: Paillier 1999, section 4, with g = n + 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import RandomiserSource
from he_processors.bignum import registry
from he_processors.bignum.interface import ModBatch, Residues, add, constant, from_wide, scale
from he_processors.bignum.rows import less_than, shift_signed
from he_processors.errors import CapacityExceeded
from he_processors.paillier.keys import PaillierPrivateKey, PaillierPublicKey
from he_processors.paillier.randomisers import (
    GeneratorPowers,
    OwnerRandomisers,
    PrimePowers,
    PublicRandomisers,
    RandomiserPool,
    SubgroupSource,
    default_block_rows,
)
from he_processors.randomness import BULK_RANDOMNESS, RandomSource


class PaillierEncryptor:
    """Encrypts signed integers with randomisers from a source, usually a pool.

    Security: one fresh randomiser for each plaintext; a failed batch loses the randomisers it took.
    """

    def __init__(self, public_key: PaillierPublicKey, arithmetic: ModBatch, randomisers: RandomiserSource) -> None:
        self.public_key = public_key
        self.arithmetic = arithmetic
        self.randomisers = randomisers
        self._n = constant(arithmetic, public_key.n)

    def encrypt(self, plaintexts: NDArray[np.uint8]) -> Residues:
        """Encrypt signed integers.

        Shapes: plaintexts: uint8[n, width], two's complement, little-endian; result: Residues[n].

        Raises:
            CapacityExceeded: a plaintext is not in (-n, n).
            ValueError: another dtype or shape; nothing is encrypted then.
        """
        # 1 + m n = (m + s) n + (1 - s n): the shift s makes narrow rows non-negative without widening them to n.
        shifted = shift_signed(plaintexts)
        shift = 1 << (8 * shifted.shape[1] - 1)
        self._check_range(shifted, shift)
        offset = constant(self.arithmetic, 1 - shift * self.public_key.n)
        n_rows = default_block_rows(self.arithmetic)
        blocks = [self._encrypt_block(shifted[i : i + n_rows], offset) for i in range(0, max(1, len(shifted)), n_rows)]
        return blocks[0] if len(blocks) == 1 else self.arithmetic.concat(blocks)

    def _encrypt_block(self, shifted: NDArray[np.uint8], offset: Residues) -> Residues:
        messages = from_wide(self.arithmetic, shifted)
        opened = add(self.arithmetic, scale(self.arithmetic, messages, self._n), offset)
        return self.arithmetic.mul(opened, self.randomisers.draw(len(shifted)))

    def _check_range(self, shifted: NDArray[np.uint8], shift: int) -> None:
        n = self.public_key.n
        if shift <= n:
            return
        is_in_range = less_than(shifted, shift + n) & ~less_than(shifted, shift - n + 1)
        if not np.all(is_in_range):
            raise CapacityExceeded("a plaintext is not in the range of this key; nothing was encrypted")


def owner_encryptor(
    private_key: PaillierPrivateKey,
    backend: str = registry.AUTO,
    source: RandomSource = BULK_RANDOMNESS,
    block_rows: int | None = None,
) -> PaillierEncryptor:
    """Open encryption by the key owner, with a pool that can be filled ahead (``encryptor.randomisers.fill``)."""
    arithmetic = registry.open_backend(backend, private_key.public_key.modulus)
    p_half = _subgroup(private_key.p, private_key.p_generator, backend, source)
    q_half = _subgroup(private_key.q, private_key.q_generator, backend, source)
    randomisers = OwnerRandomisers(arithmetic, p_half, q_half)
    return PaillierEncryptor(private_key.public_key, arithmetic, RandomiserPool(arithmetic, randomisers, block_rows))


def public_encryptor(
    public_key: PaillierPublicKey, backend: str = registry.AUTO, source: RandomSource = BULK_RANDOMNESS
) -> PaillierEncryptor:
    """Open encryption with the public key alone."""
    arithmetic = registry.open_backend(backend, public_key.modulus)
    randomisers = PublicRandomisers(public_key, arithmetic, source)
    return PaillierEncryptor(public_key, arithmetic, RandomiserPool(arithmetic, randomisers))


def _subgroup(prime: int, generator: int | None, backend: str, source: RandomSource) -> SubgroupSource:
    """Open the uniform source of p-th powers modulo p^2, by table if a generator of Z_p* is known."""
    arithmetic = registry.open_backend(backend, prime * prime)
    if generator is None:
        return PrimePowers(arithmetic, prime, source)
    return GeneratorPowers(arithmetic, pow(generator, prime, prime * prime), prime - 1, source)
