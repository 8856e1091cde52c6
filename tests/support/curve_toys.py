"""Points of every kind for the tests of the curve: of the prime-order group, of small order, and sums of both."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.curve.interface import BASE_POINT, FIELD_PRIME, GROUP_ORDER, Curve, Points
from he_processors.curve.reference import ReferenceCurve

REFERENCE = ReferenceCurve()
D = -121665 * pow(121666, -1, FIELD_PRIME) % FIELD_PRIME


def affine_rows(*points: tuple[int, int]) -> NDArray[np.uint8]:
    return np.hstack([rows_from_ints(column, 32) for column in zip(*points, strict=True)])


def segment_sums(curve: Curve, points: Points, order: NDArray[np.int32], starts: NDArray[np.int64]) -> Points:
    """The sums of one batch's segments."""
    return curve.segment_sums(order, starts, len(points))(points)


def base_rows() -> NDArray[np.uint8]:
    return np.frombuffer(BASE_POINT, dtype=np.uint8).reshape(1, 64)


@cache
def small_order_rows() -> NDArray[np.uint8]:
    """The eight points whose order divides 8, as multiples 0 to 7 of one of order 8."""
    order_8 = next(point for point in map(_torsion_part, range(2, 200)) if point is not None)
    multiples = [REFERENCE.identity(1)]
    for _ in range(7):
        multiples.append(REFERENCE.add(multiples[-1], order_8))
    return REFERENCE.to_affine(REFERENCE.concat(multiples))


def _torsion_part(y: int) -> object:
    """The order of the group times a point with this y, if there is one and the result has order 8."""
    x_squared = (y * y - 1) * pow(D * y * y + 1, -1, FIELD_PRIME) % FIELD_PRIME
    x = pow(x_squared, (FIELD_PRIME + 3) // 8, FIELD_PRIME)
    if x * x % FIELD_PRIME != x_squared:
        x = x * pow(2, (FIELD_PRIME - 1) // 4, FIELD_PRIME) % FIELD_PRIME
    if x * x % FIELD_PRIME != x_squared:
        return None
    point = REFERENCE.from_affine(affine_rows((x, y)))
    torsion = REFERENCE.add(REFERENCE.mul(point, rows_from_ints([GROUP_ORDER - 1], 32)), point)
    return None if REFERENCE.equal(REFERENCE.double(torsion, 2), REFERENCE.identity(1))[0] else torsion


@cache
def sample_rows() -> NDArray[np.uint8]:
    """Points where formulas could fail: neutral, all small orders, a point, its double, negative, and with torsion."""
    rng = np.random.default_rng(25519)
    base = REFERENCE.from_affine(base_rows())
    some = REFERENCE.fixed_base(base).mul(rng.integers(0, 256, (6, 31), dtype=np.uint8))
    small = REFERENCE.from_affine(small_order_rows())
    mixed = REFERENCE.add(REFERENCE.take(some, np.zeros(8, dtype=np.int64)), small)
    parts = [small, some, REFERENCE.double(some, 1), REFERENCE.negate(some), mixed, base, REFERENCE.negate(base)]
    return REFERENCE.to_affine(REFERENCE.concat(parts))


def both_forms(curve: Curve, rows: NDArray[np.uint8]) -> list[object]:
    """The same points as read from bytes and as a sum, which backends may hold in another form."""
    points = curve.from_affine(rows)
    return [points, curve.add(points, curve.identity(len(rows)))]


def scalar_rows(n: int, seed: int) -> NDArray[np.uint8]:
    """Scalars below the group order, among them 0, 1, the largest, and long runs of equal bits."""
    edges = [0, 1, 2, 8, GROUP_ORDER - 1, GROUP_ORDER // 2, (1 << 252) - 1, (1 << 251) + 1, int("5" * 62, 16)]
    rng = np.random.default_rng(seed)
    drawn = ints_from_rows(rng.integers(0, 256, (n, 32), dtype=np.uint8))
    return rows_from_ints([*edges, *(value % GROUP_ORDER for value in drawn)][:n], 32)
