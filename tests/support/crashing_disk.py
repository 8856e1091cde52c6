"""A disk for the ledger that fails or loses power at a chosen operation, and forgets what was not synced."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path


class PowerLoss(BaseException):
    """The process ends here; not an Exception, so that nothing in the code under test can handle it."""


@dataclass
class _Watched:
    """One file: how much of it is on the disk for certain, and what a loss of power may bring back."""

    path: Path
    kept: float
    synced: int = 0
    is_created: bool = False
    before_renaming: bytes | None = None

    def __post_init__(self) -> None:
        self.is_created = self.path.exists()
        self.synced = self.size()

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def lose(self) -> None:
        if self.kept < 0.5 and not self.is_created:
            self.path.unlink(missing_ok=True)
        elif self.kept < 0.5 and self.before_renaming is not None:
            self.path.write_bytes(self.before_renaming)
        elif self.size() > self.synced:
            os.truncate(self.path, self.synced + int(self.kept * (self.size() - self.synced)))


class CrashingDisk:
    """Stands in for the module ``os`` in dp_components.ledger. Counts what changes the disk.

    Args:
        files: The files whose unsynced bytes may be lost, each with the share of the bytes not yet synced that reach
            the disk; below one half, a creation or renaming of the file is undone too while its folder is not synced.
        crash_at: The operation at which the power goes; None for never.
        is_late: For operations other than writes: whether it takes place before the power goes.
    """

    def __init__(self, files: dict[Path, float], crash_at: int | None, is_late: bool) -> None:
        self._files = [_Watched(path, kept) for path, kept in files.items()]
        self._crash_at, self._is_late = crash_at, is_late
        self.n_operations = 0
        self._is_short = False

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def _is_crash(self) -> bool:
        self.n_operations += 1
        return self._crash_at is not None and self.n_operations == self._crash_at

    def _lose_power(self) -> None:
        for file in self._files:
            file.lose()
        raise PowerLoss

    def write(self, descriptor: int, content: bytes) -> int:
        # Short writes are allowed by POSIX, so every second one is short here.
        self._is_short = not self._is_short and len(content) > 1
        part = content[: len(content) // 2] if self._is_short else content
        if self._is_crash():
            os.write(descriptor, content[: int(self._files[0].kept * len(content))])
            self._lose_power()
        return os.write(descriptor, part)

    def fsync(self, descriptor: int) -> None:
        if self._is_crash():
            self._lose_power()
        facts = os.fstat(descriptor)  # the real disk is not waited for: its power stays on
        for file in self._files:
            if stat.S_ISDIR(facts.st_mode):
                if file.path.parent.stat().st_ino == facts.st_ino:
                    file.is_created, file.before_renaming = file.path.exists(), None
            elif file.path.exists() and facts.st_ino == file.path.stat().st_ino:
                file.synced = file.size()

    def replace(self, source: Path, target: Path) -> None:
        is_crash = self._is_crash()
        if is_crash and not self._is_late:
            self._lose_power()
        [file] = (file for file in self._files if file.path == target)
        if file.is_created and file.before_renaming is None:
            file.before_renaming = target.read_bytes()
        os.replace(source, target)
        file.synced = file.size()
        if is_crash:
            self._lose_power()

    def ftruncate(self, descriptor: int, size: int) -> None:
        is_crash = self._is_crash()
        if is_crash and not self._is_late:
            self._lose_power()
        os.ftruncate(descriptor, size)
        if is_crash:
            self._lose_power()
