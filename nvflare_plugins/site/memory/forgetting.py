"""Persons who asked to be forgotten: a site's queue of them by data set, and what became of each request.

A model is forgotten by training it again without them (``forgets`` of a horizontal job), cut points and all. Two runs
that differ by one person differ by exactly that person's rows. So the mirror of the rule for added rows holds: persons
are left out together, in a batch that all sites fill (``row_floors.are_enough``), and smaller batches wait.

**The claim.** Call rows alike that were in the same of all runs over them. The difference of any of these runs, and
each sum of such, holds of rows that are alike all or none. So no combination of runs shows fewer rows than the smallest
class of rows alike. A run that forgets divides one class alone, that of rows which all runs had (``split_of``), and the
sites count both halves: three of them have ten rows or more there, and all together 1,000. A person who has rows of
another class, one that a later job added, waits: leaving it out would divide that one too. What the consent
``recompute_with_changes`` has let through before is outside of this, as it is with added rows.

**What other jobs do** (``pooled/preparation.py``):

* rows of a person who was forgotten are left out of every later job on the data set, each by itself;
* rows of a person who waits are left out where no job has used them, for nothing can be compared with them; where one
  has, they stay until their batch is full. A refusal in their place would let one request stop all sites, and leaving
  one out would show it;
* private jobs and bagging leave out whoever is in the queue; what a ledger has paid for stays paid.

**Durability.** A request is on the disk when ``add`` has returned. A job takes its batch in the transaction that
reserves its run, and a batch is done exactly when the registry says that such a run is complete, which it does after
all sites have written their models. So no crash loses a request, or marks one as done before there is a model. A run
that was cancelled, or that never passed its count, has released nothing, and its batch is free again; one that did and
failed keeps it, and the next job that forgets takes the same persons, whose rows give the same sums. Of two jobs at a
time the one that passes its count first settles its batch; the other goes on with the same one, or is refused.

Privacy: purely local. Persons and rows are keyed hashes; no id is stored, logged or said.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.site.memory import store
from nvflare_plugins.site.policy import SitePolicy

ASKED = "of persons who asked to be forgotten"
"""Why rows are left out, for ``Table.kept``."""


BEGUN = (
    "another job that forgets persons has begun meanwhile, or some of these took their request back: submit this one "
    "again"
)


class Standing(IntEnum):
    """How far a request, or a batch, has come."""

    NONE = 0
    WAITING = 1
    LEAVING = 2  # a run without the person has released sums, and has no model yet
    FORGOTTEN = 3


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ToForget:
    """Whom a job leaves out of one data set. Shapes: persons: uint64[n], keyed hashes.

    Attributes:
        replaces: the job whose model is trained again.
        may_lack_sites: that job's sites have agreed beforehand that the others go on without one of them.
    """

    replaces: str
    persons: NDArray[np.uint64]
    may_lack_sites: bool = False


@dataclass(slots=True)
class Batch:
    """Persons who are left out together, in the place of one job. Counts are this site's own, and may be none.

    Attributes:
        runs: numbers in the registry, of attempts and repetitions, and the job of each.
        began: in UTC.
    """

    replaces: str
    runs: list[tuple[int, str]]
    persons: int
    rows: int
    began: str
    job: str = ""
    state: Standing = Standing.NONE

    @classmethod
    def read(cls, db: sqlite3.Connection, stored: Mapping[str, Any], unchecked: Collection[int]) -> Batch:
        """Return what was stored, with what has become of it: none where its runs are gone.

        The job is the one that has ended well, or the last.
        """
        batch = cls(**{**stored, "runs": [(int(run), str(job)) for run, job in stored["runs"]]})
        for run, job in batch.runs:
            row = db.execute("SELECT state FROM runs WHERE id = ?", (run,)).fetchone()
            if row is not None and batch.state is not Standing.FORGOTTEN:
                released = Standing.WAITING if run in unchecked else Standing.LEAVING
                state = Standing.FORGOTTEN if row[0] == "complete" else released
                batch.state, batch.job = max(batch.state, state), job
        return batch

    def stored(self) -> dict[str, Any]:
        """Return what is kept of it, as JSON values."""
        return {name: getattr(self, name) for name in ("replaces", "runs", "persons", "rows", "began")}


@dataclass(slots=True, repr=False)
class Queue:
    """Who asked to be forgotten of one data set.

    Shapes: keys: uint64[n_persons]; since: int64[n_persons], seconds since 1970; members: uint64[n], who was in which
        batch; batch: int32[n], its number; rows: uint64[n_rows], hashes of the rows that batches left out;
        row_batch: int32[n_rows].

    Attributes:
        named_by: id column and form under which persons were queued; "" where the policy did not say.
    """

    data_set: str
    keys: NDArray[np.uint64]
    since: NDArray[np.int64]
    members: NDArray[np.uint64]
    batch: NDArray[np.int32]
    rows: NDArray[np.uint64]
    row_batch: NDArray[np.int32]
    batches: list[Batch]
    named_by: str = ""

    @classmethod
    def read(cls, db: sqlite3.Connection, data_set: str) -> Queue:
        """Return the queue of a data set, an empty one where nobody has asked."""
        arrays = store.load_counts(db, store.FORGETTING, store.counted(data_set))
        document = arrays.pop("document").tobytes()
        unchecked = set(store.load_counts(db, store.UNCHECKED, "")["runs"].tolist())
        stored = json.loads(document) if document else {"batches": []}
        batches = [Batch.read(db, one, unchecked) for one in stored["batches"]]
        return cls(data_set, **arrays, batches=batches, named_by=stored.get("named_by", ""))

    def write(self, db: sqlite3.Connection) -> None:
        """Keep it."""
        told = {"data_set": self.data_set, "named_by": self.named_by}
        document = json.dumps({**told, "batches": [one.stored() for one in self.batches]})
        names = ("keys", "since", "members", "batch", "rows", "row_batch")
        arrays: dict[str, Any] = {name: getattr(self, name) for name in names}
        arrays["document"] = np.frombuffer(document.encode(), dtype="|u1")
        store.save_counts(db, store.FORGETTING, store.counted(self.data_set), arrays)

    @property
    def standing(self) -> NDArray[np.int64]:
        """Return how far each request has come (``Standing``). Shapes: int64[n_persons]."""
        found = np.full(self.keys.size, int(Standing.WAITING), dtype=np.int64)
        for number, batch in enumerate(self.batches):
            is_in = np.isin(self.keys, self._persons(number))
            found[is_in] = np.maximum(found[is_in], batch.state)
        return found

    def settled_beside(self, run: int) -> int | None:
        """Return how many batches of other persons than a run's have released sums.

        None if the run has no batch, or some of its persons have taken their request back.
        """
        own = [number for number, one in enumerate(self.batches) if run in dict(one.runs)]
        persons = self._persons(own[0]) if own else np.empty(0, dtype="<u8")
        if not own or (self.places(persons) < 0).any():
            return None
        others = [one for n, one in enumerate(self.batches) if not np.array_equal(self._persons(n), persons)]
        return sum(one.state >= Standing.LEAVING for one in others)

    def _persons(self, number: int) -> NDArray[np.uint64]:
        return np.sort(self.members[self.batch == number])

    def places(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return where persons stand in the queue, -1 for those who are not in it. Shapes: int64[n]."""
        if not self.keys.size:
            return np.full(keys.size, -1)
        order = np.argsort(self.keys)
        place = order[np.minimum(np.searchsorted(self.keys, keys, sorter=order), self.keys.size - 1)]
        return np.where(self.keys[place] == keys, place, -1)

    def rows_in(self, state: Standing) -> NDArray[np.uint64]:
        """Return hashes of the rows that batches in a state have left out. Shapes: uint64[n]."""
        numbers = [number for number, one in enumerate(self.batches) if one.state is state]
        return self.rows[np.isin(self.row_batch, numbers)]

    def take(self, job_id: str, run: int, whom: ToForget, rows: NDArray[np.uint64]) -> None:
        """Give a run its batch: a new one, or the one that a run before it has begun.

        Args:
            rows: hashes of those that the run leaves out, and that no batch which is done has.

        Raises:
            PolicyRefusal: another job has taken persons since they were chosen.
        """
        persons = np.sort(whom.persons)
        begun = [n for n, one in enumerate(self.batches) if one.state in (Standing.WAITING, Standing.LEAVING)]
        alike = [number for number in begun if np.array_equal(self._persons(number), persons)]
        for number in alike:
            if self.batches[number].replaces == whom.replaces:
                self.batches[number].runs.append((run, job_id))
                return
            rows = without(rows, self.rows[self.row_batch == number])
        chosen = np.isin(self.keys, persons)
        is_free = alike or (self.standing[chosen] == Standing.WAITING).all()
        if int(chosen.sum()) != persons.size or not is_free:
            raise PolicyRefusal(BEGUN)
        number, began = len(self.batches), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.batches.append(
            Batch(whom.replaces, [(run, job_id)], persons.size, rows.size, began, job_id, Standing.WAITING)
        )
        self.members = np.concatenate([self.members, persons]).astype("<u8")
        self.batch = np.concatenate([self.batch, np.full(persons.size, number)]).astype("<i4")
        self.rows = np.concatenate([self.rows, rows]).astype("<u8")
        self.row_batch = np.concatenate([self.row_batch, np.full(rows.size, number)]).astype("<i4")


