"""A lock-step conversation over routed exchanges: one site asks, the others answer."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Self

from he_processors.errors import ProtocolError, VeilBoostError
from nvflare_plugins.attempt.session import Session
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.errors import JobAborted, machine_failure, reason_of
from nvflare_plugins.wire.channel import Channel
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
# Messages are opaque bytes here. Training, alignment and inference use the same two sides: ``Requester`` asks,
# ``Responder`` answers.
#
# Security: every part is sealed for its one receiver and numbered; a part that is missing, replayed, reordered or of
# another conversation ends the job. The server sees sizes and times.


_log = logging.getLogger(__name__)
MIB = 1 << 20
_OVERHEAD_BYTES = 2 * MIB  # of a part: its header, and those of as many fragments as a step may have


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


@dataclass(frozen=True, slots=True, repr=False)
class ConversationEnd:
    """What one site's end of a conversation stands on.

    Attributes:
        purpose: what the conversation is about; sealed parts of another purpose do not open.
        interrupt: wakes a waiting exchange of this site (the transport's ``abort``).
    """

    channel: Channel
    session: Session
    purpose: str
    flow: FlowControl
    interrupt: Callable[[str], None]

    @classmethod
    def of(cls, attempt: SiteAttempt, purpose: str, flow: FlowControl) -> ConversationEnd:
        """Return this site's end in an attempt."""
        return cls(attempt.channel, attempt.session, purpose, flow, attempt.transport.abort)


def ended_by(error: Exception) -> JobAborted:
    """Return what ends the job after an error that is none of ours; a defect goes into this site's own log."""
    if machine_failure(error) is None:
        _log.error("the conversation failed", exc_info=error)
    return aborted_by(error)


def aborted_by(error: Exception) -> JobAborted:
    """Return an error that may be told to other parties; its cause says whether time mends it."""
    aborted = JobAborted(machine_failure(error) or f"{reason_of(error)}; see the log of that site")
    aborted.__cause__ = error
    return aborted


class SealedLine:
    """One site's end of the sealed line to one other site."""

    def __init__(self, end: ConversationEnd, rank: int) -> None:
        self.rank = rank
        self.outbox, self.inbox = Outbox(), Inbox(end.flow.message_bytes)
        self._session, self._purpose = end.session, end.purpose
        self._most = max(end.flow.frame_bytes, MIB) + _OVERHEAD_BYTES
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


# Requests of the active party and answers of the passive ones.

# The side of a conversation that asks.


LEFT = "the conversation has ended"


class PendingAnswer(Future[Any]):
    """The answer to one question; waiting for it lets the conversation collect answers."""

    def __init__(self, requester: Requester, read: Callable[[bytes], Any]):
        super().__init__()
        self._requester, self._read = requester, read
        self._size = 0

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer. Raises: VeilBoostError, TimeoutError."""
        if not self.done():
            with self._requester.waiting():
                super().result(timeout)
        size, self._size = self._size, 0
        self._requester.release(size)
        return super().result()

    def take(self, answer: bytes) -> None:
        self._size = len(answer)
        try:
            self.set_result(self._read(answer))
        except VeilBoostError as error:
            self.set_exception(error)
        except Exception as error:  # ends the conversation's thread; whoever waits for this answer must hear too
            self.set_exception(aborted_by(error))
            raise


class Requester:
    """The side that asks. A context manager: leaving it ends the conversation at all sites, or breaks it off.

    From entering to leaving, the channel belongs to a thread of this object.
    """

    def __init__(
        self,
        end: ConversationEnd,
        on_turn: Callable[[int], None] = lambda turn: None,
        first_turn: int = 0,
        timer: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Prepare a conversation.

        Args:
            on_turn: called between two steps whenever a turn ended, with its number; at all sites at the same step.
            timer: measures the time in which answers are waited for.
        """
        self._channel, self._flow = end.channel, end.flow
        self._interrupt, self._on_turn = end.interrupt, on_turn
        self._lines = {rank: SealedLine(end, rank) for rank in range(end.channel.world) if rank != end.channel.rank}
        self._open: dict[int, deque[PendingAnswer]] = {rank: deque() for rank in self._lines}
        self._changed = threading.Condition()
        self._collects = False  # until every question is answered
        self._held = 0  # bytes of answers that nobody has taken yet
        self._turn = self._announced = first_turn
        self._turn_is_awaited = False
        self._ending = False
        self._worked_at = time.monotonic()  # when the work asked or took anything, or an answer came
        self._error: VeilBoostError | None = None
        self._timer = timer
        self._thread = threading.Thread(target=self._run, name="veilboost_asking", daemon=True)

    def ask(self, rank: int, question: bytes, read: Callable[[bytes], Any] = bytes) -> PendingAnswer:
        """Queue a question to a site; wait only if too much is queued already.

        Args:
            read: turns the answer's bytes into the future's result; its VeilBoostErrors become the future's.

        Raises:
            VeilBoostError: what ended the conversation.
        """
        asked = PendingAnswer(self, read)
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._queued() < self._flow.queue_bytes)
            self._require_open()
            self._worked_at = time.monotonic()
            self._lines[rank].outbox.put(question)
            self._open[rank].append(asked)
            self._changed.notify_all()
        return asked

    def expect(self, rank: int, message_bytes: int) -> None:
        """Let a site's answers be so long from now on; call it while nothing is asked of the site."""
        with self._changed:
            self._lines[rank].inbox.most = message_bytes

    def flush(self) -> None:
        """Send what was asked at once, and collect the answers; asking alone waits for more to be asked."""
        with self._changed:
            self._collects = any(self._open.values())
            self._changed.notify_all()

    def turn(self, number: int) -> None:
        """Announce a turn (a boosting round, for example) with the next step, which all earlier questions precede.

        Turns are numbered without a gap; each has a step of its own, in which the next turn's first questions may
        travel. Waits until the turn before has had its step: so no site is more than two turns behind, and all hold a
        checkpoint in common however few questions there are.
        """
        with self._changed:
            self._turn_is_awaited = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or self._announced >= self._turn)
            self._turn_is_awaited = False
            self._require_open()
            self._worked_at = time.monotonic()
            self._turn = number
            self._changed.notify_all()

    def check(self) -> None:
        """Say that the work is alive though it asks nothing. Raises: VeilBoostError, what ended the conversation."""
        with self._changed:
            self._require_open()
            self._worked_at = time.monotonic()

    def release(self, n_bytes: int) -> None:
        """Note that the answers' owner has taken so many bytes."""
        with self._changed:
            self._worked_at = time.monotonic()
            self._held -= n_bytes
            self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Collect answers for this thread, and measure the time that it waits."""
        self.flush()
        with self._timer():
            yield

    def __enter__(self) -> Requester:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self._changed:
                self._ending = True
                self._changed.notify_all()
            self._thread.join()
            if self._error is not None:
                raise self._error
            return
        self._fail(error if isinstance(error, VeilBoostError) else JobAborted(LEFT))
        self._interrupt(str(self._error))
        self._thread.join()

    # -- the conversation's own thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step() is not Flag.END:
                pass
        except VeilBoostError as error:
            self._fail(error)
        except Exception as error:  # the edge of a thread: whoever waits must hear of it
            self._fail(ended_by(error))

    def _check_work(self) -> None:
        """End the conversation if the work that asks stands still. Raises: JobAborted."""
        idle_s = time.monotonic() - self._worked_at
        if idle_s <= self._flow.idle_s or self._ending or any(self._open.values()):
            return
        who = self._channel.sites[self._channel.rank]
        reason = f"the work of {who} has asked nothing for {idle_s:.0f} s: it hangs, or deadline_s is too short for it"
        self._interrupt(reason)  # ends the work as well
        raise JobAborted(reason)

    def _step(self) -> Flag:
        with self._changed:
            self._changed.wait_for(self._has_work, self._flow.patience_s)
            if self._error is not None:
                raise self._error
            self._check_work()
            turn = min(self._announced + 1, self._turn)  # each turn has a step of its own
            flag = self._flag(turn)
            limit = self._flow.part_bytes(self._channel.world)
            parts = [b""] * self._channel.world
            for rank, line in self._lines.items():
                parts[rank] = line.seal(flag, turn, limit)
            self._changed.notify_all()
        received = self._channel.route(Kind.CONVERSATION, parts)
        for rank in self._lines:
            self._take(rank, received[rank])
        if turn > self._announced:
            self._on_turn(turn - 1)
            with self._changed:
                self._announced = turn
                self._changed.notify_all()
        return flag

    def _has_work(self) -> bool:
        queued = self._queued()
        due = self._collects and self._held < self._flow.queue_bytes
        turned = self._turn != self._announced and self._turn_is_awaited
        return self._error is not None or self._ending or queued >= self._flow.flush_bytes or due or turned

    def _flag(self, turn: int) -> Flag:
        limit = self._flow.part_bytes(self._channel.world)
        if any(line.outbox.n_bytes > limit for line in self._lines.values()):
            return Flag.MORE
        if self._ending and turn == self._turn and not any(self._open.values()):
            return Flag.END
        return Flag.COLLECT if self._ending or self._collects else Flag.MORE

    def _take(self, rank: int, sealed: bytes) -> None:
        step, answers = self._lines[rank].open(sealed)
        if step.flag is not Flag.ANSWERS:
            raise ProtocolError("an answering site took the asking site's part")
        for answer in answers:
            with self._changed:
                if not self._open[rank]:
                    raise ProtocolError(f"{self._channel.sites[rank]} answered a question that nobody asked")
                asked = self._open[rank].popleft()
                self._worked_at = time.monotonic()
                self._collects = self._collects and any(self._open.values())
                self._held += len(answer)
            asked.take(answer)

    def _queued(self) -> int:
        return sum(line.outbox.n_bytes for line in self._lines.values())

    def _require_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ending:
            raise JobAborted(LEFT)

    def _fail(self, error: VeilBoostError) -> None:
        with self._changed:
            self._error = self._error or error
            failed = [asked for queue in self._open.values() for asked in queue]
            for queue in self._open.values():
                queue.clear()
            self._changed.notify_all()
        for asked in failed:
            asked.set_exception(self._error)


# The side of a conversation that answers.


class Responder:
    """The side that answers. ``run`` takes part until the asking site ends the conversation."""

    def __init__(
        self,
        end: ConversationEnd,
        asker: int,
        answer: Callable[[bytes], bytes],
        on_turn: Callable[[int], None] = lambda turn: None,
        first_turn: int = 0,
        idle: Callable[[], bool] = lambda: False,
    ):
        """Prepare to answer.

        Args:
            asker: rank of the asking site.
            answer: answers one question at a time, in order, in a thread of its own; its VeilBoostErrors end the job.
            on_turn: as in ``Requester``; called when all questions of the turn are answered.
            idle: does a little of what later answers need, in the thread of ``answer``, while no question waits;
                returns whether there is more to do. Called again after each answer; its errors end the job.
        """
        self._channel, self._flow, self._asker = end.channel, end.flow, asker
        self._interrupt, self._on_turn, self._answer, self._idle = end.interrupt, on_turn, answer, idle
        self._line = SealedLine(end, asker)
        self._turn = first_turn
        self._changed = threading.Condition()
        self._questions: deque[bytes] = deque()
        self._n_open = 0  # questions without an answer yet
        self._ripe_at: float | None = None  # when the first of the waiting answers, empty ones apart, has to travel
        self._error: VeilBoostError | None = None
        self._over = False

    def run(self) -> None:
        """Answer until the end. Raises: VeilBoostError."""
        # A daemon: native arithmetic cannot be interrupted, and must not keep a failed job's process alive.
        threading.Thread(target=self._work, name="veilboost_answering", daemon=True).start()
        try:
            flag = Flag.MORE
            while flag is not Flag.END:
                flag = self._step(flag)
        except VeilBoostError as error:
            why = self._error or error  # an interrupted exchange is not
            raise why from why.__cause__
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _step(self, flag: Flag) -> Flag:
        with self._changed:
            self._await_readiness(flag)
            if self._error is not None:
                raise self._error
            part = self._line.seal(Flag.ANSWERS, self._turn, self._flow.part_bytes(2))
            self._ripe_at = self._ripe_at if self._line.outbox.n_bytes else None
            self._changed.notify_all()
        parts = [b""] * self._channel.world
        parts[self._asker] = part
        received = self._channel.route(Kind.CONVERSATION, parts)
        if any(other for rank, other in enumerate(received) if rank != self._asker):
            raise ProtocolError("a site that has nothing to ask sent a part")
        step, questions = self._line.open(received[self._asker])
        if step.flag is Flag.ANSWERS or not 0 <= step.turn - self._turn <= 1:
            raise ProtocolError("the asking site's part is not one of its own")
        if step.turn > self._turn:  # before anything of the new turn is worked on
            self._turn = step.turn
            self._on_turn(step.turn - 1)
        with self._changed:
            self._questions.extend(questions)
            self._n_open += len(questions)
            self._changed.notify_all()
        if step.flag is Flag.END and (self._n_open or self._line.outbox.n_bytes or self._line.inbox.is_open):
            raise ProtocolError("the asking site ended the conversation before its questions were answered")
        return step.flag

    def _await_readiness(self, flag: Flag) -> None:
        latest = time.monotonic() + self._flow.patience_s
        while not self._is_ready(flag):
            until = latest if self._ripe_at is None or flag is not Flag.COLLECT else min(latest, self._ripe_at)
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            self._changed.wait(left_s)

    def _is_ready(self, flag: Flag) -> bool:
        if self._error is not None or self._line.outbox.n_bytes >= self._flow.part_bytes(2):
            return True
        if flag is Flag.COLLECT:
            return self._n_open == 0
        return sum(max(len(question), 1) for question in self._questions) < self._flow.queue_bytes

    def _work(self) -> None:
        while True:
            try:
                question = self._next_question()
                if question is None:
                    return None
                answer = self._answer(question)
            except VeilBoostError as error:
                return self._fail(error)
            except Exception as error:  # the edge of a thread: what went wrong could quote data
                return None if self._over else self._fail(ended_by(error))
            with self._changed:
                self._line.outbox.put(answer)
                self._n_open -= 1
                if answer and self._ripe_at is None:
                    self._ripe_at = time.monotonic() + self._flow.linger_s
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._over or self._line.outbox.n_bytes < self._flow.queue_bytes)

    def _next_question(self) -> bytes | None:
        """Return the next question, and use the time until it comes; None when the conversation is over."""
        has_more = True
        while has_more:
            with self._changed:
                if self._questions or self._over:
                    break
            has_more = self._idle()
        with self._changed:
            self._changed.wait_for(lambda: self._questions or self._over)
            return None if self._over else self._questions.popleft()

    def _fail(self, error: VeilBoostError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._interrupt(str(error))
