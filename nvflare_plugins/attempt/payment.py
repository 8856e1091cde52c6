"""The way from a site's policy to the ledger of a data set, and what a job of several attempts pays there, once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import count_events
from dp_components.errors import JobIdTaken, PrivacyError
from dp_components.events import Event, NeighbouringRelation, Release, event_document
from dp_components.ledger import Budget, Ledger, LedgerIdentity, Quote, ledger_files
from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.base.errors import DataRefusal, JobAborted, PolicyRefusal, machine_failure
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.pages.run_record import Spending
from nvflare_plugins.site.policy import SitePolicy

# The way from a site's policy to the ledger of a data set, and what a job pays there.


REPLAYED = "replayed: paid for before, no charge"
"""What evidence says of a release that was made before."""

_SIMULATED = (
    ". FLARE's simulator calls every job so, and a ledger that is kept beyond the run takes one of that name: take a "
    "POC, whose jobs have ids of their own."
)
_log = logging.getLogger(__name__)


def open_ledger(policy: SitePolicy, data_set: str, relation: NeighbouringRelation) -> tuple[Ledger, float]:
    """Open the ledger of a data set under the budget that the site's policy states now; return it with its delta.

    Raises:
        PolicyRefusal: the policy states no budget for the data set, or its ledger counts in another unit of privacy.
    """
    budget = policy.data_set(data_set).privacy
    if budget is None:
        raise PolicyRefusal(
            f"the policy of {policy.site} gives data set {data_set!r} no privacy budget. Policy key: "
            f"data_sets.{data_set}.privacy. Remedy: ask {policy.site} to state one."
        )
    identity = LedgerIdentity(policy.site, data_set, relation, budget.rows_per_person)
    try:
        limits = Budget(budget.epsilon, budget.delta, budget.pure_epsilon or 0.0)
        return Ledger.open(policy.ledgers, identity, limits, policy.ledger_heads), budget.delta
    except (PrivacyError, ValueError) as error:
        raise PolicyRefusal(str(error)) from None


def spending_of(policy: SitePolicy, data_sets: Iterable[str]) -> tuple[Spending, ...]:
    """Return what was spent, over all jobs so far, of each data set that has a budget; nothing is written.

    A ledger that cannot be read is said to be so: this is for a run that is done.
    """
    found = []
    ledgers = {path.stem: path for path in ledger_files(policy.ledgers)}
    for name in dict.fromkeys(data_sets):
        budget = policy.data_sets[name].privacy if name in policy.data_sets else None
        if budget is None:
            continue
        spent: float | None = 0.0
        if name in ledgers:
            try:
                spent = Ledger(ledgers[name], policy.ledger_heads).spent().epsilon(budget.delta)
            except (PrivacyError, OSError) as error:
                _log.warning("the ledger of data set %r cannot be read: %s", name, error)
                spent = None
        found.append(Spending(name, budget.epsilon, budget.delta, spent))
    return tuple(found)


def event_text(events: Iterable[Event]) -> str:
    """Return events in words for evidence and logs: mechanisms with their parameters, and how often each was run."""
    counts = count_events(events)
    documents = [(count, event_document(event)) for event, count in counts.items()]
    return "; ".join(
        " ".join([f"{count} x {facts.pop('event')}", *(f"{name} {value}" for name, value in facts.items())])
        for count, facts in documents
    )


def log_unclosed(job_id: str, error: OSError) -> None:
    """Say that a job could not be ended in the ledger. All that it reserved stays reserved, so nothing else fails."""
    _log.warning(
        "job %s stays open in the ledger, which cannot be written (%s): free its reservation with `veilboost ledger "
        "--close`",
        job_id,
        type(error).__name__,
    )


def check_rows_per_person(policy: SitePolicy, data_set: str, rows_per_person: int) -> None:
    """Refuse a job that protects fewer rows of one person than one has here.

    Raises:
        PolicyRefusal: it names the policy key and the remedy.
    """
    budget = policy.data_set(data_set).privacy
    if budget is not None and budget.rows_per_person > rows_per_person:
        raise PolicyRefusal(
            f"at {policy.site} one person has up to {budget.rows_per_person} rows, and the job's epsilon is meant for "
            f"{rows_per_person}: such a person would be protected less than it says. Policy key: "
            f"data_sets.{data_set}.privacy.rows_per_person. Remedy: rows_per_person={budget.rows_per_person} in "
            "the job, which raises the noise"
        )


def submit_anew(refusal: str, job_id: str) -> str:
    """Return a refusal that asks for a new job, with what helps where no job can have another id."""
    return refusal.rstrip(".") + _SIMULATED if job_id == "simulate_job" else refusal


class JobLedger:
    """What one job pays at one site: its plan is reserved first, then every release charged before it leaves."""

    def __init__(
        self,
        policy: SitePolicy,
        data_set: str,
        job_id: str,
        relation: NeighbouringRelation,
        evidence: EvidenceLog | None = None,
        delta: float | None = None,
    ) -> None:
        """Open the data set's ledger; nothing is reserved yet.

        Args:
            delta: at which what is spent is stated; None takes the budget's.

        Raises:
            PolicyRefusal: the data set has no budget.
        """
        self._ledger, self._of_budget = open_ledger(policy, data_set, relation)
        self._delta = self._of_budget if delta is None else delta
        self._job_id, self._evidence = job_id, evidence

    @property
    def is_known(self) -> bool:
        """Whether the ledger has heard of the job, closed jobs included."""
        try:
            self._ledger.job_spent(self._job_id)
        except PrivacyError:
            return False
        return True

    def planned(self, event: Event) -> int | None:
        """Return how often the plan has an event that this job was opened with in an earlier attempt.

        Returns:
            None for a job that is not open: its first attempt.
        """
        plan = self._ledger.planned(self._job_id)
        return None if plan is None else sum(plan[one] for one in count_events(event))

    def reserve(self, plan: Event | Iterable[Event], *, can_resume: bool = False) -> Quote:
        """Reserve the whole plan, if two accountants agree on it.

        Args:
            can_resume: the job's replies outlive its process. Else it ends with it: if the process dies, the next
                private job on the data set closes this one.

        Returns:
            What it costs at the budget's delta, in which the ledger adds up; its message says it at the job's too.

        Raises:
            PolicyRefusal: so much is not left, or the ledger knows another job of this id.
        """
        try:
            quote = self._ledger.open_job(self._job_id, plan, ends_with_process=not can_resume, can_resume=can_resume)
        except JobIdTaken as error:
            raise PolicyRefusal(submit_anew(str(error), self._job_id)) from None
        except PrivacyError as error:
            raise PolicyRefusal(str(error)) from None
        if self._delta == self._of_budget:
            return quote
        of_job = f" At the job's delta {self._delta:g} it needs epsilon {quote.plan.epsilon(self._delta):.4g}."
        return replace(quote, message=quote.message + of_job)

    def replies(self) -> tuple[str, ...]:
        """Return the queries of the open job that would be answered from the ledger, in order.

        Raises:
            PolicyRefusal: the job was closed meanwhile.
        """
        try:
            return self._ledger.answered(self._job_id)
        except PrivacyError as error:
            raise PolicyRefusal(str(error)) from None

    def pay(self, query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
        """Return a release, or the reply that the same query got before; it was charged durably before this returns.

        Args:
            query: words, then "; " and hashes of what the answer depends on, which stay out of the evidence.

        Raises:
            PolicyRefusal: the ledger refuses.
            JobAborted: the ledger cannot be written.
        """
        drawn: list[Event] = []

        def draw() -> Release:
            release = make()
            drawn.append(release.event)
            return release

        try:
            value = self._ledger.release(self._job_id, query, draw)
            spent = self.spent()
        except PrivacyError as error:
            raise PolicyRefusal(str(error)) from None
        except OSError as error:
            problem = machine_failure(error) or type(error).__name__
            raise JobAborted(f"the privacy ledger cannot be written: nothing was sent; {problem}") from error
        if self._evidence is not None:
            text = event_text(drawn) if drawn else REPLAYED
            self._evidence.spend(query.partition(";")[0], text, spent, self._delta)
        return value

    def spent(self) -> float:
        """Return epsilon, at the stated delta, of all that this job has released at this site."""
        return self._ledger.job_spent(self._job_id).epsilon(self._delta)

    def interrupt(self) -> bool:
        """Free what was not used, and keep the replies; return whether that was done."""
        return bool(self._ended(self._ledger.interrupt_job, "does not go on"))

    def close(self) -> None:
        """End the job: what it has not used is free again, and cached replies are deleted."""
        self._ended(self._ledger.close_job, "is closed")

    def _ended(self, end: Callable[[str], object], how: str) -> object:
        try:
            return end(self._job_id)
        except PrivacyError:
            _log.info("job %s %s in the ledger already", self._job_id, how)
        except OSError as error:
            log_unclosed(self._job_id, error)
        return None


# What a job of several attempts pays at one site: each release once, whichever attempt makes it.
#
# The whole plan is reserved before anything is released, each release charged before it leaves; what a failed attempt
# has not used is free again.


HISTORY_BYTES = 8 + 32 + 32
_ROWS = "; rows "


class AttemptPayment:
    """Pays for the releases of one job at one site, over all its attempts.

    A job holds its plan only while it runs: whoever begins jobs and breaks them off would otherwise take a data set's
    budget at no cost to himself. What it has released before it was interrupted stays charged, and its replies stay in
    the ledger: the same queries get them again, at no charge, in a new attempt, if the budget then still has room for
    the rest. If the process dies, the next private job on the data set settles what it had reserved.

    A replay is free only while all sites replay. So the sites compare what they would replay before anything is
    released (``history``, ``begin``), and a site then answers nothing else in its place. They may differ by the last
    query alone: its charge comes before its sum leaves the site, so that the sum over the sites was never complete
    where one of them, with all that its ledger ever wrote, had not charged it. Nor does a site replay anything among
    other sites: sums over several choices of sites would show each one's part.
    """

    def __init__(
        self,
        context: SiteContext,
        ledger: JobLedger,
        data_set: str,
        plan: Event | Iterable[Event],
        rows: bytes,
        *,
        may_replay: bool,
        is_kept: bool,
        job_id: str | None = None,
    ):
        """Reserve the cost of the whole plan, if two accountants agree on it.

        Args:
            rows: hash of the rows; it stays in this site's own ledger.
            may_replay: what was released outlives the attempt.
            is_kept: so does what was reserved, even if not all sites come so far: the job waits for lost sites.
            job_id: under which the ledger knows the job; None for its own.

        Raises:
            PolicyRefusal: the data set has no budget or not so much left, or the job has ended before.
            DataRefusal: rows or sites are not those with which it was begun.
        """
        self._job_id, self._ledger = job_id or context.job_id, ledger
        begun = "\n".join((self._job_id, *sorted(context.sites)))
        self._rows = hashlib.sha256(rows + begun.encode()).hexdigest()[:32]
        self._may_resume, self._is_kept, self._n_paid, self._n_begun = may_replay, is_kept, 0, 0
        self._was_known = ledger.is_known
        if self._was_known and not may_replay:
            ledger.close()
            text = (
                f"job {self._job_id} was begun before, and its server's noise is gone: submit it anew, to be charged "
                "anew"
            )
            raise PolicyRefusal(submit_anew(text, self._job_id))
        self.quote = ledger.reserve(plan, can_resume=may_replay)
        self._replays = ledger.replies()
        if any(query.partition(_ROWS)[2] != self._rows for query in self._replays):
            self.abandon()
            text = (
                f"the rows of data set {data_set!r} at {context.site}, or the sites of the job, are not those on "
                f"which job {self._job_id} was begun: it cannot be resumed. Submit it anew, to be charged anew"
            )
            raise DataRefusal(submit_anew(text, self._job_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Settle what is left of an attempt that failed, whatever ended it, memory that ran out included."""
        if error is not None:
            self.abandon()

    def history(self) -> bytes:
        """Return what the other sites must know to see that all replay the same: number and hashes of the queries.

        Privacy: a query names the round, and a hash of noisy sums that all sites have got.
        """
        queries = [query.partition(_ROWS)[0] for query in self._replays]
        return b"".join([len(queries).to_bytes(8, "little"), _digest(queries), _digest(queries[:-1])])

    def begin(self, histories: Sequence[bytes]) -> None:
        """Go on once every site has reserved its plan and would replay the same: now something may be released.

        Args:
            histories: ``history`` of every site.

        Raises:
            PolicyRefusal: some sites would replay what others draw afresh.
            ProtocolError: a peer's history is not one.
        """
        if any(len(history) != HISTORY_BYTES for history in histories):
            raise ProtocolError("a site's account of what it would replay has another size than it should")
        longest = max(histories, key=_length)
        for history in histories:
            is_same = history == longest
            lacks_last = _length(history) == _length(longest) - 1 and history[8:40] == longest[40:]
            if not is_same and not lacks_last:
                raise PolicyRefusal(
                    f"the sites' ledgers hold different releases of job {self._job_id}: some would be drawn afresh at "
                    "one site and replayed, unpaid, at others. Nothing was released. Submit the job anew, to be "
                    "charged anew"
                )
        self._is_kept, self._n_begun = True, _length(longest)

    @property
    def was_begun(self) -> bool:
        """Whether any site says that it paid before this attempt for what this site has paid for last."""
        return self._n_paid <= self._n_begun

    def pay(self, query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
        """Return a release, or the reply that the same query got before; it was charged durably before this returns.

        Raises:
            PolicyRefusal: the ledger refuses.
            JobAborted: it cannot be written, or holds another query in this place.
        """
        query = f"{query}{_ROWS}{self._rows}"
        if self._n_paid < len(self._replays) and query != self._replays[self._n_paid]:
            raise JobAborted(
                f"job {self._job_id} now asks for something else than before it was interrupted, as after a change of "
                "software: nothing was sent. Submit it anew, to be charged anew"
            )
        self._n_paid += 1
        return self._ledger.pay(query, make)

    def spent(self) -> float:
        """Return epsilon, at the job's delta, of all that this job has released at this site."""
        return self._ledger.spent()

    def complete(self) -> None:
        """End a job that went well: what it has not used is free again, the cached replies are deleted."""
        self._ledger.close()

    def abandon(self) -> None:
        """End an attempt that failed: free what was not released, keep the replies of a job that may be resumed."""
        if not self._was_known and not (self._is_kept and self._may_resume):
            self._ledger.close()
        elif self._ledger.interrupt():
            _log.warning(
                "job %s was interrupted: what it has released stays charged, the rest of its budget is free again. "
                "Let it go on, or delete its replies with `veilboost ledger --close`",
                self._job_id,
            )


def _digest(queries: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(queries).encode()).digest()


def _length(history: bytes) -> int:
    return int.from_bytes(history[:8], "little")
