"""Vectors of what the parties of a job that stays say to each other, besides the messages of a prediction."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from nvflare_plugins.kinds.vertical.messages import Bits, DecisionAnswer, DecisionRequest, MoreSums, PathQuery, to_bytes
from nvflare_plugins.kinds.vertical_inference.serving import LIMITS, Question, answered, next_step, open_rows, refused
from tests.vectors.drawn import Case, at, cut_and_longer, damages

_GIVEN = {"rows": 1000, "most": 4}
_LONGEST = 128


def cases() -> Iterator[Case]:
    """Yield questions, then answers."""
    yield from _questions()
    yield from _answers()


def _questions() -> Iterator[Case]:
    def question(name: str, data: bytes) -> Case:
        return name, "serving question", {**_GIVEN, "data": data.hex()}

    asked = to_bytes(DecisionRequest(0, (PathQuery(0, 3, Bits.of(np.array([True, False]))),)))
    opened = open_rows(np.array([0, 17, 999]))
    yield question("open one row", open_rows(np.array([5])))
    yield question("open three rows", opened)
    yield question("open as many as there may be", open_rows(np.arange(4)))
    yield question("ask", bytes([Question.ASK]) + asked)
    yield question("next: another alignment", next_step("3f0c1e2a-77d0-4be1-8f2e-0a1b2c3d4e5f"))
    yield question("next: the longest id", next_step("a" * _LONGEST))
    yield question("next: the end", next_step(None))
    changes = {
        **cut_and_longer(opened),
        "no question": b"\0" + opened[1:],
        "a question that is not there": b"\4" + opened[1:],
        "no row": opened[:1],
        "too many rows": open_rows(np.arange(5)),
        "a row twice": at(opened, 5, opened[1:5]),
        "rows not in order": at(opened, 1, opened[5:9] + opened[1:5]),
        "a row that is not there": at(opened, 9, struct.pack("<I", 1000)),
    }
    yield from damages("open", "serving question", _GIVEN, changes)
    others = {"nothing": b"", "another message": to_bytes(MoreSums(0)), "cut short": asked[:-1]}
    asking = {what: bytes([Question.ASK]) + content for what, content in others.items()}
    yield from damages("ask", "serving question", _GIVEN, asking)
    ids = {
        "too long": b"a" * (_LONGEST + 1),
        "a path": b"a/b",
        "a parent": b"..",
        "no ASCII": "größe".encode(),
        "0": b"\0",
    }
    following = {what: bytes([Question.NEXT]) + content for what, content in ids.items()}
    yield from damages("next", "serving question", _GIVEN, following)


def _answers() -> Iterator[Case]:
    def answer(name: str, to: Question, data: bytes) -> Case:
        return name, "serving answer", {"to": to.name, "data": data.hex()}

    told = to_bytes(DecisionAnswer((Bits.of(np.array([True, False])),)))
    yield answer("yes to open", Question.OPEN, answered())
    yield answer("yes to next", Question.NEXT, answered())
    yield answer("bits", Question.ASK, answered(told))
    for limit in LIMITS:
        yield answer(f"refused by {limit or 'what the log says'}", Question.OPEN, refused(limit))
    yield answer("a question that came with a batch that is refused", Question.ASK, refused(LIMITS[-1]))
    changes = {
        "empty": b"",
        "neither": b"\2",
        "no limit": b"\1",
        "a limit that is not there": bytes([1, len(LIMITS)]),
        "a limit and more": b"\1\1\0",
        "bits to open": answered(told),
    }
    yield from damages("answer", "serving answer", {"to": "OPEN"}, changes)
    asked = {
        "nothing": answered(),
        "another message": answered(to_bytes(MoreSums(0))),
        "longer": answered(told + b"\0"),
    }
    yield from damages("answer to ask", "serving answer", {"to": "ASK"}, asked)
