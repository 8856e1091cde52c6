"""ElGamal keys, and encryption by the key owner: many messages under one randomiser, R = r B, C_k = r P_k + m_k B."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import Scheme, StaysInProcess
from he_processors.bignum.interface import random_rows_below, row_blocks, run_blocks
from he_processors.curve.interface import (
    AFFINE_BYTES,
    COMPRESSED_BYTES,
    GROUP_ORDER,
    Curve,
    FixedBase,
    Points,
    base_point,
    rows_of,
)
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.fixed_point import WORD_BITS, IntegerRange, PairFormat, lower_words
from he_processors.paillier import BLOCK_ROWS, RandomiserPool
from he_processors.randomness import BULK_RANDOMNESS, OS_RANDOMNESS, RandomSource

# ElGamal keys: one secret scalar for each message of a row, all under the same randomiser.
#
# Layout of a public key (little-endian): magic 4s, version u8, scheme u8, number of points u8, then the points in
# affine form, 64 bytes each.
#
# Security: decisional Diffie-Hellman in the group of prime order of edwards25519, that of ristretto255: 128-bit
# strength. One randomiser serves several keys because all of them are one owner's and independent
# (he_processors/README.md).


MESSAGES = (2, 4)
"""Messages that a key may have: one or two digits of a gradient and of a hessian."""
_MAGIC = b"VBPK"
_VERSION = 1
_PREFIX = struct.Struct("<4sBBB")
_REFUSED = "these bytes are no elgamal key of this version"


@dataclass(frozen=True)
class ElGamalPublicKey:
    """The public key: P_k = x_k B for each message k, in affine form, 64 bytes each."""

    scheme: ClassVar[Scheme] = Scheme.ELGAMAL
    points: tuple[bytes, ...]

    @property
    def n_messages(self) -> int:
        """Return the messages that one randomiser hides."""
        return len(self.points)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Return the points. Shapes: uint8[n_messages, 64]."""
        return np.frombuffer(b"".join(self.points), dtype=np.uint8).reshape(-1, AFFINE_BYTES)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 that names this key."""
        return hashlib.sha256(b"veilboost public key " + self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the one encoding of the key."""
        prefix = _PREFIX.pack(_MAGIC, _VERSION, self.scheme.value, self.n_messages)
        return prefix + b"".join(self.points)

    @classmethod
    def from_bytes(cls, data: bytes, curve: Curve) -> ElGamalPublicKey:
        """Read a key that a peer announced.

        Security: every point is on the curve, of prime order, and not the neutral one. Whether the key owner knows its
            logarithm cannot be seen, and need not be: re-randomised sums are hidden from it whatever it is.

        Raises:
            ProtocolError: these bytes are not the one encoding of such a key.
        """
        n = data[_PREFIX.size - 1] if len(data) >= _PREFIX.size else 0
        is_ours = n in MESSAGES and data[: _PREFIX.size] == _PREFIX.pack(_MAGIC, _VERSION, Scheme.ELGAMAL.value, n)
        if not is_ours or len(data) != _PREFIX.size + n * AFFINE_BYTES:
            raise ProtocolError(_REFUSED)
        body = data[_PREFIX.size :]
        key = cls(tuple(body[i : i + AFFINE_BYTES] for i in range(0, len(body), AFFINE_BYTES)))
        points = curve.from_affine(key.rows)
        neutral = curve.identity(n)
        almost = curve.mul(points, np.repeat(rows_of([-1]), n, axis=0))
        if curve.equal(points, neutral).any() or not curve.equal(curve.add(almost, points), neutral).all():
            raise ProtocolError("a point of a public key has a small factor in its order")
        return key

    def __repr__(self) -> str:
        return f"ElGamalPublicKey({self.n_messages} points, {self.fingerprint[:16]})"


@dataclass(frozen=True, repr=False)
class ElGamalPrivateKey(StaysInProcess):
    """The private key: a secret scalar for each message.

    Security: stays with its owner. It prints as a fingerprint and refuses to be pickled.
    """

    scalars: tuple[int, ...]
    public_key: ElGamalPublicKey

    def __repr__(self) -> str:
        return f"ElGamalPrivateKey({self.public_key.n_messages} scalars, {self.public_key.fingerprint[:16]})"


def generate_elgamal_key(n_messages: int, curve: Curve, source: RandomSource = OS_RANDOMNESS) -> ElGamalPrivateKey:
    """Generate a key with independent, uniform secret scalars from 1 to the order less 1.

    Raises:
        ValueError: the key has another number of messages than ``MESSAGES``.
    """
    if n_messages not in MESSAGES:
        raise ValueError(f"an elgamal key has {MESSAGES} messages")
    below = random_rows_below(n_messages, GROUP_ORDER - 1, source)
    scalars = tuple(int.from_bytes(row.tobytes(), "little") + 1 for row in below)
    table = curve.fixed_base(base_point(curve))
    points = curve.to_affine(table.mul(rows_of(list(scalars))))
    return ElGamalPrivateKey(scalars, ElGamalPublicKey(tuple(row.tobytes() for row in points)))


