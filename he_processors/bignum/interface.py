"""What every big-number backend offers: batches of residues modulo one odd number.

A backend is a factory ``ModBatch(modulus)``. Residues enter and leave in wire form (``uint8[n, width]``,
little-endian, canonical, below the modulus); in between they stay in the backend's own form (Montgomery limbs,
device memory, Python ints) behind the opaque ``Residues``.

A module that holds a backend offers ``load() -> Callable[[int], ModBatch]`` (``load(variant)`` for the native one),
which raises ``BackendUnavailable`` where it cannot run; ``registry.py`` calls it. A backend may offer four further
methods, listed in ``batch_ops.py``, which otherwise go through wire form.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
