"""Schema documents of hostile peers: valid and canonical, or ProtocolError."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.data.schema import Column, Schema
from tests.support.examples import examples

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
