"""Steps of a conversation and fragments of messages: exactly what was sent comes back, anything else is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.kinds.vertical.conversation import ConversationStep, Flag, Fragment, Inbox, Outbox

FRAGMENTS = st.builds(Fragment, st.integers(0, 1 << 40), st.booleans(), st.binary(max_size=40))
STEPS = st.builds(
    ConversationStep,
    st.sampled_from(Flag),
    st.integers(0, 1 << 60),
    st.integers(0, 1 << 30),
    st.lists(FRAGMENTS, max_size=5).map(tuple),
)


@given(STEPS)
def test_steps_come_back(step):
    assert ConversationStep.from_bytes(step.to_bytes()) == step


@given(STEPS, st.data())
def test_changed_steps_are_refused_or_other_steps(step, data):
    raw = bytearray(step.to_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        assert ConversationStep.from_bytes(bytes(raw)).to_bytes() == bytes(raw)


@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused(data):
    for raw in (data, ConversationStep(Flag.MORE, 0, 0, ()).to_bytes()[:18] + data):
        with contextlib.suppress(ProtocolError):
            assert ConversationStep.from_bytes(raw).to_bytes() == raw


@given(STEPS, st.integers(0, 300))
def test_cut_and_prolonged_steps_are_refused(step, size):
    raw = step.to_bytes()
    for other in (raw[:size], raw + b"\0"):
        if other != raw:
            with pytest.raises(ProtocolError):
                ConversationStep.from_bytes(other)


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_messages_in_fragments_of_any_size_come_back(messages, limits):
    outbox, inbox, received = Outbox(), Inbox(1 << 20), []
    for message in messages:
        outbox.put(message)
    for i in range(10_000):
        if not outbox.n_bytes:
            break
        limit = limits[i % len(limits)]
        fragments = outbox.take(limit)
        assert sum(len(f.data) for f in fragments) <= limit
        received += inbox.put(fragments)
    assert received == messages and not inbox.is_open and outbox.take(1) == ()


@pytest.mark.parametrize(
    "fragments",
    [
        [Fragment(1, True, b"a")],
        [Fragment(0, False, b"a"), Fragment(1, True, b"b")],
        [Fragment(0, True, b"a"), Fragment(0, True, b"a")],
        [Fragment(0, False, b"")],
        [Fragment(0, False, b"x" * 60), Fragment(0, True, b"x" * 60)],
    ],
    ids=["skipped", "unfinished", "replayed", "endless", "too_long"],
)
def test_fragments_out_of_place_are_refused(fragments):
    with pytest.raises(ProtocolError):
        Inbox(100).put(tuple(fragments))
