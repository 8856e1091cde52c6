"""Blinding against an independent implementation of P-256, and the library kept quiet."""

from __future__ import annotations

import builtins
import traceback

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import BackendUnavailable, ProtocolError
from nvflare_plugins.alignment import blinding
from nvflare_plugins.alignment.blinding import POINT_BYTES, BlindingKey, psi_library
from tests.support.alignment import needs_psi
from tests.support.seeded_randomness import SeededRandomness

pytestmark = needs_psi
ITEMS = ["a", "b", "c"]


class Given:
    """A source that yields one number, to the random integer below the order."""

    def __init__(self, secret: int):
        self._bytes = (secret - 1).to_bytes(32, "little")

    def bytes(self, n: int) -> bytes:
        return self._bytes[:n]


@pytest.mark.parametrize("secret", [1, 2, 12345, blinding._ORDER - 1, 2**255 + 7])
def test_blinding_is_multiplication_by_the_key(secret):
    points = BlindingKey(Given(1)).blind_items(ITEMS)
    blinded = BlindingKey(Given(secret)).blind(points)
    private = ec.derive_private_key(secret, ec.SECP256R1())
    for point, result in zip(points, blinded, strict=True):
        public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
        assert private.exchange(ec.ECDH(), public) == result[1:]
    assert BlindingKey(Given(secret)).blind_items(ITEMS) == blinded


def test_keys_commute_and_come_off_in_any_order():
    one, two = BlindingKey(SeededRandomness(1)), BlindingKey(SeededRandomness(2))
    both = two.blind(one.blind_items(ITEMS))
    assert both == one.blind(two.blind_items(ITEMS))
    assert one.unblind(both) == two.blind_items(ITEMS) and two.unblind(both) == one.blind_items(ITEMS)
    assert len({*both, *one.blind_items(ITEMS), *two.blind_items(ITEMS)}) == 9
    assert {len(point) for point in both} == {POINT_BYTES}


def test_every_key_is_new():
    assert BlindingKey().blind_items(ITEMS) != BlindingKey().blind_items(ITEMS)


def test_long_lists_keep_their_order(monkeypatch):
    monkeypatch.setattr(blinding, "_PER_CALL", 3)
    key = BlindingKey(SeededRandomness(3))
    items = [str(number) for number in range(10)]
    assert key.blind_items(items) == [key.blind_items([item])[0] for item in items]
    assert key.unblind(key.blind(key.blind_items(items))) == key.blind_items(items)
    assert key.blind([]) == []


@given(st.binary(max_size=70))
@settings(max_examples=100, deadline=None)
def test_bytes_of_a_peer_are_a_point_or_an_error(data):
    key = BlindingKey(SeededRandomness(4))
    try:
        result = key.blind([data])
    except ProtocolError as error:
        assert error.__cause__ is None and error.__context__ is None
        assert str(error) == "a party sent something that is no point of the alignment's curve"
    else:
        public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), data)
        assert len(result[0]) == POINT_BYTES and public.public_numbers()


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 33, b"\2" + b"\xff" * 32, b"\4" + b"\1" * 64, b"\5" + b"\1" * 32])
def test_infinity_and_points_off_the_curve_are_refused(data):
    with pytest.raises(ProtocolError):
        BlindingKey().unblind([data])


def test_what_the_library_quotes_goes_nowhere():
    items = [f"secret-{number}" for number in range(3)] + ["\ud800"]
    with pytest.raises(TypeError, match="secret-1"):
        psi_library().client.CreateWithNewKey(True).CreateRequest(items)  # this is why
    with pytest.raises(ProtocolError) as refused:
        BlindingKey().blind_items(items)
    assert "secret-1" not in "".join(traceback.format_exception(refused.value))


def test_a_missing_library_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("private_set_intersection"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendUnavailable, match=r'pip install "veilboost\[psi\]"'):
        psi_library()
