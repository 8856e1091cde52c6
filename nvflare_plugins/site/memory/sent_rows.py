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

The site's memory holds keyed hashes of the identifiers.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.site.memory.schema import load_array, store_array
from nvflare_plugins.site.memory.store import KEY_BYTES, Memory
from nvflare_plugins.site.policy.policy import SitePolicy

_HASH_BYTES = 12
_PAID_ONCE = (
    "randomised buckets of rows of this job were sent, and this job would reveal more of them than was paid for. Take "
    "rows that were not sent."
)


class SentRows:
    """The rows of one site."""

    def __init__(self, policy: SitePolicy, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._site, self._consents = policy.site, policy.consents
        self._memory = Memory.open(policy)
        self._key = self._memory.secret("sent rows", randomness.bytes(KEY_BYTES))

    def note(self, job_id: str, ids: Sequence[str], data_set: str = "") -> None:
        """Remember rows, durably; to be called before their buckets are sent.

        Args:
            data_set: whose ledger has paid.

        Raises:
            DataRefusal: one of them was sent under the name of another data set, perhaps since ``refuse`` allowed it.
            ConfigurationError: the site's memory is damaged.
        """
        hashes = self._hashes(ids)
        with self._memory.transaction() as db:
            # A job at the same time may have noted them since ``refuse`` looked.
            if not _sent(db, data_set).isdisjoint(hashes):
                raise DataRefusal(_PAID_ONCE)
            stored = store_array(db, np.frombuffer(b"".join(hashes), dtype="|u1"))
            db.execute(
                "INSERT INTO sent_rows (job_id, data_set, row_hashes) VALUES (?, ?, ?)", (job_id, data_set, stored)
            )

    def asks_for_ids(self, spec: DataSet) -> bool:
        """Return whether the rows of a data set must be compared with those sent; decided before any is read.

        Raises:
            PolicyRefusal: they must, and the data set has no id column.
            ConfigurationError: the site's memory is damaged.
        """
        if not self._of_others("") or self._consents.gives("exact_use_of_budgeted_data"):
            return False
        if spec.id is None:
            raise self._no_ids(f"Policy keys: data_sets.{spec.name}.id, consents.exact_use_of_budgeted_data.")
        return True

    def sent(self, ids: Sequence[str | None]) -> NDArray[np.bool_]:
        """Return whose buckets were sent; a row without an id may be any. Shapes: result: bool[n_rows]."""
        known = self._of_others("")
        if not known or not len(ids):
            return np.zeros(len(ids), dtype=np.bool_)
        return np.array([row is None or self._hashes([row])[0] in known for row in ids])

    def refuse(self, ids: Sequence[str] | None, data_set: str = "") -> None:
        """Refuse a job on rows whose buckets were sent; to be called before anything is answered.

        Args:
            ids: canonical identifiers; None where the rows have none, so that they might be any.
            data_set: whose ledger pays for this job too: what was sent under its name does not count.

        Raises:
            PolicyRefusal: rows without ids may be such ones.
            DataRefusal: there is such a row.
            ConfigurationError: the site's memory is damaged.
        """
        if ids is None and self._of_others(data_set):
            raise self._no_ids("Policy key: data_sets.<name>.id.")
        if ids is not None and self.sent_by_others(ids, data_set):
            raise DataRefusal(_PAID_ONCE)

    def sent_by_others(self, ids: Sequence[str], data_set: str) -> bool:
        """Return whether buckets of one of the rows were sent under the name of another data set."""
        known = self._of_others(data_set)
        return bool(known) and not known.isdisjoint(self._hashes(ids))

    def _no_ids(self, keys: str) -> PolicyRefusal:
        return PolicyRefusal(
            f"{self._site} has sent randomised buckets of rows that may be among those of this job, which have no ids: "
            "it would reveal more of them than was paid for. Nothing was answered. Remedy: take rows that were not "
            f"sent, from a data set with an id column. {keys}"
        )

    def _of_others(self, data_set: str) -> set[bytes]:
        """Return the hashes of the rows that were sent under another name; an empty one is another of all."""
        with self._memory.reading() as db:
            return _sent(db, data_set)

    def _hashes(self, ids: Sequence[str]) -> list[bytes]:
        return [hashlib.blake2b(item.encode(), digest_size=_HASH_BYTES, key=self._key).digest() for item in ids]


def _sent(db: sqlite3.Connection, data_set: str) -> set[bytes]:
    """See ``SentRows._of_others``. Notes of versions before 0.3 have no name."""
    numbers = db.execute("SELECT row_hashes FROM sent_rows WHERE ? = '' OR data_set != ?", (data_set, data_set))
    stored = [load_array(db, number, "|u1").tobytes() for (number,) in numbers.fetchall()]
    return {hashes[start : start + _HASH_BYTES] for hashes in stored for start in range(0, len(hashes), _HASH_BYTES)}
