"""Whether a device computes what the CPU computes, over the whole width of the numbers it is to work on.

A wrong product would give wrong sums without any error, and a wrong power a key's secret factor away (a fault in
half of a decryption by the Chinese remainder theorem does). So nothing is done on a device before it has agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from he_processors.bignum.interface import ModBatch, Residues
from he_processors.bignum.reference import ReferenceBatch
from he_processors.bignum.rows import random_rows_below, rows_from_ints
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below

_N_RANDOM = 5
_EXPONENT_BITS = 72  # more than two words
_GROUP, _SHIFT_BITS = 3, 70
_STARTS = np.array([0, 0, 1, 3, 9], dtype=np.int64)  # no row, one, two, several

_Operation = Callable[[ModBatch, Residues], Residues]


def random_modulus(bits: int, source: RandomSource = OS_RANDOMNESS) -> int:
    """Return a random odd number of exactly ``bits`` bits."""
    return 1 << (bits - 1) | random_below(1 << (bits - 1), source) | 1


def first_disagreement(batch: ModBatch, source: RandomSource = OS_RANDOMNESS) -> str | None:
    """Return the first operation whose result differs from the CPU's, or None.

    Operands: 0, 1, the two largest residues, and random ones.
    """
    trusted: ModBatch = ReferenceBatch(batch.modulus)  # type: ignore[assignment]  # its residues are plain lists
    edges = rows_from_ints([0, 1, batch.modulus - 1, batch.modulus - 2], batch.width)
    rows = np.concatenate([edges, random_rows_below(_N_RANDOM, batch.modulus, source)])
    for name, operation in _operations(len(rows), batch.modulus, source):
        ours, theirs = (b.to_wire(operation(b, b.from_wire(rows))) for b in (batch, trusted))
        if not np.array_equal(ours, theirs):
            return name
    return None


def _operations(n_rows: int, modulus: int, source: RandomSource) -> Iterator[tuple[str, _Operation]]:
    order = np.arange(n_rows, dtype=np.int64)[::-1].copy()
    exponent = random_modulus(_EXPONENT_BITS, source)
    exponents = random_rows_below(n_rows, 1 << _EXPONENT_BITS, source)
    base = random_below(modulus, source)
    yield "entering and leaving", lambda batch, rows: rows
    yield "products", lambda batch, rows: batch.mul(rows, batch.take(rows, order))
    yield "squares", lambda batch, rows: batch.mul(rows, rows)
    yield "segprod", lambda batch, rows: batch.segprod(rows, order.astype(np.int32), _STARTS)
    yield "powers", lambda batch, rows: batch.pow_const(rows, exponent)
    yield "powers of one base", lambda batch, rows: batch.fixed_base(base, _EXPONENT_BITS).pow(exponents)
    yield "horner", lambda batch, rows: batch.horner(rows, _GROUP, _SHIFT_BITS)
