"""The side of a conversation that answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from he_processors.errors import ProtocolError, VeilBoostError
from nvflare_plugins.vertical.protocol.conversation import FlowControl, Line, PairSeal, RoutingChannel, ended_by
from nvflare_plugins.vertical.protocol.fragmentation import Flag
from nvflare_plugins.wire.catalogue import Kind


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
