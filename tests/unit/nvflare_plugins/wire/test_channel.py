"""A channel believes no answer of the server that is not one to its own frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from he_processors.errors import CapacityExceeded, ProtocolError
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.wire.channel import _ROOM_BESIDE, Channel, RescaleRequested
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Kind, pack_list, unpack

SITES = ("a", "b", "c")
ATTEMPT = b"attempt of tests"


class Answering:
    """A server that answers what the test says; ``sent`` counts the frames."""

    def __init__(self, answer: Callable[[Frame], Frame]) -> None:
        self.sent, self._answer = 0, answer

    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        self.sent += 1
        return self._answer(unpack(data)).pack()


def channel(answer: Callable[[Frame], Frame], site: str = "b") -> tuple[Channel, Answering]:
    server = Answering(answer)
    return Channel(site, SITES, "job", ATTEMPT, server, 5.0), server


def result(frame: Frame, **changes: object) -> Frame:
    return replace(frame, **{"type": FrameType.RESULT, "payload": pack_list([b""] * 3), **changes})


GATHER = (lambda of: of.gather(Kind.HANDSHAKE, b"x"), ProtocolError)
SUM = (lambda of: of.sum(Kind.CUT_COUNTS, Codec.MASKED, bytes(8), 1), RescaleRequested)
ASK = (lambda of: of.request_rescale(Kind.HISTOGRAM, Codec.MASKED, 1), ProtocolError)
ROUTE = (lambda of: of.route(Kind.CONVERSATION, [b"x", b"", b"x"]), ProtocolError)


@pytest.mark.parametrize(
    ("call", "changes", "words"),
    [
        (GATHER, {"attempt": b"another attempt!"}, "another job attempt"),
        (GATHER, {"type": FrameType.CONTRIBUTION}, "or type"),
        (GATHER, {"counter": 7}, "belongs elsewhere"),
        (GATHER, {"type": FrameType.RESCALE, "payload": b""}, "has no scale"),
        (SUM, {"type": FrameType.RESCALE, "payload": b""}, "CUT_COUNTS"),
        (ASK, {"payload": bytes(8)}, "with a sum"),
        (ROUTE, {"payload": pack_list([b"x", b"mine", b"x"])}, "of this site's own"),
    ],
    ids=["attempt", "type", "counter", "scale of no sum", "scale of counts", "sum for a scale", "own part"],
)
def test_an_answer_to_something_else_is_refused(call, changes: dict, words: str) -> None:
    ask, error = call
    of, _ = channel(lambda frame: result(frame, **changes))
    with pytest.raises(error, match=words):
        ask(of)


def test_an_abort_is_told_in_the_servers_words() -> None:
    of, _ = channel(lambda frame: result(frame, type=FrameType.ABORT, payload=b"c: the disk is full"))
    with pytest.raises(JobAborted, match="the disk is full"):
        of.gather(Kind.HANDSHAKE, b"x")


@pytest.mark.parametrize("parts", [[b"x", b""], [b"x", b"own", b"x"]], ids=["too few", "own"])
def test_parts_that_fit_no_group_are_not_sent(parts: list[bytes]) -> None:
    of, server = channel(result)
    with pytest.raises(ValueError, match="one part for each site"):
        of.route(Kind.CONVERSATION, parts)
    assert not server.sent


def test_a_message_that_is_too_long_is_refused_by_name_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gigabytes by default: a shorter one travels in pieces."""
    of, server = channel(result)
    monkeypatch.setattr("nvflare_plugins.wire.channel.MAX_FRAME_BYTES", _ROOM_BESIDE + 80)
    of.sum(Kind.HISTOGRAM, Codec.MASKED, bytes(80), 10)
    with pytest.raises(CapacityExceeded, match=r"HISTOGRAM \(setup:0\): a message of 88 bytes.*max_depth"):
        of.sum(Kind.HISTOGRAM, Codec.MASKED, bytes(88), 11)
    assert server.sent == 1


@pytest.mark.parametrize(("site", "content"), [("a", None), ("b", b"x")])
def test_only_rank_0_broadcasts(site: str, content: bytes | None) -> None:
    of, server = channel(result, site)
    with pytest.raises(ValueError, match="exactly rank 0"):
        of.broadcast(Kind.HE_SECRET, content)
    assert not server.sent
