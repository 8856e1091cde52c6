"""What the ledger's records mean: the state that they add up to."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting.composition import PrivacyCost, compose, gaussian_limit
from dp_components.errors import LedgerDamaged, PrivacyRefusal, UnknownEvent
from dp_components.events import Event, PricedEvent, RepeatedEvent, event_document, event_from_document
from dp_components.ledger_journal import Record
from dp_components.neighbouring import NeighbouringRelation

_VERSION = 1
MOST_UNPAID = 8
"""Interrupted jobs that have released nothing: they hold nothing, and so many are kept to be resumed."""


@dataclass(frozen=True, slots=True)
class LedgerIdentity:
    """Whose ledger it is, and what its guarantee means.

    Attributes:
        site: the site.
        data_set: the name of the data set at the site.
        relation: the neighbouring relation of all its events.
        rows_per_person: rows of one person that are protected together; every charge is priced for that many.
    """

    site: str
    data_set: str
    relation: NeighbouringRelation
    rows_per_person: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.rows_per_person, bool) or not isinstance(self.rows_per_person, int):
            raise TypeError("rows_per_person must be a whole number")
        if self.rows_per_person < 1:
            raise ValueError("a person has at least one row")


@dataclass(frozen=True, slots=True)
class Budget:
    """What all jobs on a data set may spend together; stated by the site, never by a job.

    Attributes:
        epsilon: the whole epsilon.
        delta: the whole delta, public.
        pure_epsilon: the part of epsilon reserved for pure mechanisms; Gaussians get the rest.
        zcdp_rho: reserved for mechanisms known by their Renyi divergence only.

    Raises:
        ValueError: the parts do not fit together.
    """

    epsilon: float
    delta: float
    pure_epsilon: float = 0.0
    zcdp_rho: float = 0.0

    def __post_init__(self) -> None:
        _ = self.limit

    @property
    def limit(self) -> PrivacyCost:
        """The budget as the cost that must not be exceeded, part by part."""
        return _limit(self)


@lru_cache
def _limit(budget: Budget) -> PrivacyCost:
    return gaussian_limit(budget.epsilon, budget.delta, pure_epsilon=budget.pure_epsilon, zcdp_rho=budget.zcdp_rho)


@dataclass(slots=True)
class Job:
    """One open job: what it may spend, what it has spent, and the replies that a retry gets again.

    Attributes:
        ends_with_process: nothing goes on with it once the process that opened it has ended.
        can_resume: another process may go on with it.
        is_interrupted: nobody goes on with it at present; it holds no more than it has spent.
    """

    opened: str
    plan: Counter[PricedEvent]
    spent: Counter[PricedEvent] = field(default_factory=Counter)
    replies: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    n_releases: int = 0
    ends_with_process: bool = False
    can_resume: bool = False
    is_interrupted: bool = False

    def held(self) -> PrivacyCost:
        """What must be kept for it: what it has spent; its whole plan where that is more, unless it was interrupted."""
        if self.is_interrupted:
            return compose(event_list(self.spent))
        return compose(event_list(self.spent)).at_least(compose(event_list(self.plan)))


@dataclass(frozen=True, slots=True)
class ClosedJob:
    """What is kept of a job that has ended; ``spending`` is a number in ``ClosedJobs.spendings``."""

    opened: str
    closed: str
    n_releases: int
    spending: int


class ClosedJobs:
    """All jobs that have ended. Most have spent the same events as another one, which are kept and priced once."""

    def __init__(self) -> None:
        self.jobs: dict[str, ClosedJob] = {}
        self.spendings: list[Counter[PricedEvent]] = []
        self._costs: list[PrivacyCost] = []
        self._counts: list[int] = []
        self._number: dict[frozenset[tuple[PricedEvent, int]], int] = {}

    def spending(self, events: Counter[PricedEvent]) -> int:
        """Return the number of what a job has spent."""
        key = frozenset(events.items())
        if key not in self._number:
            self._number[key] = len(self.spendings)
            self.spendings.append(events)
            self._costs.append(compose(event_list(events)))
            self._counts.append(0)
        return self._number[key]

    def add(self, job_id: str, job: ClosedJob) -> None:
        """Take a job in."""
        self._counts[job.spending] += 1
        self.jobs[job_id] = job

    def cost_of(self, job_id: str) -> PrivacyCost:
        """Return what one of them has spent, for one row."""
        return self._costs[self.jobs[job_id].spending]

    def cost(self) -> PrivacyCost:
        """Return what all of them have spent, for one row."""
        total = PrivacyCost()
        for cost, count in zip(self._costs, self._counts, strict=True):
            total = total + PrivacyCost(*(count * part for part in cost.parts()))
        return total


@dataclass(frozen=True, slots=True)
class JobSpending:
    """What one job means to a ledger, priced for one person.

    Attributes:
        opened, closed: ISO 8601 in UTC; ``closed`` is "" for a job that is open.
        state: "closed", "open" or "interrupted".
        spent: what it has released.
        plan: what it may release; None once it is closed.
        events: what it has released, each with how often.
    """

    job_id: str
    opened: str
    closed: str
    state: str
    n_releases: int
    spent: PrivacyCost
    plan: PrivacyCost | None
    events: tuple[tuple[PricedEvent, int], ...]


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """A whole ledger as values. Attributes: spent: of all jobs, with ``lost``, of records that are missing."""

    identity: LedgerIdentity
    budget: Budget
    jobs: tuple[JobSpending, ...]
    spent: PrivacyCost
    held: PrivacyCost
    lost: PrivacyCost


@dataclass(slots=True)
class LedgerState:
    """What the records so far add up to.

    Attributes:
        jobs: those that are open.
        closed: those that have ended.
        lost: what was spent by records that are missing, for one row; see ``Ledger.accept_cut``.
        has_head: whether the journal's head is kept elsewhere.
    """

    identity: LedgerIdentity | None = None
    budget: Budget | None = None
    jobs: dict[str, Job] = field(default_factory=dict)
    closed: ClosedJobs = field(default_factory=ClosedJobs)
    lost: PrivacyCost = PrivacyCost()
    has_head: bool = False

    def spent(self, without: str | None = None) -> PrivacyCost:
        """What was released at all, for one row; optionally without one open job.

        Partitions of different jobs have nothing to do with each other.
        """
        total = self.closed.cost() + self.lost
        for job_id, job in self.jobs.items():
            if job_id != without:
                total = total + compose(event_list(job.spent))
        return total

    def held(self, without: str | None = None) -> PrivacyCost:
        """What was released or is promised to open jobs, for one row; optionally without one open job."""
        total = self.closed.cost() + self.lost
        for job_id, job in self.jobs.items():
            if job_id != without:
                total = total + job.held()
        return total

    def begun(self) -> tuple[LedgerIdentity, Budget]:
        """Return whose ledger it is, and its budget. Raises: LedgerDamaged: it was created and holds nothing."""
        if self.identity is None or self.budget is None:
            raise LedgerDamaged("The ledger is empty.")
        return self.identity, self.budget

    def open_job(self, job_id: str) -> Job:
        """Return an open job. Raises: PrivacyRefusal: it is not open."""
        job = self.jobs.get(job_id)
        if job is None:
            raise PrivacyRefusal(f"Job {job_id} is not open in the ledger: it was never opened, or is closed.")
        return job

    def running_job(self, job_id: str) -> Job:
        """Return an open job that goes on. Raises: PrivacyRefusal: it does not."""
        job = self.open_job(job_id)
        if job.is_interrupted:
            raise PrivacyRefusal(f"Job {job_id} was interrupted: it must be opened again before it goes on.")
        return job

    def is_running(self, job_id: str) -> bool:
        """Tell whether a job is open and was not interrupted."""
        return job_id in self.jobs and not self.jobs[job_id].is_interrupted

    def apply(self, record: Record) -> None:
        """Take in one record.

        Raises:
            LedgerDamaged: it is not what the ledger writes, or does not follow from the records before it.
        """
        reader = _READERS.get(str(record.get("record")))
        if reader is None:
            raise LedgerDamaged("the ledger holds a record of an unknown kind.")
        fields = {key: value for key, value in record.items() if key not in ("record", "at")}
        if not isinstance(record.get("at"), str) or (self.identity is None) != (record["record"] == "ledger"):
            raise LedgerDamaged("the ledger holds a record out of place.")
        try:
            reader(self, str(record["at"]), **fields)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, UnknownEvent, binascii.Error):
            raise LedgerDamaged(f"the ledger holds a record {record['record']!r} that is not well formed.") from None

    def _ledger(self, at: str, version: int, site: str, data_set: str, relation: str, rows_per_person: int) -> None:
        if version != _VERSION:
            raise ValueError("unknown version")
        self.identity = LedgerIdentity(site, data_set, NeighbouringRelation(relation), rows_per_person)

    def _budget(self, at: str, epsilon: float, delta: float, pure_epsilon: float, zcdp_rho: float) -> None:
        self.budget = Budget(epsilon, delta, pure_epsilon, zcdp_rho)

    def _person(self, at: str, rows_per_person: int) -> None:
        if self.identity is None or rows_per_person <= self.identity.rows_per_person:
            raise ValueError("rows per person can only be raised")
        self.identity = replace(self.identity, rows_per_person=rows_per_person)

    def _head(self, at: str) -> None:
        self.has_head = True

    def _lost(self, at: str, spent: list[float]) -> None:
        self.lost = self.lost + PrivacyCost(*spent)

    def _open(
        self, at: str, job: str, plan: list[object], ends_with_process: bool = False, can_resume: bool = False
    ) -> None:
        self._require_new(job)
        if not isinstance(ends_with_process, bool) or not isinstance(can_resume, bool):
            raise TypeError("ends_with_process and can_resume are true or false")
        self.jobs[job] = Job(at, _counter(plan), ends_with_process=ends_with_process, can_resume=can_resume)

    def _interrupt(self, at: str, job: str) -> None:
        self._running(job).is_interrupted = True

    def _resume(self, at: str, job: str) -> None:
        if not self.jobs[job].is_interrupted:
            raise ValueError("a job resumed that was not interrupted")
        self.jobs[job].is_interrupted = False

    def _release(self, at: str, job: str, query: str, events: list[object], shape: list[int], value: str) -> None:
        running = self._running(job)
        if query in running.replies:
            raise ValueError("a query released twice")
        flat = np.frombuffer(base64.b64decode(value, validate=True), dtype="<i8")
        running.replies[query] = flat.reshape(shape).astype(np.int64)
        running.spent.update(_counter(events))
        running.n_releases += 1

    def _close(self, at: str, job: str) -> None:
        ended = self.jobs[job]
        self.closed.add(job, ClosedJob(ended.opened, at, ended.n_releases, self.closed.spending(ended.spent)))
        del self.jobs[job]

    def _closed(self, at: str, job: str, opened: str, spent: list[object], n_releases: int) -> None:
        self._require_new(job)
        self.closed.add(job, ClosedJob(opened, at, n_releases, self.closed.spending(_counter(spent))))

    def _history(self, at: str, spendings: list[list[object]], jobs: dict[str, list[object]]) -> None:
        numbers = [self.closed.spending(_counter(events)) for events in spendings]
        for job, (opened, closed, n_releases, number) in jobs.items():
            self._require_new(job)
            if not isinstance(opened, str) or not isinstance(closed, str):
                raise TypeError("not a job that has ended")
            if type(n_releases) is not int or type(number) is not int or min(n_releases, number) < 0:
                raise TypeError("not a job that has ended")
            self.closed.add(job, ClosedJob(opened, closed, n_releases, numbers[number]))

    def history(self, identity: LedgerIdentity, budget: Budget) -> LedgerHistory:
        """Return all jobs in the order in which they were opened."""
        rows = identity.rows_per_person
        found = [
            JobSpending(
                name,
                job.opened,
                job.closed,
                "closed",
                job.n_releases,
                self.closed.cost_of(name).for_person(rows),
                None,
                tuple(self.closed.spendings[job.spending].items()),
            )
            for name, job in self.closed.jobs.items()
        ]
        for name, running in self.jobs.items():
            spent, plan = (compose(event_list(events)).for_person(rows) for events in (running.spent, running.plan))
            state, events = "interrupted" if running.is_interrupted else "open", tuple(running.spent.items())
            found.append(JobSpending(name, running.opened, "", state, running.n_releases, spent, plan, events))
        found.sort(key=lambda one: (one.opened, one.job_id))
        totals = (self.spent().for_person(rows), self.held().for_person(rows), self.lost.for_person(rows))
        return LedgerHistory(identity, budget, tuple(found), *totals)

    def _running(self, job: str) -> Job:
        if self.jobs[job].is_interrupted:
            raise ValueError("a record of a job that was interrupted")
        return self.jobs[job]

    def _require_new(self, job: str) -> None:
        if job in self.jobs or job in self.closed.jobs:
            raise ValueError("a job opened twice")


_READERS: dict[str, Callable[..., None]] = {
    "ledger": LedgerState._ledger,
    "budget": LedgerState._budget,
    "person": LedgerState._person,
    "open": LedgerState._open,
    "interrupt": LedgerState._interrupt,
    "resume": LedgerState._resume,
    "release": LedgerState._release,
    "close": LedgerState._close,
    "closed": LedgerState._closed,
    "history": LedgerState._history,
    "head": LedgerState._head,
    "lost": LedgerState._lost,
}


def dated(record: Record) -> Record:
    """Return a record with the time of now, in UTC."""
    return {**record, "at": datetime.now(UTC).isoformat(timespec="seconds")}


def ledger_record(identity: LedgerIdentity) -> Record:
    """Return the first record of a ledger."""
    return {"record": "ledger", "version": _VERSION, **asdict(identity), "relation": identity.relation.value}


def budget_record(budget: Budget) -> Record:
    """Return the record of a budget."""
    return {"record": "budget", **asdict(budget)}


def person_record(rows_per_person: int) -> Record:
    """Return the record of a raised number of rows per person."""
    return {"record": "person", "rows_per_person": rows_per_person}


def open_record(job_id: str, plan: Counter[PricedEvent]) -> Record:
    """Return the record of a job that is opened with its plan."""
    return {"record": "open", "job": job_id, "plan": _documents(plan)}


def release_record(job_id: str, query: str, events: Counter[PricedEvent], value: NDArray[np.int64]) -> Record:
    """Return the record of one release; what a person reads comes before the value."""
    content = base64.b64encode(np.ascontiguousarray(value, dtype="<i8").tobytes()).decode()
    return {
        "record": "release",
        "job": job_id,
        "query": query,
        "events": _documents(events),
        "shape": list(value.shape),
        "value": content,
    }


def interrupt_record(job_id: str) -> Record:
    """Return the record that gives back what a job has not used, until it is resumed."""
    return {"record": "interrupt", "job": job_id}


def resume_record(job_id: str) -> Record:
    """Return the record that reserves anew what an interrupted job has not used."""
    return {"record": "resume", "job": job_id}


def close_record(job_id: str) -> Record:
    """Return the record that ends a job."""
    return {"record": "close", "job": job_id}


def head_record() -> Record:
    """Return the record that from here on the journal's head is kept elsewhere."""
    return {"record": "head"}


