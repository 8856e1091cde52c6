"""Any bytes in place of a hello, a proof or a sealed message: a named error or a valid value, nothing else."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.key_agreement import SealedBox
from nvflare_plugins.attempt.session import Hello, Proof
from nvflare_plugins.data.schema import Column, Schema
from tests.support.examples import examples
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
@settings(max_examples=examples(400))
def test_hello(data):
    try:
        hello = Hello.unpack(data)
    except ProtocolError:
        return
    assert hello.pack() == data, "what is accepted has one encoding only"


def test_hello_round_trip():
    assert Hello.unpack(PACKED) == HELLO


@given(st.one_of(st.binary(max_size=200), damaged(Proof(b"m" * 32, b"s" * 61).pack())))
@settings(max_examples=examples(200))
def test_proof(data):
    try:
        proof = Proof.unpack(data)
    except ProtocolError:
        return
    assert proof.pack() == data


@given(st.one_of(st.binary(max_size=100), damaged(SEALED)))
@settings(max_examples=examples(200))
def test_sealed_message(data):
    if data == SEALED:
        return
    try:
        SealedBox(b"k" * 32, b"s" * 32, 0, 1).open(data)
    except (ProtocolError, AuthenticationError):
        return
    raise AssertionError("a changed message opened")


# -- ciphertexts -------------------------------------------------------------------------------------------------------
# The cases run in a process of their own: if one could crash the C++ library, the test fails instead of the test run.


FUZZ = """
import sys
import numpy as np
from he_processors import bfv, ckks
from he_processors.errors import ProtocolError

module = {"bfv": bfv, "ckks": ckks}[sys.argv[1]]
kind = {"bfv": bfv.BfvProcessor, "ckks": ckks.CkksProcessor}[sys.argv[1]]
rng = np.random.default_rng(int(sys.argv[2]))
secret = kind.generate(3)
site = kind(secret)
public = site.public_parameters()
good = {"payload": site.encrypt(np.arange(-50, 50)), "public": public, "secret": secret}


def damage(data):
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        header = rng.random() < 0.5  # half of the damage goes to the few bytes that steer the rest
        start = int(rng.integers(0, 40 if header else len(data) + 1))
        choice = rng.integers(4)
        if choice == 0:
            data[start : start + int(rng.integers(1, 9))] = rng.bytes(int(rng.integers(0, 9)))
        elif choice == 1:
            data[start : start + 8] = rng.choice([b"\\xff" * 8, bytes(8), b"\\0\\0\\0\\x80" * 2])
        elif choice == 2:
            del data[start:]
        else:
            data += rng.bytes(int(rng.integers(1, 2000)))
    return bytes(data)


accepted = refused = 0
for _ in range(int(sys.argv[3])):
    bad = {name: damage(data) for name, data in good.items()}
    noise = rng.bytes(int(rng.integers(0, 200)))
    attempts = [
        lambda: module.add_ciphertexts(public, [good["payload"], bad["payload"]]),
        lambda: module.add_ciphertexts(bad["public"], [good["payload"]] * 2),
        lambda: site.decrypt(bad["payload"], 100),
        lambda: site.decrypt(noise, 100),
        lambda: kind(bad["secret"]).encrypt(np.arange(3)),
        lambda: kind(noise),
    ]
    for attempt in attempts:
        try:
            attempt()
            accepted += 1
        except ProtocolError:
            refused += 1
print(accepted, refused)
"""


@pytest.mark.parametrize("scheme", ["bfv", "ckks"])
def test_hostile_bytes_are_refused_or_harmless(scheme):
    arguments = [sys.executable, "-c", FUZZ, scheme, "1", "150"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    _accepted, refused = map(int, result.stdout.split())
    assert refused > 400, "most damage must be noticed; the rest is damage to residues, which only noise can show"


# -- schemas -----------------------------------------------------------------------------------------------------------


PRINTABLE = st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ")
names = st.text(PRINTABLE, min_size=1, max_size=12)
lists = st.lists(names, min_size=1, max_size=4, unique=True).map(tuple)
column_lists = st.lists(
    st.one_of(st.builds(Column, names, st.just("float")), st.builds(Column, names, st.just("c"), lists)),
    min_size=1,
    max_size=5,
    unique_by=lambda column: column.name,
).map(tuple)
schemas = st.builds(Schema, column_lists, names, st.none() | lists, st.none() | names)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda v: st.lists(v, max_size=3), max_leaves=5
)


@given(schemas)
def test_round_trip(schema: Schema) -> None:
    assert Schema.from_bytes(schema.to_bytes()) == schema


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_cleanly(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        Schema.from_bytes(payload)


@settings(max_examples=examples(200))
@given(schemas, st.sampled_from(["version", "columns", "label", "label_classes", "weight", "more"]), json_values)
def test_any_changed_field_is_valid_or_refused(schema: Schema, key: str, value: object) -> None:
    document = json.loads(schema.to_bytes()) | {key: value}
    payload = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    with contextlib.suppress(ProtocolError):
        assert Schema.from_bytes(payload).to_bytes() == payload


@given(schemas, st.data())
def test_a_flipped_byte_is_valid_or_refused(schema: Schema, data: st.DataObject) -> None:
    payload = bytearray(schema.to_bytes())
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        assert Schema.from_bytes(bytes(payload)).to_bytes() == bytes(payload)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b + b" ",
        lambda b: b.replace(b'"label":', b'"label":"x","label":'),
        lambda b: b"[" * 100_000,
        lambda b: b" " * (16 * 2**20 + 1),
        lambda b: b.replace(b'"age"', b'"a\\ud800e"'),
        lambda b: b.replace(b'"age"', b'"a\\u000ae"'),
        lambda b: b.replace(b'"version":1', b'"version":true'),
    ],
)
def test_known_tricks(change) -> None:  # type: ignore[no-untyped-def]
    payload = Schema((Column("age", "float"),), "y").to_bytes()
    Schema.from_bytes(payload)
    with pytest.raises(ProtocolError):
        Schema.from_bytes(change(payload))
