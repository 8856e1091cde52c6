"""What a site has paid of budgets that count rows, persons and predictions."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.errors import PrivacyError
from dp_components.ledger import Ledger, ledger_files
from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.site.memory.store import (
    PERSONS,
    PREDICTIONS,
    UNNAMED,
    DamagedArray,
    Memory,
    counted,
    insert,
    keyed_hashes,
    load_counts,
    save_counts,
)
from nvflare_plugins.site.policy import SitePolicy

# Which data set's budget pays for a person: nobody is counted twice.
#
# Each data set with a budget has a ledger of its own, and no ledger adds up what two of them spend on one person. So
# the persons of the first private job on a data set belong to it from then on, and a later data set of the same site
# (next month's file, say, with a budget of its own) trains on new persons alone: rows of others are left out, each by
# itself and without a word, because that they are there is private. Whether a row is left out depends on no other
# person.
#
# Persons are known by the data set's id column, which therefore should name persons (a patient's number, not that of a
# stay). A data set without one might hold anybody. So it is refused once another one was spent on, and once it was
# spent on itself all others are, whatever they name; unless the site vouches for one of both that nobody of it is in
# the other (``PrivacyBudget.own_persons``). A ledger of an earlier version, whose persons nobody noted, counts as
# without names.
#
# Concurrency: ledgers are read before the memory is held, never within: another job may hold a ledger for as long as a
# slow disk takes, and all jobs of the site would wait with this one. Nothing is missed: what is spent after that was
# noted in the memory before it was spent.
#
# Privacy: purely local; keyed hashes of ids.


_log = logging.getLogger(__name__)


class PersonsOfBudgets:
    """The persons of one data set with a budget, beside those of the others."""

    def __init__(self, policy: SitePolicy, spec: DataSet) -> None:
        """Open the memory.

        Raises:
            PolicyRefusal: another data set was spent on, and this one or that one names no id column.
            ConfigurationError: the site's memory is damaged.
        """
        self._memory, self._policy, self._spec = Memory.open(policy), policy, spec
        self._key = self._memory.secret("persons of budgets")
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


# How often a party has answered for each of its rows, over all jobs: predictions tell about rows, so they are limited.
#
# Every row counts once for each job that asks for it. The charge is on the disk before the first answer leaves; a job
# that fails afterwards has spent it all the same. So that one party's refusal does not spend the budgets of others, all
# parties check first, tell each other, and then charge.
#
# Privacy: purely local. Rows are kept as hashes under a key of this site, so that a row is recognised in the next job,
# in whatever order the rows come. A refusal tells neither which rows nor how many.


_NO_VALUES: NDArray[np.float32] = np.empty(0, dtype="<f4")


@dataclass(frozen=True, slots=True)
class Payment:
    """What the memory holds of rows once a job has paid for them.

    Shapes: rows: uint64[n_rows], keyed hashes; paid: int64[n_rows], by all jobs; answers: uint64[n], which this job is
        the first to ask for.
    """

    rows: NDArray[np.uint64]
    paid: NDArray[np.int64]
    answers: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, dtype="<u8"))
    day: Day | None = None


class ScoringRefusal(PolicyRefusal):
    """A limit of standing scoring forbids rows.

    Attributes:
        limit: its key below ``vertical`` of the policy.
    """

    def __init__(self, limit: str, text: str) -> None:
        super().__init__(text)
        self.limit = limit


class _RowBudget(ABC):
    """What jobs have paid for each row of one data set at one site. Processes wait for each other."""

    def __init__(self, policy: SitePolicy, data_set: str, secret: str) -> None:
        self._site, self._rules = policy.site, policy.vertical
        self._memory, self._data_set = Memory.open(policy), counted(data_set)
        self._key = self._memory.secret(secret)

    def check(self, names: Sequence[str], values: NDArray[np.float32] = _NO_VALUES) -> None:
        """Refuse what ``charge`` would refuse, and charge nothing. Raises: as ``charge``."""
        with self._memory.reading() as db:
            self._payment(db, names, values)

    def charge(self, names: Sequence[str], values: NDArray[np.float32] = _NO_VALUES) -> None:
        """Charge a job's rows, durably, before anything about them is answered; none is if one may not be asked for.

        Args:
            names: what names the rows at this site from job to job.
            values: those that a ``ScoringBudget`` answers from.

        Shapes: values: float32[n_rows, n_features].

        Raises:
            PolicyRefusal: a limit of the policy forbids it.
            ConfigurationError: the site's memory is damaged.
        """
        with self._memory.transaction() as db:
            payment = self._payment(db, names, values)
            if payment is not None:
                self._keep(db, payment)

    def _payment(self, db: sqlite3.Connection, names: Sequence[str], values: NDArray[np.float32]) -> Payment | None:
        if len(names) > self._rules.predictions_per_job:
            raise self._refusal("predictions_per_job", "answers for fewer rows in one job", "name fewer rows (rows)")
        return self._price(db, names, values)

    @abstractmethod
    def _price(self, db: sqlite3.Connection, names: Sequence[str], values: NDArray[np.float32]) -> Payment | None:
        """Return what a job has to pay; None if nothing. Raises: as ``charge``."""

    @abstractmethod
    def _keep(self, db: sqlite3.Connection, payment: Payment) -> None:
        """Enter a payment."""

    def _refusal(self, key: str, what: str, remedy: str) -> PolicyRefusal:
        return PolicyRefusal(f"{self._site} {what}. Policy key: vertical.{key}. Remedy: {remedy}, or ask {self._site}.")


class PredictionBudget(_RowBudget):
    """How often each row of a data set may be asked for; a row that comes twice in a job counts twice."""

    def __init__(self, policy: SitePolicy, data_set: str, *, in_training: bool = False):
        """Open the budget.

        Args:
            data_set: the name in the site's policy: counts stay when the file behind it changes.
            in_training: the rows are those of a training's evaluation set, for which a job has other remedies.
        """
        super().__init__(policy, data_set, "predictions")
        self._in_training = in_training

    def _price(self, db: sqlite3.Connection, names: Sequence[str], values: NDArray[np.float32]) -> Payment:
        stored = load_counts(db, PREDICTIONS, self._data_set)
        keys, counts = stored["keys"], stored["counts"]
        if keys.size != counts.size or (counts < 0).any() or (keys[1:] <= keys[:-1]).any():
            raise DamagedArray("its counts of predictions do not fit together")
        asked, times = np.unique(keyed_hashes(self._key, map(str.encode, names)), return_counts=True)
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
        return Payment(everyone, total)

    def _keep(self, db: sqlite3.Connection, payment: Payment) -> None:
        save_counts(db, PREDICTIONS, self._data_set, {"keys": payment.rows, "counts": payment.paid})

    def _refusal(self, key: str, what: str, remedy: str) -> PolicyRefusal:
        return super()._refusal(key, what, "another eval_data_set, or none" if self._in_training else remedy)


# What standing scoring has shown of each row, over all jobs: distinct bits, each counted before it leaves.
#
# With the consent ``scoring`` a passive party answers for a row as often as it is asked, and bounds what the answers
# show. An answer is one bit: on which side of a split the row lies. For one model and one version of the row's values
# there are no more of them than the party has distinct splits in the model, whatever paths the row takes; so the first
# question about a row is charged with all of these, and later ones about the same model and values with nothing: all
# that they could show is on the record. A row whose charge would exceed ``vertical.scoring_bits_per_row`` is not
# answered for any more; ``vertical.scoring_rows_per_day`` bounds how many rows are charged within a day of UTC, of
# which none comes back where a clock is set back.
#
# Two models that share splits are charged twice, so that the cap is kept with room to spare. What it does not bound:
# what many rows tell together, and when and how often the active party asks.
#
# Privacy: purely local. Rows, models and values are hashes under a key of this site. A refusal says neither which rows
# nor how many.


_DAY_S = 24 * 3600


class ScoringBudget(_RowBudget):
    """The distinct bits of each row of a data set, for one model."""

    def __init__(
        self, policy: SitePolicy, data_set: str, model: str, n_bits: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the record.

        Args:
            data_set: the name in the site's policy: the record stays when the file behind it changes.
            model: what is answered with, and how: the model's id and the job's action.
            n_bits: most distinct bits that one row can show so.
        """
        super().__init__(policy, data_set, "scoring")
        self._model, self._n_bits, self._clock = model.encode(), n_bits, clock
        with self._memory.reading() as db:
            ScoredRows(db, self._data_set).check_all()

    def _price(self, db: sqlite3.Connection, names: Sequence[str], values: NDArray[np.float32]) -> Payment | None:
        record = ScoredRows(db, self._data_set)
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
        return Payment(rows, bits, answers[is_new], Day(today, spent + n_charged))

    def _keep(self, db: sqlite3.Connection, payment: Payment) -> None:
        ScoredRows(db, self._data_set).add(payment)

    def _refusal(self, key: str, what: str, remedy: str) -> PolicyRefusal:
        return ScoringRefusal(key, str(super()._refusal(key, what, remedy)))

    def _hashes(self, purpose: bytes, items: Iterable[Sequence[bytes]]) -> NDArray[np.uint64]:
        found = []
        for parts in items:
            digest = hashlib.blake2b(digest_size=8, key=self._key, person=purpose)
            for part in parts:
                digest.update(len(part).to_bytes(8, "little") + part)
            found.append(digest.digest())
        return np.frombuffer(b"".join(found), dtype="<u8")


