"""A lock-step conversation over routed exchanges: one site asks, the others answer."""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, Self, TypeVar

from he_processors.errors import ProtocolError
from he_processors.histogram.planner import BinLayout
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.base.failures import machine_failure, reason_of
from nvflare_plugins.kinds.vertical.protocol.messages import Answer, PartySchema, Request
from nvflare_plugins.wire.envelope import Kind

# The parts that sites exchange in one step of a conversation, and messages cut into fragments that fit.
#
# Bytes from a peer are either exactly a step or a ``ProtocolError``.


_HEADER = struct.Struct("<4sBBQII")
_FRAGMENT = struct.Struct("<QBQ")
_MAGIC, _VERSION = b"VLBC", 1
MAX_FRAGMENTS = 1 << 16


class Flag(IntEnum):
    """Who sends a step, and how the asking site goes on."""

    MORE = 1
    COLLECT = 2
    END = 3
    ANSWERS = 4


_FLAGS = frozenset(flag.value for flag in Flag)


@dataclass(frozen=True, slots=True, repr=False)
class Fragment:
    """A piece of a message. Messages of one direction are numbered from 0."""

    message: int
    is_last: bool
    data: bytes


@dataclass(frozen=True, slots=True, repr=False)
class ConversationStep:
    """What one site sends another in one exchange.

    Attributes:
        number: of the step in this conversation.
        turn: of the asking site, for example the boosting round.
    """

    flag: Flag
    number: int
    turn: int
    fragments: tuple[Fragment, ...]

    def to_bytes(self) -> bytes:
        """Return the bytes that are sealed."""
        parts = [_HEADER.pack(_MAGIC, _VERSION, self.flag, self.number, self.turn, len(self.fragments))]
        for fragment in self.fragments:
            parts += [_FRAGMENT.pack(fragment.message, fragment.is_last, len(fragment.data)), fragment.data]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a step strictly. Raises: ProtocolError."""
        if len(data) < _HEADER.size:
            raise ProtocolError("a step of a conversation is shorter than its header")
        magic, version, flag, number, turn, n_fragments = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or flag not in _FLAGS or n_fragments > MAX_FRAGMENTS:
            raise ProtocolError("not a step of a conversation of this version")
        fragments, position = [], _HEADER.size
        for _ in range(n_fragments):
            if position + _FRAGMENT.size > len(data):
                raise ProtocolError("a step of a conversation is cut short")
            message, is_last, size = _FRAGMENT.unpack_from(data, position)
            start = position + _FRAGMENT.size
            position = start + size
            if is_last > 1 or position > len(data):
                raise ProtocolError("a step of a conversation is cut short")
            fragments.append(Fragment(message, bool(is_last), data[start:position]))
        if position != len(data):
            raise ProtocolError("a step of a conversation has trailing bytes")
        return cls(Flag(flag), number, turn, tuple(fragments))


class Outbox:
    """Messages on their way out, in order."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._number = 0  # of the first waiting message
        self._offset = 0  # how much of it has gone
        self.n_bytes = 0

    def put(self, message: bytes) -> None:
        """Queue a message."""
        self._waiting.append(message)
        self.n_bytes += max(len(message), 1)  # an empty message waits too

    def take(self, limit: int) -> tuple[Fragment, ...]:
        """Return fragments of at most ``limit`` bytes of content, and forget them."""
        taken: list[Fragment] = []
        while self._waiting and limit > 0 and len(taken) < MAX_FRAGMENTS:
            message = self._waiting[0]
            end = min(self._offset + limit, len(message))
            is_last = end == len(message)
            taken.append(Fragment(self._number, is_last, message[self._offset : end]))
            gone = end - self._offset
            limit -= gone
            self.n_bytes -= gone if message else 1
            self._offset = end
            if is_last:
                self._waiting.popleft()
                self._number, self._offset = self._number + 1, 0
        return tuple(taken)


