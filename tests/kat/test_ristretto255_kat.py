"""The reference curve: the test vectors of RFC 9496, appendix A, and a few known facts of edwards25519."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from he_processors.bignum.rows import rows_from_ints
from he_processors.curve.interface import BASE_POINT, FIELD_PRIME, GROUP_ORDER
from he_processors.curve.reference import ReferenceCurve
from he_processors.errors import ProtocolError

# Multiples 0 to 15 of the generator; encodings that are invalid; elements from the SHA-512 of labels.
VECTORS = json.loads((Path(__file__).parent / "vectors" / "ristretto255.json").read_text())
MULTIPLES: list[str] = VECTORS["multiples"]


@pytest.fixture
def curve() -> ReferenceCurve:
    return ReferenceCurve()


def rows(*encoded: str) -> NDArray[np.uint8]:
    return np.stack([np.frombuffer(bytes.fromhex(one), dtype=np.uint8) for one in encoded])


def test_multiples_of_the_generator(curve: ReferenceCurve) -> None:
    base = curve.from_affine(rows(BASE_POINT.hex()))
    multiples = curve.fixed_base(base).mul(np.arange(16, dtype=np.uint8)[:, None])
    assert [row.tobytes().hex() for row in curve.to_ristretto(multiples)] == MULTIPLES
    decoded = curve.from_ristretto(rows(*MULTIPLES))
    assert (curve.to_ristretto(decoded) == rows(*MULTIPLES)).all()


@pytest.mark.parametrize("encoded", VECTORS["invalid"])
def test_invalid_encodings_are_refused(curve: ReferenceCurve, encoded: str) -> None:
    with pytest.raises(ProtocolError):
        curve.from_ristretto(rows(MULTIPLES[1], encoded))


def test_elements_from_uniform_bytes(curve: ReferenceCurve) -> None:
    elements = VECTORS["from_uniform"]
    uniform = rows(*(hashlib.sha512(label.encode()).hexdigest() for label in elements))
    assert [row.tobytes().hex() for row in curve.to_ristretto(curve.from_uniform(uniform))] == [*elements.values()]


def test_the_base_point_has_the_prime_order_and_affine_points_are_checked(curve: ReferenceCurve) -> None:
    base = curve.from_affine(rows(BASE_POINT.hex()))
    last = curve.mul(base, rows_from_ints([GROUP_ORDER - 1], 32))
    assert curve.equal(curve.add(last, base), curve.identity(1)).all()
    assert curve.to_affine(curve.identity(1)).tobytes() == bytes(32) + b"\1" + bytes(31)
    x, y = (int.from_bytes(BASE_POINT[i : i + 32], "little") for i in (0, 32))
    for bad in ((x, y + 1), (x + FIELD_PRIME, y), (0, FIELD_PRIME + 1), (1, 1)):
        with pytest.raises(ProtocolError):
            curve.from_affine(np.hstack([rows_from_ints([value], 32) for value in bad]))


def test_points_of_small_order_are_points(curve: ReferenceCurve) -> None:
    order_2 = curve.from_affine(np.hstack([rows_from_ints([value], 32) for value in (0, FIELD_PRIME - 1)]))
    assert not curve.equal(order_2, curve.identity(1))[0]
    assert curve.equal(curve.double(order_2, 1), curve.identity(1))[0]
