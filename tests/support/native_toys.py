"""Small moduli and batches for the tests of the native backend."""

from __future__ import annotations

import random

import pytest

from he_processors.bignum import native
from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.bignum.native import NativeBatch, NativeResidues

VARIANTS = native.instruction_sets()
TOY_BITS = 521

needs_the_extension = pytest.mark.skipif(not VARIANTS, reason="the native extension was not built")
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def toy(variant: str, threads: int = 1, bits: int = TOY_BITS) -> NativeBatch:
    return native.load(variant, threads)(random.Random(7).getrandbits(bits) | 1 << (bits - 1) | 1)


def draw(arithmetic: NativeBatch, n: int, seed: int = 0) -> tuple[list[int], NativeResidues]:
    rng = random.Random(seed)
    values = [rng.randrange(arithmetic.modulus) for _ in range(n)]
    return values, arithmetic.from_wire(rows_from_ints(values, arithmetic.width))


def ints(arithmetic: NativeBatch, residues: NativeResidues) -> list[int]:
    return ints_from_rows(arithmetic.to_wire(residues))


def product(values: list[int], modulus: int) -> int:
    result = 1 % modulus
    for value in values:
        result = result * value % modulus
    return result
