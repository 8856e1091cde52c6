"""Split candidates: our form is one that XGBoost reads, XGBoost's is one that we read, anything else is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.wire.expand_entries import ENTRY_SIZE, ExpandEntry, pack_entry, unpack_entry

REALS = st.floats(width=32, allow_nan=False)
DOUBLES = st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False))
ENTRIES = st.builds(
    ExpandEntry,
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    REALS,
    st.integers(0, 2**31 - 1),
    st.booleans(),
    REALS,
    DOUBLES,
    DOUBLES,
)


@given(ENTRIES)
def test_entries_read_back_in_one_length(entry):
    data = pack_entry(entry)
    assert unpack_entry(data) == entry and len(data) == ENTRY_SIZE


def test_short_integers_as_xgboost_writes_them():
    entry = ExpandEntry(3, 1, 0.5, 7, False, 0.25, (1.0, 2.0), (3.0, 4.0))
    long_form = pack_entry(entry)
    short = long_form
    for value in (1, 3, 0, 7):
        short = short.replace(b"L" + struct.pack(">q", value), b"i" + struct.pack(">b", value), 1)
    assert len(short) < len(long_form) and unpack_entry(short) == entry


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(data):
    with pytest.raises(ProtocolError):
        unpack_entry(data)


@given(ENTRIES, st.data())
def test_every_changed_byte_is_refused_or_another_entry(entry, data):
    encoded = bytearray(pack_entry(entry))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        other = unpack_entry(bytes(encoded))
    except ProtocolError:
        return
    assert pack_entry(other) != pack_entry(entry) or other != other


@pytest.mark.parametrize("cut", [0, 1, ENTRY_SIZE // 2, ENTRY_SIZE - 1])
def test_cut_and_extended_entries_are_refused(cut):
    data = pack_entry(ExpandEntry(0, 0))
    for broken in (data[:cut], data + b"}"):
        with pytest.raises(ProtocolError):
            unpack_entry(broken)


@pytest.mark.parametrize(
    ("held", "offered", "is_replaced"),
    [
        ((1.0, 5), (2.0, 9), True),
        ((2.0, 5), (1.0, 1), False),
        ((2.0, 5), (2.0, 9), False),
        ((2.0, 5), (2.0, 1), True),
        ((0.0, 0), (0.0, 3), False),
        ((1.0, 5), (np.inf, 1), False),
        ((1.0, 5), (-np.inf, 1), False),
    ],
)
def test_replacement_rule(held, offered, is_replaced):
    first, second = (ExpandEntry(0, 0, change, feature) for change, feature in (held, offered))
    assert first.is_replaced_by(second) == is_replaced
