"""The way from a site's policy to the ledger of a data set, and what a job pays there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting.composition import count_events
from dp_components.errors import JobIdTaken, PrivacyError
from dp_components.events import Event, Release, event_document
from dp_components.ledger import Budget, Ledger, LedgerIdentity, Quote, ledger_files
from dp_components.neighbouring import NeighbouringRelation
from he_processors.errors import JobAborted, PolicyRefusal
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.report.run_record import Spending
from nvflare_plugins.site.policy.policy import SitePolicy

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

    def reserve(self, plan: Event | Iterable[Event], can_resume: bool = False) -> Quote:
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
            problem = type(error).__name__
            raise JobAborted(f"the privacy ledger cannot be written ({problem}): nothing was sent") from None
        if self._evidence is not None:
            text = event_text(drawn) if drawn else REPLAYED
            self._evidence.spend(query.partition(";")[0], text, spent, self._delta)
        return value

    def spent(self) -> float:
        """Return epsilon, at the stated delta, of all that this job has released at this site."""
        return self._ledger.job_spent(self._job_id).epsilon(self._delta)

    def interrupt(self) -> bool:
        """Free what was not used, and keep the replies; return whether that was done."""
        try:
            return self._ledger.interrupt_job(self._job_id)
        except PrivacyError:
            _log.info("job %s does not go on in the ledger already", self._job_id)
        except OSError as error:
            log_unclosed(self._job_id, error)
        return False

    def close(self) -> None:
        """End the job: what it has not used is free again, and cached replies are deleted."""
        try:
            self._ledger.close_job(self._job_id)
        except PrivacyError:
            _log.info("job %s is closed in the ledger already", self._job_id)
        except OSError as error:
            log_unclosed(self._job_id, error)
