"""What standing scoring has shown of each row, over all jobs: distinct bits, each counted before it leaves.

With the consent ``scoring`` a passive party answers for a row as often as it is asked, and bounds what the answers
show. An answer is one bit: on which side of a split the row lies. For one model and one version of the row's values
there are no more of them than the party has distinct splits in the model, whatever paths the row takes; so the first
question about a row is charged with all of these, and later ones about the same model and values with nothing: all that
they could show is on the record. A row whose charge would exceed ``vertical.scoring_bits_per_row`` is not answered for
any more; ``vertical.scoring_rows_per_day`` bounds how many rows are charged within a day of UTC.

Two models that share splits are charged twice, so that the cap is kept with room to spare. What it does not bound: what
many rows tell together, and when and how often the active party asks.

Privacy: purely local. Rows, models and values are hashes under a key of this site. A refusal says neither which rows
    nor how many.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.site.memory.schema import SCORED, DamagedArray, counted, load_counts, save_counts
from nvflare_plugins.site.memory.store import KEY_BYTES, Memory
from nvflare_plugins.site.policy.policy import SitePolicy

_DAY_S = 24 * 3600


class ScoringRefusal(PolicyRefusal):
    """A limit of standing scoring forbids rows.

    Attributes:
        limit: its key below ``vertical`` of the policy.
    """

    def __init__(self, limit: str, text: str) -> None:
        super().__init__(text)
        self.limit = limit


@dataclass(slots=True)
class _Record:
    """Shapes: answered: uint64[n], ascending; rows: uint64[n_rows], ascending; bits: int64[n_rows]; day: int64[2]."""

    answered: NDArray[np.uint64]
    rows: NDArray[np.uint64]
    bits: NDArray[np.int64]
    day: NDArray[np.int64]


class ScoringBudget:
    """The record of one data set at one site, for one model. Processes wait for each other."""

    def __init__(
        self,
        policy: SitePolicy,
        data_set: str,
        model: str,
        n_bits: int,
        randomness: RandomSource = OS_RANDOMNESS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the record.

        Args:
            data_set: the name in the site's policy: the record stays when the file behind it changes.
            model: what is answered with, and how: the model's id and the job's action.
            n_bits: most distinct bits that one row can show so.
        """
        self._site, self._rules, self._model, self._n_bits = policy.site, policy.vertical, model.encode(), n_bits
        self._memory, self._data_set, self._clock = Memory.open(policy), counted(data_set), clock
        self._key = self._memory.secret("scoring", randomness.bytes(KEY_BYTES))

    def check(self, names: Sequence[str], values: NDArray[np.float32]) -> None:
        """Refuse what ``charge`` would refuse, and charge nothing. Raises: as ``charge``."""
        with self._memory.reading() as db:
            self._charged(db, names, values)

    def charge(self, names: Sequence[str], values: NDArray[np.float32]) -> None:
        """Charge rows, durably, before anything about them is answered; nothing is charged if one must not be.

        Args:
            names: what names the rows at this site from job to job.

        Shapes: values: float32[n_rows, n_features].

        Raises:
            PolicyRefusal: a row would show more than it may, or there are too many rows for a day.
            ConfigurationError: the site's memory is damaged.
        """
        with self._memory.transaction() as db:
            record, is_new = self._charged(db, names, values)
            if is_new:
                arrays = {name: getattr(record, name) for name in _Record.__slots__}
                save_counts(db, SCORED, self._data_set, arrays)

    def _charged(
        self, db: sqlite3.Connection, names: Sequence[str], values: NDArray[np.float32]
    ) -> tuple[_Record, bool]:
        """Return the record with these rows, and whether it has changed. Raises: as ``charge``."""
        if len(names) > self._rules.predictions_per_job:
            raise self._refusal("predictions_per_job", "answers for fewer rows in one job", "name fewer rows (rows)")
        record = self._read(db)
        content = np.ascontiguousarray(np.where(np.isnan(values), np.float32(np.nan), values + np.float32(0)), "<f4")
        row_keys = self._hashes(b"row", ((name.encode(),) for name in names))
        answers = self._hashes(
            b"answer", ((self._model, name.encode(), row.tobytes()) for name, row in zip(names, content, strict=True))
        )
        answers, first = np.unique(answers, return_index=True)
        is_new = ~np.isin(answers, record.answered, kind="sort")  # NumPy 2.0 overflows in tables
        if not is_new.any():
            return record, False
        fresh = row_keys[first[is_new]]
        today = int(self._clock() // _DAY_S)
        spent = int(record.day[1]) if record.day[0] == today else 0
        if spent + fresh.size > self._rules.scoring_rows_per_day:
            raise self._refusal(
                "scoring_rows_per_day", "has answered for as many rows as it does within a day", "ask again tomorrow"
            )
        everyone = np.union1d(record.rows, fresh)
        bits = np.zeros(everyone.size, dtype=np.int64)
        bits[np.searchsorted(everyone, record.rows)] = record.bits
        np.add.at(bits, np.searchsorted(everyone, fresh), self._n_bits)
        if (bits[np.searchsorted(everyone, fresh)] > self._rules.scoring_bits_per_row).any():
            raise self._refusal(
                "scoring_bits_per_row", "has shown as much of a row of this job as it does", "name other rows (rows)"
            )
        day = np.array([today, spent + fresh.size], dtype="<i8")
        return _Record(np.union1d(record.answered, answers), everyone, bits, day), True

    def _read(self, db: sqlite3.Connection) -> _Record:
        record = _Record(**load_counts(db, SCORED, self._data_set))
        if not record.day.size:
            record.day = np.zeros(2, dtype="<i8")
        ascend = all((keys[1:] > keys[:-1]).all() for keys in (record.answered, record.rows))
        if record.rows.size != record.bits.size or record.day.size != 2 or not ascend or (record.bits < 0).any():
            raise DamagedArray("its record of scored rows does not fit together")
        return record

    def _hashes(self, purpose: bytes, items: Iterable[Sequence[bytes]]) -> NDArray[np.uint64]:
        found = []
        for parts in items:
            digest = hashlib.blake2b(digest_size=8, key=self._key, person=purpose)
            for part in parts:
                digest.update(len(part).to_bytes(8, "little") + part)
            found.append(digest.digest())
        return np.frombuffer(b"".join(found), dtype="<u8")

    def _refusal(self, key: str, what: str, remedy: str) -> PolicyRefusal:
        text = f"{self._site} {what}. Policy key: vertical.{key}. Remedy: {remedy}, or ask {self._site}."
        return ScoringRefusal(key, text)
