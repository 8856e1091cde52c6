"""The reference backend: plain Python integers, written to be obviously right.

Every other backend is compared with this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import FixedBase, byte_width
from he_processors.errors import ProtocolError

IntBatch = list[int]


class ReferenceFixedBase:
    """Powers of one base by Python's own ``pow``."""

    def __init__(self, arithmetic: ReferenceBatch, base: int, exponent_bits: int) -> None:
        self._arithmetic = arithmetic
        self._base = base % arithmetic.modulus
        self._exponent_bits = exponent_bits

    def pow(self, exponents: NDArray[np.uint8]) -> IntBatch:
        """Raise the base to each exponent.

        Shapes: exponents: uint8[n, ceil(exponent_bits / 8)], little-endian; result: Residues[n].

        Raises:
            ValueError: an exponent needs more than ``exponent_bits`` bits.
        """
        check_exponents(exponents, self._exponent_bits)
        return [self._arithmetic.power(self._base, int.from_bytes(row.tobytes(), "little")) for row in exponents]


class ReferenceBatch:
    """Batch arithmetic modulo one odd modulus; a batch is a list of Python ints."""

    name = "reference"

    def __init__(self, modulus: int) -> None:
        check_modulus(modulus)
        self.modulus = modulus
        self.width = byte_width(modulus)
        self._modulus = self.number(modulus)

    # The two operations that a faster integer type replaces.
    def number(self, value: int) -> int:
        """Return ``value`` in the integer type of this backend."""
        return value

    def power(self, base: int, exponent: int) -> int:
        """Return base ** exponent modulo the modulus."""
        return pow(base, exponent, self._modulus)

    def from_wire(self, rows: NDArray[np.uint8]) -> IntBatch:
        """Take residues in. Shapes: rows: uint8[n, width]. Raises: ProtocolError if a value >= modulus."""
        check_rows(rows, self.width)
        values = [self.number(int.from_bytes(row.tobytes(), "little")) for row in rows]
        if any(value >= self._modulus for value in values):
            raise ProtocolError("a residue is not below its modulus")
        return values

    def to_wire(self, residues: Sequence[int]) -> NDArray[np.uint8]:
        """Give residues out in canonical form. Shapes: result: uint8[n, width]."""
        joined = bytearray().join(int(value).to_bytes(self.width, "little") for value in residues)
        return np.frombuffer(joined, dtype=np.uint8).reshape(-1, self.width)

    def take(self, residues: Sequence[int], index: NDArray[np.int64]) -> IntBatch:
        """Gather rows. Shapes: index: int64[m]; result: Residues[m]. Raises: IndexError out of range."""
        check_index(index, len(residues))
        return [residues[i] for i in index.tolist()]

    def concat(self, parts: list[IntBatch]) -> IntBatch:
        """Join batches in order."""
        return [value for part in parts for value in part]

    def mul(self, a: Sequence[int], b: Sequence[int]) -> IntBatch:
        """Multiply element by element. Raises: ValueError if the lengths differ."""
        if len(a) != len(b):
            raise ValueError("batches of different length cannot be multiplied")
        modulus = self._modulus
        return [x * y % modulus for x, y in zip(a, b, strict=True)]

    def segprod(self, residues: Sequence[int], order: NDArray[np.int32], starts: NDArray[np.int64]) -> IntBatch:
        """Multiply the rows of each segment of a row order; an empty segment gives 1.

        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; result: Residues[n_segments].
        """
        check_segments(order, starts, len(residues))
        modulus, one = self._modulus, self.number(1 % self.modulus)
        row_of, bounds = order.tolist(), starts.tolist()
        products = []
        for begin, end in itertools.pairwise(bounds):
            product = one
            for row in row_of[begin:end]:
                product = product * residues[row] % modulus
            products.append(product)
        return products

    def fixed_base(self, base: int, exponent_bits: int) -> FixedBase:
        """Prepare powers of one base for exponents of at most ``exponent_bits`` bits."""
        return ReferenceFixedBase(self, base, exponent_bits)

    def pow_const(self, residues: Sequence[int], exponent: int) -> IntBatch:
        """Raise every row to the same non-negative exponent. Raises: ValueError if it is negative."""
        if exponent < 0:
            raise ValueError("exponent must not be negative")
        power = self.number(exponent)
        return [self.power(value, power) for value in residues]

    def horner(self, residues: Sequence[int], group: int, shift_bits: int) -> IntBatch:
        """Pack: for each group of consecutive rows c_0, c_1, ... return prod_j c_j^(2^(shift_bits * j)).

        Shapes: residues: Residues[n], the last group may be shorter; result: Residues[ceil(n / group)].
        """
        check_horner(group, shift_bits)
        modulus, shift = self._modulus, self.number(1 << shift_bits)
        packed = []
        for begin in range(0, len(residues), group):
            members = residues[begin : begin + group]
            accumulator = members[-1]
            for member in reversed(members[:-1]):
                accumulator = self.power(accumulator, shift) * member % modulus
            packed.append(accumulator)
        return packed


def check_modulus(modulus: int) -> None:
    """Raises: ValueError unless the modulus is odd and at least 3."""
    if modulus < 3 or modulus % 2 == 0:
        raise ValueError("modulus must be odd and at least 3")


def check_rows(rows: NDArray[np.uint8], width: int) -> None:
    """Raises: ValueError unless rows is uint8[n, width]."""
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"rows must be uint8[n, {width}]")


def check_index(index: NDArray[np.integer], n_rows: int) -> None:
    """Raises: IndexError unless every index lies in [0, n_rows)."""
    if index.size and (int(index.min()) < 0 or int(index.max()) >= n_rows):
        raise IndexError("row index out of range")


def check_segments(order: NDArray[np.int32], starts: NDArray[np.int64], n_rows: int) -> None:
    """Raises: ValueError if the segments do not describe the order; IndexError if a row is out of range."""
    if starts.ndim != 1 or starts.size < 1 or int(starts[0]) < 0 or int(starts[-1]) > order.size:
        raise ValueError("starts must lie within the row order")
    if np.any(np.diff(starts) < 0):
        raise ValueError("starts must not decrease")
    check_index(order, n_rows)


def check_exponents(exponents: NDArray[np.uint8], exponent_bits: int) -> None:
    """Raises: ValueError unless exponents is uint8[n, ceil(exponent_bits / 8)] without bits beyond exponent_bits."""
    width = (exponent_bits + 7) // 8
    if exponents.dtype != np.uint8 or exponents.ndim != 2 or exponents.shape[1] != width:
        raise ValueError(f"exponents must be uint8[n, {width}]")
    spare_bits = 8 * width - exponent_bits
    if spare_bits and np.any(exponents[:, -1] >> (8 - spare_bits)):
        raise ValueError(f"an exponent needs more than {exponent_bits} bits")


def check_horner(group: int, shift_bits: int) -> None:
    """Raises: ValueError unless both are at least 1."""
    if group < 1 or shift_bits < 1:
        raise ValueError("group and shift_bits must be at least 1")
