"""Requests of the active party and answers of the passive ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Protocol

from he_processors.errors import ProtocolError, VeilBoostError
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.kinds.vertical.job import VerticalProfile
from nvflare_plugins.kinds.vertical.protocol.conversation import (
    Flag,
    FlowControl,
    Line,
    PairSeal,
    RoutingChannel,
    aborted_by,
    ended_by,
)
from nvflare_plugins.kinds.vertical.protocol.messages import (
    Answer,
    DecisionAnswer,
    DecisionRequest,
    HistogramAnswer,
    HistogramRequest,
    Message,
    MoreGradients,
    MoreSums,
    PartySchema,
    Request,
    SplitAnswer,
    SplitRequest,
    TrainingSetup,
    TreeGradients,
    from_bytes,
    to_bytes,
)
from nvflare_plugins.wire.envelope import Kind

# The side of a conversation that asks.


LEFT = "the conversation has ended"


class PendingAnswer(Future[Any]):
    """The answer to one question; waiting for it lets the conversation collect answers."""

    def __init__(self, asking: Requester, read: Callable[[bytes], Any]):
        super().__init__()
        self._asking, self._read = asking, read
        self._size = 0

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer. Raises: VeilBoostError, TimeoutError."""
        if not self.done():
            with self._asking.waiting():
                super().result(timeout)
        size, self._size = self._size, 0
        self._asking.release(size)
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
        channel: RoutingChannel,
        session: PairSeal,
        purpose: str,
        pace: FlowControl,
        interrupt: Callable[[str], None],
        on_turn: Callable[[int], None] = lambda turn: None,
        first_turn: int = 0,
        timer: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Prepare a conversation.

        Args:
            purpose: what the conversation is about; sealed parts of another purpose do not open.
            interrupt: wakes a waiting exchange of this site (the transport's ``abort``).
            on_turn: called between two steps whenever a turn ended, with its number; at all sites at the same step.
            timer: measures the time in which answers are waited for.
        """
        self._channel, self._pace = channel, pace
        self._interrupt, self._on_turn = interrupt, on_turn
        self._lines = {r: Line(session, r, purpose, pace) for r in range(channel.world) if r != channel.rank}
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
            self._changed.wait_for(lambda: self._error or self._queued() < self._pace.queue_bytes)
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
        if idle_s <= self._pace.idle_s or self._ending or any(self._open.values()):
            return
        who = self._channel.sites[self._channel.rank]
        reason = f"the work of {who} has asked nothing for {idle_s:.0f} s: it hangs, or deadline_s is too short for it"
        self._interrupt(reason)  # ends the work as well
        raise JobAborted(reason)

    def _step(self) -> Flag:
        with self._changed:
            self._changed.wait_for(self._has_work, self._pace.patience_s)
            if self._error is not None:
                raise self._error
            self._check_work()
            turn = min(self._announced + 1, self._turn)  # each turn has a step of its own
            flag = self._flag(turn)
            limit = self._pace.part_bytes(self._channel.world)
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
        due = self._collects and self._held < self._pace.queue_bytes
        turned = self._turn != self._announced and self._turn_is_awaited
        return self._error is not None or self._ending or queued >= self._pace.flush_bytes or due or turned

    def _flag(self, turn: int) -> Flag:
        limit = self._pace.part_bytes(self._channel.world)
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


# The messages of training on their way through a conversation, each noted in the evidence by what it holds.


_CONTENT: dict[type[Message], Content] = {
    PartySchema: Content.SCHEMA,
    TrainingSetup: Content.SETUP,
    TreeGradients: Content.GRADIENTS,
    MoreGradients: Content.GRADIENTS,
    HistogramRequest: Content.HISTOGRAM_REQUEST,
    MoreSums: Content.HISTOGRAM_REQUEST,
    HistogramAnswer: Content.HISTOGRAMS,
    SplitRequest: Content.SPLITS,
    SplitAnswer: Content.PARTITIONS,
    DecisionRequest: Content.DECISION_REQUEST,
    DecisionAnswer: Content.DECISIONS,
}
_CIPHERTEXTS = {
    VerticalProfile.PAILLIER.value: Protection.PAILLIER,
    VerticalProfile.ELGAMAL.value: Protection.ELGAMAL,
    VerticalProfile.PLAIN.value: Protection.CLEAR,
}


class ContentLog(Protocol):
    """What the link needs of an evidence log."""

    def content(self, direction: str, peer: str, what: Content, protection: Protection, size_bytes: int) -> None: ...


class MessageNotes(Protocol):
    """Takes note of the messages of a conversation."""

    def sent(self, peer: str, message: Message, size: int) -> None:
        """Note a message that is about to leave."""

    def received(self, peer: str, message: Message, size: int) -> None:
        """Note a message that came."""


class ContentRecorder:
    """Notes in the evidence what passes between this site and the others.

    Attributes:
        has_told: whether this site has told more than its public key.
    """

    def __init__(self, evidence: ContentLog, profile: str):
        self._evidence = evidence
        self._ciphertexts = _CIPHERTEXTS[profile]
        self.has_told = False

    def sent(self, peer: str, message: Message, size: int) -> None:
        """Note a message that is about to leave. Raises: ProtocolError, if its content must not."""
        self.has_told = self.has_told or not isinstance(message, TrainingSetup)
        self._note("sent", peer, message, size)

    def received(self, peer: str, message: Message, size: int) -> None:
        """Note a message that came."""
        self._note("received", peer, message, size)

    def _note(self, direction: str, peer: str, message: Message, size: int) -> None:
        what = _CONTENT[type(message)]
        protection = self._ciphertexts if what.encrypted else Protection.CLEAR
        self._evidence.content(direction, peer, what, protection, size)


class ConversationLink:
    """The active party's link to one passive party (a ``PassiveLink``)."""

    def __init__(self, asking: Requester, rank: int, name: str, notes: MessageNotes):
        self._asking, self._rank, self._name, self._notes = asking, rank, name, notes

    def ask(self, request: Request) -> Future[Answer | None]:
        """Queue a request."""
        data = to_bytes(request)
        self._notes.sent(self._name, request, len(data))
        return self._asking.ask(self._rank, data, self._read)

    def flush(self) -> None:
        """Let requests go that wait for further ones."""
        self._asking.flush()

    def _read(self, data: bytes) -> Answer | None:
        if not data:
            return None
        answer = from_bytes(data)
        if not isinstance(answer, Answer):
            raise ProtocolError(f"{self._name} answered with a request")
        self._notes.received(self._name, answer, len(data))
        return answer


def answer_bytes(data: bytes, peer: str, answer: Callable[[Request], Answer | None], notes: MessageNotes) -> bytes:
    """Answer a request in its byte form, at a passive party.

    Raises:
        ProtocolError: not a request, or one that has no place here.
    """
    request = from_bytes(data)
    if not isinstance(request, Request):
        raise ProtocolError("the active party sent an answer where a request is due")
    notes.received(peer, request, len(data))
    reply = answer(request)
    if reply is None:
        return b""
    encoded = to_bytes(reply)
    notes.sent(peer, reply, len(encoded))
    return encoded


# The side of a conversation that answers.


class Responder:
    """The side that answers. ``run`` takes part until the asking site ends the conversation."""

    def __init__(
        self,
        channel: RoutingChannel,
        session: PairSeal,
        purpose: str,
        pace: FlowControl,
        interrupt: Callable[[str], None],
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
            interrupt, on_turn: as in ``Requester``. ``on_turn`` is called when all questions of the turn are answered.
            idle: does a little of what later answers need, in the thread of ``answer``, while no question waits;
                returns whether there is more to do. Called again after each answer; its errors end the job.
        """
        self._channel, self._pace, self._asker = channel, pace, asker
        self._interrupt, self._on_turn, self._answer, self._idle = interrupt, on_turn, answer, idle
        self._line = Line(session, asker, purpose, pace)
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
            raise (self._error or error) from None  # an interrupted exchange is not why
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _step(self, flag: Flag) -> Flag:
        with self._changed:
            self._await_readiness(flag)
            if self._error is not None:
                raise self._error
            part = self._line.seal(Flag.ANSWERS, self._turn, self._pace.part_bytes(2))
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
        latest = time.monotonic() + self._pace.patience_s
        while not self._is_ready(flag):
            until = latest if self._ripe_at is None or flag is not Flag.COLLECT else min(latest, self._ripe_at)
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            self._changed.wait(left_s)

    def _is_ready(self, flag: Flag) -> bool:
        if self._error is not None or self._line.outbox.n_bytes >= self._pace.part_bytes(2):
            return True
        if flag is Flag.COLLECT:
            return self._n_open == 0
        return sum(max(len(question), 1) for question in self._questions) < self._pace.queue_bytes

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
                    self._ripe_at = time.monotonic() + self._pace.linger_s
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._over or self._line.outbox.n_bytes < self._pace.queue_bytes)

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
