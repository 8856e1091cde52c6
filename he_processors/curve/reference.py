"""The reference backend: plain Python integers, written to be obviously right.

Every other backend is compared with this one. Points are extended coordinates (X, Y, Z, T) with x = X/Z, y = Y/Z and
T = XY/Z; one complete formula adds any two of them.

Reference: RFC 8032, 5.1.4 (addition); RFC 9496, 4 (ristretto255).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import ints_from_rows, less_than, rows_from_ints
from he_processors.bignum.reference import check_index, check_rows, check_segments
from he_processors.curve.interface import (
    AFFINE_BYTES,
    COMPRESSED_BYTES,
    FIELD_PRIME,
    GROUP_ORDER,
    NOT_ON_CURVE,
    NOT_RISTRETTO,
    RISTRETTO_BYTES,
    SCALAR_BYTES,
)
from he_processors.errors import ProtocolError

Point = tuple[int, int, int, int]
PointBatch = list[Point]

_P = FIELD_PRIME
_D = -121665 * pow(121666, -1, _P) % _P
_SQRT_M1 = pow(2, (_P - 1) // 4, _P)
_NEUTRAL: Point = (0, 1, 1, 0)


class ReferenceColumn:
    """Points that come in batches."""

    def __init__(self, n: int) -> None:
        self._n, self._points = n, PointBatch()

    def append(self, points: PointBatch) -> None:
        """Take the next points. Raises: ValueError for too many of them."""
        if len(self._points) + len(points) > self._n:
            raise ValueError("a column takes no more points than it has room for")
        self._points += points

    def whole(self) -> PointBatch:
        """Return all points. Raises: ValueError before the last has come."""
        if len(self._points) != self._n:
            raise ValueError("a column lacks points")
        return self._points


class ReferenceFixedBase:
    """Multiples of one point by double and add."""

    def __init__(self, base: Point) -> None:
        self._base = base

    def mul(self, scalars: NDArray[np.uint8]) -> PointBatch:
        """Multiply the point by each scalar. Shapes: scalars: uint8[n, width <= 32]; result: Points[n]."""
        return [_times(self._base, scalar) for scalar in read_scalars(scalars)]


class ReferenceCurve:
    """Batch arithmetic on edwards25519; a batch is a list of coordinates in Python ints."""

    name = "reference"
    threads = 1

    def from_affine(self, rows: NDArray[np.uint8]) -> PointBatch:
        """Take points in. Shapes: rows: uint8[n, 64]. Raises: ProtocolError unless canonical and on the curve."""
        check_rows(rows, AFFINE_BYTES)
        points = []
        for x, y in zip(ints_from_rows(rows[:, :32]), ints_from_rows(rows[:, 32:]), strict=True):
            if x >= _P or y >= _P or (y * y - x * x - 1 - _D * x * x * y * y) % _P:
                raise ProtocolError(NOT_ON_CURVE)
            points.append((x, y, 1, x * y % _P))
        return points

    def to_affine(self, points: PointBatch) -> NDArray[np.uint8]:
        """Give points out in their one affine form. Shapes: result: uint8[n, 64]."""
        affine = [_affine(point) for point in points]
        return np.hstack([rows_from_ints((x for x, _ in affine), 32), rows_from_ints((y for _, y in affine), 32)])

    def from_compressed(self, rows: NDArray[np.uint8]) -> PointBatch:
        """Decode points. Shapes: rows: uint8[n, 32]. Raises: ProtocolError unless canonical and on the curve."""
        check_rows(rows, COMPRESSED_BYTES)
        return [_with_x(*divmod(row, 1 << 255)) for row in ints_from_rows(rows)]

    def from_ristretto(self, rows: NDArray[np.uint8]) -> PointBatch:
        """Decode elements of ristretto255. Shapes: rows: uint8[n, 32]. Raises: ProtocolError for any other bytes."""
        check_rows(rows, RISTRETTO_BYTES)
        return [_decode(s) for s in ints_from_rows(rows)]

    def to_ristretto(self, points: PointBatch) -> NDArray[np.uint8]:
        """Encode elements of ristretto255. Shapes: result: uint8[n, 32]."""
        return rows_from_ints((_encode(point) for point in points), 32)

    def from_uniform(self, rows: NDArray[np.uint8]) -> PointBatch:
        """Derive elements of ristretto255 from uniform bytes. Shapes: rows: uint8[n, 64]; result: Points[n]."""
        check_rows(rows, 2 * RISTRETTO_BYTES)
        halves = zip(ints_from_rows(rows[:, :32]), ints_from_rows(rows[:, 32:]), strict=True)
        return [_add(_map(low % 2**255), _map(high % 2**255)) for low, high in halves]

    def identity(self, n: int) -> PointBatch:
        """Return the neutral point ``n`` times."""
        return [_NEUTRAL] * n

    def take(self, points: PointBatch, index: NDArray[np.int64]) -> PointBatch:
        """Gather points. Shapes: index: int64[m]; result: Points[m]. Raises: IndexError out of range."""
        check_index(index, len(points))
        return [points[i] for i in index.tolist()]

    def concat(self, parts: list[PointBatch]) -> PointBatch:
        """Join batches in order."""
        return [point for part in parts for point in part]

    def column(self, n: int) -> ReferenceColumn:
        """Take ``n`` points in batch by batch."""
        return ReferenceColumn(n)

    def add(self, a: PointBatch, b: PointBatch) -> PointBatch:
        """Add point by point. Raises: ValueError if the lengths differ."""
        check_lengths(a, b)
        return [_add(*pair) for pair in zip(a, b, strict=True)]

    def negate(self, points: PointBatch) -> PointBatch:
        """Return the negative of every point."""
        return [(-x % _P, y, z, -t % _P) for x, y, z, t in points]

    def double(self, points: PointBatch, times: int) -> PointBatch:
        """Multiply every point by 2^times."""
        for _ in range(times):
            points = [_add(point, point) for point in points]
        return points

    def segment_sums(
        self, order: NDArray[np.int32], starts: NDArray[np.int64], n_rows: int
    ) -> Callable[[PointBatch], PointBatch]:
        """Return what adds the points of each segment of a row order; an empty segment gives the neutral point.

        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; its result: Points[n_segments].
        """
        check_segments(order, starts, n_rows)
        rows, segments = order.tolist(), list(itertools.pairwise(starts.tolist()))

        def add(points: PointBatch) -> PointBatch:
            check_lengths(points, range(n_rows))
            return [reduce(_add, (points[row] for row in rows[begin:end]), _NEUTRAL) for begin, end in segments]

        return add

    def fixed_base(self, base: PointBatch) -> ReferenceFixedBase:
        """Prepare multiples of one point. Shapes: base: Points[1]. Raises: ValueError for any other number."""
        if len(base) != 1:
            raise ValueError("a fixed base is one point")
        return ReferenceFixedBase(base[0])

    def mul(self, points: PointBatch, scalars: NDArray[np.uint8]) -> PointBatch:
        """Multiply every point by a scalar of its own. Shapes: scalars: uint8[n, 32]; result: Points[n]."""
        check_rows(scalars, SCALAR_BYTES)
        check_lengths(points, scalars)
        return [_times(point, scalar) for point, scalar in zip(points, read_scalars(scalars), strict=True)]

    def mul_by_each(self, points: PointBatch, scalars: NDArray[np.uint8]) -> list[PointBatch]:
        """Multiply every point by each of a few scalars. Shapes: scalars: uint8[k, 32]; result: k times Points[n]."""
        check_rows(scalars, SCALAR_BYTES)
        return [[_times(point, scalar) for point in points] for scalar in read_scalars(scalars)]

    def scale(self, scalars: NDArray[np.uint8], factors: list[int], shift: int) -> list[NDArray[np.uint8]]:
        """Return factor * scalar + shift modulo the group order. Shapes: scalars: uint8[n, 32]; results: likewise."""
        check_rows(scalars, SCALAR_BYTES)
        values = read_scalars(scalars)
        return [rows_from_ints([(f * value + shift) % GROUP_ORDER for value in values], SCALAR_BYTES) for f in factors]

    def equal(self, a: PointBatch, b: PointBatch) -> NDArray[np.bool_]:
        """Compare point by point, as points of the curve. Shapes: result: bool[n]."""
        check_lengths(a, b)
        return np.array([_affine(p) == _affine(q) for p, q in zip(a, b, strict=True)], dtype=np.bool_)

    def y_words(self, points: PointBatch) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the low 64 bits of each y and the lowest bit of each x. Shapes: uint64[n], uint8[n]."""
        affine = [_affine(point) for point in points]
        words = np.array([y % 2**64 for _, y in affine], dtype=np.uint64)
        return words, np.array([x & 1 for x, _ in affine], dtype=np.uint8)