class Forgetting:
    """The requests at one site."""

    def __init__(self, policy: SitePolicy, clock: Callable[[], float] = time.time) -> None:
        self._site, self._memory, self._clock = policy.site, store.Memory.open(policy), clock
        self._key, self._specs = self._memory.secret(store.FORGETTING), policy.data_sets

    def keys(self, ids: Sequence[str | None]) -> NDArray[np.uint64]:
        """Return what stands for persons, 0 where a row names none. Shapes: uint64[n]."""
        keys = store.keyed_hashes(self._key, ((one or "").encode() for one in ids))
        return np.where([one is None for one in ids], np.uint64(0), keys) if len(ids) else keys

    def queue(self, data_set: str) -> Queue:
        """Return the queue of a data set, as it is now."""
        with self._memory.reading() as db:
            return Queue.read(db, data_set)

    def queues(self) -> list[Queue]:
        """Return the queues of all data sets, by name."""
        with self._memory.reading() as db:
            found = db.execute("SELECT DISTINCT data_set FROM row_counts WHERE purpose = ?", (store.FORGETTING,))
            documents = [
                store.load_counts(db, store.FORGETTING, one)["document"].tobytes() for (one,) in found.fetchall()
            ]
            return [Queue.read(db, name) for name in sorted(json.loads(one)["data_set"] for one in documents)]

    def add(self, data_set: str, ids: Sequence[str]) -> int:
        """Queue persons, durably; return how many were not in the queue.

        Args:
            ids: in canonical form.

        Raises:
            PolicyRefusal: others were queued under another id column or form.
        """
        spec = self._specs.get(data_set)
        with self._memory.transaction() as db:
            queue = Queue.read(db, data_set)
            if not queue.keys.size:
                queue.named_by = "" if spec is None else _named_by(spec)
            elif spec is not None:
                self._check_named(queue, spec)
            keys = np.unique(self.keys(ids))
            fresh = keys[queue.places(keys) < 0]
            queue.keys = np.concatenate([queue.keys, fresh]).astype("<u8")
            queue.since = np.concatenate([queue.since, np.full(fresh.size, int(self._clock()))]).astype("<i8")
            queue.write(db)
        return fresh.size

    def withdraw(self, data_set: str, ids: Sequence[str]) -> int:
        """Take requests back that still wait; return how many."""
        with self._memory.transaction() as db:
            queue = Queue.read(db, data_set)
            kept = ~(np.isin(queue.keys, self.keys(ids)) & (queue.standing == Standing.WAITING))
            queue.keys, queue.since = queue.keys[kept], queue.since[kept]
            queue.write(db)
        return int(np.count_nonzero(~kept))

    def replaced(self) -> dict[str, str]:
        """Return the jobs whose models saw rows of persons who are forgotten -> the job that replaces each."""
        return {job: by for _, job, by in self.receipts()}

    def receipts(self) -> Iterator[tuple[str, str, str]]:
        """Yield data set, job that was forgotten, and job that replaces it."""
        for queue in self.queues():
            for batch in queue.batches:
                if batch.state is Standing.FORGOTTEN:
                    yield queue.data_set, batch.replaces, batch.job

    def asks_for_ids(self, spec: DataSet) -> bool:
        """Return whether rows of a data set must be compared with the queue; decided before any is read.

        Raises:
            PolicyRefusal: they must, and the data set names no id column any more, or spells ids otherwise.
        """
        queue = self.queue(spec.name)
        if not queue.keys.size:
            return False
        if spec.id is None:
            raise PolicyRefusal(
                f"data set {spec.name!r} of {self._site} names no id column, by which persons were to be forgotten. "
                f"Policy key: data_sets.{spec.name}.id. Remedy: name it again"
            )
        self._check_named(queue, spec)
        return True

    def _check_named(self, queue: Queue, spec: DataSet) -> None:
        if queue.named_by not in ("", _named_by(spec)):
            raise PolicyRefusal(
                f"data set {spec.name!r} of {self._site} has another id column or id_form than when persons were "
                "queued to be forgotten, and their rows would not be found. Policy keys: "
                f"data_sets.{spec.name}.id, data_sets.{spec.name}.id_form. Remedy: set both back as they were"
            )

    def are_free(self, ids: Sequence[str | None], data_set: str) -> NDArray[np.bool_]:
        """Return which rows are of nobody in the queue: those that stay, of a job that leaves all others out.

        Shapes: bool[n_rows].
        """
        return self.queue(data_set).places(self.keys(ids)) < 0

    def refuse(self, ids: Sequence[bytes] | None, spec: DataSet) -> None:
        """Refuse a kind of job that leaves nobody out, where rows are of persons in the queue. Raises: DataRefusal."""
        if self.asks_for_ids(spec) and not self.are_free([one.decode() for one in ids or ()], spec.name).all():
            raise DataRefusal(
                f"data set {spec.name!r} holds rows of persons who asked to be forgotten (veilboost forget), whom this "
                "kind of job cannot leave out: remove their rows from the file, and align anew"
            )


