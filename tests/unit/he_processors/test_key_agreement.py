"""Key agreement: published vectors, injective encoding, transcripts, confirmations."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.key_agreement import (
    DOMAIN,
    EphemeralKey,
    Participant,
    check_confirmation,
    confirm_key,
    derive_group_secret,
    derive_key,
    derive_pair_secret,
    encode_fields,
    expand_key,
    extract_key,
    hash_transcript,
)


class FixedBytes:
    """A source that yields given bytes: for published vectors."""

    def __init__(self, data: bytes):
        self._data = data

    def bytes(self, n: int) -> bytes:
        taken, self._data = self._data[:n], self._data[n:]
        return taken


def test_x25519_vector_of_rfc_7748():
    bob = EphemeralKey(FixedBytes(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")))
    alice_public = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert bob.agree(alice_public).hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


SMALL_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    ((1 << 255) - 20).to_bytes(32, "little"),
    ((1 << 255) - 19).to_bytes(32, "little"),
    ((1 << 255) - 18).to_bytes(32, "little"),
]


@pytest.mark.parametrize("point", SMALL_ORDER, ids=lambda p: p.hex()[:8])
def test_points_of_small_order_are_refused(point):
    with pytest.raises(ProtocolError, match="small order"):
        EphemeralKey().agree(point)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_malformed_public_keys_are_refused(length):
    with pytest.raises(ProtocolError):
        EphemeralKey().agree(b"\x09" * length)


def test_keys_are_fresh():
    assert EphemeralKey().public != EphemeralKey().public


FIELD = st.one_of(st.binary(max_size=12), st.text(max_size=6), st.integers(0, 2**64 - 1))


@settings(max_examples=40)
@given(st.lists(FIELD, max_size=5), st.lists(FIELD, max_size=5))
def test_encoding_is_injective(left, right):
    assert (encode_fields(*left) == encode_fields(*right)) == (left == right)


UNCLEAR = [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (True, TypeError)]


@pytest.mark.parametrize(("field", "error"), UNCLEAR)
def test_encoding_refuses_what_it_cannot_tell_apart(field, error):
    with pytest.raises(error):
        encode_fields(field)


def test_derived_keys_depend_on_everything():
    keys = {
        derive_key(b"k" * 32, b"salt", "a", 1, "x"),
        derive_key(b"l" * 32, b"salt", "a", 1, "x"),
        derive_key(b"k" * 32, b"tlas", "a", 1, "x"),
        derive_key(b"k" * 32, b"salt", "b", 1, "x"),
        derive_key(b"k" * 32, b"salt", "a", 2, "x"),
        derive_key(b"k" * 32, b"salt", "a", 1, "y"),
        derive_key(b"k" * 32, b"salt", "a", 1),
    }
    assert len(keys) == 7 and all(len(key) == 32 for key in keys)
    assert len(derive_key(b"k" * 32, b"", "a", length=48)) == 48


SITES = [
    Participant(f"site-{i}", "site", *(bytes([first + i]) * 32 for first in (0, 16, 32, 48)), (1, 2)) for i in range(3)
]


def test_extracted_keys_give_what_is_derived_at_once():
    for secret in (b"", b"s" * 32, b"t" * 100):
        info = encode_fields(f"{DOMAIN}/purpose", 7, "context", b"bytes")
        assert expand_key(extract_key(secret), info) == derive_key(secret, b"", "purpose", 7, "context", b"bytes")


def test_transcript_depends_on_everything():
    def changed(**change: object) -> list[Participant]:
        return [SITES[0], dataclasses.replace(SITES[1], **change), SITES[2]]

    hashes = [
        hash_transcript("job", "00", b"b", 1, SITES),
        hash_transcript("jo", "b00", b"b", 1, SITES),
        hash_transcript("job", "01", b"b", 1, SITES),
        hash_transcript("job", "00", b"c", 1, SITES),
        hash_transcript("job", "00", b"b", 2, SITES),
        hash_transcript("job", "00", b"b", 1, SITES[:2]),
        hash_transcript("job", "00", b"b", 1, [SITES[1], SITES[0], SITES[2]]),
        hash_transcript("job", "00", b"b", 1, changed(site="other")),
        hash_transcript("job", "00", b"b", 1, changed(role="unsigned site")),
        hash_transcript("job", "00", b"b", 1, changed(nonce=bytes(32))),
        hash_transcript("job", "00", b"b", 1, changed(public_key=bytes(32))),
        hash_transcript("job", "00", b"b", 1, changed(certificate_fingerprint=b"")),
        hash_transcript("job", "00", b"b", 1, changed(policy_hash=bytes(32))),
        hash_transcript("job", "00", b"b", 1, changed(protocols=(1, 3))),
        hash_transcript("job", "00", b"b", 1, changed(protocols=(2, 2))),
    ]
    assert len(set(hashes)) == len(hashes)


def test_pair_secrets_are_symmetric_and_bound():
    a, b = EphemeralKey(), EphemeralKey()
    shared = a.agree(b.public)
    assert derive_pair_secret(shared, b"s", 0, 1) == derive_pair_secret(b.agree(a.public), b"s", 1, 0)
    assert derive_pair_secret(shared, b"s", 0, 1) != derive_pair_secret(shared, b"s", 0, 2)
    assert derive_pair_secret(shared, b"s", 0, 1) != derive_pair_secret(shared, b"t", 0, 1)
    assert derive_pair_secret(shared, b"s", 0, 1) != shared


def test_group_secret_needs_every_share_in_its_place():
    a, b = bytes([1]) * 32, bytes([2]) * 32
    secrets = {derive_group_secret(shares, b"s") for shares in ([a, b], [b, a], [a, a], [a + b], [a, b, b""])}
    assert len(secrets) == 5


def test_confirmations_name_their_direction():
    secret = b"k" * 32
    mac = confirm_key(secret, b"s", "pair", 0, 1)
    check_confirmation(mac, secret, b"s", "pair", 0, 1)
    wrong = [
        (mac, secret, b"s", "pair", 1, 0),  # reflected to its author
        (mac, secret, b"s", "pair", 0, 2),
        (mac, secret, b"s", "group", 0, 1),
        (mac, secret, b"t", "pair", 0, 1),
        (mac, b"l" * 32, b"s", "pair", 0, 1),
        (b"", secret, b"s", "pair", 0, 1),
        (mac[:-1], secret, b"s", "pair", 0, 1),
    ]
    for arguments in wrong:
        with pytest.raises(AuthenticationError):
            check_confirmation(*arguments)
