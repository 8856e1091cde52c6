"""What every big-number backend offers: batches of residues modulo one odd number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.rows import add_mod, ints_from_rows, rows_from_ints, widen

# What every big-number backend offers: batches of residues modulo one odd number.
#
# A backend is a factory ``ModBatch(modulus)``. Residues enter and leave in wire form (``uint8[n, width]``, little-
# endian, canonical, below the modulus); in between they stay in the backend's own form (Montgomery limbs, device
# memory, Python ints) behind the opaque ``Residues``.
#
# A module that holds a backend offers ``load() -> Callable[[int], ModBatch]`` (``load(variant)`` for the native one),
# which raises ``BackendUnavailable`` where it cannot run; ``registry.py`` calls it. A backend may offer four further
# methods, listed in ``rows.py``, which otherwise go through wire form.


class Residues(Protocol):
    """A batch of residues in the backend's own form. Belongs to the ``ModBatch`` that made it."""

    def __len__(self) -> int: ...


class FixedBase(Protocol):
    """A table of powers of one base."""

    def pow(self, exponents: NDArray[np.uint8]) -> Residues:
        """Raise the base to each exponent.

        Shapes: exponents: uint8[n, ceil(exponent_bits / 8)], little-endian; result: Residues[n].

        Raises:
            ValueError: an exponent needs more than ``exponent_bits`` bits.
        """


class ModBatch(Protocol):
    """Batch arithmetic modulo one odd modulus."""

    name: str
    modulus: int
    width: int

    def from_wire(self, rows: NDArray[np.uint8]) -> Residues:
        """Take residues in. Shapes: rows: uint8[n, width]. Raises: ProtocolError if a value >= modulus."""

    def to_wire(self, residues: Residues) -> NDArray[np.uint8]:
        """Give residues out in canonical form. Shapes: result: uint8[n, width]."""

    def take(self, residues: Residues, index: NDArray[np.int64]) -> Residues:
        """Gather rows. Shapes: index: int64[m]; result: Residues[m]."""

    def concat(self, parts: list[Residues]) -> Residues:
        """Join batches in order."""

    def mul(self, a: Residues, b: Residues) -> Residues:
        """Multiply element by element; ``a`` and ``b`` may be the same object."""

    def segprod(self, residues: Residues, order: NDArray[np.int32], starts: NDArray[np.int64]) -> Residues:
        """Multiply the rows of each segment of a row order.

        Segment s is ``residues[order[starts[s]:starts[s + 1]]]``; an empty segment gives 1. Segments may be of any
        length: a backend with lanes cuts the long ones.
        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; result: Residues[n_segments].
        """

    def fixed_base(self, base: int, exponent_bits: int) -> FixedBase:
        """Prepare powers of one base for exponents of at most ``exponent_bits`` bits."""

    def pow_const(self, residues: Residues, exponent: int) -> Residues:
        """Raise every row to the same non-negative exponent."""

    def horner(self, residues: Residues, group: int, shift_bits: int) -> Residues:
        """Pack: for each group of ``group`` consecutive rows c_0, c_1, ... return prod_j c_j^(2^(shift_bits * j)).

        Shapes: residues: Residues[n], the last group may be shorter; result: Residues[ceil(n / group)].
        """


# Batch operations built from the backend interface, with the backend's own version where it has one.
#
# A backend may offer four further methods beyond ``ModBatch``; each saves a trip through wire form, which matters on a
# device whose memory is far from numpy's:
#
# - ``scale(residues, factor)``: multiply every row by the single row of ``factor``. - ``add(a, b)``: add element by
# element. - ``lift(source, residues)``: take residues of ``source`` (a ``ModBatch`` of the same backend with a smaller
# modulus), canonical, as residues of this modulus. - ``from_wide(rows)``: take integers of any width in, reduced by the
# modulus.


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
