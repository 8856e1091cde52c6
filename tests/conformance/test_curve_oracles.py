"""Every backend of the curve against the vectors of RFC 9496 and against libsodium."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from nacl import bindings as libsodium
from numpy.typing import NDArray

from he_processors.bignum.interface import rows_from_ints
from he_processors.curve import registry
from he_processors.curve.interface import GROUP_ORDER, Curve, Points
from he_processors.errors import ProtocolError
from tests.support.curve_toys import base_rows, both_forms, sample_rows, scalar_rows, small_order_rows

VECTORS = json.loads((Path(__file__).parents[1] / "kat" / "vectors" / "ristretto255.json").read_text())


@pytest.fixture(params=registry.available_backends())
def curve(request: pytest.FixtureRequest) -> Curve:
    return registry.load_backend(request.param)


def rows(*encoded: str) -> NDArray[np.uint8]:
    return np.stack([np.frombuffer(bytes.fromhex(one), dtype=np.uint8) for one in encoded])


def hexes(encoded: NDArray[np.uint8]) -> list[str]:
    return [row.tobytes().hex() for row in encoded]


def test_multiples_of_the_generator(curve: Curve) -> None:
    base = curve.from_affine(base_rows())
    multiples = curve.fixed_base(base).mul(np.arange(16, dtype=np.uint8)[:, None])
    assert hexes(curve.to_ristretto(multiples)) == VECTORS["multiples"]
    decoded = curve.from_ristretto(rows(*VECTORS["multiples"]))
    assert hexes(curve.to_ristretto(decoded)) == VECTORS["multiples"]
    assert hexes(curve.to_ristretto(curve.add(decoded, curve.identity(16)))) == VECTORS["multiples"]


@pytest.mark.parametrize("encoded", VECTORS["invalid"])
def test_invalid_encodings_are_refused_in_every_lane(curve: Curve, encoded: str) -> None:
    good = VECTORS["multiples"][:9]
    for lane in (0, 3, 7, 8):
        with pytest.raises(ProtocolError):
            curve.from_ristretto(rows(*good[:lane], encoded, *good[lane + 1 :]))


def test_elements_from_uniform_bytes(curve: Curve) -> None:
    elements = VECTORS["from_uniform"]
    uniform = rows(*(hashlib.sha512(label.encode()).hexdigest() for label in elements))
    assert hexes(curve.to_ristretto(curve.from_uniform(uniform))) == [*elements.values()]


def test_torsion_that_ristretto_quotients_out_does_not_change_an_encoding(curve: Curve) -> None:
    """The cosets of the points of order 4: adding one leaves the element, adding one of order 8 leaves the group."""
    element = curve.take(curve.double(curve.from_affine(sample_rows()[8:9]), 1), np.zeros(4, dtype=np.int64))
    order_4 = curve.from_affine(small_order_rows()[::2])
    encodings = curve.to_ristretto(curve.add(element, order_4))
    assert len({row.tobytes() for row in encodings}) == 1


def compressed(curve: Curve, points: Points) -> list[bytes]:
    """RFC 8032, 5.1.2: y, and the lowest bit of x as its highest bit."""
    affine = curve.to_affine(points)
    encoded = affine[:, 32:].copy()
    encoded[:, 31] |= (affine[:, 0] & 1) << 7
    return [row.tobytes() for row in encoded]


def test_multiples_agree_with_libsodium(curve: Curve) -> None:
    scalars = scalar_rows(20, 11)[1:]  # libsodium refuses the neutral result of 0
    base = curve.from_affine(base_rows())
    expected = [libsodium.crypto_scalarmult_ed25519_base_noclamp(row.tobytes()) for row in scalars]
    points = curve.fixed_base(base).mul(scalars)
    assert compressed(curve, points) == expected
    assert compressed(curve, curve.mul(curve.take(base, np.zeros(19, dtype=np.int64)), scalars)) == expected
    each = curve.mul_by_each(base, scalars)
    assert [compressed(curve, one)[0] for one in each] == expected
    again = scalar_rows(20, 12)[1:]
    multiplied = [
        libsodium.crypto_scalarmult_ed25519_noclamp(row.tobytes(), point)
        for row, point in zip(again, expected, strict=True)
    ]
    for form in both_forms(curve, curve.to_affine(points)):
        assert compressed(curve, curve.mul(form, again)) == multiplied


def test_sums_and_differences_agree_with_libsodium(curve: Curve) -> None:
    table = curve.fixed_base(curve.from_affine(base_rows()))
    a, b = table.mul(scalar_rows(19, 13)), table.mul(scalar_rows(19, 14)[::-1].copy())
    pairs = list(zip(compressed(curve, a), compressed(curve, b), strict=True))
    assert compressed(curve, curve.add(a, b)) == [libsodium.crypto_core_ed25519_add(p, q) for p, q in pairs]
    difference = curve.add(a, curve.negate(b))
    assert compressed(curve, difference) == [libsodium.crypto_core_ed25519_sub(p, q) for p, q in pairs]


def test_scalars_wrap_at_the_group_order_as_in_libsodium(curve: Curve) -> None:
    a, b = scalar_rows(15, 15), scalar_rows(15, 16)[::-1].copy()
    added = [libsodium.crypto_core_ed25519_scalar_add(x.tobytes(), y.tobytes()) for x, y in zip(a, b, strict=True)]
    table = curve.fixed_base(curve.from_affine(base_rows()))
    wrapped = np.frombuffer(b"".join(added), dtype=np.uint8).reshape(-1, 32)
    assert curve.equal(curve.add(table.mul(a), table.mul(b)), table.mul(wrapped)).all()
    last = rows_from_ints([GROUP_ORDER - 1], 32)
    assert curve.equal(curve.add(table.mul(last), curve.from_affine(base_rows())), curve.identity(1)).all()
