"""Where requests for scores wait until the active party's conversation takes them. Nothing here is logged."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

MOST_WAITING = 64

Score = dict[str, Any]
"""What is told of one row: ``row``, and ``class`` with ``probability``, or ``prediction``."""


class Refused(Exception):
    """A request that gets an error in place of scores; the text is for whoever asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Rows that somebody wants scored.

    Attributes:
        positions: in the standing alignment, in any order.
        answer: their scores in that order, or ``Refused``.
        since: when it came, by the desk's clock.
    """

    positions: tuple[int, ...]
    since: float
    answer: Future[list[Score]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """Something other than rows: ``stop``, or ``refresh`` with the alignment to take.

    Attributes:
        answer: what is told to whoever gave the command.
    """

    name: str
    argument: str = ""
    answer: Future[Score] = field(default_factory=Future)


class Desk:
    """A bounded queue. Threads: any number may hand in, one takes."""

    def __init__(self, most_waiting: int = MOST_WAITING, clock: Callable[[], float] = monotonic) -> None:
        self._waiting: deque[Request] = deque()
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._most, self._clock = most_waiting, clock
        self._closed: str | None = None

    def hand_in(self, positions: Sequence[int]) -> Future[list[Score]]:
        """Queue a request. Raises: Refused, if too many wait already, or nobody takes any more."""
        with self._changed:
            self._require_open()
            if len(self._waiting) >= self._most:
                raise Refused(f"{self._most} requests are waiting already: ask again later")
            request = Request(tuple(positions), self._clock())
            self._waiting.append(request)
            self._changed.notify_all()
        return request.answer

    def command(self, name: str, argument: str = "") -> Future[Score]:
        """Queue a command, which comes before all waiting requests. Raises: Refused."""
        with self._changed:
            self._require_open()
            if self._commands:
                raise Refused("another command is waiting already")
            command = Command(name, argument)
            self._commands.append(command)
            self._changed.notify_all()
        return command.answer

    def take(self, most_rows: int, wait_s: float) -> Command | list[Request]:
        """Return a command, or the requests that come next and have so many rows at most together; none after a while.

        A first request is returned whatever its size.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._commands, wait_s)
            if self._commands:
                return self._commands.popleft()
            taken: list[Request] = []
            n_rows = 0
            while self._waiting and (not taken or n_rows + len(self._waiting[0].positions) <= most_rows):
                request = self._waiting.popleft()
                if request.answer.set_running_or_notify_cancel():  # whoever asked may have left
                    taken.append(request)
                    n_rows += len(request.positions)
            return taken

    def close(self, reason: str) -> None:
        """Refuse what waits and what comes."""
        with self._changed:
            self._closed = reason
            left: list[Request | Command] = [*self._waiting, *self._commands]
            self._waiting.clear()
            self._commands.clear()
        for one in left:
            if one.answer.set_running_or_notify_cancel():
                one.answer.set_exception(Refused(reason))

    def _require_open(self) -> None:
        if self._closed is not None:
            raise Refused(self._closed)
