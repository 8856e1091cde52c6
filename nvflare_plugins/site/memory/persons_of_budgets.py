"""Which data set's budget pays for a person: nobody is counted twice.

Each data set with a budget has a ledger of its own, and no ledger adds up what two of them spend on one person. So the
persons of the first private job on a data set belong to it from then on, and a later data set of the same site (next
month's file, say, with a budget of its own) trains on new persons alone: rows of others are left out, each by itself
and without a word, because that they are there is private. Whether a row is left out depends on no other person.

Persons are known by the data set's id column, which therefore should name persons (a patient's number, not that of a
stay). A data set without one might hold anybody. So it is refused once another one was spent on, and once it was spent
on itself all others are, whatever they name; unless the site vouches for one of both that nobody of it is in the other
(``PrivacyBudget.own_persons``). A ledger of an earlier version, whose persons nobody noted, counts as without names.

Concurrency: ledgers are read before the memory is held, never within: another job may hold a ledger for as long as a
    slow disk takes, and all jobs of the site would wait with this one. Nothing is missed: what is spent after that
    was noted in the memory before it was spent.

Privacy: purely local; keyed hashes of ids.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.errors import PrivacyError
from dp_components.ledger import Ledger, ledger_files
from he_processors.errors import PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.site.memory.schema import PERSONS, UNNAMED, counted, keyed_hashes, load_counts, save_counts
from nvflare_plugins.site.memory.store import KEY_BYTES, Memory
from nvflare_plugins.site.policy.policy import SitePolicy

_log = logging.getLogger(__name__)


class PersonsOfBudgets:
    """The persons of one data set with a budget, beside those of the others."""

    def __init__(self, policy: SitePolicy, spec: DataSet, randomness: RandomSource = OS_RANDOMNESS) -> None:
        """Open the memory.

        Raises:
            PolicyRefusal: another data set was spent on, and this one or that one names no id column.
            ConfigurationError: the site's memory is damaged.
        """
        self._memory, self._policy, self._spec = Memory.open(policy), policy, spec
        self._key = self._memory.secret("persons of budgets", randomness.bytes(KEY_BYTES))
        earlier = self._spent_before()
        with self._memory.reading() as db:
            self._others = _of_others(db, spec.name)
            refusal = self._refusal(db, earlier)
        if refusal is not None:
            raise PolicyRefusal(refusal)

    @property
    def needs_ids(self) -> bool:
        """Return whether the rows' ids must be read."""
        return self._spec.id is not None

    def are_new(self, ids: Sequence[str | None]) -> NDArray[np.bool_]:
        """Return whose budget may pay; a row without an id may be anybody's. Shapes: result: bool[n_rows]."""
        if not self._others.size:
            return np.ones(len(ids), dtype=np.bool_)
        is_named = np.array([one is not None for one in ids], dtype=np.bool_)
        keys = keyed_hashes(self._key, ((one or "").encode() for one in ids))
        return is_named & ~np.isin(keys, self._others, kind="sort")

    def note(self, ids: Sequence[str | None]) -> None:
        """Remember the persons of a job, durably; once its price is reserved, before anything is released.

        Raises:
            DataRefusal: one of them was noted for another data set since ``are_new`` was asked.
            PolicyRefusal: so was another data set that names nobody.
        """
        keys = np.unique(keyed_hashes(self._key, (one.encode() for one in ids if one is not None)))
        earlier = self._spent_before()
        with self._memory.transaction() as db:
            refusal = self._refusal(db, earlier)
            if refusal is not None:
                raise PolicyRefusal(refusal)
            if np.isin(keys, _of_others(db, self._spec.name), kind="sort").any():
                raise DataRefusal("another job has begun to spend on persons of this one meanwhile: submit it again")
            mine = counted(self._spec.name)
            if not self.needs_ids or mine in earlier - _noted(db):
                save_counts(db, UNNAMED, mine, {"is_spent": np.ones(1, dtype="<i8")})
            known = load_counts(db, PERSONS, mine)["keys"]
            save_counts(db, PERSONS, mine, {"keys": np.union1d(known, keys).astype("<u8")})

    def _refusal(self, db: sqlite3.Connection, earlier: set[str]) -> str | None:
        """Return why nobody could tell who is counted twice; None where that can be told, or the site vouches.

        Args:
            earlier: see ``_spent_before``.
        """
        site, name = self._policy.site, self._spec.name
        vouched = {one for one, spec in self._policy.data_sets.items() if spec.privacy and spec.privacy.own_persons}
        if name in vouched:
            return None
        apart = {counted(one) for one in (name, *vouched)}
        if (earlier - _known(db) | _counted_under(db, UNNAMED)) - apart:
            return (
                f"{site} has spent the budget of another data set and does not know on whom: persons of {name!r} might "
                f"be counted twice. Policy key: data_sets.{name}.privacy.own_persons. Remedy: add the rows to that "
                f"data set, whose budget pays for them then; or let {site} vouch that nobody is in both."
            )
        if self._spec.id is None and any(load_counts(db, PERSONS, one)["keys"].size for one in _noted(db) - apart):
            return (
                f"{site} has spent the budget of another data set on persons who may be in {name!r} too, which names "
                f"nobody: they would be counted twice. Policy keys: data_sets.{name}.id, data_sets.{name}.privacy."
                f"own_persons. Remedy: ask {site} to name the column of persons, or to vouch that nobody is in both."
            )
        return None

    def _spent_before(self) -> set[str]:
        """Return the data sets that were spent on without a note of it, as ``counted`` says; holds no transaction."""
        with self._memory.reading() as db:
            noted = _noted(db)
        names = (path.name.removesuffix(".ledger") for path in ledger_files(self._policy.ledgers))
        return {counted(name) for name in names if counted(name) not in noted and self._has_spent(name)}

    def _has_spent(self, data_set: str) -> bool:
        """Return whether a ledger has released anything; one that cannot be read may have."""
        path = self._policy.ledgers / f"{data_set}.ledger"
        if not path.exists():
            return False
        try:
            return any(Ledger(path, self._policy.ledger_heads).spent().parts())
        except (PrivacyError, OSError) as error:
            _log.warning("the ledger of data set %r cannot be read: %s", data_set, error)
            return True


def _of_others(db: sqlite3.Connection, data_set: str) -> NDArray[np.uint64]:
    """Return the hashes of all persons of other data sets. Shapes: uint64[n]."""
    parts = [load_counts(db, PERSONS, name)["keys"] for name in sorted(_noted(db) - {counted(data_set)})]
    return np.concatenate([np.empty(0, dtype="<u8"), *parts])


def _noted(db: sqlite3.Connection) -> set[str]:
    return _counted_under(db, PERSONS)


def _known(db: sqlite3.Connection) -> set[str]:
    """Return the data sets of which the memory knows whom they were spent on, or whose rows were sent."""
    return _noted(db) | {counted(name) for (name,) in db.execute("SELECT DISTINCT data_set FROM sent_rows") if name}


def _counted_under(db: sqlite3.Connection, purpose: str) -> set[str]:
    return {name for (name,) in db.execute("SELECT DISTINCT data_set FROM row_counts WHERE purpose = ?", (purpose,))}
