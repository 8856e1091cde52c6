"""The gmpy2 backend: GMP integers, one at a time, with fixed-base tables.

Runs everywhere the package installs; the native backends take over where they can.
"""

from __future__ import annotations

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.reference import IntBatch, ReferenceBatch, check_exponents

_WINDOW_BITS = 8


class GmpFixedBase:
    """Table of base^(d * 256^i) for every byte value d and byte position i: one product for each exponent byte."""

    def __init__(self, arithmetic: GmpBatch, base: int, exponent_bits: int) -> None:
        self._modulus = arithmetic.number(arithmetic.modulus)
        self._exponent_bits = exponent_bits
        self._windows: list[IntBatch] = []
        unit = arithmetic.number(base % arithmetic.modulus)
        for _ in range((exponent_bits + _WINDOW_BITS - 1) // _WINDOW_BITS):
            powers = [arithmetic.number(1)]
            for _ in range((1 << _WINDOW_BITS) - 1):
                powers.append(powers[-1] * unit % self._modulus)
            self._windows.append(powers)
            unit = powers[-1] * unit % self._modulus

    def pow(self, exponents: NDArray[np.uint8]) -> IntBatch:
        """Raise the base to each exponent.

        Shapes: exponents: uint8[n, ceil(exponent_bits / 8)], little-endian; result: Residues[n].

        Raises:
            ValueError: an exponent needs more than ``exponent_bits`` bits.
        """
        check_exponents(exponents, self._exponent_bits)
        return [self._power(row.tobytes()) for row in exponents]

    def _power(self, digits: bytes) -> int:
        product = self._windows[0][digits[0]]
        for powers, digit in zip(self._windows[1:], digits[1:], strict=True):
            if digit:
                product = product * powers[digit] % self._modulus
        return product


class GmpBatch(ReferenceBatch):
    """The reference algorithms on GMP integers."""

    name = "gmpy2"

    def number(self, value: int) -> int:
        """Return ``value`` as a GMP integer."""
        number: int = gmpy2.mpz(value)
        return number

    def power(self, base: int, exponent: int) -> int:
        """Return base ** exponent modulo the modulus."""
        power: int = gmpy2.powmod(base, exponent, self._modulus)
        return power

    def fixed_base(self, base: int, exponent_bits: int) -> GmpFixedBase:
        """Prepare powers of one base for exponents of at most ``exponent_bits`` bits."""
        return GmpFixedBase(self, base, exponent_bits)
