"""Re-randomisation that holds against the key owner.

The key owner knows every randomiser it drew and the factors of n. A party that returns products of the owner's
ciphertexts therefore multiplies in a residue of its own: h^a * prod z_i^(b_i) with its own random n-th residues h and
z_i. The exponent a is longer than the group order by 128 bits, so h^a is uniform over the subgroup that h generates
(up to 2^-128); the random subset of the z_i makes the coset of that subgroup random as well, which h^a alone would not.

Textbook Paillier re-randomisation draws a fresh x^n for each ciphertext, which
costs 2048 or more products where this costs about 300.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.public_randomisers import PublicRandomisers
from he_processors.additive.randomiser_pool import RandomiserPool
from he_processors.additive.scheme import StaysInProcess
from he_processors.bignum.interface import ModBatch, Residues
from he_processors.bignum.rows import ints_from_rows
from he_processors.paillier.keys import PaillierPublicKey
from he_processors.randomness import BULK_RANDOMNESS, RandomSource

N_SUBSET_BASES = 96
EXPONENT_SLACK_BITS = 128
_SUBSET_BITS = 8


class Rerandomiser(StaysInProcess):
    """Draws fresh encryptions of zero that even the key owner cannot tell from any other.

    Security: the bases are this party's own, from its own randomness, and stay with it: never sent, never taken from
        a message. One re-randomiser serves one key; make a new one for each session.
    """

    def __init__(
        self, public_key: PaillierPublicKey, arithmetic: ModBatch, source: RandomSource = BULK_RANDOMNESS
    ) -> None:
        self.arithmetic = arithmetic
        self._source = source
        residues = PublicRandomisers(public_key, arithmetic, source).draw(1 + N_SUBSET_BASES)
        base = ints_from_rows(arithmetic.to_wire(arithmetic.take(residues, np.zeros(1, dtype=np.int64))))[0]
        self._exponent_bytes = (public_key.n.bit_length() + EXPONENT_SLACK_BITS + 7) // 8
        self._powers = arithmetic.fixed_base(base, 8 * self._exponent_bytes)
        self._subsets = _subset_products(arithmetic, residues)
        self._ready = RandomiserPool(arithmetic, self)

    def fill(self, n: int) -> None:
        """Make fresh encryptions of zero until ``n`` are ready for ``rerandomise``."""
        self._ready.fill(n)

    def draw(self, n: int) -> Residues:
        """Draw ``n`` fresh encryptions of zero. Shapes: result: Residues[n]."""
        exponents = self._random_bytes(n, self._exponent_bytes)
        return self.arithmetic.mul(self._powers.pow(exponents), self._subset_choice(n))

    def rerandomise(self, ciphertexts: Residues) -> Residues:
        """Hide where ciphertexts came from, with what was made ahead and more.

        Shapes: ciphertexts: Residues[n]; result: Residues[n].
        """
        return self.arithmetic.mul(ciphertexts, self._ready.draw(len(ciphertexts)))

    def _subset_choice(self, n: int) -> Residues:
        """Multiply a random subset of the z_i for each row: one table entry for each byte of random bits."""
        n_tables = N_SUBSET_BASES // _SUBSET_BITS
        bits = self._random_bytes(n, n_tables)
        order = bits.astype(np.int32) + (np.arange(n_tables, dtype=np.int32) << _SUBSET_BITS)
        starts = np.arange(n + 1, dtype=np.int64) * n_tables
        return self.arithmetic.segprod(self._subsets, order.reshape(-1), starts)

    def _random_bytes(self, n: int, width: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._source.bytes(n * width), dtype=np.uint8).reshape(n, width)


def _subset_products(arithmetic: ModBatch, residues: Residues) -> Residues:
    """Tabulate the products of all subsets of z_1..z_8, of z_9..z_16, and so on.

    Shapes: residues: Residues[1 + N_SUBSET_BASES], the first one is not used; result: Residues[12 * 256].
    """
    order: list[int] = []
    starts = [0]
    for first in range(1, 1 + N_SUBSET_BASES, _SUBSET_BITS):
        for subset in range(1 << _SUBSET_BITS):
            order += [first + bit for bit in range(_SUBSET_BITS) if subset >> bit & 1]
            starts.append(len(order))
    return arithmetic.segprod(residues, np.array(order, dtype=np.int32), np.array(starts, dtype=np.int64))