class Inbox:
    """Puts fragments of messages together."""

    def __init__(self, message_bytes: int) -> None:
        self.most = message_bytes
        self._number = 0
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def is_open(self) -> bool:
        """Whether the rest of a message is still due."""
        return bool(self._parts)

    def put(self, fragments: tuple[Fragment, ...]) -> list[bytes]:
        """Take fragments; return the messages that are whole now.

        Raises:
            ProtocolError: a fragment that is not the next one, or a message that is too long.
        """
        whole = []
        for fragment in fragments:
            self._size += len(fragment.data)
            if fragment.message != self._number or not (fragment.data or fragment.is_last):
                raise ProtocolError("a fragment of a message is not the one that is due")
            if self._size > self.most:
                raise ProtocolError("a message of a conversation is too long")
            self._parts.append(fragment.data)
            if fragment.is_last:
                whole.append(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
                self._parts, self._size, self._number = [], 0, self._number + 1
        return whole


# A lock-step conversation over routed exchanges: one site asks, the others answer.
#
# All sites meet at every exchange of the channel, so questions and answers travel in steps. In each step the asking
# site sends every other site a sealed part with the questions that are ready, and says how to go on:
#
# * MORE: take the next step at once, with whatever answers are ready. More questions follow. * COLLECT: take the next
# step when all questions are answered, or after a moment with those that are. * END: the conversation is over.
#
# The answering sites work in a thread of their own, so that computing and transfer overlap: questions that are asked
# together and answered in a moment take two steps, and while a site computes for longer, what it has done travels.
# Messages longer than a step travel in fragments; queues are bounded, so memory is. Nobody is silent for long: a site
# that still computes takes part in empty steps, so that the deadline of an exchange tells a dead site from a slow one.
#
# Messages are opaque bytes here. Training, alignment and inference use the same two sides: the asking one in
# ``requester.py``, the answering one in ``responder.py``; here is what both hold.
#
# Security: every part is sealed for its one receiver and numbered; a part that is missing, replayed, reordered or of
# another conversation ends the job. The server sees sizes and times.


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


# The blocks of features in which sums travel: each is sent as soon as it is done.
#
# Both sides derive them from what both know, so that none is named on the way. A passive party holds the sums of one or
# two blocks and not those of a level, and the active party opens one block while the next is added up.


MOST_SLOTS = (
    1 << 15
)  # of all nodes in a block: some 30 MB of ciphertexts of Paillier-3072, and thrice that while packed
MOST_ADDITIONS = 1 << 20  # to a block: about a second of Paillier, a tenth of one of elgamal
_STEP = 2  # features that can share cells (histogram/planner.py)


def feature_blocks(layout: BinLayout, n_nodes: int, n_rows: int, is_streamed: bool = True) -> tuple[slice, ...]:
    """Divide the features of a tree.

    Args:
        layout: of the features that the tree uses.
        n_nodes: whose sums are asked for.
        n_rows: most rows that these nodes hold together.
        is_streamed: False for a scheme whose sums cost less than dividing them.

    Returns:
        Features by position in the layout, in order; each block holds two, more where they fit, or the last one.
    """
    n_features, starts = layout.n_features, layout.starts
    if not is_streamed:
        return (slice(0, n_features),)
    blocks, start = [], 0
    while start < n_features:
        end = start + _STEP
        while end < n_features:
            further = min(end + _STEP, n_features)
            n_slots = n_nodes * int(starts[further] - starts[start])
            if n_slots > MOST_SLOTS or n_rows * (further - start) > MOST_ADDITIONS:
                break
            end = further
        blocks.append(slice(start, min(end, n_features)))
        start = end
    return tuple(blocks)


def layout_of(layout: BinLayout, block: slice) -> BinLayout:
    """Return the layout of a block's features."""
    return BinLayout(layout.n_bins[block])


def most_slots(n_bins: Sequence[int], n_nodes: int, is_streamed: bool = True) -> int:
    """Return the most slots of one block, whichever of the features a tree uses.

    Args:
        n_bins: of each of the party's features.
        n_nodes: whose sums are asked for at most.
    """
    slots = sorted((n + 1 for n in n_bins), reverse=True)  # one more for rows without a value
    if not is_streamed:
        return n_nodes * sum(slots)
    return n_nodes * min(sum(slots), max(sum(slots[:_STEP]), MOST_SLOTS // n_nodes))


# How the active party reaches the passive ones: a request goes out, its answer is collected later.


A = TypeVar("A", bound=Answer | None)


class PassiveLink(Protocol):
    """Carries requests to one passive party in order; FLARE's transport seals them end to end."""

    def ask(self, request: Request) -> Future[Answer | None]:
        """Send a request; do not wait. The future fails with a VeilBoostError if the party or the way to it does."""

    def flush(self) -> None:
        """Let requests go that wait for further ones to travel with; waiting for an answer does as much."""


@dataclass(frozen=True, slots=True)
class Party:
    """One passive party as the active party knows it.

    Attributes:
        first_column: where its columns start among those of all parties.
    """

    name: str
    schema: PartySchema
    first_column: int
    link: PassiveLink

    @property
    def columns(self) -> slice:
        """Return the party's place among the columns of all parties."""
        return slice(self.first_column, self.first_column + len(self.schema.n_bins))


def place_parties(
    n_own_columns: int, introductions: Sequence[tuple[str, PartySchema, PassiveLink]]
) -> tuple[Party, ...]:
    """Order the columns of all parties: the active party's first, then each passive party's."""
    parties, column = [], n_own_columns
    for name, schema, link in introductions:
        parties.append(Party(name, schema, column, link))
        column += len(schema.n_bins)
    return tuple(parties)


def collect(party: Party, future: Future[Any], expected: type[A], deadline_s: float) -> A:
    """Wait for an answer of the expected type.

    Raises:
        JobAborted: none came in time.
        ProtocolError: another type of answer came.
    """
    try:
        answer = future.result(deadline_s)
    except FutureTimeout:
        raise JobAborted(f"{party.name} did not answer within {deadline_s:.0f} s") from None
    if not isinstance(answer, expected):
        raise ProtocolError(f"{party.name} answered with {type(answer).__name__} where {expected.__name__} is due")
    return answer
