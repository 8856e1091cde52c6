"""The privacy ledger of one data set at one site: what was spent, over all jobs, and what is left."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import (
    PrivacyCost,
    check_second_opinion,
    compose,
    count_events,
    gaussian_limit,
    relation_of,
)
from dp_components.errors import JobIdTaken, LedgerDamaged, PrivacyRefusal, UnknownEvent
from dp_components.events import (
    Event,
    NeighbouringRelation,
    PricedEvent,
    Release,
    RepeatedEvent,
    event_document,
    event_from_document,
)

# The ledger's file: one JSON record a line, only ever appended to, each line bound to all before it.
#
# A record counts once its line, with the line feed, is on disk (fsync). A line that a crash cut off has no line feed;
# it never counted, nothing was released on it, and it is removed before the next record is written. Anything else that
# is not exactly what this module writes is damage, and is refused: each line ends with a hash of itself and of the line
# before, so that edits and missing lines in the middle are noticed. Lines missing at the end are noticed by the head
# (``Head``), a small file elsewhere that says how far the journal had been written.
#
# Rewriting replaces the file whole (rename). Locking is by a file of its own, because the journal may be replaced.


Record = dict[str, object]
_CHECK = "check"
_CHECK_DIGITS = 32
_LARGEST_HEAD, _N_PARTS = 4096, 4


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two lines: the bytes before it, and the check of the last line before it, which binds all."""

    n_bytes: int
    check: str


