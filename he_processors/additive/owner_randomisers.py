"""Random n-th residues drawn by the key owner, prime by prime.

Modulo each prime power x^n runs over the whole subgroup of order p - 1 as x runs over the units, uniformly. The
owner therefore draws a uniform element of each subgroup and joins the two by the Chinese remainder theorem: exactly
the distribution of x^n for uniform x, at a fraction of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import gmpy2

from he_processors.additive.scheme import StaysInProcess
from he_processors.bignum.batch_ops import add, constant, lift, product, scale
from he_processors.bignum.interface import ModBatch, Residues
from he_processors.bignum.rows import add_rows, random_rows_below, rows_from_ints, sum_rows, widen
from he_processors.errors import VeilBoostError
from he_processors.randomness import RandomSource


class ArithmeticFault(VeilBoostError):
    """A result of the big-number arithmetic is wrong: this machine must not encrypt."""


@dataclass(frozen=True, slots=True, repr=False)
class SubgroupElements:
    """Elements of one prime's subgroup, and what their product must be."""

    residues: Residues
    expected_product: int


class SubgroupSource(Protocol):
    """Draws uniform elements of the subgroup of order p - 1 modulo a prime or its square. Secret."""

    arithmetic: ModBatch

    def draw(self, n: int) -> SubgroupElements: ...


class GeneratorPowers(StaysInProcess):
    """Uniform subgroup elements as powers of a known generator, from a table.

    Security: exponents are uniform in [0, order), by rejection, so the elements are exactly uniform.
    """

    def __init__(self, arithmetic: ModBatch, generator: int, order: int, source: RandomSource) -> None:
        self.arithmetic = arithmetic
        self._generator = generator
        self._order = order
        self._source = source
        self._table = arithmetic.fixed_base(generator, (order - 1).bit_length())

    def draw(self, n: int) -> SubgroupElements:
        """Draw ``n`` elements. Shapes: result: Residues[n]."""
        exponents = random_rows_below(n, self._order, self._source)
        residues = self._table.pow(exponents)
        expected = gmpy2.powmod(self._generator, sum_rows(exponents) % self._order, self.arithmetic.modulus)
        return SubgroupElements(residues, int(expected))


class PrimePowers(StaysInProcess):
    """Uniform subgroup elements modulo p^2 as s^p with s uniform in [1, p): for primes without a known generator."""

    def __init__(self, arithmetic: ModBatch, p: int, source: RandomSource) -> None:
        self.arithmetic = arithmetic
        self._p = p
        self._source = source

    def draw(self, n: int) -> SubgroupElements:
        """Draw ``n`` elements. Shapes: result: Residues[n]."""
        below = widen(random_rows_below(n, self._p - 1, self._source), self.arithmetic.width)
        bases = self.arithmetic.from_wire(add_rows(below, rows_from_ints([1], self.arithmetic.width)))
        expected = gmpy2.powmod(product(self.arithmetic, bases), self._p, self.arithmetic.modulus)
        return SubgroupElements(self.arithmetic.pow_const(bases, self._p), int(expected))


class OwnerRandomisers:
    """Uniform n-th residues modulo the product of two coprime moduli.

    Security: for the key owner only. Every batch is checked against the product that its exponents predict, modulo
        both primes: a fault in one half would let any receiver factor the modulus.
    """

    def __init__(self, arithmetic: ModBatch, larger: SubgroupSource, smaller: SubgroupSource) -> None:
        """Take the two halves, the one with the larger modulus first."""
        if larger.arithmetic.modulus <= smaller.arithmetic.modulus:
            raise ValueError("the half with the larger modulus comes first")
        self.arithmetic = arithmetic
        self._larger = larger
        self._smaller = smaller
        large, small = larger.arithmetic.modulus, smaller.arithmetic.modulus
        inverse = int(gmpy2.invert(small, large))
        self._inverse = constant(larger.arithmetic, inverse)
        self._minus_inverse = constant(larger.arithmetic, -inverse)
        self._small_modulus = constant(arithmetic, small)

    def draw(self, n: int) -> Residues:
        """Draw ``n`` fresh n-th residues.

        Shapes: result: Residues[n].

        Raises:
            ArithmeticFault: the batch fails its check; none of it is returned.
        """
        large, small = self._larger.draw(n), self._smaller.draw(n)
        joined = self._join(large.residues, small.residues)
        total = product(self.arithmetic, joined)
        if (
            total % self._larger.arithmetic.modulus != large.expected_product
            or total % self._smaller.arithmetic.modulus != small.expected_product
        ):
            raise ArithmeticFault("a batch of randomisers failed its check; nothing was encrypted with it")
        return joined

    def _join(self, large: Residues, small: Residues) -> Residues:
        """Chinese remainder, Garner's form: small + M_small * ((large - small) / M_small mod M_large)."""
        upper, lower = self._larger.arithmetic, self._smaller.arithmetic
        quotient = add(
            upper,
            scale(upper, large, self._inverse),
            scale(upper, lift(upper, lower, small), self._minus_inverse),
        )
        shifted = scale(self.arithmetic, lift(self.arithmetic, upper, quotient), self._small_modulus)
        return add(self.arithmetic, shifted, lift(self.arithmetic, lower, small))