def check_lengths(a: object, b: object) -> None:
    """Raises: ValueError unless two batches are equally long."""
    if len(a) != len(b):  # type: ignore[arg-type]
        raise ValueError("batches of different length do not go together")


def check_scalars(scalars: NDArray[np.uint8]) -> None:
    """Raises: ValueError unless scalars is uint8[n, 1 to 32], each below the group order."""
    if scalars.dtype != np.uint8 or scalars.ndim != 2 or not 1 <= scalars.shape[1] <= SCALAR_BYTES:
        raise ValueError(f"scalars must be uint8[n, width], width 1 to {SCALAR_BYTES}")
    if not np.all(less_than(scalars, GROUP_ORDER)):
        raise ValueError("a scalar is not below the group order")


def read_scalars(scalars: NDArray[np.uint8]) -> list[int]:
    """Read checked scalars. Shapes: scalars: uint8[n, width]. Raises: ValueError as ``check_scalars``."""
    check_scalars(scalars)
    return ints_from_rows(scalars)


def _add(a: Point, b: Point) -> Point:
    """Add two points (RFC 8032, 5.1.4): complete, because d is no square."""
    (x1, y1, z1, t1), (x2, y2, z2, t2) = a, b
    e, f = (y1 - x1) * (y2 - x2) % _P, (y1 + x1) * (y2 + x2) % _P
    c, d = 2 * t1 * t2 * _D % _P, 2 * z1 * z2 % _P
    return (f - e) * (d - c) % _P, (d + c) * (f + e) % _P, (d - c) * (d + c) % _P, (f - e) * (f + e) % _P


