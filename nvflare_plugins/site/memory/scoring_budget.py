"""What standing scoring has shown of each row, over all jobs: distinct bits, each counted before it leaves.

With the consent ``scoring`` a passive party answers for a row as often as it is asked, and bounds what the answers
show. An answer is one bit: on which side of a split the row lies. For one model and one version of the row's values
there are no more of them than the party has distinct splits in the model, whatever paths the row takes; so the first
question about a row is charged with all of these, and later ones about the same model and values with nothing: all that
they could show is on the record. A row whose charge would exceed ``vertical.scoring_bits_per_row`` is not answered for
any more; ``vertical.scoring_rows_per_day`` bounds how many rows are charged within a day of UTC, of which
none comes back where a clock is set back.

Two models that share splits are charged twice, so that the cap is kept with room to spare. What it does not bound: what
many rows tell together, and when and how often the active party asks.

Privacy: purely local. Rows, models and values are hashes under a key of this site. A refusal says neither which rows
    nor how many.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.site.memory.schema import counted
from nvflare_plugins.site.memory.scored_rows import Day, ScoredRows
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


@dataclass(frozen=True, slots=True)
class _Charge:
    """What is to be added to the record. Shapes: answers: uint64[n]; rows: uint64[n_rows]; bits: int64[n_rows]."""

    answers: NDArray[np.uint64]
    rows: NDArray[np.uint64]
    bits: NDArray[np.int64]
    day: Day


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
        with self._memory.reading() as db:
            ScoredRows(db, self._data_set).check_all()

    def check(self, names: Sequence[str], values: NDArray[np.float32]) -> None:
        """Refuse what ``charge`` would refuse, and charge nothing. Raises: as ``charge``."""
        with self._memory.reading() as db:
            self._charge(ScoredRows(db, self._data_set), names, values)

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
            record = ScoredRows(db, self._data_set)
            charge = self._charge(record, names, values)
            if charge is not None:
                record.add(charge.answers, charge.rows, charge.bits, charge.day)

    def _charge(self, record: ScoredRows, names: Sequence[str], values: NDArray[np.float32]) -> _Charge | None:
        """Return what the record lacks of these rows; None if nothing. Raises: as ``charge``."""
        if len(names) > self._rules.predictions_per_job:
            raise self._refusal("predictions_per_job", "answers for fewer rows in one job", "name fewer rows (rows)")
        content = np.ascontiguousarray(np.where(np.isnan(values), np.float32(np.nan), values + np.float32(0)), "<f4")
        row_keys = self._hashes(b"row", ((name.encode(),) for name in names))
        answers = self._hashes(
            b"answer", ((self._model, name.encode(), row.tobytes()) for name, row in zip(names, content, strict=True))
        )
        answers, first = np.unique(answers, return_index=True)
        is_new = ~record.is_answered(answers)
        if not is_new.any():
            return None
        rows, times = np.unique(row_keys[first[is_new]], return_counts=True)
        n_charged = int(times.sum())
        # No day comes back: a clock that is set back stands at the latest day on the record until it has passed it.
        today = max(int(self._clock() // _DAY_S), record.day.number)
        spent = record.day.rows if record.day.number == today else 0
        if spent + n_charged > self._rules.scoring_rows_per_day:
            raise self._refusal(
                "scoring_rows_per_day",
                "answers for no more rows today",
                "ask again tomorrow, or after a day that a clock ahead of time has shown",
            )
        bits = record.bits(rows) + times * self._n_bits
        if (bits > self._rules.scoring_bits_per_row).any():
            raise self._refusal(
                "scoring_bits_per_row", "shows no more bits of some row of this job", "name other rows (rows)"
            )
        return _Charge(answers[is_new], rows, bits, Day(today, spent + n_charged))

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
