"""How often a party has answered for each of its rows, over all jobs: predictions tell about rows, so they are limited.

Every row counts once for each job that asks for it. The charge is on the disk before the first answer leaves; a job
that fails afterwards has spent it all the same. So that one party's refusal does not spend the budgets of others, all
parties check first, tell each other, and then charge.

Privacy: purely local. Rows are kept as hashes under a key of this site, so that a row is recognised in the
    next job, in whatever order the rows come. A refusal tells neither which rows nor how many.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.site.memory.schema import (
    PREDICTIONS,
    DamagedArray,
    counted,
    keyed_hashes,
    load_counts,
    save_counts,
)
from nvflare_plugins.site.memory.store import KEY_BYTES, Memory
from nvflare_plugins.site.policy.policy import SitePolicy


class PredictionBudget:
    """The budget of one data set at one site. Processes wait for each other."""

    def __init__(
        self, policy: SitePolicy, data_set: str, randomness: RandomSource = OS_RANDOMNESS, in_training: bool = False
    ):
        """Open the budget.

        Args:
            data_set: the name in the site's policy: counts stay when the file behind it changes.
            in_training: the rows are those of a training's evaluation set, for which a job has other remedies.
        """
        self._site, self._rules, self._in_training = policy.site, policy.vertical, in_training
        self._memory, self._data_set = Memory.open(policy), counted(data_set)
        self._key = self._memory.secret("predictions", randomness.bytes(KEY_BYTES))

    def check(self, row_ids: Sequence[str]) -> None:
        """Refuse what ``charge`` would refuse, and charge nothing. Raises: as ``charge``."""
        with self._memory.reading() as db:
            self._charged(db, row_ids)

    def charge(self, row_ids: Sequence[str]) -> None:
        """Charge a job's rows, durably; nothing is charged if any of them may not be asked for.

        Args:
            row_ids: ids of the rows that the job asks for; a row that comes twice counts twice.

        Raises:
            PolicyRefusal: more rows than one job may ask for, or a row that was asked for too often before.
            ConfigurationError: the site's memory is damaged.
        """
        with self._memory.transaction() as db:
            keys, counts = self._charged(db, row_ids)
            save_counts(db, PREDICTIONS, self._data_set, {"keys": keys, "counts": counts})

    def _charged(self, db: sqlite3.Connection, row_ids: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the counts with those of a job. Shapes: uint64[n], int64[n]. Raises: as ``charge``."""
        if len(row_ids) > self._rules.predictions_per_job:
            raise self._refusal("predictions_per_job", "answers for fewer rows in one job", "name fewer rows (rows)")
        asked, times = np.unique(keyed_hashes(self._key, map(str.encode, row_ids)), return_counts=True)
        keys, counts = self._read(db)
        everyone = np.union1d(keys, asked)
        total = np.zeros(everyone.size, dtype=np.int64)
        total[np.searchsorted(everyone, keys)] = counts
        total[np.searchsorted(everyone, asked)] += times
        if (total[np.searchsorted(everyone, asked)] > self._rules.predictions_per_row).any():
            raise self._refusal(
                "predictions_per_row",
                "answers no more often for rows of this job (with consents.scoring it counts distinct bits)",
                "name other rows (rows, data_set)",
            )
        return everyone, total

    def _read(self, db: sqlite3.Connection) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        stored = load_counts(db, PREDICTIONS, self._data_set)
        keys, counts = stored["keys"], stored["counts"]
        if keys.size != counts.size or (counts < 0).any() or (keys[1:] <= keys[:-1]).any():
            raise DamagedArray("its counts of predictions do not fit together")
        return keys, counts

    def _refusal(self, key: str, what: str, remedy: str) -> PolicyRefusal:
        if self._in_training:
            remedy = "another eval_data_set, or none"
        return PolicyRefusal(f"{self._site} {what}. Policy key: vertical.{key}. Remedy: {remedy}, or ask {self._site}.")
