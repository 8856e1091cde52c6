"""The side of a conversation that asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

from he_processors.errors import JobAborted, ProtocolError, VeilBoostError
from nvflare_plugins.vertical.protocol.conversation import (
    FlowControl,
    Line,
    PairSeal,
    RoutingChannel,
    aborted_by,
    ended_by,
)
from nvflare_plugins.vertical.protocol.fragmentation import Flag
from nvflare_plugins.wire.catalogue import Kind

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
