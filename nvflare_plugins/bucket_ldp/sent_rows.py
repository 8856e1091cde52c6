"""Whose buckets this party has sent: kept over all jobs, at the party only, to refuse predictions of those rows.

Prediction reveals exact bits of true values. For a row whose buckets were sent under local privacy that would undo what
was paid for, whichever model asks. The other way round, a row that was predicted before has shown those bits already;
then the buckets protect the rest of it only.

The file holds keyed hashes of identifiers, mode 0600, with its key: whoever reads it can test guesses of identifiers.
Keep it: deleting it forgets which rows must be refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from he_processors.errors import ConfigurationError, PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.site_policy import SitePolicy

FILE_NAME = "rows_of_buckets.jsonl"
_KEY_BYTES = 32


class SentRows:
    """The rows of one site. Several jobs may have it open; each holds the file's lock for a moment."""

    def __init__(self, policy: SitePolicy, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._site = policy.site
        self._path = policy.ledgers / FILE_NAME
        self._randomness = randomness

    def note(self, job_id: str, ids: Sequence[str]) -> None:
        """Remember rows, durably; to be called before their buckets are sent.

        Raises:
            ConfigurationError: the file is damaged.
        """
        with self._locked() as (file, key, _):
            _append(file, {"job": job_id, "rows": _hashes(key, ids)})

    def refuse(self, ids: Sequence[str] | None) -> None:
        """Refuse to train on or predict rows whose buckets were sent; to be called before anything is answered.

        Args:
            ids: canonical identifiers; None where the rows have none, so that they might be any.

        Raises:
            PolicyRefusal: there is, or may be, such a row. Which, and how many, is not said.
            ConfigurationError: the file is damaged.
        """
        if not self._path.exists():
            return
        with self._locked() as (_, key, sent):
            if sent and (ids is None or not sent.isdisjoint(_hashes(key, ids))):
                raise PolicyRefusal(
                    f"{self._site} has sent randomised buckets of rows that are, or may be, among those of this job: "
                    "its true thresholds would reveal exact bits of their values, beside what the epsilon covers. "
                    "Nothing was answered. Remedy: take rows that were not sent, from a data set with an id column."
                )

    @contextmanager
    def _locked(self) -> Iterator[tuple[BinaryIO, bytes, set[str]]]:
        """Hold the lock; yield the file, its key and the hashes in it."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            *lines, cut_short = file.read().split(b"\n")
            if cut_short:
                # A crash came in between: nothing was sent on the strength of this line.
                file.truncate(sum(len(line) + 1 for line in lines))
            if not lines:
                _append(file, {"key": self._randomness.bytes(_KEY_BYTES).hex()})
                self._sync_folder()
                file.seek(0)
                *lines, _ = file.read().split(b"\n")
            yield file, *self._parsed(lines)

    def _sync_folder(self) -> None:
        """Make the new file's name as durable as what is written into it."""
        descriptor = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _parsed(self, lines: Sequence[bytes]) -> tuple[bytes, set[str]]:
        try:
            first, *records = map(json.loads, lines)
            key = bytes.fromhex(first["key"])
            sent = {str(row) for record in records for row in record["rows"]}
        except (ValueError, TypeError, KeyError):
            key = b""
        if len(key) != _KEY_BYTES:
            raise ConfigurationError(f"{self._site}: {FILE_NAME} in the folder of ledgers is damaged: restore it")
        return key, sent


def _append(file: BinaryIO, record: dict[str, object]) -> None:
    file.write(json.dumps(record).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _hashes(key: bytes, ids: Sequence[str]) -> list[str]:
    return [hashlib.blake2b(item.encode(), digest_size=12, key=key).hexdigest() for item in ids]
