"""What every curve backend offers: batches of points of edwards25519, and the group ristretto255 on top.

The curve is -x^2 + y^2 = 1 + d x^2 y^2 modulo 2^255 - 19. Its points form a group of eight times a prime order: a peer
that sends points of the curve can add one of order 1, 2, 4 or 8 to them (torsion), which a multiplication by 8 removes.
Points enter and leave as bytes; in between they stay in the backend's own form behind the opaque ``Points``.

Shapes of bytes: affine points are x and y, 32 bytes each, little-endian and canonical (below 2^255 - 19); compressed
ones are y, with the lowest bit of x as the top bit; elements of ristretto255 are 32 bytes; scalars are little-endian
and below the prime order.

Security: no backend runs in constant time; only CUDA kernels take the same way for all scalars.
Reference: RFC 8032, section 5.1; RFC 9496, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import rows_from_ints

FIELD_PRIME = 2**255 - 19
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493
COFACTOR_BITS = 3  # the curve has 2^3 times as many points
AFFINE_BYTES = 64
COMPRESSED_BYTES = 32
RISTRETTO_BYTES = 32
SCALAR_BYTES = 32
BASE_POINT = bytes.fromhex(  # x and y of the base point, of prime order
    "1ad5258f602d56c9b2a7259560c72c695cdcd6fd31e2a4c0fe536ecdd3366921"
    "5866666666666666666666666666666666666666666666666666666666666666"
)
NOT_ON_CURVE = "bytes are no point of the curve"
NOT_RISTRETTO = "bytes are no element of ristretto255"


def rows_of(scalars: Sequence[int]) -> NDArray[np.uint8]:
    """Write integers as scalars. Shapes: result: uint8[n, 32], below the order."""
    return rows_from_ints((scalar % GROUP_ORDER for scalar in scalars), SCALAR_BYTES)


def to_compressed(curve: Curve, points: Points) -> NDArray[np.uint8]:
    """Encode points (RFC 8032, 5.1.2). Shapes: result: uint8[n, 32]."""
    affine = curve.to_affine(points)
    rows = affine[:, COMPRESSED_BYTES:].copy()
    rows[:, -1] |= (affine[:, 0] & 1) << 7
    return rows


def base_point(curve: Curve) -> Points:
    """Return the base point. Shapes: result: Points[1]."""
    return curve.from_affine(np.frombuffer(BASE_POINT, dtype=np.uint8)[None])


class Points(Protocol):
    """A batch of points in the backend's own form. Belongs to the ``Curve`` that made it, and is never changed."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> Points: ...


class PointColumn(Protocol):
    """Takes so many points in, batch by batch, into memory set aside once: joining batches holds all points twice."""

    def append(self, points: Points) -> None:
        """Take the next points, which ``from_affine`` or ``from_ristretto`` made.

        Raises:
            ValueError: more than there is room for. A backend may refuse what some operation made.
        """

    def whole(self) -> Points:
        """Return all points, in order. Raises: ValueError before the last has come."""


class FixedBase(Protocol):
    """A table of multiples of one point."""

    def mul(self, scalars: NDArray[np.uint8]) -> Points:
        """Multiply the point by each scalar.

        Shapes: scalars: uint8[n, width], width 1 to 32, little-endian, below the group order; result: Points[n].

        Raises:
            ValueError: another shape, or a scalar that is not below the group order.
        """


