"""The privacy ledger of one data set at one site: what was spent, over all jobs, and what is left.

A job is opened with its whole plan, which is refused if it would overdraw the budget together with all that was spent
and all that other open jobs may still spend. Each release is written durably, charge and reply in one record, before it
is handed out. So after a crash either nothing had left, or the reply is there and the same query gets it again, at no
charge; a question is never answered twice with different noise but as a second, charged release. Closing a job frees
what it did not use. A job whose process is gone is settled as soon as another one is opened: one that cannot be
resumed is closed; one that can is interrupted, which frees what it did not use as well and keeps its replies, so that
whoever resumes it asks for the rest anew.

Files, mode 0600 in folders of mode 0700: ``<data set>.ledger`` (ledger_journal.py) and its lock; and elsewhere
``<data set>.head``, which says how far the ledger was written and what was spent, so that a ledger that lacks its last
records is refused. The noised replies of open jobs stand in the ledger; under distributed noise they carry this site's
share only, so the file must stay at the site. Keep both: deleting them, or putting both back to the same earlier state,
forgets what was released, and giving the same rows another name hides them from it.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting.composition import PrivacyCost, compose, count_events, relation_of
from dp_components.accounting.second_opinion import check_second_opinion
from dp_components.errors import JobIdTaken, LedgerDamaged, PrivacyRefusal
from dp_components.events import Event, PricedEvent, Release
from dp_components.ledger_journal import Alive, Head, HeadState, Journal, Position, Record, make_private
from dp_components.ledger_records import (
    MOST_UNPAID,
    Budget,
    LedgerHistory,
    LedgerIdentity,
    LedgerState,
    budget_record,
    close_record,
    dated,
    event_list,
    for_one_row,
    head_record,
    interrupt_record,
    ledger_record,
    lost_record,
    open_record,
    person_record,
    release_record,
    resume_record,
    summarise_closed,
    unpaid_jobs,
)
from dp_components.ledger_text import closed_text, describe, overdrawn, quote_text

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
                ledger._append(ledger_record(identity))
            else:
                ledger._take_identity(state.identity, identity)
            if state.budget != budget:
                ledger._append(budget_record(budget))
            if not state.has_head:
                # The head comes first: a crash in between leaves a head that the journal meets, and no head record.
                ledger._write_head()
                ledger._append(head_record())
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
            SecondOpinionDiffers: see accounting/second_opinion.py.
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
            if job_id in state.closed.jobs:
                raise JobIdTaken(closed_text(job_id, state.closed.jobs[job_id].n_releases))
            if job is not None and job.plan != counts:
                raise JobIdTaken(f"Job {job_id} was opened before, with another plan. Submit it as a new job.")
            quote = self._quote(state, counts, f"Job {job_id}", job_id)
            if job is None:
                record = open_record(job_id, counts)
                record |= {"ends_with_process": True} if ends_with_process else {}
                record |= {"can_resume": True} if can_resume else {}
            elif job.is_interrupted:
                record = resume_record(job_id)
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
            self._append(interrupt_record(job_id))
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
                self._append(interrupt_record(name))
                self._alive.release(name)
        ended = [name for name in abandoned if state.jobs[name].ends_with_process] + unpaid_jobs(state)[:-MOST_UNPAID]
        if ended:
            self._close(state, ended)
        return self._state

    def _close(self, state: LedgerState, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._append(close_record(job_id))
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
            for record in (lost_record(missing), head_record()):
                with_time = dated(record)
                self._journal.append(with_time)
                state.apply(with_time)
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
        with_time = dated(record)
        self._journal.append(with_time)
        self._state.apply(with_time)
        if self._state.has_head:
            self._write_head()

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
            self._append(person_record(stated.rows_per_person))

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


def ledger_files(folder: Path) -> list[Path]:
    """Return the ledgers in a folder, by name."""
    return sorted(folder.glob("*" + _SUFFIX))


def _require_text(name: str, value: str) -> None:
    if not _TEXT.fullmatch(value):
        raise ValueError(f"a {name} is 1 to 300 printable ASCII characters")
