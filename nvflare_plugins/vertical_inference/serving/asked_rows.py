"""Which rows a job that stays was asked for at this site, over all its attempts: a file in the run's folder.

``vertical.predictions_per_job`` bounds the different rows of one job. A row is noted durably before anything about it
is answered, so that a job which is interrupted, and goes on in a further attempt, goes on counting.

Privacy: purely local, mode 0600. Rows are keyed hashes of 8 bytes, one after the other; the key stays in the site's
    memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nvflare_plugins.files import sync_folder

ASKED_FILE = "asked_rows"
_SIZE = 8


class AskedRows:
    """The rows of one job. Not safe for concurrent use."""

    def __init__(self, path: Path, key: bytes, most: int) -> None:
        """Read what earlier attempts have noted; what a crash has torn was never answered for, and goes.

        Args:
            key: names rows; of this site alone.
            most: different rows that one job may ask for.

        Raises:
            OSError: the file cannot be read or made.
        """
        self._path, self._key, self._most = path, key, most
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            self._n_bytes = len(content) // _SIZE * _SIZE
            os.ftruncate(descriptor, self._n_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
        self._rows = set(np.frombuffer(content[: self._n_bytes], dtype="<u8").tolist())

    def __len__(self) -> int:
        return len(self._rows)

    def new(self, names: Sequence[str], alignment: str = "") -> list[int] | None:
        """Return the rows that are new to the job, as ``note`` takes them; None if it would have too many with them.

        Args:
            names: what names the rows at this site.
            alignment: where names are positions, that of which alignment.
        """
        found = {self._hash(alignment, name) for name in names} - self._rows
        return None if len(self._rows) + len(found) > self._most else sorted(found)

    def note(self, rows: Sequence[int]) -> None:
        """Note rows, durably: all, or none if it raises. Raises: OSError."""
        if not rows:
            return
        content = np.array(rows, dtype="<u8").tobytes()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            written = 0
            while written < len(content):
                written += os.pwrite(descriptor, content[written:], self._n_bytes + written)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._n_bytes += len(content)
        self._rows.update(rows)

    def _hash(self, alignment: str, name: str) -> int:
        parts = (alignment.encode(), name.encode())
        digest = hashlib.blake2b(digest_size=_SIZE, key=self._key, person=b"asked row")
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return int.from_bytes(digest.digest(), "little")
