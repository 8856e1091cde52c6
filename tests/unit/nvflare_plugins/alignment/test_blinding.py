"""Blinding against vectors of RFC 9497 and plain integers; what is refused; openmined-psi as an oracle of results."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.bignum.interface import rows_from_ints
from he_processors.curve.equal_logarithms import hash_to_ristretto
from he_processors.curve.interface import FIELD_PRIME, GROUP_ORDER
from he_processors.curve.reference import ReferenceCurve
from he_processors.curve.registry import open_curve
from he_processors.errors import ProtocolError
from nvflare_plugins.kinds.alignment import intersection as blinding
from nvflare_plugins.kinds.alignment.intersection import POINT_BYTES, BlindingKey
from tests.support.seeded_randomness import SeededRandomness

ITEMS = [b"a", b"b", b"c"]
DOMAIN = b"test"
REFUSED = "a party sent something that is no element of the alignment's group"


class Given:
    """A source that yields one number, to the random integer below the order."""

    def __init__(self, secret: int):
        self._bytes = ((secret - 1) << 3).to_bytes(32, "little")  # the order has 253 bits

    def bytes(self, n: int) -> bytes:
        return self._bytes[:n]


def key(seed: int, domain: bytes = DOMAIN) -> BlindingKey:
    return BlindingKey(domain, SeededRandomness(seed))


@pytest.mark.parametrize(
    ("message", "blinded"),
    [
        (b"\0", "609a0ae68c15a3cf6903766461307e5c8bb2f95e7e6550e1ffa2dc99e412803c"),
        (b"\x5a" * 17, "da27ef466870f5f15296299850aa088629945a17d1f5b7f5ff043f76b3c06418"),
    ],
)
def test_hashing_gives_the_blinded_elements_of_rfc_9497(message, blinded):
    """Appendix A.1.1: the blind times the hash of the input, under the tag of that RFC."""
    blind = bytes.fromhex("64d37aed22a27f5191de1c1d69fadb899d8862b58eb4220029e036ec4c1f6706")
    for curve in (open_curve(), ReferenceCurve()):
        hashed = hash_to_ristretto(curve, [message], b"HashToGroup-OPRFV1-\x00-ristretto255-SHA512")
        product = curve.mul(hashed, np.frombuffer(blind, dtype=np.uint8).reshape(1, 32))
        assert curve.to_ristretto(product).tobytes().hex() == blinded


@pytest.mark.parametrize("tag", [b"", b"x" * 256])
def test_hashing_refuses_tags_of_another_length(tag):
    with pytest.raises(ValueError):
        hash_to_ristretto(ReferenceCurve(), ITEMS, tag)


@pytest.mark.parametrize("secret", [1, 2, 12345, GROUP_ORDER - 1, 2**251 + 7])
def test_blinding_is_multiplication_by_the_key(secret):
    curve = ReferenceCurve()
    hashed = hash_to_ristretto(curve, ITEMS, blinding._SUITE + DOMAIN)
    expected = curve.to_ristretto(curve.mul(hashed, rows_from_ints([secret] * 3, 32)))
    blinded = BlindingKey(DOMAIN, Given(secret)).blind_items(ITEMS)
    assert blinded == [row.tobytes() for row in expected]
    assert BlindingKey(DOMAIN, Given(secret)).blind(BlindingKey(DOMAIN, Given(1)).blind_items(ITEMS)) == blinded


def test_keys_commute_and_come_off_in_any_order():
    one, two = key(1), key(2)
    both = two.blind(one.blind_items(ITEMS))
    assert both == one.blind(two.blind_items(ITEMS))
    assert one.unblind(both) == two.blind_items(ITEMS) and two.unblind(both) == one.blind_items(ITEMS)
    assert len({*both, *one.blind_items(ITEMS), *two.blind_items(ITEMS)}) == 9
    assert {len(point) for point in both} == {POINT_BYTES}


def test_every_key_is_new_and_ids_of_another_domain_are_other_elements():
    assert BlindingKey(DOMAIN).blind_items(ITEMS) != BlindingKey(DOMAIN).blind_items(ITEMS)
    assert not set(key(3).blind_items(ITEMS)) & set(key(3, b"another").blind_items(ITEMS))


def test_long_lists_keep_their_order():
    items = [str(number).encode() for number in range(50)]
    assert key(3).blind_items(items) == [key(3).blind_items([item])[0] for item in items]
    assert key(3).unblind(key(3).blind(key(3).blind_items(items))) == key(3).blind_items(items)
    assert key(3).blind([]) == []


@given(st.binary(max_size=40) | st.binary(min_size=32, max_size=32))
def test_bytes_of_a_peer_are_an_element_or_an_error(data):
    curve = ReferenceCurve()
    try:
        result = key(4).blind([data])
    except ProtocolError as error:
        assert str(error) == REFUSED and error.__cause__ is None and error.__context__ is None
    else:
        decoded = curve.from_ristretto(np.frombuffer(data, dtype=np.uint8).reshape(1, 32))
        assert len(result[0]) == POINT_BYTES and not curve.equal(decoded, curve.identity(1))[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        bytes(32),  # the neutral element
        bytes(33),
        b"\1" + bytes(31),
        FIELD_PRIME.to_bytes(32, "little"),  # zero, but not its one encoding
        (FIELD_PRIME - 1).to_bytes(32, "little"),
        b"\xff" * 32,
    ],
)
def test_what_is_no_element_is_refused_wherever_it_stands(data):
    good = key(5).blind_items(ITEMS)
    for points in ([data], [*good, data], [data, *good]):
        for call in (key(6).blind, key(6).unblind):
            with pytest.raises(ProtocolError, match=REFUSED):
                call(points)


def test_the_intersection_is_that_of_openmined_psi():
    psi = pytest.importorskip("private_set_intersection.python")
    source = random.Random(7)
    pool = [f"item{number}" for number in range(300)]
    ours, theirs = source.sample(pool, 200), source.sample(pool, 150)
    client, server = psi.client.CreateWithNewKey(True), psi.server.CreateWithNewKey(True)
    setup = server.CreateSetupMessage(0.0, len(ours), theirs, psi.DataStructure.RAW)
    found = client.GetIntersection(setup, server.ProcessRequest(client.CreateRequest(ours)))
    one, two = key(8), key(9)
    mine = two.blind(one.blind_items([item.encode() for item in ours]))
    others = set(one.blind(two.blind_items([item.encode() for item in theirs])))
    assert [place for place, point in enumerate(mine) if point in others] == sorted(found)
