"""Vertical messages: what is written reads back, and hostile bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.kinds.vertical import messages
from tests.support.examples import examples

NODES = st.integers(0, 1 << 24)
BITS = st.lists(st.booleans(), max_size=40).map(lambda values: messages.Bits.of(np.array(values, dtype=bool)))
BLOBS = st.binary(max_size=60)


def tuples(strategy, least=0):
    return st.lists(strategy, min_size=least, max_size=5).map(tuple)


@st.composite
def schemas(draw):
    aliases = draw(st.lists(st.text(max_size=8), min_size=1, max_size=5, unique=True))
    n_bins = draw(st.lists(st.integers(1, 65_535), min_size=len(aliases), max_size=len(aliases)))
    lists = [tuple(f"w{i}" for i in range(n)) if n < 9 and draw(st.booleans()) else () for n in n_bins]
    return messages.PartySchema(draw(tuples(st.integers(0, 2**31 - 1), 1)), tuple(n_bins), tuple(aliases), tuple(lists))


MESSAGES = st.one_of(
    schemas(),
    st.builds(messages.TrainingSetup, st.integers(0, 255), st.integers(0, 62), st.integers(1, 2**31 - 1), BLOBS),
    st.builds(messages.TreeGradients, NODES, BITS, BLOBS),
    st.builds(messages.MoreGradients, NODES, BLOBS),
    st.builds(
        messages.HistogramRequest,
        NODES,
        tuples(st.builds(messages.NodePartition, NODES, NODES, NODES, BITS)),
        tuples(st.builds(messages.OwnDivision, NODES, NODES, NODES)),
    ),
    st.builds(messages.MoreSums, NODES),
    st.builds(messages.HistogramAnswer, NODES, tuples(NODES), BLOBS, tuples(NODES)),
    st.builds(
        messages.SplitRequest,
        NODES,
        tuples(
            st.builds(
                messages.OwnedSplit,
                NODES,
                st.integers(0, 1 << 20),
                st.integers(-1, 65_535),
                st.booleans(),
                tuples(st.integers(0, 65_535)),
            )
        ),
    ),
    st.builds(messages.SplitAnswer, NODES, tuples(BITS)),
    st.builds(messages.DecisionRequest, NODES, tuples(st.builds(messages.PathQuery, NODES, NODES, BITS))),
    st.builds(messages.DecisionAnswer, tuples(BITS)),
    st.builds(messages.Transfers, BLOBS, BLOBS),
    st.builds(messages.TransfersAnswer, BLOBS, BLOBS),
    st.builds(messages.SealedRequest, NODES, st.integers(0, 2), tuples(NODES), BLOBS),
    st.builds(messages.SealedAnswer, NODES, BLOBS),
)


@given(MESSAGES)
def test_messages_read_back(message):
    assert messages.from_bytes(messages.to_bytes(message)) == message


@given(st.lists(st.booleans(), max_size=100))
def test_bits_read_back(values):
    assert messages.Bits.of(np.array(values, dtype=bool)).unpack().tolist() == values


@given(st.binary(max_size=80), st.integers(0, 17))
def test_any_bytes_are_a_message_or_refused(body, code):
    for data in (body, b"VLBV\x02" + bytes([code]) + body):
        try:
            message = messages.from_bytes(data)
        except ProtocolError:
            continue
        assert messages.to_bytes(message) == data  # every accepted form is the one form


@settings(max_examples=examples(200))
@given(MESSAGES, st.data())
def test_every_changed_message_is_refused_or_another_message(message, data):
    encoded = messages.to_bytes(message)
    position = data.draw(st.integers(0, len(encoded) - 1))
    changed = bytearray(encoded)
    changed[position] ^= data.draw(st.integers(1, 255))
    try:
        other = messages.from_bytes(bytes(changed))
    except ProtocolError:
        return
    assert other != message and messages.to_bytes(other) == bytes(changed)


@given(MESSAGES, st.data())
def test_cut_and_extended_messages_are_refused(message, data):
    encoded = messages.to_bytes(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    for broken in (encoded[:cut], encoded + b"\0"):
        with pytest.raises(ProtocolError):
            messages.from_bytes(broken)


def test_a_huge_announced_list_costs_no_memory():
    with pytest.raises(ProtocolError):
        messages.from_bytes(messages.to_bytes(messages.DecisionAnswer(()))[:-4] + b"\xff\xff\xff\x00")


def test_two_columns_of_one_name_are_refused():
    with pytest.raises(ProtocolError):
        messages.from_bytes(messages.to_bytes(messages.PartySchema((5,), (2, 2), ("a", "a"))))