# The tables of what standing scoring has shown: one record for each answer and each row, looked up by key.
#
# A charge reads and writes the records of its own rows alone, however many there are of others. SQLite notices damage
# to its own structures; each record of a row says besides, by a hash, that it is what was written. An answer that is
# damaged is not found, and charged again.
#
# Concurrency: all of it within a transaction of the memory.


_ANSWER = "SELECT answer FROM scored_answers WHERE data_set = ? AND answer = ?"
_ROW = "SELECT row, bits, digest FROM scored_rows WHERE data_set = ? AND row = ?"
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Day:
    """How many rows were charged on a day. Units: number: days of UTC since 1970."""

    number: int
    rows: int


class ScoredRows:
    """The records of one data set.

    Keys are hashes of 64 bits, as uint64.
    """

    def __init__(self, db: sqlite3.Connection, data_set: str) -> None:
        """Look the data set up. Args: data_set: see ``schema.counted``."""
        self._db = db
        found = db.execute("SELECT id, day, rows FROM scored_sets WHERE data_set = ?", (data_set,)).fetchone()
        self._name = data_set
        self._number: int | None = None if found is None else found[0]
        self.day = Day(0, 0) if found is None else Day(found[1], found[2])
        if min(self.day.number, self.day.rows) < 0:
            raise DamagedArray("its record of scored rows does not fit together")

    def is_answered(self, answers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which answers are on the record. Shapes: uint64[n] -> bool[n]."""
        found = {key for (key,) in self._look_up(_ANSWER, answers)}
        return np.array([key in found for key in _signed(answers)], dtype=bool)

    def bits(self, rows: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return how many bits each row has shown. Shapes: uint64[n] -> int64[n]. Raises: DamagedArray."""
        found = dict(self._checked(self._look_up(_ROW, rows)))
        return np.array([found.get(key, 0) for key in _signed(rows)], dtype=np.int64)

    def check_all(self) -> None:
        """Read every record of a row. Raises: DamagedArray: one is not what was written."""
        query = "SELECT row, bits, digest FROM scored_rows WHERE data_set = ?"
        for _ in self._checked(self._db.execute(query, (self._number,))):
            pass

    def add(self, payment: Payment) -> None:
        """Write records, of rows in the place of those before."""
        self.day = payment.day or self.day
        if self._number is None:
            self._number = insert(
                self._db, "INSERT INTO scored_sets (data_set, day, rows) VALUES (?, 0, 0)", [self._name]
            )
        number = self._number
        self._db.executemany(
            "INSERT INTO scored_answers VALUES (?, ?)", ((number, key) for key in _signed(payment.answers))
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO scored_rows VALUES (?, ?, ?, ?)",
            (
                (number, key, n, _digest(key, n))
                for key, n in zip(_signed(payment.rows), payment.paid.tolist(), strict=True)
            ),
        )
        self._db.execute(
            "UPDATE scored_sets SET day = ?, rows = ? WHERE id = ?", (self.day.number, self.day.rows, number)
        )

    def _look_up(self, query: str, keys: NDArray[np.uint64]) -> list[tuple[Any, ...]]:
        return [one for key in _signed(keys) for one in self._db.execute(query, (self._number, key))]

    @staticmethod
    def _checked(records: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, int]]:
        for row, bits, digest in records:
            if type(bits) is not int or bits < 0 or digest != _digest(row, bits):
                raise DamagedArray("its record of scored rows is damaged")
            yield row, bits


def _signed(keys: NDArray[np.uint64]) -> list[int]:
    """Return keys as SQLite's whole numbers, which have a sign."""
    numbers: list[int] = np.ascontiguousarray(keys, dtype="<u8").view("<i8").tolist()
    return numbers


def _digest(row: int, bits: int) -> bytes:
    return hashlib.blake2b(b"%d %d" % (row, bits), digest_size=_DIGEST_BYTES).digest()
