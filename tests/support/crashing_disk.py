"""A disk for the ledger that fails or loses power at a chosen operation, and forgets what was not synced."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class PowerLoss(BaseException):
    """The process ends here; not an Exception, so that nothing in the code under test can handle it."""


class CrashingDisk:
    """Stands in for the module ``os`` in dp_components.ledger_journal. Counts what changes the disk.

    Args:
        journal: The file whose unsynced bytes may be lost.
        crash_at: The operation at which the power goes; None for never.
        kept: Share of the bytes not yet synced that reach the disk; below one half, a creation or renaming of the
            journal is undone too while its folder is not synced.
        is_late: For operations other than writes: whether it takes place before the power goes.
    """

    def __init__(self, journal: Path, crash_at: int | None, kept: float, is_late: bool) -> None:
        self._journal, self._crash_at, self._kept, self._is_late = journal, crash_at, kept, is_late
        self._synced = journal.stat().st_size if journal.exists() else 0
        self._is_created = journal.exists()
        self._before_renaming: bytes | None = None
        self.n_operations = 0
        self._is_short = False

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def _is_crash(self) -> bool:
        self.n_operations += 1
        return self._crash_at is not None and self.n_operations == self._crash_at

    def _lose_power(self) -> None:
        if self._kept < 0.5 and not self._is_created:
            self._journal.unlink(missing_ok=True)
        elif self._kept < 0.5 and self._before_renaming is not None:
            self._journal.write_bytes(self._before_renaming)
        elif self._journal.exists():
            size = self._journal.stat().st_size
            if size > self._synced:
                os.truncate(self._journal, self._synced + int(self._kept * (size - self._synced)))
        raise PowerLoss

    def write(self, descriptor: int, content: bytes) -> int:
        # Short writes are allowed by POSIX, so every second one is short here.
        self._is_short = not self._is_short and len(content) > 1
        part = content[: len(content) // 2] if self._is_short else content
        if self._is_crash():
            os.write(descriptor, content[: int(self._kept * len(content))])
            self._lose_power()
        return os.write(descriptor, part)

    def fsync(self, descriptor: int) -> None:
        if self._is_crash():
            self._lose_power()
        os.fsync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self._is_created, self._before_renaming = True, None
        elif self._journal.exists() and os.fstat(descriptor).st_ino == self._journal.stat().st_ino:
            self._synced = self._journal.stat().st_size

    def replace(self, source: Path, target: Path) -> None:
        is_crash = self._is_crash()
        if is_crash and not self._is_late:
            self._lose_power()
        if self._before_renaming is None:
            self._before_renaming = self._journal.read_bytes()
        os.replace(source, target)
        self._synced = self._journal.stat().st_size
        if is_crash:
            self._lose_power()

    def ftruncate(self, descriptor: int, size: int) -> None:
        is_crash = self._is_crash()
        if is_crash and not self._is_late:
            self._lose_power()
        os.ftruncate(descriptor, size)
        if is_crash:
            self._lose_power()
