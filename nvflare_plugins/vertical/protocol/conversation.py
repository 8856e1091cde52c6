"""A lock-step conversation over routed exchanges: one site asks, the others answer.

All sites meet at every exchange of the channel, so questions and answers travel in steps. In each step the asking site
sends every other site a sealed part with the questions that are ready, and says how to go on:

* MORE: take the next step at once, with whatever answers are ready. More questions follow.
* COLLECT: take the next step when all questions are answered, or after a moment with those that are.
* END: the conversation is over.

The answering sites work in a thread of their own, so that computing and transfer overlap: questions that are asked
together and answered in a moment take two steps, and while a site computes for longer, what it has done travels.
Messages longer than a step travel in fragments; queues are bounded, so memory is. Nobody is silent for long: a site
that still computes takes part in empty steps, so that the deadline of an exchange tells a dead site from a slow one.

Messages are opaque bytes here. Training, alignment and inference use the same two sides: the asking one in
``requester.py``, the answering one in ``responder.py``; here is what both hold.

Security: every part is sealed for its one receiver and numbered; a part that is missing, replayed, reordered or of
    another conversation ends the job. The server sees sizes and times.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from he_processors.errors import JobAborted, ProtocolError
from nvflare_plugins.failures import machine_failure, reason_of
from nvflare_plugins.vertical.protocol.fragmentation import ConversationStep, Flag, Inbox, Outbox
from nvflare_plugins.wire.catalogue import Kind

_log = logging.getLogger(__name__)
MIB = 1 << 20
_OVERHEAD_BYTES = 2 * MIB  # of a part: its header, and those of as many fragments as a step may have


class RoutingChannel(Protocol):
    """What a conversation needs of ``nvflare_plugins.wire.channel.Channel``."""

    sites: tuple[str, ...]
    rank: int
    world: int

    def route(self, kind: Kind, parts: list[bytes]) -> list[bytes]: ...


class PairSeal(Protocol):
    """What a conversation needs of a session."""

    def seal_for(self, rank: int, plaintext: bytes, purpose: str) -> bytes: ...

    def open_of(self, rank: int, sealed: bytes, purpose: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class FlowControl:
    """Sizes and times of a conversation; equal at all sites. Units: bytes, seconds.

    Attributes:
        frame_bytes: content that one site sends in one step, over all receivers.
        flush_bytes: so much waits before it is sent without anyone waiting for answers.
        queue_bytes: so much may wait at either side before the sender is made to wait.
        message_bytes: longest message that may come.
        patience_s: longest silence of a site that is alive; shorter than the deadline of an exchange.
        linger_s: so long an answer waits for those that come after it.
        idle_s: so long the asking site's work may ask nothing while nothing is unanswered; else it is taken to hang.
    """

    frame_bytes: int = 48 * MIB
    flush_bytes: int = MIB
    queue_bytes: int = 128 * MIB
    message_bytes: int = 64 * MIB
    patience_s: float = 20.0
    linger_s: float = 0.25
    idle_s: float = 3600.0

    @classmethod
    def within(cls, deadline_s: float) -> FlowControl:
        """Return a pace that fits exchanges of this deadline."""
        return cls(patience_s=min(cls().patience_s, deadline_s / 4))

    def part_bytes(self, world: int) -> int:
        """Return the content of one part of the asking site."""
        return max(self.frame_bytes // max(world - 1, 1), MIB)


def ended_by(error: Exception) -> JobAborted:
    """Return what ends the job after an error that is none of ours; a defect goes into this site's own log."""
    if machine_failure(error) is None:
        _log.error("the conversation failed", exc_info=error)
    return aborted_by(error)


def aborted_by(error: Exception) -> JobAborted:
    """Return an error that may be told to other parties."""
    return JobAborted(machine_failure(error) or f"{reason_of(error)}; see the log of that site")


class Line:
    """One site's end of the sealed line to one other site."""

    def __init__(self, session: PairSeal, rank: int, purpose: str, pace: FlowControl):
        self.rank = rank
        self.outbox, self.inbox = Outbox(), Inbox(pace.message_bytes)
        self._session, self._purpose = session, purpose
        self._most = max(pace.frame_bytes, MIB) + _OVERHEAD_BYTES
        self._step = 0

    def seal(self, flag: Flag, turn: int, limit: int) -> bytes:
        step = ConversationStep(flag, self._step, turn, self.outbox.take(limit))
        return self._session.seal_for(self.rank, step.to_bytes(), self._purpose)

    def open(self, sealed: bytes) -> tuple[ConversationStep, list[bytes]]:
        if len(sealed) > self._most:
            raise ProtocolError("a part of a conversation is longer than any may be")
        step = ConversationStep.from_bytes(self._session.open_of(self.rank, sealed, self._purpose))
        if step.number != self._step:
            raise ProtocolError("a part of a conversation is missing")
        self._step += 1
        return step, self.inbox.put(step.fragments)
