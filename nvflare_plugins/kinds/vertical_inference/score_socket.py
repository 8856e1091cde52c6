"""The Unix socket at the active party through which programs of the same user ask for scores, in lines of JSON.

One line is one request, an object with one of these names; one line comes back, in order:

    {"rows": [0, 17]}          positions in the standing alignment    -> {"scores": [{"row": 0, "class": ...}, ...]}
    {"ids": ["a-1", "a-2"]}    ids, looked up here                    -> the same, each with its id
    {"status": true}           -> how many rows there are and were asked for, seconds of answers, until when it stays
    {"refresh": "JOB"}         take the rows of that alignment        -> {"refreshed": "JOB", "rows": n}
    {"stop": true}             end the job at all parties             -> {"stopping": true}

Whatever cannot be answered gets {"error": text}; the text quotes nothing of the request.

Security: the socket is for the user that runs FLARE (mode 0600, in the run's folder of mode 0700; on Linux the caller's
    user is checked too). Lines, rows of a request, connections, and requests that wait are bounded; a caller that sends
    too long a line, or nothing for long, is left.
Privacy: ids are looked up in this site's memory and go nowhere; nothing that is asked or answered is logged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Protocol

from he_processors.errors import ConfigurationError

Score = dict[str, Any]
"""What is told of one row: ``row``, and ``class`` with ``probability``, or ``prediction``."""
MOST_WAITING = 64
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_job_id(text: str) -> bool:
    """Return whether a text can be a job's id."""
    return _JOB_ID.fullmatch(text) is not None and text not in (".", "..")


