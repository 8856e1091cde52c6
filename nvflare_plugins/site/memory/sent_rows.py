"""Whose buckets this party has sent: kept over all jobs, at the party only, and respected by every kind of job.

What was paid for a row's randomised buckets would be undone by a job that uses the row without differential privacy, or
under the budget of another data set: no ledger adds the two up. So, whatever the data set is called,

* vertical training and prediction, which reveal exact bits of true values, refuse such rows;
* horizontal training and evaluation refuse them too: the exact sums that the sites see are made of them;
* another FederBoost job sends them again only under the name of the same data set, whose ledger adds up what each
  draw of noise costs; under another name it refuses;
* private trees and DPBoost leave them out, each row by itself and without a word: that they are there is private.

A data set without an id column might hold any row, and is refused before it is read. The policy's consent
``exact_use_of_budgeted_data`` lifts this for horizontal jobs, private trees and DPBoost. The other way round, a row
that was used before has shown what it has shown; then the buckets protect the rest of it only. Alignment uses ids
alone.

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
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.site.policy.policy import SitePolicy

FILE_NAME = "rows_of_buckets.jsonl"
_KEY_BYTES = 32


class SentRows:
    """The rows of one site. Several jobs may have it open; each holds the file's lock for a moment."""

    def __init__(self, policy: SitePolicy, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._site, self._has_consent = policy.site, policy.consents.exact_use_of_budgeted_data
        self._path = policy.ledgers / FILE_NAME
        self._randomness = randomness

    def note(self, job_id: str, ids: Sequence[str], data_set: str = "") -> None:
        """Remember rows, durably; to be called before their buckets are sent.

        Args:
            data_set: whose ledger has paid.

        Raises:
            ConfigurationError: the file is damaged.
        """
        with self._locked() as (file, key, _):
            _append(file, {"job": job_id, "data_set": data_set, "rows": _hashes(key, ids)})

    def asks_for_ids(self, spec: DataSet) -> bool:
        """Return whether the rows of a data set must be compared with those sent; decided before any is read.

        Raises:
            PolicyRefusal: they must, and the data set has no id column.
            ConfigurationError: the file is damaged.
        """
        if self._has_consent or not self._of_others(""):
            return False
        if spec.id is None:
            raise self._no_ids(f"Policy keys: data_sets.{spec.name}.id, consents.exact_use_of_budgeted_data.")
        return True

    def sent(self, ids: Sequence[str | None]) -> NDArray[np.bool_]:
        """Return whose buckets were sent; a row without an id may be any. Shapes: result: bool[n_rows]."""
        known = self._of_others("")
        if not known or not len(ids):
            return np.zeros(len(ids), dtype=np.bool_)
        with self._locked() as (_, key, _):
            return np.array([row is None or _hashes(key, [row])[0] in known for row in ids])

    def refuse(self, ids: Sequence[str] | None, data_set: str = "") -> None:
        """Refuse a job on rows whose buckets were sent; to be called before anything is answered.

        Args:
            ids: canonical identifiers; None where the rows have none, so that they might be any.
            data_set: whose ledger pays for this job too: what was sent under its name does not count.

        Raises:
            PolicyRefusal: rows without ids may be such ones.
            DataRefusal: there is such a row.
            ConfigurationError: the file is damaged.
        """
        if ids is None and self._of_others(data_set):
            raise self._no_ids("Policy key: data_sets.<name>.id.")
        if ids is not None and self.sent_by_others(ids, data_set):
            raise DataRefusal(
                "randomised buckets of rows of this job were sent, and this job would reveal more of them than was "
                "paid for. Take rows that were not sent."
            )

    def sent_by_others(self, ids: Sequence[str], data_set: str) -> bool:
        """Return whether buckets of one of the rows were sent under the name of another data set."""
        known = self._of_others(data_set)
        if not known:
            return False
        with self._locked() as (_, key, _):
            return not known.isdisjoint(_hashes(key, ids))

    def _no_ids(self, keys: str) -> PolicyRefusal:
        return PolicyRefusal(
            f"{self._site} has sent randomised buckets of rows that may be among those of this job, which have no ids: "
            "it would reveal more of them than was paid for. Nothing was answered. Remedy: take rows that were not "
            f"sent, from a data set with an id column. {keys}"
        )

    def _of_others(self, data_set: str) -> set[str]:
        """Return the hashes of the rows that were sent under another name. Notes of older releases have none."""
        if not self._path.exists():
            return set()
        with self._locked() as (_, _, records):
            return {
                str(row)
                for record in records
                if not data_set or record.get("data_set", data_set) != data_set
                for row in record["rows"]
            }

    @contextmanager
    def _locked(self) -> Iterator[tuple[BinaryIO, bytes, list[dict[str, Any]]]]:
        """Hold the lock; yield the file, its key and its records."""
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

    def _parsed(self, lines: Sequence[bytes]) -> tuple[bytes, list[dict[str, Any]]]:
        try:
            first, *records = map(json.loads, lines)
            key = bytes.fromhex(first["key"])
            if not all(isinstance(record["rows"], list) for record in records):
                raise ValueError("rows")
        except (ValueError, TypeError, KeyError):
            key, records = b"", []
        if len(key) != _KEY_BYTES:
            raise ConfigurationError(f"{self._site}: {FILE_NAME} in the folder of ledgers is damaged: restore it")
        return key, records


def _append(file: BinaryIO, record: dict[str, object]) -> None:
    file.write(json.dumps(record).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _hashes(key: bytes, ids: Sequence[str]) -> list[str]:
    return [hashlib.blake2b(item.encode(), digest_size=12, key=key).hexdigest() for item in ids]
