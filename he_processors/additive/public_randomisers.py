"""Random n-th residues drawn with the public key alone: x^n for uniform x.

Slow, and exactly the textbook distribution. Short exponents over one public base would need a further assumption and
are not offered.
"""

from __future__ import annotations

import math

from he_processors.bignum.batch_ops import product
from he_processors.bignum.interface import ModBatch, Residues
from he_processors.bignum.rows import add_rows, random_rows_below, rows_from_ints, widen
from he_processors.paillier.keys import PaillierPublicKey
from he_processors.randomness import BULK_RANDOMNESS, RandomSource


class PublicRandomisers:
    """Uniform n-th residues for whoever has the public key."""

    def __init__(
        self, public_key: PaillierPublicKey, arithmetic: ModBatch, source: RandomSource = BULK_RANDOMNESS
    ) -> None:
        self._n = public_key.n
        self._arithmetic = arithmetic
        self._source = source

    def draw(self, n: int) -> Residues:
        """Draw ``n`` fresh n-th residues. Shapes: result: Residues[n]."""
        width = self._arithmetic.width
        while True:
            below = widen(random_rows_below(n, self._n - 1, self._source), width)
            bases = self._arithmetic.from_wire(add_rows(below, rows_from_ints([1], width)))
            # A base that shares a factor with n would be no unit. It never happens for a real key; toy keys meet it.
            if math.gcd(product(self._arithmetic, bases), self._n) == 1:
                return self._arithmetic.pow_const(bases, self._n)
