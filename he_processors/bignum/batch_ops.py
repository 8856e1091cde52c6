"""Batch operations built from the backend interface, with the backend's own version where it has one.

A backend may offer four further methods beyond ``ModBatch``; each saves a trip through wire form, which matters on
a device whose memory is far from numpy's:

- ``scale(residues, factor)``: multiply every row by the single row of ``factor``.
- ``add(a, b)``: add element by element.
- ``lift(source, residues)``: take residues of ``source`` (a ``ModBatch`` of the same backend with a smaller modulus),
  canonical, as residues of this modulus.
- ``from_wide(rows)``: take integers of any width in, reduced by the modulus.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import ModBatch, Residues
from he_processors.bignum.rows import add_mod, ints_from_rows, rows_from_ints, widen

_Operation = Callable[..., Residues]


def constant(arithmetic: ModBatch, value: int) -> Residues:
    """Take one integer in. Shapes: result: Residues[1]."""
    return arithmetic.from_wire(rows_from_ints([value % arithmetic.modulus], arithmetic.width))


def scale(arithmetic: ModBatch, residues: Residues, factor: Residues) -> Residues:
    """Multiply every row by one row. Shapes: residues: Residues[n]; factor: Residues[1]; result: Residues[n]."""
    own: _Operation | None = getattr(arithmetic, "scale", None)
    if own is not None:
        return own(residues, factor)
    return arithmetic.mul(residues, arithmetic.take(factor, np.zeros(len(residues), dtype=np.int64)))


def add(arithmetic: ModBatch, a: Residues, b: Residues) -> Residues:
    """Add element by element. Shapes: a, b: Residues[n]; or b: Residues[1], added to every row."""
    own: _Operation | None = getattr(arithmetic, "add", None)
    if own is not None:
        return own(a, b)
    total = add_mod(arithmetic.to_wire(a), arithmetic.to_wire(b), arithmetic.modulus)
    return arithmetic.from_wire(total)


def lift(target: ModBatch, source: ModBatch, residues: Residues) -> Residues:
    """Take the canonical residues of a smaller modulus as residues of ``target``."""
    own: _Operation | None = getattr(target, "lift", None)
    if own is not None:
        return own(source, residues)
    return target.from_wire(widen(source.to_wire(residues), target.width))


def from_wide(arithmetic: ModBatch, rows: NDArray[np.uint8]) -> Residues:
    """Take integers of any width in, reduced by the modulus. Shapes: rows: uint8[n, any width]."""
    own: _Operation | None = getattr(arithmetic, "from_wide", None)
    if own is not None:
        return own(rows)
    if rows.dtype != np.uint8 or rows.ndim != 2:
        raise ValueError("rows must be uint8[n, width]")
    if rows.shape[1] < arithmetic.width:
        return arithmetic.from_wire(widen(rows, arithmetic.width))
    reduced = (value % arithmetic.modulus for value in ints_from_rows(rows))
    return arithmetic.from_wire(rows_from_ints(reduced, arithmetic.width))


def product(arithmetic: ModBatch, residues: Residues) -> int:
    """Multiply a whole batch together; the product of no rows is 1."""
    order = np.arange(len(residues), dtype=np.int32)
    total = arithmetic.segprod(residues, order, np.array([0, len(residues)], dtype=np.int64))
    return ints_from_rows(arithmetic.to_wire(total))[0]
