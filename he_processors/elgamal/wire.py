"""Rows of points as bytes: a fixed header, then every column's points in affine form.

The receiver states what it expects, key and content and count, and refuses anything else. Nothing in a message is
believed: not a length, not a point. Points of small order are points; those who add them up clear them (``bin_sums``).

Layout (little-endian): magic 4s, version u16, scheme u8, content u8, columns u8, fraction bits u8, two zero bytes,
max additions u64, count u64, key fingerprint 32s; then R of every row, then each C of every row, 64 bytes each.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.scheme import Scheme
from he_processors.curve.interface import AFFINE_BYTES, Curve
from he_processors.elgamal.digits import DigitFormat
from he_processors.elgamal.encryption import PointColumns
from he_processors.elgamal.keys import ElGamalPublicKey
from he_processors.errors import ProtocolError

_MAGIC = b"VBEG"
_VERSION = 1
_HEADER = struct.Struct("<4sHBBBB2xQQ32s")


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
            self.digits.max_additions,
            self.count,
            bytes.fromhex(self.public_key.fingerprint),
        )

    @property
    def message_bytes(self) -> int:
        """Return the length of the whole message."""
        return _HEADER.size + self.count * self.n_columns * AFFINE_BYTES


def encode_points(header: PointHeader, curve: Curve, rows: PointColumns) -> bytes:
    """Write rows of points.

    Security: bins must have been hidden (``bin_sums.Hider``); pairs are fresh encryptions.

    Raises:
        ValueError: the rows are not those of the header.
    """
    if len(rows) != header.count or len(rows.columns) != header.n_columns:
        raise ValueError("the rows differ from the header")
    return join_message(header, [curve.to_affine(column).tobytes() for column in rows.columns])


def decode_points(message: bytes | memoryview, expected: PointHeader, curve: Curve) -> PointColumns:
    """Read rows of points.

    Raises:
        ProtocolError: the header differs from ``expected`` in any bit, the length is not exact, or bytes are no point
            of the curve in its one form.
    """
    return read_rows(open_message(message, expected), curve, slice(None))


def open_message(message: bytes | memoryview, expected: PointHeader) -> NDArray[np.uint8]:
    """Check all of a message but its points. Shapes: result: uint8[n_columns, count, 64].

    Raises:
        ProtocolError: the header differs from ``expected`` in any bit, or the length is not exact.
    """
    if len(message) != expected.message_bytes:
        raise ProtocolError(f"a message of points has {len(message)} bytes, expected {expected.message_bytes}")
    if bytes(message[: _HEADER.size]) != expected.to_bytes():
        raise ProtocolError("a message of points is for another key, format, content or count")
    body = np.frombuffer(message, dtype=np.uint8, offset=_HEADER.size)
    return body.reshape(expected.n_columns, expected.count, AFFINE_BYTES)


def read_rows(body: NDArray[np.uint8], curve: Curve, rows: slice) -> PointColumns:
    """Read some rows of a message that was opened. Raises: ProtocolError, if a point of these rows is none."""
    return PointColumns(tuple(curve.from_affine(column[rows]) for column in body))


def join_message(header: PointHeader, columns: Sequence[bytes | memoryview]) -> bytes:
    """Make a message of columns in affine form, or of their pieces in order."""
    return b"".join([header.to_bytes(), *columns])