class Journal:
    """One journal file, as seen by one thread of one process; others may hold the same file open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._check = ""

    @property
    def position(self) -> Position:
        """The end of what was read or written so far."""
        return Position(self._offset, self._check)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other processes and threads out; every other method must be called inside."""
        with _opened(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def read_new(self) -> tuple[bool, list[Record]]:
        """Return the records written since the last call, and whether they start again from the first one.

        Raises:
            LedgerDamaged: the file is not what this module writes.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            if self._offset:
                raise LedgerDamaged(f"{self.path.name} was removed while it was in use.") from None
            return True, []
        try:
            is_restart = not self._offset or not _stands(descriptor, self.position)
            if is_restart:
                self._forget()
            content = _read_from(descriptor, self._offset)
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.ftruncate(descriptor, self._offset + len(whole))
        finally:
            os.close(descriptor)
        records = [self._accept(line) for line in whole.splitlines(keepends=True)]
        return is_restart, records

    def stands(self, position: Position) -> bool:
        """Say whether the journal holds all lines that it held at a position, and they are still the same."""
        try:
            with _opened(self.path, os.O_RDONLY) as descriptor:
                return _stands(descriptor, position)
        except FileNotFoundError:
            return False

    def append(self, record: Record) -> None:
        """Write one record; on return it is durable. After any exception, read again before going on."""
        line, check = _line(record, self._check)
        with _opened(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as descriptor:
            _write_all(descriptor, line)
            os.fsync(descriptor)
        if not self._offset:
            _sync_folder(self.path.parent)
        self._check = check
        self._offset += len(line)

    def read_all(self) -> list[Record]:
        """Return every record from the start."""
        self._forget()
        return self.read_new()[1]

    def rewrite(self, records: Sequence[Record], announce: Callable[[Position], None]) -> None:
        """Replace the file by these records, whole or not at all; the next ``read_new`` starts again.

        Args:
            announce: called with the end of the new file before it takes the old one's place.
        """
        check, lines = "", []
        for record in records:
            line, check = _line(record, check)
            lines.append(line)
        content = b"".join(lines)
        partial = self.path.with_name(self.path.name + ".partial")
        _write_new(partial, content)
        announce(Position(len(content), check))
        os.replace(partial, self.path)
        _sync_folder(self.path.parent)

    def _forget(self) -> None:
        self._offset = 0
        self._check = ""

    def _accept(self, line: bytes) -> Record:
        """Parse one line and bind it to those before."""
        try:
            record: Record = json.loads(line)
            check = str(record.pop(_CHECK))
            ending = f', "{_CHECK}": "{check}"}}\n'.encode()
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            raise LedgerDamaged(f"{self.path.name} has a line that is not a record.") from None
        # The bytes themselves are hashed, so that another way to write the same record is noticed too.
        body = line[: -len(ending)] + b"}"
        if not line.endswith(ending) or check != _check_of(body, self._check):
            raise LedgerDamaged(f"{self.path.name} has a line that was changed, or lacks one before it.")
        self._check = check
        self._offset += len(line)
        return record


@dataclass(frozen=True, slots=True)
class HeadState:
    """What a head says.

    Attributes:
        position: how far the journal had been written.
        following: the end of the file that was about to take the journal's place, if one was.
        spent: what the ledger had counted as spent, part by part, for one row.
    """

    position: Position
    following: Position | None
    spent: tuple[float, ...]

    def is_met_by(self, journal: Journal) -> bool:
        """Say whether the journal, or the file that took its place, still holds all that it held."""
        return any(journal.stands(place) for place in (self.position, self.following) if place is not None)


class Head:
    """How far a journal was written, in a file that lies elsewhere, so that a journal that lacks its end is noticed.

    Order of writing: the journal first, then the head, then what was paid for is handed out. So a crash leaves a
    journal that goes on beyond its head, which is what ``HeadState.is_met_by`` accepts, and never one that ends before
    it. Where the whole file is about to be replaced, the head names the new file's end beforehand, beside the old
    one's. Each time the head is replaced whole and durably.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> HeadState | None:
        """Return what it says; None if there is no such file.

        Raises:
            LedgerDamaged: it is not what ``write`` writes.
        """
        try:
            with self.path.open("rb") as file:
                document = json.loads(file.read(_LARGEST_HEAD))
            following, spent = document["following"], tuple(map(float, document["spent"]))
            if len(spent) != _N_PARTS or not all(0 <= part < math.inf for part in spent):
                raise ValueError("not a cost")
            return HeadState(
                _position(document["position"]), None if following is None else _position(following), spent
            )
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise LedgerDamaged(f"the head {self.path.name} is not what the ledger writes.") from None

    def write(self, state: HeadState) -> None:
        """Say it durably."""
        document = {
            "position": [state.position.n_bytes, state.position.check],
            "following": state.following and [state.following.n_bytes, state.following.check],
            "spent": list(state.spent),
        }
        partial = self.path.with_name(self.path.name + ".partial")
        _write_new(partial, json.dumps(document, allow_nan=False).encode() + b"\n")
        os.replace(partial, self.path)
        _sync_folder(self.path.parent)


class Alive:
    """A mark that a job goes on, held by the process that runs it: the system lets go of it whenever that ends.

    A lock on an empty file beside the journal. All of it is called under the journal's own lock.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._held: dict[str, int] = {}

    def hold(self, job_id: str) -> None:
        """Mark a job as going on in this process."""
        if job_id not in self._held:
            descriptor = os.open(self._path(job_id), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # it goes on elsewhere too, which keeps the mark up just as well
                os.close(descriptor)
            else:
                self._held[job_id] = descriptor

    def is_held(self, job_id: str) -> bool:
        """Say whether any process runs the job."""
        if job_id in self._held:
            return True
        try:
            with _opened(self._path(job_id), os.O_RDWR) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def is_held_elsewhere(self, job_id: str) -> bool:
        """Say whether another process, or another user of this one, runs the job."""
        return job_id not in self._held and self.is_held(job_id)

    def release(self, job_id: str) -> None:
        """Take the mark away."""
        self._path(job_id).unlink(missing_ok=True)
        if job_id in self._held:
            os.close(self._held.pop(job_id))

    def _path(self, job_id: str) -> Path:
        return self._journal.with_name(f"{self._journal.name}.{hashlib.sha256(job_id.encode()).hexdigest()[:32]}.alive")


def _position(value: list[object]) -> Position:
    n_bytes, check = value
    if type(n_bytes) is not int or n_bytes < 1 or not isinstance(check, str) or len(check) != _CHECK_DIGITS:
        raise ValueError("not a position")
    return Position(n_bytes, check)


def _stands(descriptor: int, position: Position) -> bool:
    # The check commits to all lines before it: where it still stands, they are still the same.
    mark = f'"{_CHECK}": "{position.check}"}}\n'.encode()
    start = position.n_bytes - len(mark)
    return start >= 0 and os.pread(descriptor, len(mark), start) == mark


def _check_of(body: bytes, previous_check: str) -> str:
    return hashlib.sha256(previous_check.encode() + body).hexdigest()[:_CHECK_DIGITS]


def _line(record: Record, previous_check: str) -> tuple[bytes, str]:
    body = json.dumps(record, allow_nan=False).encode()
    check = _check_of(body, previous_check)
    return body[:-1] + f', "{_CHECK}": "{check}"}}\n'.encode(), check


def _read_from(descriptor: int, offset: int) -> bytes:
    parts = []
    while part := os.pread(descriptor, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file, of mode 0600 where it is made, until the block ends."""
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_new(path: Path, content: bytes) -> None:
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        _write_all(descriptor, content)
        os.fsync(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _sync_folder(folder: Path) -> None:
    with _opened(folder, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def make_private(folder: Path) -> None:
    """Create a folder and those above it that are missing, all of mode 0700."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


# What the ledger's records mean: the state that they add up to.


_VERSION = 1
_OR_NEWER = ", or that a newer VeilBoost has written: then install that version again."
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
        costs = (compose(event_list(job.spent)) for job_id, job in self.jobs.items() if job_id != without)
        return sum(costs, self.closed.cost() + self.lost)

    def held(self, without: str | None = None) -> PrivacyCost:
        """What was released or is promised to open jobs, for one row; optionally without one open job."""
        costs = (job.held() for job_id, job in self.jobs.items() if job_id != without)
        return sum(costs, self.closed.cost() + self.lost)

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
            raise LedgerDamaged(f"the ledger holds a record of an unknown kind{_OR_NEWER}")
        fields = {key: value for key, value in record.items() if key not in ("record", "at")}
        if not isinstance(record.get("at"), str) or (self.identity is None) != (record["record"] == "ledger"):
            raise LedgerDamaged("the ledger holds a record out of place.")
        try:
            reader(self, str(record["at"]), **fields)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, UnknownEvent, binascii.Error):
            what = f"the ledger holds a record {record['record']!r} that is not well formed"
            raise LedgerDamaged(f"{what}{_OR_NEWER}") from None

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
        self, at: str, job: str, plan: list[object], *, ends_with_process: bool = False, can_resume: bool = False
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

    def spendings(self, rows_per_person: int) -> Iterator[JobSpending]:
        """Yield all jobs, those that have ended first, in the order in which they did."""
        for name, job in self.closed.jobs.items():
            cost, events = self.closed.cost_of(name).for_person(rows_per_person), self.closed.spendings[job.spending]
            times = job.opened, job.closed, "closed"
            yield JobSpending(name, *times, job.n_releases, cost, None, tuple(events.items()))
        for name, running in self.jobs.items():
            both = (compose(event_list(events)) for events in (running.spent, running.plan))
            spent, plan = (cost.for_person(rows_per_person) for cost in both)
            times = running.opened, "", "interrupted" if running.is_interrupted else "open"
            yield JobSpending(name, *times, running.n_releases, spent, plan, tuple(running.spent.items()))

    def history(self, identity: LedgerIdentity, budget: Budget) -> LedgerHistory:
        """Return all jobs in the order in which they were opened."""
        rows = identity.rows_per_person
        found = sorted(self.spendings(rows), key=lambda one: (one.opened, one.job_id))
        totals = (self.spent().for_person(rows), self.held().for_person(rows), self.lost.for_person(rows))
        return LedgerHistory(identity, budget, tuple(found), *totals)

    def _running(self, job: str) -> Job:
        if self.jobs[job].is_interrupted:
            raise ValueError("a record of a job that was interrupted")
        return self.jobs[job]

    def _require_new(self, job: str) -> None:
        if job in self.jobs or job in self.closed.jobs:
            raise ValueError("a job opened twice")


_OF_LEDGERS = ("ledger", "budget", "person", "history", "head", "lost")
_OF_JOBS = ("open", "interrupt", "resume", "release", "close", "closed")
_READERS: dict[str, Callable[..., None]] = {kind: getattr(LedgerState, f"_{kind}") for kind in _OF_LEDGERS + _OF_JOBS}


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


# The privacy ledger in words: what a plan would cost, what is too much, and a ledger with all its jobs.


def quote_text(who: str, cost: PrivacyCost, held: PrivacyCost, identity: LedgerIdentity, budget: Budget) -> str:
    """Return what a plan costs beside what is held already, and what is too much of it."""
    total = held + cost
    fits = total.fits(budget.limit)
    message = (
        f"{who} {'fits' if fits else 'would overdraw'} the privacy budget of data set {identity.data_set} at "
        f"{identity.site}: it needs {_text(cost, budget)}; {_text(held, budget)} is spent or promised; together "
        f"that is {_text(total, budget)}, and the budget is epsilon {budget.epsilon:g}, all at its delta "
        f"{budget.delta:g} ({budget.pure_epsilon:g} of it for pure mechanisms)."
    )
    if not fits:
        message += f" Too much: {overdrawn(total, budget.limit)}."
        message += " Ask for less, close jobs that have ended, or ask the site to raise its budget."
    return message


def closed_text(job_id: str, n_releases: int) -> str:
    """Return why a job that is closed is not opened again, and what to do."""
    if n_releases:
        return (
            f"Job {job_id} is closed: what it has released stays charged, and its replies are deleted. Submit it as a "
            "new job."
        )
    return (
        f"Job {job_id} is closed, and has released nothing: it ended so, or it was interrupted and the ledger keeps "
        f"only the latest {MOST_UNPAID} interrupted jobs that have released nothing. Submit it as a new job: nothing "
        "is lost."
    )


def _text(cost: PrivacyCost, budget: Budget) -> str:
    return f"epsilon {cost.epsilon(budget.delta):.4g}" if any(cost.parts()) else "nothing"


def overdrawn(total: PrivacyCost, limit: PrivacyCost) -> str:
    """Name the parts of a cost that exceed the budget's; the whole epsilon may be small all the same."""
    names = (
        "the Gaussian part (mu^2)",
        "the pure part (pure_epsilon)",
        "the Renyi part (rho)",
        "the discrete slack (total variation between the noise drawn and that accounted)",
    )
    parts = zip(names, total.parts(), limit.parts(), strict=True)
    return "; ".join(f"{name} would be {part:.6g} of {most:.6g}" for name, part, most in parts if part > most)


def describe(state: LedgerState, identity: LedgerIdentity, budget: Budget) -> str:
    """Return a ledger as a table, with all its jobs."""
    rows = identity.rows_per_person
    spent, held, lost = (cost.for_person(rows) for cost in (state.spent(), state.held(), state.lost))
    lines = [
        f"Data set {identity.data_set} at {identity.site}",
        f"  Neighbouring   {identity.relation.value}, {identity.rows_per_person} row(s) per person",
        f"  Budget         epsilon {budget.epsilon:g} at delta {budget.delta:g}, {budget.pure_epsilon:g} of it pure",
        f"  Spent          {_text(spent, budget)}, at the budget's delta",
        f"  With open jobs {_text(held, budget)}",
        f"  Gaussian part  mu^2 {spent.mu_squared:.6g} of {budget.limit.mu_squared:.6g}",
        f"  Pure part      epsilon {spent.pure_epsilon:.6g} of {budget.limit.pure_epsilon:.6g}",
        f"  Discrete slack {spent.total_variation:.3g} of {budget.limit.total_variation:.3g} in total variation",
        "",
        f"  {'job':<40} {'state':<11} {'releases':>8} {'spent':>16} {'plan':>16}",
    ]
    text = cache(lambda cost: _text(cost, budget))  # most jobs have spent the same as another one
    for job in state.spendings(rows):
        plan = "" if job.plan is None else f" {text(job.plan):>16}"
        lines.append(f"  {job.job_id:<40} {job.state:<11} {job.n_releases:>8} {text(job.spent):>16}{plan}")
    if any(lost.parts()):
        lines.append(f"  {'(records that are missing)':<61} {text(lost):>16}")
    unpaid = unpaid_jobs(state)
    if len(unpaid) >= MOST_UNPAID:
        lines.append(
            f"  {len(unpaid)} jobs that have released nothing are interrupted; the latest {MOST_UNPAID} of such are "
            f"kept. The next ones close the oldest, {unpaid[0]}: resume it before, or close others (veilboost ledger "
            "--close JOB)."
        )
    return "\n".join(lines)


# The privacy ledger of one data set at one site: what was spent, over all jobs, and what is left.
#
# A job is opened with its whole plan, which is refused if it would overdraw the budget together with all that was spent
# and all that other open jobs may still spend. Each release is written durably, charge and reply in one record, before
# it is handed out. So after a crash either nothing had left, or the reply is there and the same query gets it again, at
# no charge; a question is never answered twice with different noise but as a second, charged release. Closing a job
# frees what it did not use. A job whose process is gone is settled as soon as another one is opened: one that cannot be
# resumed is closed; one that can is interrupted, which frees what it did not use as well and keeps its replies, so that
# whoever resumes it asks for the rest anew.
#
# Files, mode 0600 in folders of mode 0700: ``<data set>.ledger`` and its lock; and elsewhere
# ``<data set>.head``, which says how far the ledger was written and what was spent, so that a ledger that lacks its
# last records is refused. The noised replies of open jobs stand in the ledger; under distributed noise they carry this
# site's share only, so the file must stay at the site. Keep both: deleting them, or putting both back to the same
# earlier state, forgets what was released, and giving the same rows another name hides them from it.


__all__ = ["Budget", "Ledger", "LedgerIdentity", "Quote", "is_ledger_name", "ledger_files"]

_SUFFIX, _HEAD_SUFFIX = ".ledger", ".head"
_DATA_SET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,127}")
_TEXT = re.compile(r"[ -~]{1,300}")


@dataclass(frozen=True, slots=True)
class Quote:
    """What a plan would cost. Nothing was written.

    Attributes:
        fits: whether the budget allows it now.
        plan: its cost.
        held: what is spent, or promised to open jobs, without it.
        limit: the budget.
        message: for a person.
    """

    fits: bool
    plan: PrivacyCost
    held: PrivacyCost
    limit: PrivacyCost
    message: str


class Ledger:
    """The ledger of one data set. Any number of processes and threads may have it open."""

    def __init__(self, path: Path, heads: Path | None = None) -> None:
        """Open an existing ledger as it is; ``Ledger.open`` also creates one.

        Args:
            heads: folder of its head, as ``Ledger.open`` was given it. None reads without checking for a missing end;
                nothing can be written then.
        """
        self._journal = Journal(path)
        self._head = None if heads is None else Head(heads / (path.name.removesuffix(_SUFFIX) + _HEAD_SUFFIX))
        self._head_at: Position | None = None
        self._alive = Alive(path)
        self._state = LedgerState()
        self._thread_lock = RLock()

    @classmethod
    def open(cls, folder: Path, identity: LedgerIdentity, budget: Budget, heads: Path | None = None) -> Ledger:
        """Open the ledger of a data set, creating it at the first time, under the site's present budget.

        The rows of one person may be raised: events are kept for one row, so that all that was ever spent is from then
        on priced for as many rows. They cannot be lowered, which would make what was promised cheaper afterwards.

        Args:
            heads: folder of the ledgers' heads, best one that is not restored together with ``folder``; None takes
                ``heads`` in it. A ledger of the time before heads gets one now.

        Raises:
            ValueError: the name of the data set is not a plain file name.
            PrivacyRefusal: the ledger is there with another neighbouring relation or site, or more rows per person.
            LedgerDamaged: the file is not a ledger.
        """
        if not is_ledger_name(identity.data_set):
            raise ValueError("the name of a data set has letters, digits and _ . @ + - only")
        heads = folder / "heads" if heads is None else heads
        for needed in (folder, heads):
            make_private(needed)
        ledger = cls(folder / (identity.data_set + _SUFFIX), heads)
        with ledger._locked() as state:
            if state.identity is None:
                stated = {**asdict(identity), "relation": identity.relation.value}
                ledger._append({"record": "ledger", "version": _VERSION, **stated})
            else:
                ledger._take_identity(state.identity, identity)
            if state.budget != budget:
                ledger._append({"record": "budget", **asdict(budget)})
            if not state.has_head:
                # The head comes first: a crash in between leaves a head that the journal meets, and no head record.
                ledger._write_head()
                ledger._append({"record": "head"})
        return ledger

    @property
    def identity(self) -> LedgerIdentity:
        """Whose ledger it is."""
        with self._locked() as state:
            return state.begun()[0]

    def quote(self, plan: Event | Iterable[Event], job_id: str | None = None) -> Quote:
        """Say what a plan would cost and whether it fits, without writing anything.

        Raises:
            UnknownEvent, ValueError, PrivacyRefusal: the plan cannot be priced, or not in this ledger.
        """
        with self._locked() as state:
            return self._quote(state, count_events(plan), job_id or "the job", job_id)

    def open_job(
        self, job_id: str, plan: Event | Iterable[Event], *, ends_with_process: bool = False, can_resume: bool = False
    ) -> Quote:
        """Reserve the cost of a whole job, durably, if a second accountant agrees on it.

        The same job with the same plan again changes nothing; if it was interrupted, what it has not spent is reserved
        anew.

        Args:
            ends_with_process: the job cannot be resumed, say because its noise was drawn elsewhere. If this process
                ends without closing it, the next job that is opened closes it first: what it has spent stays spent,
                what it had reserved is free again.
            can_resume: another process may go on with the job. If this one ends without closing or interrupting it, the
                next job that is opened interrupts it first.

        Raises:
            SecondOpinionDiffers: see accounting.py.
            PrivacyRefusal: the plan would overdraw the budget.
            JobIdTaken: the job is closed, or is open with another plan.
            UnknownEvent, ValueError: the plan cannot be priced.
        """
        counts = count_events(plan)
        _require_text("job id", job_id)
        if ends_with_process and can_resume:
            raise ValueError("a job that can be resumed does not end with its process")
        with self._locked() as state:
            state = self._settle_abandoned(state)
            job = state.jobs.get(job_id)
            _require_untaken(state, job_id, counts)
            quote = self._quote(state, counts, f"Job {job_id}", job_id)
            if job is None:
                record: Record = {"record": "open", "job": job_id, "plan": _documents(counts)}
                record |= {"ends_with_process": True} if ends_with_process else {}
                record |= {"can_resume": True} if can_resume else {}
            elif job.is_interrupted:
                record = {"record": "resume", "job": job_id}
            else:
                if can_resume:
                    self._alive.hold(job_id)
                return quote
            if ends_with_process or can_resume:
                self._alive.hold(job_id)
            try:
                self._write_if_sound(state, quote, counts, record)
            except BaseException:
                if not self._state.is_running(job_id):
                    self._alive.release(job_id)
                raise
            return quote

    def interrupt_job(self, job_id: str) -> bool:
        """Give back what a job has not used, and keep its replies for the one that resumes it (``open_job``).

        Of interrupted jobs that have released nothing the latest few are kept: the next job that is opened closes those
        before.

        Returns:
            Whether that was done; False while another process goes on with the job, which changes nothing.

        Raises:
            PrivacyRefusal: the job is not open, or was interrupted before.
        """
        with self._locked() as state:
            state.running_job(job_id)
            if self._alive.is_held_elsewhere(job_id):
                return False
            self._append({"record": "interrupt", "job": job_id})
            self._alive.release(job_id)
            return True

    def release(self, job_id: str, query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
        """Return the answer to a query: the cached one, or a fresh one that is charged before it is handed out.

        Shapes:  result: int64[...], as ``make`` says.
        Privacy: only what this returns may leave the site. ``query`` must say everything that the exact answer depends
            on, the model's state included: the cached answer is given whenever it is the same.

        Args:
            job_id: an open job.
            query: what is asked, printable ASCII up to 300 characters; hash what is longer.
            make: draws the release. Called at most once, under the ledger's lock: it must neither wait for others nor
                use the ledger.

        Raises:
            PrivacyRefusal: the job is not open, has spent its plan, or the site has lowered its budget below what
                is spent. Nothing is handed out and nothing charged.
            OSError: the charge could not be written. Nothing is handed out; it may have been charged.
        """
        _require_text("query", query)
        with self._locked() as state:
            job = state.running_job(job_id)
            if query in job.replies:
                return job.replies[query].copy()
            release = make()
            events = count_events(release.event)
            self._check_release(state, job_id, events)
            if np.asarray(release.value).dtype.kind not in "iu":
                raise TypeError("a release holds integers")
            # What is handed out is what was written, whatever the caller does to its own array.
            value = np.array(release.value, dtype=np.int64)
            self._append(release_record(job_id, query, events, value))
            return value

    def answered(self, job_id: str) -> tuple[str, ...]:
        """Return the queries of an open job that would be answered from the cache, in the order of their release.

        Raises:
            PrivacyRefusal: the job is not open.
        """
        with self._locked() as state:
            return tuple(state.open_job(job_id).replies)

    def planned(self, job_id: str) -> Counter[PricedEvent] | None:
        """Return the plan that a job was opened with; None for one that is not open."""
        with self._locked() as state:
            return Counter(state.jobs[job_id].plan) if job_id in state.jobs else None

    def close_job(self, job_id: str) -> None:
        """End a job: what it has not used becomes free again, and its cached replies are deleted.

        Raises:
            PrivacyRefusal: the job is not open.
        """
        with self._locked() as state:
            state.open_job(job_id)
            self._close(state, [job_id])

    def _settle_abandoned(self, state: LedgerState) -> LedgerState:
        """Close or interrupt the jobs whose process ended and did not say so; return the state after it.

        Of interrupted jobs that have released nothing the latest few are kept: beginning one costs nobody anything.
        """
        abandoned = [
            name
            for name, job in state.jobs.items()
            if (job.ends_with_process or (job.can_resume and not job.is_interrupted)) and not self._alive.is_held(name)
        ]
        for name in abandoned:
            if state.jobs[name].can_resume:
                self._append({"record": "interrupt", "job": name})
                self._alive.release(name)
        ended = [name for name in abandoned if state.jobs[name].ends_with_process] + unpaid_jobs(state)[:-MOST_UNPAID]
        if ended:
            self._close(state, ended)
        return self._state

    def _close(self, state: LedgerState, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._append({"record": "close", "job": job_id})
            self._alive.release(job_id)
        records, before = summarise_closed(self._journal.read_all(), state), self._journal.position
        self._journal.rewrite(records, lambda after: self._write_head(before, after))
        self._read()  # what follows is appended to the new file

    def spent(self) -> PrivacyCost:
        """Return what was released so far, priced for one person."""
        with self._locked() as state:
            return state.spent().for_person(state.begun()[0].rows_per_person)

    def job_spent(self, job_id: str) -> PrivacyCost:
        """Return what one job has released so far, priced for one person.

        Raises:
            PrivacyRefusal: there is no such job.
        """
        with self._locked() as state:
            if job_id in state.closed.jobs:
                cost = state.closed.cost_of(job_id)
            elif job_id in state.jobs:
                cost = compose(event_list(state.jobs[job_id].spent))
            else:
                raise PrivacyRefusal(f"The ledger knows no job {job_id}.")
            return cost.for_person(state.begun()[0].rows_per_person)

    def history(self) -> LedgerHistory:
        """Return the ledger as values, with all its jobs."""
        with self._locked() as state:
            return state.history(*state.begun())

    def describe(self) -> str:
        """Return the ledger as text for a person."""
        with self._locked() as state:
            identity, budget = state.begun()
            return describe(state, identity, budget)

    def accept_cut(self) -> PrivacyCost:
        """Go on with a journal that lacks its end or its head, charging all that may be missing; return the charge.

        The head knows what had been spent. Where it is gone too, the whole budget is charged: no more could have been
        spent. Answers that are missing are drawn and charged afresh.

        Raises:
            PrivacyRefusal: nothing is missing.
            LedgerDamaged: the lines that are there are damaged, or the journal is gone: only a copy of it helps.
        """
        if self._head is None:
            raise ValueError("a cut is accepted where the head is known")
        with self._thread_lock, self._journal.locked():
            self._read()
            state, identity, budget = self._state, *self._state.begun()
            try:
                head = self._head.read()
                is_whole = not state.has_head if head is None else head.is_met_by(self._journal)
            except LedgerDamaged:
                head, is_whole = None, False
            if is_whole:
                raise PrivacyRefusal(f"The ledger of data set {identity.data_set} lacks nothing.")
            spent = head.spent if head is not None else for_one_row(budget.limit, identity.rows_per_person)
            missing = PrivacyCost(*(max(0.0, a - b) for a, b in zip(spent, state.spent().parts(), strict=True)))
            self._write({"record": "lost", "spent": list(missing.parts())})
            self._write({"record": "head"})
            self._write_head()
            return missing.for_person(identity.rows_per_person)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[LedgerState]:
        """Hold the lock and bring the state up to date with what others have written."""
        with self._thread_lock, self._journal.locked():
            if self._read():
                self._check_head()
            if self._state.has_head and self._head is not None and self._head_at != self._journal.position:
                self._write_head()  # what a crash, or another process, wrote last may not be in it
            yield self._state

    def _read(self) -> bool:
        is_restart, records = self._journal.read_new()
        if is_restart:
            self._state, self._head_at = LedgerState(), None
        self._apply(records)
        return is_restart

    def _check_head(self) -> None:
        if self._head is None:
            return
        try:
            head = self._head.read()
            if head is not None and not head.is_met_by(self._journal):
                raise LedgerDamaged("its end is missing: it holds less than had been written when it was last used.")
            if head is None and self._state.has_head:
                raise LedgerDamaged(f"the file {self._head.path.name}, which says where it ends, is missing.")
        except LedgerDamaged as error:
            self._journal = Journal(self._journal.path)
            raise LedgerDamaged(
                f"{self._journal.path.name}: {error} Nothing is released. Remedy: put both files back from the same "
                "copy; or accept the loss with `veilboost ledger --accept-cut`, which charges all that may be missing."
            ) from None

    def _write_head(self, position: Position | None = None, following: Position | None = None) -> None:
        """Say how far the journal is written; ``following`` is the end of the file that will take its place."""
        if self._head is not None:
            here = position or self._journal.position
            self._head.write(HeadState(here, following, self._state.spent().parts()))
            self._head_at = None if following else here

    def _apply(self, records: Iterable[Record]) -> None:
        try:
            for record in records:
                self._state.apply(record)
        except LedgerDamaged as error:
            self._journal = Journal(self._journal.path)
            raise LedgerDamaged(f"{self._journal.path.name}: {error}") from None

    def _append(self, record: Record) -> None:
        if self._state.has_head and self._head is None:
            raise ValueError("this ledger's head is kept elsewhere: open it with its folder to write")
        self._write(record)
        if self._state.has_head:
            self._write_head()

    def _write(self, record: Record) -> None:
        dated = {**record, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        self._journal.append(dated)
        self._state.apply(dated)

    def _take_identity(self, known: LedgerIdentity, stated: LedgerIdentity) -> None:
        if replace(known, rows_per_person=stated.rows_per_person) != stated:
            raise PrivacyRefusal(
                f"The ledger of data set {known.data_set} was begun for another site or neighbouring relation; what "
                "was spent under one cannot be counted under another."
            )
        if stated.rows_per_person < known.rows_per_person:
            raise PrivacyRefusal(
                f"The ledger of data set {known.data_set} counts {known.rows_per_person} rows per person, and the "
                f"site's policy now says {stated.rows_per_person}: the number can be raised, never lowered. Policy "
                f"key: data_sets.{known.data_set}.privacy.rows_per_person. Remedy: state {known.rows_per_person}."
            )
        if stated != known:
            self._append({"record": "person", "rows_per_person": stated.rows_per_person})

    def _write_if_sound(self, state: LedgerState, quote: Quote, plan: Counter[PricedEvent], record: Record) -> None:
        if not quote.fits:
            raise PrivacyRefusal(quote.message)
        if quote.plan.mu_squared:
            check_second_opinion(event_list(plan), state.begun()[1].delta)
        self._append(record)

    def _check_relation(self, state: LedgerState, events: Counter[PricedEvent]) -> None:
        identity = state.begun()[0]
        if relation_of(events) not in (None, identity.relation):
            raise PrivacyRefusal(
                f"The ledger of data set {identity.data_set} counts {identity.relation.value}; the events are for "
                "another neighbouring relation."
            )

    def _check_release(self, state: LedgerState, job_id: str, events: Counter[PricedEvent]) -> None:
        identity, budget = state.begun()
        self._check_relation(state, events)
        job = state.jobs[job_id]
        # Composed together: parts of one partition cost as much as the costliest of them.
        of_job = compose(event_list(job.spent + events))
        if not of_job.fits(compose(event_list(job.plan))):
            raise PrivacyRefusal(
                f"Job {job_id} has spent its plan ({job.n_releases} releases); a further one is not paid for. Extend "
                "the job if the budget allows."
            )
        total = state.spent(without=job_id) + of_job
        if not total.for_person(identity.rows_per_person).fits(budget.limit):
            raise PrivacyRefusal(
                f"A further release of job {job_id} would overdraw the budget of data set {identity.data_set}, which "
                f"the site has lowered: {overdrawn(total.for_person(identity.rows_per_person), budget.limit)}."
            )

    def _quote(self, state: LedgerState, plan: Counter[PricedEvent], who: str, job_id: str | None) -> Quote:
        identity, budget = state.begun()
        self._check_relation(state, plan)
        cost = compose(event_list(plan)).for_person(identity.rows_per_person)
        held = state.held(without=job_id).for_person(identity.rows_per_person)
        fits = (held + cost).fits(budget.limit)
        return Quote(fits, cost, held, budget.limit, quote_text(who, cost, held, identity, budget))


def is_ledger_name(data_set: str) -> bool:
    """Tell whether a data set of that name can have a ledger."""
    return _DATA_SET.fullmatch(data_set) is not None


def back_up(path: Path, target: Path) -> None:
    """Copy a ledger, as it is between two records, to a new file of mode 0600, and check the copy.

    Its head is not copied: a ledger that was restored from the copy is refused until somebody accepts what may have
    been spent since (``Ledger.accept_cut``).

    Raises:
        FileExistsError: there is such a file.
        LedgerDamaged: the file is not a ledger.
    """
    journal = Journal(path)
    with journal.locked():
        journal.read_all()
        content = path.read_bytes()
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    _write_new(target, content)
    try:
        Journal(target).read_all()
    except LedgerDamaged:
        target.unlink()
        raise


def ledger_files(folder: Path) -> list[Path]:
    """Return the ledgers in a folder, by name."""
    return sorted(folder.glob("*" + _SUFFIX))


def _require_untaken(state: LedgerState, job_id: str, counts: Counter[PricedEvent]) -> None:
    if job_id in state.closed.jobs:
        raise JobIdTaken(closed_text(job_id, state.closed.jobs[job_id].n_releases))
    job = state.jobs.get(job_id)
    if job is not None and job.plan != counts:
        raise JobIdTaken(f"Job {job_id} was opened before, with another plan. Submit it as a new job.")


def _require_text(name: str, value: str) -> None:
    if not _TEXT.fullmatch(value):
        raise ValueError(f"a {name} is 1 to 300 printable ASCII characters")
