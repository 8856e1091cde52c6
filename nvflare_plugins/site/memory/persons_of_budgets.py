"""Which data set's budget pays for a person: nobody is counted twice.

Each data set with a budget has a ledger of its own, and no ledger adds up what two of them spend on one person. So the
persons of the first private job on a data set belong to it from then on, and a later data set of the same site (next
month's file, say, with a budget of its own) trains on new persons alone: rows of others are left out, each by itself
and without a word, because that they are there is private. Whether a row is left out depends on no other person.

Persons are known by the data set's id column, which therefore should name persons (a patient's number, not that of a
stay). A data set without one might hold anybody, and is refused once persons of another set are known. What a set had
trained on before it named an id column is not known.

Privacy: purely local; keyed hashes of ids.
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
from nvflare_plugins.site.memory.schema import PERSONS, counted, load_counts, save_counts
from nvflare_plugins.site.memory.store import KEY_BYTES, Memory
from nvflare_plugins.site.policy.policy import SitePolicy


class PersonsOfBudgets:
    """The persons of one data set with a budget, beside those of the others."""

    def __init__(self, policy: SitePolicy, spec: DataSet, randomness: RandomSource = OS_RANDOMNESS) -> None:
        """Open the memory.

        Raises:
            PolicyRefusal: other data sets have persons of their own, and this one names no id column.
            ConfigurationError: the site's memory is damaged.
        """
        self._memory, self._spec = Memory.open(policy), spec
        self._key = self._memory.secret("persons of budgets", randomness.bytes(KEY_BYTES))
        with self._memory.reading() as db:
            self._others = _of_others(db, spec.name)
        if spec.id is None and self._others.size:
            raise PolicyRefusal(
                f"{policy.site} has spent the budget of another data set on persons who may be in {spec.name!r} too, "
                "which names nobody: they would be counted twice. "
                f"Policy key: data_sets.{spec.name}.id. Remedy: ask {policy.site} to name the column of persons."
            )

    @property
    def needs_ids(self) -> bool:
        """Return whether the rows' ids must be read."""
        return self._spec.id is not None

    def are_new(self, ids: Sequence[str | None]) -> NDArray[np.bool_]:
        """Return whose budget may pay; a row without an id may be anybody's. Shapes: result: bool[n_rows]."""
        if not self._others.size:
            return np.ones(len(ids), dtype=np.bool_)
        is_named = np.array([one is not None for one in ids], dtype=np.bool_)
        return is_named & ~np.isin(self._hashes([one or "" for one in ids]), self._others)

    def note(self, ids: Sequence[str | None]) -> None:
        """Remember the persons of a job, durably; once its price is reserved, before anything is released.

        Raises:
            DataRefusal: one of them was noted for another data set since ``are_new`` was asked.
        """
        if not self.needs_ids:
            return
        keys = np.unique(self._hashes([one for one in ids if one is not None]))
        with self._memory.transaction() as db:
            if np.isin(keys, _of_others(db, self._spec.name)).any():
                raise DataRefusal("another job has begun to spend on persons of this one meanwhile: submit it again")
            mine = counted(self._spec.name)
            known = load_counts(db, PERSONS, mine)["keys"]
            save_counts(db, PERSONS, mine, {"keys": np.union1d(known, keys).astype("<u8")})

    def _hashes(self, ids: Sequence[str]) -> NDArray[np.uint64]:
        digests = b"".join(hashlib.blake2b(one.encode(), digest_size=8, key=self._key).digest() for one in ids)
        return np.frombuffer(digests, dtype="<u8")


def _of_others(db: sqlite3.Connection, data_set: str) -> NDArray[np.uint64]:
    """Return the hashes of all persons of other data sets. Shapes: uint64[n]."""
    found = db.execute(
        "SELECT DISTINCT data_set FROM row_counts WHERE purpose = ? AND data_set != ?", (PERSONS, counted(data_set))
    ).fetchall()
    parts = [load_counts(db, PERSONS, name)["keys"] for (name,) in found]
    return np.concatenate([np.empty(0, dtype="<u8"), *parts])