def _named_by(spec: DataSet) -> str:
    """Return what the hashes of persons depend on: ids of another column, or spelled otherwise, have others."""
    return json.dumps([spec.id, asdict(spec.id_form)], sort_keys=True)


def replaced_jobs(policy: SitePolicy) -> dict[str, str]:
    """Return ``Forgetting.replaced``, nothing where the site has no memory: looking makes none."""
    return Forgetting(policy).replaced() if store.Memory.is_there(policy) else {}


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """How a run divides the rows of those before it. Shapes: gone: uint64[n], hashes; left counts the other half."""

    gone: NDArray[np.uint64]
    n_left: int


def split_of(
    fresh: NDArray[np.uint64],
    base: NDArray[np.uint64],
    released: Sequence[NDArray[np.uint64]],
    done: NDArray[np.uint64],
    leaving: NDArray[np.uint64],
) -> Split | None:
    """Return the rows that a run leaves out; None where it divides rows that some earlier run had and another had not.

    Rows of one hash are interchangeable: the nth of them is in each set that has n or more.

    Args:
        fresh: rows of the run. base: of the run that it replaces.
        released: of all earlier runs over these rows.
        done, leaving: left out by batches that are done, and by one that has released sums.

    Shapes: all: uint64[any], hashes of rows.
    """
    sets = [base, *released]
    values = np.unique(np.concatenate([fresh, *sets, done, leaving]))
    n_fresh, n_done, n_leaving, *n_of = (_times(values, one) for one in (fresh, done, leaving, *sets))
    most = np.maximum.reduce(n_of)
    top = np.maximum(most, n_fresh)
    value = np.repeat(np.arange(values.size), top)
    nth = np.arange(value.size) - np.repeat(np.cumsum(top) - top, top)
    in_fresh, in_base = nth < n_fresh[value], nth < n_of[0][value]
    in_all = np.logical_and.reduce([nth < n[value] for n in n_of])
    is_alive = nth < (most - n_done)[value]
    stays = in_base & (nth < (most - n_done - n_leaving)[value])
    if (in_fresh & ~in_base).any() or (in_fresh != stays)[~in_all].any():
        return None
    gone = in_base & is_alive & ~in_fresh
    return Split(values[value[gone]], int(np.count_nonzero(in_all & in_fresh)))


def without(rows: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return rows less others, each as often as it stands there. Shapes: all: uint64[any]; result is sorted."""
    values = np.unique(rows)
    return np.repeat(values, np.maximum(_times(values, rows) - _times(values, others), 0))


def _times(values: NDArray[np.uint64], rows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how often each value is among rows; others do not count. Shapes: values: sorted, all different."""
    rows = rows[np.isin(rows, values)]
    return np.bincount(np.searchsorted(values, rows), minlength=values.size)
