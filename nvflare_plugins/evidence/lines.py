"""Files that grow by lines, and room on the disk for their last ones."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from nvflare_plugins.files import make_folder, sync_folder


class Lines:
    """A new file that grows by lines. What a full disk did not take stays in memory, so that no line is ever torn."""

    def __init__(self, path: Path, mode: int) -> None:
        make_folder(path.parent)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        self._folder: Path | None = path.parent  # until the file's name is on the disk
        self._pending = bytearray()

    def add(self, line: bytes) -> None:
        """Take a line, in memory."""
        self._pending += line

    def drain(self, most: int = 0) -> None:
        """Write what is pending if it is more than ``most`` bytes. Raises: OSError."""
        while len(self._pending) > most:
            del self._pending[: os.write(self._descriptor, self._pending)]

    def sync(self) -> None:
        """Write all, durably. Raises: OSError."""
        self.drain()
        os.fsync(self._descriptor)
        if self._folder is not None:
            sync_folder(self._folder)
            self._folder = None

    def close(self) -> None:
        """Let go of the file; what was not written is lost."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def set_room_aside(path: Path, n_bytes: int) -> None:
    """Fill a file that is deleted when the disk is full: else that would cost the record of the end."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"\1" * n_bytes)
        finally:
            os.close(descriptor)