def _times(point: Point, scalar: int) -> Point:
    total = _NEUTRAL
    for bit in bin(scalar)[2:]:
        total = _add(total, total)
        if bit == "1":
            total = _add(total, point)
    return total


def _affine(point: Point) -> tuple[int, int]:
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    return x * inverse % _P, y * inverse % _P


def _is_negative(value: int) -> bool:
    return bool(value % _P & 1)


def _magnitude(value: int) -> int:
    return -value % _P if _is_negative(value) else value % _P


def _sqrt_ratio(u: int, v: int) -> tuple[bool, int]:
    """Return whether u / v is a square, and the non-negative root of it or of sqrt(-1) u / v (RFC 9496, 4.2)."""
    r = u * v**3 * pow(u * v**7, (_P - 5) // 8, _P) % _P
    check = v * r * r % _P
    is_square, is_negated = check == u % _P, check == -u % _P
    if is_negated or check == -u * _SQRT_M1 % _P:
        r = r * _SQRT_M1 % _P
    return is_square or is_negated, _magnitude(r)


_SQRT_AD_MINUS_ONE = -_sqrt_ratio(-_D - 1, 1)[1] % _P  # RFC 9496, 4.1, takes the negative root
_INVSQRT_A_MINUS_D = _sqrt_ratio(1, -1 - _D)[1]


def _with_x(odd: int, y: int) -> Point:
    """Decode a point from y and the lowest bit of x (RFC 8032, 5.1.3)."""
    was_square, x = _sqrt_ratio((y * y - 1) % _P, (_D * y * y + 1) % _P)
    if y >= _P or not was_square or (odd and x == 0):
        raise ProtocolError(NOT_ON_CURVE)
    x = -x % _P if odd else x
    return x, y, 1, x * y % _P


def _decode(s: int) -> Point:
    """Decode an element (RFC 9496, 4.3.1)."""
    if s >= _P or _is_negative(s):
        raise ProtocolError(NOT_RISTRETTO)
    u1, u2 = (1 - s * s) % _P, (1 + s * s) % _P
    v = (-_D * u1 * u1 - u2 * u2) % _P
    was_square, inverse_root = _sqrt_ratio(1, v * u2 * u2)
    den_x, den_y = inverse_root * u2 % _P, inverse_root * inverse_root * u2 * v % _P
    x, y = _magnitude(2 * s * den_x), u1 * den_y % _P
    t = x * y % _P
    if not was_square or _is_negative(t) or y == 0:
        raise ProtocolError(NOT_RISTRETTO)
    return x, y, 1, t


def _encode(point: Point) -> int:
    """Encode an element (RFC 9496, 4.3.2)."""
    x0, y0, z0, t0 = point
    u1, u2 = (z0 + y0) * (z0 - y0) % _P, x0 * y0 % _P
    _, inverse_root = _sqrt_ratio(1, u1 * u2 * u2)
    den1, den2 = inverse_root * u1 % _P, inverse_root * u2 % _P
    z_inverse = den1 * den2 * t0 % _P
    x, y, den = x0, y0, den2
    if _is_negative(t0 * z_inverse):
        x, y, den = y0 * _SQRT_M1 % _P, x0 * _SQRT_M1 % _P, den1 * _INVSQRT_A_MINUS_D % _P
    if _is_negative(x * z_inverse):
        y = -y % _P
    return _magnitude(den * (z0 - y))


def _map(t: int) -> Point:
    """Map a field element to a point (RFC 9496, 4.3.4, MAP)."""
    r = _SQRT_M1 * t * t % _P
    u, v = (r + 1) * (1 - _D * _D) % _P, (-1 - r * _D) * (r + _D) % _P
    was_square, s = _sqrt_ratio(u, v)
    if not was_square:
        s = -_magnitude(s * t) % _P
    c = -1 if was_square else r
    n = (c * (r - 1) * (_D - 1) ** 2 - v) % _P
    w0, w1, w2, w3 = 2 * s * v % _P, n * _SQRT_AD_MINUS_ONE % _P, (1 - s * s) % _P, (1 + s * s) % _P
    return w0 * w3 % _P, w2 * w1 % _P, w1 * w3 % _P, w0 * w2 % _P
