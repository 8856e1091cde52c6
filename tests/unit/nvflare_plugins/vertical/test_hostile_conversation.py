"""Conversations with sites that die or lie and a server that changes parts: a clear error at every site."""

from __future__ import annotations

from functools import partial

import pytest

from he_processors.errors import AuthenticationError, ProtocolError, VeilBoostError
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.kinds.vertical.conversation import ConversationStep, Flag, Fragment
from nvflare_plugins.wire.envelope import Kind, pack_list, unpack, unpack_list
from tests.support.conversations import PATIENCE_S, Site, answering, ask_once, asking, converse, shout
from tests.support.federation import dies_at


def ask_both(site: Site) -> None:
    with asking(site) as talk:
        for _ in range(20):
            for rank in (1, 2):
                talk.ask(rank, b"x").result(PATIENCE_S)


@pytest.mark.parametrize("victim", ["site-1", "site-2"])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_dead_site_is_named(victim, n):
    results = converse(
        [ask_both, answering(shout), answering(shout)], tamper={victim: dies_at(Kind.CONVERSATION, n + 1)}
    )
    others = [r for rank, r in enumerate(results) if f"site-{rank + 1}" != victim]
    assert all(isinstance(r, JobAborted) and f"no message from {victim}" in str(r) for r in others)


def on_route(change):
    """Apply a change to the parts of every routed answer from the second on."""
    seen: list = []

    def tamper(data: bytes) -> bytes:
        frame = unpack(data)
        if frame.kind is not Kind.CONVERSATION or not frame.payload or frame.type.name == "ABORT":
            return data
        seen.append(frame.payload)
        if len(seen) < 2:
            return data
        parts = unpack_list(frame.payload, 3)
        payload = pack_list(change(parts, unpack_list(seen[-2], 3)))
        return type(frame)(*(payload if name == "payload" else getattr(frame, name) for name in frame.__slots__)).pack()

    return tamper


CHANGES = {
    "replayed": lambda parts, before: before,
    "withheld": lambda parts, before: [b""] * 3,
    "changed": lambda parts, before: [part[:-1] + bytes([part[-1] ^ 1]) if part else b"" for part in parts],
    "cut": lambda parts, before: [part[:20] for part in parts],
    "moved": lambda parts, before: [parts[2], b"", parts[0]] if parts[0] else [b"", parts[2], parts[1]],
    "added": lambda parts, before: [parts[0] or b"x", parts[1] or b"x", parts[2] or b"x"],
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("victim", ["site-1", "site-2"])
def test_parts_that_the_server_changes_are_noticed(name, victim):
    results = converse([ask_both, answering(shout), answering(shout)], tamper_reply={victim: on_route(CHANGES[name])})
    rank = int(victim[-1]) - 1
    assert isinstance(results[rank], (ProtocolError, AuthenticationError))
    assert all(isinstance(r, VeilBoostError) for r in results)


HOSTILE_STEPS = {
    "early_end": [ConversationStep(Flag.END, 0, 0, (Fragment(0, True, b"q"),))],
    "early_end_of_message": [ConversationStep(Flag.END, 0, 0, (Fragment(0, False, b"q"),))],
    "answer": [ConversationStep(Flag.ANSWERS, 0, 0, ())],
    "other_number": [ConversationStep(Flag.MORE, 3, 0, ())],
    "turn_back": [ConversationStep(Flag.MORE, 0, 1, ()), ConversationStep(Flag.MORE, 1, 0, ())],
    "turn_ahead": [ConversationStep(Flag.MORE, 0, 2, ())],
    "too_long": [ConversationStep(Flag.MORE, i, 0, (Fragment(0, False, bytes(1 << 20)),)) for i in range(5)],
    "garbage": [b"VLBC nonsense"],
    "part_too_long": [bytes(4 << 20)],
}


@pytest.mark.parametrize("name", HOSTILE_STEPS)
def test_a_hostile_asking_site_is_refused(name):
    def lead(site: Site):
        for step in HOSTILE_STEPS[name]:
            plain = step if isinstance(step, bytes) else step.to_bytes()
            part = site.session.seal_for(1, plain, "test")
            site.channel.route(Kind.CONVERSATION, [b"", part])
        site.channel.gather(Kind.CLOSING, b"")

    results = converse([lead, answering(shout)])
    assert isinstance(results[1], ProtocolError), results


HOSTILE_ANSWERS = {
    "unasked": ConversationStep(Flag.ANSWERS, 0, 0, (Fragment(0, True, b"a"), Fragment(1, True, b"b"))),
    "question": ConversationStep(Flag.MORE, 0, 0, ()),
    "other_number": ConversationStep(Flag.ANSWERS, 1, 0, ()),
    "garbage": b"",
}


@pytest.mark.parametrize("name", HOSTILE_ANSWERS)
def test_a_hostile_answering_site_is_refused(name):
    step = HOSTILE_ANSWERS[name]

    def liar(site: Site):
        part = site.session.seal_for(0, step if isinstance(step, bytes) else step.to_bytes(), "test")
        site.channel.route(Kind.CONVERSATION, [part, b""])
        site.channel.route(Kind.CONVERSATION, [b"", b""])

    results = converse([ask_once, liar])
    assert isinstance(results[0], ProtocolError), results


def test_parts_of_another_conversation_do_not_open():
    results = converse([ask_once, answering(shout, purpose="other")])
    assert any(isinstance(r, AuthenticationError) for r in results)


def test_an_answer_that_cannot_be_read_fails_its_question():
    def read(answer: bytes):
        raise ProtocolError("not a message")

    results = converse([partial(ask_once, read=read), answering(shout)])
    assert isinstance(results[0], ProtocolError) and "not a message" in str(results[0])