def lost_record(cost: PrivacyCost) -> Record:
    """Return the record that charges what missing records had spent."""
    return {"record": "lost", "spent": list(cost.parts())}


def summarise_closed(records: list[Record], state: LedgerState) -> list[Record]:
    """Return the records with all that concerns jobs that have ended replaced by one record.

    Opening a ledger then takes one line for all of them, and the price of each different spending once.

    Args:
        records: all records of a ledger.
        state: what they add up to.
    """
    closed = state.closed
    kept = [record for record in records if record["record"] != "history" and record.get("job") not in closed.jobs]
    if not closed.jobs:
        return kept
    jobs = {name: [job.opened, job.closed, job.n_releases, job.spending] for name, job in closed.jobs.items()}
    spendings = [_documents(events) for events in closed.spendings]
    at = max(job.closed for job in closed.jobs.values())
    n_common = next((i for i, record in enumerate(kept) if "job" in record), len(kept))
    kept.insert(n_common, {"record": "history", "spendings": spendings, "jobs": jobs, "at": at})
    return kept


def unpaid_jobs(state: LedgerState) -> list[str]:
    """Return the interrupted jobs that have released nothing, the oldest first."""
    return [name for name, job in state.jobs.items() if job.is_interrupted and not job.n_releases]


def event_list(counts: Counter[PricedEvent]) -> list[Event]:
    """Return counted events as a list of repeated ones."""
    return [RepeatedEvent(event, count) for event, count in counts.items()]


def _documents(counts: Counter[PricedEvent]) -> list[object]:
    return [{"count": count, **event_document(event)} for event, count in counts.items()]


def _counter(documents: list[object]) -> Counter[PricedEvent]:
    counts: Counter[PricedEvent] = Counter()
    for document in documents:
        if not isinstance(document, dict):
            raise TypeError("an event must be an object")
        values = dict(document)
        count = values.pop("count")
        event = event_from_document(values)
        counts[event] += RepeatedEvent(event, count).count
    return counts


def for_one_row(cost: PrivacyCost, n_rows: int) -> tuple[float, ...]:
    """Return the parts of a cost to one row that is ``cost`` to a person with so many."""
    mu_squared, epsilon, rho, slack = cost.parts()
    return mu_squared / n_rows**2, epsilon / n_rows, rho / n_rows**2, slack
