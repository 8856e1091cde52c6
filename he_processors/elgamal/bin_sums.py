"""The passive party's side: rows of points as bytes, added into bins that are hidden from the key owner."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import Scheme, StaysInProcess
from he_processors.bignum.interface import random_rows_below
from he_processors.curve.interface import (
    AFFINE_BYTES,
    COFACTOR_BITS,
    GROUP_ORDER,
    Curve,
    Points,
    base_point,
    rows_of,
    to_compressed,
)
from he_processors.elgamal.encryption import ColumnBatches, DigitFormat, ElGamalPublicKey, PointColumns, by_blocks
from he_processors.errors import ProtocolError
from he_processors.histogram.planner import HistogramPlan
from he_processors.histogram.sums import BinNoise
from he_processors.paillier import BLOCK_ROWS, RandomiserPool
from he_processors.randomness import BULK_RANDOMNESS, RandomSource

# The passive party's side: add rows of points into bins, and hide the bins from the key owner.
#
# Security: the key owner knows every randomiser that it drew, and chose the points. Every sum therefore leaves as 8 (R
# + s B), 8 (C_k + s P_k) with a fresh uniform s: the multiplication by 8 takes off what points of small order on single
# rows would tell about sums modulo 8, and the new randomiser, uniform in the group of prime order, makes R independent
# of the rows. What the C_k then hold is the sum of the messages and nothing else.


# Sums take the full addition, and rows that came as bytes a cheaper one: a cell of a pair of features has to save more
# than under schemes that multiply. Measured with the AVX512-IFMA backend, from rows in random order: 10 to 11.
CELL_COST = 10


def bin_summer(curve: Curve, n_rows: int, plan: HistogramPlan) -> Callable[[Points], Points]:
    """Prepare to add columns of rows per bin: what a plan asks for is worked out once for all columns.

    Shapes:   of the result: column: Points[n_rows]; sums: Points[plan.n_slots].
    Security: an empty bin is the neutral point, and every sum is one that the key owner could recompute: pass the
        sums through a ``Hider`` before they leave.
    """
    position = np.empty(plan.n_slots, dtype=np.int64)
    position[np.concatenate([block.slots for block in plan.blocks])] = np.arange(plan.n_slots, dtype=np.int64)
    steps = []
    for block in plan.blocks:
        cells = curve.segment_sums(block.cells.order, block.cells.starts, n_rows)
        n_cells = block.cells.starts.size - 1
        steps.append((cells, curve.segment_sums(block.bins.order, block.bins.starts, n_cells)))

    def add(column: Points) -> Points:
        return curve.take(curve.concat([into_bins(into_cells(column)) for into_cells, into_bins in steps]), position)

    return add


def noise_points(curve: Curve, digits: DigitFormat, noise: BinNoise, number: int, n_bins: int) -> Points:
    """Return one message's noise on each bin, times the base point: add it to the bins before they are hidden.

    Shapes: result: Points[n_bins].

    Args:
        number: of the column, from 1; column 0 holds randomisers.

    Raises:
        ValueError, CapacityExceeded: as ``BinNoise.check``.
    """
    noise.check(digits, n_bins)
    values = digits.digits_of(noise.g, noise.h)[number - 1]
    return curve.fixed_base(base_point(curve)).mul(rows_of([int(value) for value in values]))


class HiderMasks(StaysInProcess):
    """Draws 8 s B, 8 s P_1, 8 s P_2, ... for fresh s. Secret.

    Security: its own multiples 8 B and 8 P_k are what s multiplies: nothing of small order in the owner's key survives.
        s is exactly uniform below the group order, by rejection.
    """

    def __init__(self, public_key: ElGamalPublicKey, curve: Curve, source: RandomSource = BULK_RANDOMNESS) -> None:
        self._curve, self._source = curve, source
        points = curve.concat([base_point(curve), curve.from_affine(public_key.rows)])
        cleared = curve.double(points, COFACTOR_BITS)
        single = [np.array([i], dtype=np.int64) for i in range(len(cleared))]
        self._tables = [curve.fixed_base(curve.take(cleared, index)) for index in single]

    def draw(self, n: int) -> PointColumns:
        """Draw masks for ``n`` bins."""
        s = random_rows_below(n, GROUP_ORDER, self._source)
        return by_blocks(self._curve, n, lambda block: PointColumns(tuple(t.mul(s[block]) for t in self._tables)))


class Hider(StaysInProcess):
    """Clears small factors and re-randomises, for one key, with masks that can be made ahead."""

    def __init__(self, public_key: ElGamalPublicKey, curve: Curve, source: RandomSource = BULK_RANDOMNESS) -> None:
        self._curve = curve
        self._masks = RandomiserPool(
            ColumnBatches(curve), HiderMasks(public_key, curve, source), BLOCK_ROWS * curve.threads
        )

    def fill(self, n: int) -> None:
        """Make masks until those for ``n`` bins are ready."""
        self._masks.fill(n)

    def draw(self, n: int) -> PointColumns:
        """Take masks for ``n`` bins: the same for all columns of an answer, and for no other answer. Secret."""
        masks: PointColumns = self._masks.draw(n)  # type: ignore[assignment]  # a pool knows its batches by their length
        return masks

    def hide(self, number: int, bins: Points, masks: PointColumns) -> Points:
        """Make one column of sums show its messages, eight times, to the key owner, and no more.

        Args:
            number: of the column: 0 for R, k for the k-th C.
            masks: from ``draw``.
        """
        return self._curve.add(self._curve.double(bins, COFACTOR_BITS), masks.columns[number])


# Rows of points as bytes: a fixed header, then every column's points, affine or compressed as the header says.
#
# The receiver states what it expects, key and content and count, and refuses anything else. Nothing in a message is
# believed: not a length, not a point. Points of small order are points; those who add them up clear them
# (``bin_sums``).
#
# Layout (little-endian): magic 4s, version u16, scheme u8, content u8, columns u8, fraction bits u8, bytes of a point
# u8 (zero for 64), a zero byte, max additions u64, count u64, key fingerprint 32s; then R of every row, then each C of
# every row.


_MAGIC = b"VBEG"
_VERSION = 1
_HEADER = struct.Struct("<4sHBBBBBxQQ32s")


class Content(enum.Enum):
    """What the rows of a message hold; the value is the code on the wire."""

    PAIRS = 1
    BINS = 2


@dataclass(frozen=True, slots=True)
class PointHeader:
    """Everything that fixes the meaning and the length of a message."""

    public_key: ElGamalPublicKey
    content: Content
    digits: DigitFormat
    count: int

    @property
    def n_columns(self) -> int:
        """Return the points of a row."""
        return 1 + self.public_key.n_messages

    def to_bytes(self) -> bytes:
        """Return the header's one encoding."""
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            Scheme.ELGAMAL.value,
            self.content.value,
            self.n_columns,
            self.digits.fraction_bits,
            self.digits.point_bytes % AFFINE_BYTES,
            self.digits.max_additions,
            self.count,
            bytes.fromhex(self.public_key.fingerprint),
        )

    @property
    def message_bytes(self) -> int:
        """Return the length of the whole message."""
        return _HEADER.size + self.count * self.n_columns * self.digits.point_bytes


