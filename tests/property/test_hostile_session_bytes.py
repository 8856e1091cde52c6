"""Any bytes in place of a hello, a proof or a sealed message: a named error or a valid value, nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.key_agreement import SealedBox
from nvflare_plugins.attempt.session import Hello, Proof
from tests.support.sessions import Policy, signed_sites

HELLO = Hello.new(signed_sites(1)[0], b"k" * 32, Policy(), "horizontal", b"b" * 32)
PACKED = HELLO.pack()
SEALED = SealedBox(b"k" * 32, b"s" * 32, 0, 1).seal(b"content")


@st.composite
def damaged(draw, good: bytes):
    """Good bytes with some of them cut, replaced, inserted or doubled."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 16)))
        data[start:end] = draw(st.binary(max_size=16))
    return bytes(data)


@given(st.one_of(st.binary(max_size=300), damaged(PACKED)))
@settings(max_examples=400, deadline=None)
def test_hello(data):
    try:
        hello = Hello.unpack(data)
    except ProtocolError:
        return
    assert hello.pack() == data, "what is accepted has one encoding only"


def test_hello_round_trip():
    assert Hello.unpack(PACKED) == HELLO


@given(st.one_of(st.binary(max_size=200), damaged(Proof(b"m" * 32, b"s" * 61).pack())))
@settings(max_examples=200, deadline=None)
def test_proof(data):
    try:
        proof = Proof.unpack(data)
    except ProtocolError:
        return
    assert proof.pack() == data


@given(st.one_of(st.binary(max_size=100), damaged(SEALED)))
@settings(max_examples=200, deadline=None)
def test_sealed_message(data):
    if data == SEALED:
        return
    try:
        SealedBox(b"k" * 32, b"s" * 32, 0, 1).open(data)
    except (ProtocolError, AuthenticationError):
        return
    raise AssertionError("a changed message opened")
