"""The ledger's file: one JSON record a line, only ever appended to, each line bound to all before it.

A record counts once its line, with the line feed, is on disk (fsync). A line that a crash cut off has no line feed; it
never counted, nothing was released on it, and it is removed before the next record is written. Anything else that is
not exactly what this module writes is damage, and is refused: each line ends with a hash of itself and of the line
before, so that edits and missing lines in the middle are noticed. Lines missing at the end are noticed by the head
(``Head``), a small file elsewhere that says how far the journal had been written.

Rewriting replaces the file whole (rename). Locking is by a file of its own, because the journal may be replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dp_components.errors import LedgerDamaged

Record = dict[str, object]
_CHECK = "check"
_CHECK_DIGITS = 32
_LARGEST_HEAD, _N_PARTS = 4096, 4


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two lines: the bytes before it, and the check of the last line before it, which binds all."""

    n_bytes: int
    check: str


class Journal:
    """One journal file, as seen by one thread of one process; others may hold the same file open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._check = ""

    @property
    def position(self) -> Position:
        """The end of what was read or written so far."""
        return Position(self._offset, self._check)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other processes and threads out; every other method must be called inside."""
        descriptor = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def read_new(self) -> tuple[bool, list[Record]]:
        """Return the records written since the last call, and whether they start again from the first one.

        Raises:
            LedgerDamaged: the file is not what this module writes.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            if self._offset:
                raise LedgerDamaged(f"{self.path.name} was removed while it was in use.") from None
            return True, []
        try:
            is_restart = not self._offset or not _stands(descriptor, self.position)
            if is_restart:
                self._forget()
            content = _read_from(descriptor, self._offset)
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.ftruncate(descriptor, self._offset + len(whole))
        finally:
            os.close(descriptor)
        records = [self._accept(line) for line in whole.splitlines(keepends=True)]
        return is_restart, records

    def stands(self, position: Position) -> bool:
        """Say whether the journal holds all lines that it held at a position, and they are still the same."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return _stands(descriptor, position)
        finally:
            os.close(descriptor)

    def append(self, record: Record) -> None:
        """Write one record; on return it is durable. After any exception, read again before going on."""
        line, check = _line(record, self._check)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            _write_all(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not self._offset:
            _sync_folder(self.path.parent)
        self._check = check
        self._offset += len(line)

    def read_all(self) -> list[Record]:
        """Return every record from the start."""
        self._forget()
        return self.read_new()[1]

    def rewrite(self, records: Sequence[Record], announce: Callable[[Position], None]) -> None:
        """Replace the file by these records, whole or not at all; the next ``read_new`` starts again.

        Args:
            announce: called with the end of the new file before it takes the old one's place.
        """
        check, lines = "", []
        for record in records:
            line, check = _line(record, check)
            lines.append(line)
        content = b"".join(lines)
        partial = self.path.with_name(self.path.name + ".partial")
        _write_new(partial, content)
        announce(Position(len(content), check))
        os.replace(partial, self.path)
        _sync_folder(self.path.parent)

    def _forget(self) -> None:
        self._offset = 0
        self._check = ""

    def _accept(self, line: bytes) -> Record:
        """Parse one line and bind it to those before."""
        try:
            record: Record = json.loads(line)
            check = str(record.pop(_CHECK))
            ending = f', "{_CHECK}": "{check}"}}\n'.encode()
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            raise LedgerDamaged(f"{self.path.name} has a line that is not a record.") from None
        # The bytes themselves are hashed, so that another way to write the same record is noticed too.
        body = line[: -len(ending)] + b"}"
        if not line.endswith(ending) or check != _check_of(body, self._check):
            raise LedgerDamaged(f"{self.path.name} has a line that was changed, or lacks one before it.")
        self._check = check
        self._offset += len(line)
        return record


@dataclass(frozen=True, slots=True)
class HeadState:
    """What a head says.

    Attributes:
        position: how far the journal had been written.
        following: the end of the file that was about to take the journal's place, if one was.
        spent: what the ledger had counted as spent, part by part, for one row.
    """

    position: Position
    following: Position | None
    spent: tuple[float, ...]

    def is_met_by(self, journal: Journal) -> bool:
        """Say whether the journal, or the file that took its place, still holds all that it held."""
        return any(journal.stands(place) for place in (self.position, self.following) if place is not None)


class Head:
    """How far a journal was written, in a file that lies elsewhere, so that a journal that lacks its end is noticed.

    Order of writing: the journal first, then the head, then what was paid for is handed out. So a crash leaves a
    journal that goes on beyond its head, which is what ``HeadState.is_met_by`` accepts, and never one that ends before
    it. Where the whole file is about to be replaced, the head names the new file's end beforehand, beside the old
    one's. Each time the head is replaced whole and durably.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> HeadState | None:
        """Return what it says; None if there is no such file.

        Raises:
            LedgerDamaged: it is not what ``write`` writes.
        """
        try:
            with self.path.open("rb") as file:
                document = json.loads(file.read(_LARGEST_HEAD))
            following, spent = document["following"], tuple(map(float, document["spent"]))
            if len(spent) != _N_PARTS or not all(0 <= part < math.inf for part in spent):
                raise ValueError("not a cost")
            return HeadState(
                _position(document["position"]), None if following is None else _position(following), spent
            )
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise LedgerDamaged(f"the head {self.path.name} is not what the ledger writes.") from None

    def write(self, state: HeadState) -> None:
        """Say it durably."""
        document = {
            "position": [state.position.n_bytes, state.position.check],
            "following": state.following and [state.following.n_bytes, state.following.check],
            "spent": list(state.spent),
        }
        partial = self.path.with_name(self.path.name + ".partial")
        _write_new(partial, json.dumps(document, allow_nan=False).encode() + b"\n")
        os.replace(partial, self.path)
        _sync_folder(self.path.parent)


class Alive:
    """A mark that a job goes on, held by the process that runs it: the system lets go of it whenever that ends.

    A lock on an empty file beside the journal. All of it is called under the journal's own lock.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._held: dict[str, int] = {}

    def hold(self, job_id: str) -> None:
        """Mark a job as going on in this process."""
        if job_id not in self._held:
            descriptor = os.open(self._path(job_id), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # it goes on elsewhere too, which keeps the mark up just as well
                os.close(descriptor)
            else:
                self._held[job_id] = descriptor

    def is_held(self, job_id: str) -> bool:
        """Say whether any process runs the job."""
        if job_id in self._held:
            return True
        try:
            descriptor = os.open(self._path(job_id), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def is_held_elsewhere(self, job_id: str) -> bool:
        """Say whether another process, or another user of this one, runs the job."""
        return job_id not in self._held and self.is_held(job_id)

    def release(self, job_id: str) -> None:
        """Take the mark away."""
        self._path(job_id).unlink(missing_ok=True)
        if job_id in self._held:
            os.close(self._held.pop(job_id))

    def _path(self, job_id: str) -> Path:
        return self._journal.with_name(f"{self._journal.name}.{hashlib.sha256(job_id.encode()).hexdigest()[:32]}.alive")


def _position(value: list[object]) -> Position:
    n_bytes, check = value
    if type(n_bytes) is not int or n_bytes < 1 or not isinstance(check, str) or len(check) != _CHECK_DIGITS:
        raise ValueError("not a position")
    return Position(n_bytes, check)


def _stands(descriptor: int, position: Position) -> bool:
    # The check commits to all lines before it: where it still stands, they are still the same.
    mark = f'"{_CHECK}": "{position.check}"}}\n'.encode()
    start = position.n_bytes - len(mark)
    return start >= 0 and os.pread(descriptor, len(mark), start) == mark


def _check_of(body: bytes, previous_check: str) -> str:
    return hashlib.sha256(previous_check.encode() + body).hexdigest()[:_CHECK_DIGITS]


def _line(record: Record, previous_check: str) -> tuple[bytes, str]:
    body = json.dumps(record, allow_nan=False).encode()
    check = _check_of(body, previous_check)
    return body[:-1] + f', "{_CHECK}": "{check}"}}\n'.encode(), check


def _read_from(descriptor: int, offset: int) -> bytes:
    parts = []
    while part := os.pread(descriptor, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private(folder: Path) -> None:
    """Create a folder and those above it that are missing, all of mode 0700."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