def encode_points(header: PointHeader, curve: Curve, rows: PointColumns) -> bytes:
    """Write rows of points.

    Security: bins must have been hidden (``bin_sums.Hider``); pairs are fresh encryptions.

    Raises:
        ValueError: the rows are not those of the header.
    """
    if len(rows) != header.count or len(rows.columns) != header.n_columns:
        raise ValueError("the rows differ from the header")
    return join_message(header, [write_column(header.digits, curve, column).tobytes() for column in rows.columns])


def decode_points(message: bytes | memoryview, expected: PointHeader, curve: Curve) -> PointColumns:
    """Read rows of points.

    Raises:
        ProtocolError: the header differs from ``expected`` in any bit, the length is not exact, or bytes are no point
            of the curve in its one form.
    """
    return read_rows(open_message(message, expected), curve, slice(None))


def open_message(message: bytes | memoryview, expected: PointHeader) -> NDArray[np.uint8]:
    """Check all of a message but its points. Shapes: result: uint8[n_columns, count, point_bytes].

    Raises:
        ProtocolError: the header differs from ``expected`` in any bit, or the length is not exact.
    """
    if len(message) != expected.message_bytes:
        raise ProtocolError(f"a message of points has {len(message)} bytes, expected {expected.message_bytes}")
    if bytes(message[: _HEADER.size]) != expected.to_bytes():
        raise ProtocolError("a message of points is for another key, format, content or count")
    body = np.frombuffer(message, dtype=np.uint8, offset=_HEADER.size)
    return body.reshape(expected.n_columns, expected.count, expected.digits.point_bytes)


def read_rows(body: NDArray[np.uint8], curve: Curve, rows: slice) -> PointColumns:
    """Read some rows of a message that was opened. Raises: ProtocolError, if a point of these rows is none."""
    read = curve.from_affine if body.shape[2] == AFFINE_BYTES else curve.from_compressed
    return PointColumns(tuple(read(column[rows]) for column in body))


def write_column(digits: DigitFormat, curve: Curve, column: Points) -> NDArray[np.uint8]:
    """Give points out as messages of a format hold them. Shapes: result: uint8[n, point_bytes]."""
    return curve.to_affine(column) if digits.point_bytes == AFFINE_BYTES else to_compressed(curve, column)


def join_message(header: PointHeader, columns: Sequence[bytes | memoryview]) -> bytes:
    """Make a message of columns as ``write_column`` gives them, or of their pieces in order."""
    return b"".join([header.to_bytes(), *columns])
