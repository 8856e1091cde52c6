"""The ledger's file: one JSON record a line, only ever appended to, each line bound to all before it.

A record counts once its line, with the line feed, is on disk (fsync). A line that a crash cut off has no line feed; it
never counted, nothing was released on it, and it is removed before the next record is written. Anything else that is
not exactly what this module writes is damage, and is refused: each line ends with a hash of itself and of the line
before, so that edits and missing lines in the middle are noticed. (A file put back to an earlier state is not.)

Rewriting replaces the file whole (rename). Locking is by a file of its own, because the journal may be replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dp_components.errors import LedgerDamaged

Record = dict[str, object]
_CHECK = "check"
_CHECK_DIGITS = 32


class Journal:
    """One journal file, as seen by one thread of one process; others may hold the same file open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._check = ""

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
            LedgerDamaged: The file is not what this module writes.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            if self._offset:
                raise LedgerDamaged(f"{self.path.name} was removed while it was in use.") from None
            return True, []
        try:
            # The check commits to all lines before it: where it still stands, they are still the same.
            mark = f'"{_CHECK}": "{self._check}"}}\n'.encode()
            is_restart = not self._offset or os.pread(descriptor, len(mark), self._offset - len(mark)) != mark
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

    def rewrite(self, records: Sequence[Record]) -> None:
        """Replace the file by these records, whole or not at all; the next ``read_new`` starts again."""
        check, lines = "", []
        for record in records:
            line, check = _line(record, check)
            lines.append(line)
        partial = self.path.with_name(self.path.name + ".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(descriptor, b"".join(lines))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, self.path)
        _sync_folder(self.path.parent)

    def _forget(self) -> None:
        self._offset = 0
        self._check = ""

    def _accept(self, line: bytes) -> Record:
        """Parse one line and bind it to those before."""
        try:
            document = json.loads(line)
            record = {key: value for key, value in document.items() if key != _CHECK}
            expected, check = _line(record, self._check)
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise LedgerDamaged(f"{self.path.name} has a line that is not a record.") from None
        if expected != line:
            raise LedgerDamaged(f"{self.path.name} has a line that was changed, or lacks one before it.")
        self._check = check
        self._offset += len(line)
        return record


def _line(record: Record, previous_check: str) -> tuple[bytes, str]:
    body = json.dumps(record, allow_nan=False)
    check = hashlib.sha256((previous_check + body).encode()).hexdigest()[:_CHECK_DIGITS]
    return (json.dumps({**record, _CHECK: check}, allow_nan=False) + "\n").encode(), check


def _read_from(descriptor: int, offset: int) -> bytes:
    parts = []
    while part := os.pread(descriptor, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