# Gradient pairs as small digits, because a sum is read back by a discrete logarithm, and that must be short.
#
# With 40 fraction bits an encoded value is two digits of base 2^20, the lower one in [-2^19, 2^19) and the upper one in
# [-2^20, 2^20]. Digits are added bin by bin, each by itself, and never carried: the sums are joined when they are
# decoded. With 20 fraction bits one digit is enough, and a float32 gradient is rounded. Sums that are noised have 14:
# their noise is as many steps as it has to be, and steps of a finer format would only make the search longer.


EXACT_FRACTION_BITS = 40
"""Every float32 gradient of at least 2^-16 of its bound is encoded without rounding."""
SHORT_FRACTION_BITS = 20
NOISED_FRACTION_BITS = 14
FRACTION_BITS = (EXACT_FRACTION_BITS, SHORT_FRACTION_BITS, NOISED_FRACTION_BITS)
POINT_BYTES = (AFFINE_BYTES, COMPRESSED_BYTES)
"""A point of a message: both coordinates, or y and the lowest bit of x."""
DIGIT_BITS = WORD_BITS
_HALF = 1 << (DIGIT_BITS - 1)
_MAX_ROWS = 1 << 31  # rows are numbered by int32


@dataclass(frozen=True, slots=True)
class DigitFormat(PairFormat):
    """Fixed-point format of (g, h) pairs as digits: |g| <= 1 and 0 <= h <= 1.

    Units:    encoded integers count 2^-fraction_bits.
    Capacity: any number of rows below 2^31.

    Attributes:
        point_bytes: of a point in messages, one of ``POINT_BYTES``.
    """

    point_bytes: int = AFFINE_BYTES

    @classmethod
    def of(
        cls, fraction_bits: int, n_rows: int, tails: tuple[int, int] = (0, 0), point_bytes: int = AFFINE_BYTES
    ) -> DigitFormat:
        """Return the format of a table.

        Args:
            tails: see ``PairFormat``; noise on sums needs values of one digit.

        Raises:
            ConfigurationError: other fraction bits or bytes of a point, or too many rows.
        """
        if fraction_bits not in FRACTION_BITS or point_bytes not in POINT_BYTES:
            raise ConfigurationError(f"elgamal has fraction bits of {FRACTION_BITS} and points of {POINT_BYTES} bytes")
        if n_rows >= _MAX_ROWS:
            raise ConfigurationError(f"{n_rows} rows are more than a vertical job may have: fewer than {_MAX_ROWS}")
        if any(tails) and fraction_bits != NOISED_FRACTION_BITS:
            raise ConfigurationError(f"noised sums under elgamal have {NOISED_FRACTION_BITS} fraction bits: one digit")
        return cls(fraction_bits, max(n_rows, 1), 1.0, 0.0, 1.0, tails, point_bytes)

    @property
    def n_digits(self) -> int:
        """Return the digits of one value."""
        return 2 if self.fraction_bits > DIGIT_BITS else 1

    @property
    def n_messages(self) -> int:
        """Return the digits of a pair: those of g, the lowest first, and then those of h."""
        return 2 * self.n_digits

    def digits_of(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Cut encoded pairs into digits. Shapes: g, h: int64[n]; result: n_messages times int64[n]."""
        if self.n_digits == 1:
            return [g, h]
        return [*_cut(g), *_cut(h)]

    def digits_of_total(self, g: int, h: int, low_g: int, low_h: int) -> list[int]:
        """Return the sums of a node's digits from its sums and those of its lower digits."""
        if self.n_digits == 1:
            return [g, h]
        return [low_g, (g - low_g) >> DIGIT_BITS, low_h, (h - low_h) >> DIGIT_BITS]

    def digit_ranges(self, n_rows: int) -> list[IntegerRange]:
        """Return the range of each digit's sum over ``n_rows`` rows."""
        if self.n_digits == 1:
            return [self.g_range(n_rows), self.h_range(n_rows)]
        lower = IntegerRange(-n_rows * _HALF, n_rows * (_HALF - 1))
        top = n_rows << (self.fraction_bits - DIGIT_BITS)
        return [lower, IntegerRange(-top, top), lower, IntegerRange(0, top)]

    def join(self, sums: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sums of digits as sums of g and h.

        Shapes: sums: n_messages times int64[n]; results: int64[n_digits, n] (``fixed_point``).
        """
        half = self.n_digits
        return np.stack(sums[:half]), np.stack(sums[half:])


def _cut(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    low = lower_words(values)
    return low, (values - low) >> DIGIT_BITS


# ElGamal encryption by the key owner, many messages under one randomiser: R = r B, C_k = r P_k + m_k B.
#
# The owner knows the logarithms x_k of its P_k, so that every point is a multiple of B: one table, and no more than the
# scalars r x_k modulo the group order. All of it but m_k B is made ahead (``fill``).


_OFFSET = 1 << DIGIT_BITS  # added to every message, so that none is negative, and taken off in its mask
_MESSAGE_BYTES = 3
_LANES = 8  # rows that the fastest backend works on at once


@dataclass(frozen=True, slots=True, repr=False)
class PointColumns:
    """Rows of several points each, column by column: R first, then a C for every message. Shapes: Points[n] each."""

    columns: tuple[Points, ...]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, part: slice) -> PointColumns:
        """Return some of the rows, in the same memory."""
        return PointColumns(tuple(column[part] for column in self.columns))

    def take(self, curve: Curve, index: NDArray[np.int64]) -> PointColumns:
        """Gather rows. Shapes: index: int64[m]."""
        return PointColumns(tuple(curve.take(column, index) for column in self.columns))


def concat_columns(curve: Curve, parts: Sequence[PointColumns]) -> PointColumns:
    """Join batches in order."""
    if len(parts) == 1:
        return parts[0]
    return PointColumns(tuple(curve.concat(list(columns)) for columns in zip(*(p.columns for p in parts), strict=True)))


class ColumnBatches:
    """What a pool needs to know of batches."""

    def __init__(self, curve: Curve) -> None:
        self.name = curve.name
        self._curve = curve

    def take(self, batch: PointColumns, index: NDArray[np.int64]) -> PointColumns:
        """Gather rows. Shapes: index: int64[m]."""
        return batch.take(self._curve, index)

    def concat(self, parts: list[PointColumns]) -> PointColumns:
        """Join batches in order."""
        return concat_columns(self._curve, parts)


class OwnerMasks(StaysInProcess):
    """Draws (r B, r P_1 - 2^20 B, r P_2 - 2^20 B, ...) for fresh r. Secret.

    Security: r is exactly uniform below the group order, by rejection.
    """

    def __init__(
        self, key: ElGamalPrivateKey, curve: Curve, multiples: FixedBase, source: RandomSource = BULK_RANDOMNESS
    ) -> None:
        """Args: multiples: of the base point."""
        self._key = key
        self._curve = curve
        self._source = source
        self._multiples = multiples

    def draw(self, n: int) -> PointColumns:
        """Draw ``n`` masks."""
        r = random_rows_below(n, GROUP_ORDER, self._source)
        return by_blocks(self._curve, n, lambda block: self._masks(r[block]))

    def _masks(self, r: NDArray[np.uint8]) -> PointColumns:
        scalars = self._curve.scale(r, list(self._key.scalars), -_OFFSET)
        return PointColumns(tuple(self._multiples.mul(column) for column in (r, *scalars)))


class ElGamalEncryptor(StaysInProcess):
    """Encrypts rows of digits with masks from a pool.

    Security: one fresh r for each row; a failed batch loses the masks that it took.
    """

    def __init__(self, key: ElGamalPrivateKey, curve: Curve, source: RandomSource = BULK_RANDOMNESS) -> None:
        self.public_key = key.public_key
        self.curve = curve
        self._multiples = curve.fixed_base(base_point(curve))
        masks = OwnerMasks(key, curve, self._multiples, source)
        self._masks = RandomiserPool(ColumnBatches(curve), masks, BLOCK_ROWS * curve.threads)

    def fill(self, n: int) -> None:
        """Make masks until ``n`` are ready."""
        self._masks.fill(n)

    def encrypt(self, digits: Sequence[NDArray[np.int64]]) -> PointColumns:
        """Encrypt one row of messages for each position.

        Shapes: digits: int64[n] for each message of the key; result: n rows.

        Raises:
            CapacityExceeded: a digit is larger than 2^20; nothing is encrypted then.
            ValueError: another number of messages than the key has, or of other lengths.
        """
        n = digits[0].size
        if len(digits) != self.public_key.n_messages or any(column.size != n for column in digits):
            raise ValueError("a row needs one digit for each message of the key")
        if any(np.any((column < -_OFFSET) | (column > _OFFSET)) for column in digits):
            raise CapacityExceeded("a digit of a gradient is too large; nothing was encrypted")
        masks: Any = self._masks.draw(n)
        return by_blocks(self.curve, n, lambda block: self._add(masks, digits, block))

    def _add(self, masks: PointColumns, digits: Sequence[NDArray[np.int64]], block: slice) -> PointColumns:
        r, *columns = masks[block].columns
        messages = (self._multiples.mul(_message_rows(column[block])) for column in digits)
        return PointColumns((r, *(self.curve.add(*pair) for pair in zip(columns, messages, strict=True))))


def by_blocks(curve: Curve, n: int, function: Callable[[slice], PointColumns]) -> PointColumns:
    """Return the rows that a function gives for ``n`` rows, made by all threads, a block of rows each."""
    blocks = row_blocks(n, curve.threads, _LANES)
    parts: list[Any] = [None] * len(blocks)

    def run(number: int) -> None:
        parts[number] = function(blocks[number])

    run_blocks(run, list(range(len(blocks))), curve.threads)
    return concat_columns(curve, parts)


def _message_rows(digits: NDArray[np.int64]) -> NDArray[np.uint8]:
    words = (digits + _OFFSET).astype("<u4")
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, 4)[:, :_MESSAGE_BYTES])