class Curve(Protocol):
    """Batch arithmetic on edwards25519.

    Attributes:
        threads: how many share a batch.
    """

    name: str
    threads: int

    def from_affine(self, rows: NDArray[np.uint8]) -> Points:
        """Take points in. Shapes: rows: uint8[n, 64]; result: Points[n].

        Raises:
            ProtocolError: a coordinate is not canonical, or a point does not lie on the curve. Small orders are not
                looked for.
        """

    def to_affine(self, points: Points) -> NDArray[np.uint8]:
        """Give points out in their one affine form. Shapes: result: uint8[n, 64]."""

    def from_compressed(self, rows: NDArray[np.uint8]) -> Points:
        """Decode points (RFC 8032, 5.1.3): a square root each. Shapes: rows: uint8[n, 32]; result: Points[n].

        Raises:
            ProtocolError: a row is not the one encoding of a point of the curve. Small orders are not looked for.
        """

    def from_ristretto(self, rows: NDArray[np.uint8]) -> Points:
        """Decode elements of ristretto255 (RFC 9496, 4.3.1). Shapes: rows: uint8[n, 32]; result: Points[n].

        Raises:
            ProtocolError: a row is not the one encoding of an element.
        """

    def to_ristretto(self, points: Points) -> NDArray[np.uint8]:
        """Encode elements of ristretto255 (RFC 9496, 4.3.2). Shapes: result: uint8[n, 32]."""

    def from_uniform(self, rows: NDArray[np.uint8]) -> Points:
        """Derive elements of ristretto255 from uniform bytes (RFC 9496, 4.3.4). Shapes: rows: uint8[n, 64]."""

    def identity(self, n: int) -> Points:
        """Return the neutral point ``n`` times."""

    def take(self, points: Points, index: NDArray[np.int64]) -> Points:
        """Gather points. Shapes: index: int64[m]; result: Points[m]. Raises: IndexError out of range."""

    def concat(self, parts: list[Points]) -> Points:
        """Join batches in order."""

    def column(self, n: int) -> PointColumn:
        """Set memory aside for ``n`` points that come in batches."""

    def add(self, a: Points, b: Points) -> Points:
        """Add point by point; complete, so that ``a`` may equal ``b``. Raises: ValueError if the lengths differ."""

    def negate(self, points: Points) -> Points:
        """Return the negative of every point."""

    def double(self, points: Points, times: int) -> Points:
        """Multiply every point by 2^times."""

    def segment_sums(
        self, order: NDArray[np.int32], starts: NDArray[np.int64], n_rows: int
    ) -> Callable[[Points], Points]:
        """Return what adds the points of each segment of a row order, for batches of ``n_rows`` points.

        Segment s is ``points[order[starts[s]:starts[s + 1]]]``; an empty segment gives the neutral point.
        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; its result: Points[n_segments].

        Raises:
            ValueError: such segments cannot be; from the result, another number of points.
        """

    def fixed_base(self, base: Points) -> FixedBase:
        """Prepare multiples of one point. Shapes: base: Points[1]."""

    def mul(self, points: Points, scalars: NDArray[np.uint8]) -> Points:
        """Multiply every point by a scalar of its own.

        Shapes: scalars: uint8[n, 32]; result: Points[n].

        Raises:
            ValueError: the lengths differ, or a scalar is not below the group order.
        """

    def mul_by_each(self, points: Points, scalars: NDArray[np.uint8]) -> list[Points]:
        """Multiply every point by each of a few scalars; the doublings are shared.

        Shapes: scalars: uint8[k, 32]; result: k times Points[n].

        Raises:
            ValueError: a scalar is not below the group order.
        """

    def scale(self, scalars: NDArray[np.uint8], factors: list[int], shift: int) -> list[NDArray[np.uint8]]:
        """Return factor * scalar + shift modulo the group order, for each of a few factors.

        Shapes: scalars: uint8[n, 32], little-endian; result: for each factor uint8[n, 32], below the order.

        Raises:
            ValueError: another shape, or a scalar that is not below the group order.
        """

    def equal(self, a: Points, b: Points) -> NDArray[np.bool_]:
        """Compare point by point, as points of the curve: torsion makes a difference. Shapes: result: bool[n]."""

    def y_words(self, points: Points) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the low 64 bits of each y, and the lowest bit of each x: a key for tables of points.

        A point and its negative share y, and differ in the lowest bit of x unless x is zero.
        Shapes: results: uint64[n], uint8[n].
        """