class Refused(Exception):
    """A request that gets an error in place of scores; the text is for whoever asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Rows that somebody wants scored.

    Attributes:
        positions: in the standing alignment, in any order.
        answer: their scores in that order, or ``Refused``.
        since: when it came, by the queue's clock.
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


class RequestQueue:
    """A bounded queue. Threads: any number may hand in, one takes."""

    def __init__(self, most_waiting: int = MOST_WAITING, clock: Callable[[], float] = monotonic) -> None:
        self._waiting: deque[Request] = deque()
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._most, self._clock = most_waiting, clock
        self._closed: str | None = None

    def submit(self, positions: Sequence[int]) -> Future[list[Score]]:
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


SOCKET = "score.sock"
MOST_CONNECTIONS = 16
MOST_LINE_BYTES = 1 << 20
ANSWER_S = 30.0  # longest that a caller waits
IDLE_S = 600.0  # a caller that says nothing
_NAMES = ("rows", "ids", "status", "refresh", "stop")
_HOW = "a request is one line, a JSON object with one of the names rows, ids, status, refresh and stop"
_LONGEST_PATH = 100  # of a Unix socket; 108 with its end on Linux, 104 elsewhere
_READ_BYTES = 1 << 16
_BACKLOG = 128


class ServedRows(Protocol):
    """What the socket knows of the rows that are served."""

    @property
    def n_rows(self) -> int: ...

    def places(self, ids: Sequence[str]) -> list[int]:
        """Return the positions of ids. Raises: Refused."""

    def status(self) -> Score:
        """Return what ``status`` is answered with."""


class ScoreSocket:
    """Serves callers until it is left. A context manager."""

    def __init__(self, folder: Path, queue: RequestQueue, rows: Callable[[], ServedRows], most_rows: int) -> None:
        """Prepare the socket.

        Args:
            folder: the run's, for this user alone.
            most_rows: of one request.
        """
        self.path = folder / SOCKET
        self._folder, self._queue, self._rows, self._most_rows = folder, queue, rows, most_rows
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None

    def __enter__(self) -> ScoreSocket:
        """Listen. Raises: ConfigurationError, if there is a socket already that answers, or none can be made."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)  # of a process that was killed: the run's evidence is this one's alone
            with reachable(self.path) as name:
                listener.bind(name)
            self.path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigurationError(
                f"no socket can be made in the run's folder ({os.strerror(error.errno or 0)}): its file system must "
                "take Unix sockets. Policy key: runs."
            ) from None
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="veilboost_door", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):  # wakes the thread that accepts
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self.path.unlink(missing_ok=True)
        with self._lock:
            left = list(self._open)
        for connection in left:
            with contextlib.suppress(OSError):  # what was answered still goes out
                connection.shutdown(socket.SHUT_RD)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not _is_own_user(connection):
                connection.close()
            elif not self._slots.acquire(blocking=False):
                _say(connection, {"error": f"{MOST_CONNECTIONS} callers are connected already: come again later"})
                connection.close()
            else:
                with self._lock:
                    self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name="veilboost_caller", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(IDLE_S)
            for line in _lines(connection):
                if line is None:
                    _say(connection, {"error": f"a line has at most {MOST_LINE_BYTES} bytes"})
                    return
                if not _say(connection, self.reply(line)):
                    return
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
            self._slots.release()

    def reply(self, line: bytes) -> Score:
        """Return what one line is answered with."""
        try:
            return self._reply(_read(line))
        except Refused as error:
            return {"error": str(error)}
        except FutureTimeout:
            return {"error": f"no answer within {ANSWER_S:.0f} s: a party may be slow or gone; ask again later"}

    def _reply(self, request: dict[str, Any]) -> Score:
        ((name, value),) = request.items()
        if name in ("status", "stop", "refresh"):
            return self._command(name, value)
        if not isinstance(value, list) or not 1 <= len(value) <= self._most_rows:
            raise Refused(f"{name} is a list of 1 to {self._most_rows} entries (batch_rows of the job)")
        positions = self._positions(value) if name == "rows" else self._places(value)
        answer = self._queue.submit(positions)
        try:
            scores = answer.result(ANSWER_S)
        except FutureTimeout:
            answer.cancel()
            raise
        if name == "ids":
            scores = [{"id": one, **score} for one, score in zip(value, scores, strict=True)]
        return {"scores": scores}

    def _command(self, name: str, value: Any) -> Score:
        if name == "status":
            return self._rows().status()
        if name == "stop":
            if value is not True:
                raise Refused(_HOW)
            return self._queue.command(name).result(ANSWER_S)
        if not isinstance(value, str) or not is_job_id(value):
            raise Refused("refresh names the job whose alignment is to be taken, by its id")
        return self._queue.command(name, value).result(10 * ANSWER_S)

    def _positions(self, value: list[Any]) -> list[int]:
        n_rows = self._rows().n_rows
        n_wrong = sum(type(one) is not int or not 0 <= one < n_rows for one in value)
        if n_wrong:
            raise Refused(f"{n_wrong} of {len(value)} rows are no positions: there are 0 to {n_rows - 1}")
        return value

    def _places(self, value: list[Any]) -> list[int]:
        if not all(isinstance(one, str) for one in value):
            raise Refused("ids are texts")
        return self._rows().places(value)


@contextlib.contextmanager
def reachable(path: Path) -> Any:
    """Give a name by which a socket in a folder can be bound or connected, however long the folder's path is."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        short = f"/proc/self/fd/{descriptor}"
        if not Path(short).exists():
            raise OSError(36, "File name too long")
        yield f"{short}/{path.name}"
    finally:
        os.close(descriptor)


def _read(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is one
        raise Refused(_HOW) from None
    if not isinstance(request, dict) or len(request) != 1 or not set(request) <= set(_NAMES):
        raise Refused(_HOW)
    return request


def _lines(connection: socket.socket) -> Any:
    """Yield lines without their end; None for one that is too long, and nothing after it."""
    waiting = bytearray()
    while True:
        try:
            data = connection.recv(_READ_BYTES)
        except OSError:
            return
        if not data:
            return
        waiting += data
        *lines, rest = waiting.split(b"\n")
        waiting = bytearray(rest)
        for line in lines:
            if len(line) > MOST_LINE_BYTES:
                yield None
                return
            if line.strip():
                yield bytes(line)
        if len(waiting) > MOST_LINE_BYTES:
            yield None
            return


def _say(connection: socket.socket, answer: Score) -> bool:
    """Send one line; return whether the caller took it."""
    try:
        connection.settimeout(ANSWER_S)
        connection.sendall(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        connection.settimeout(IDLE_S)
    except OSError:
        return False
    return True


def _is_own_user(connection: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the socket's mode alone decides
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (os.geteuid(), 0)
