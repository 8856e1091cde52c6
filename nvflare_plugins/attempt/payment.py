"""The way from a site's policy to the ledger of a data set, and what a job pays there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting.composition import count_events
from dp_components.errors import PrivacyError
from dp_components.events import Event, Release, event_document
from dp_components.ledger import Budget, Ledger, LedgerIdentity
from dp_components.neighbouring import NeighbouringRelation
from he_processors.errors import JobAborted, PolicyRefusal
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.site.policy.policy import SitePolicy

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


class JobLedger:
    """What one job pays at one site. Opening it reserves the whole plan; every release is charged before it leaves.

    For jobs that end with their attempt: if the process dies, the next private job on the data set closes this one.
    """

    def __init__(
        self,
        policy: SitePolicy,
        data_set: str,
        job_id: str,
        plan: Event,
        relation: NeighbouringRelation,
        evidence: EvidenceLog,
    ) -> None:
        """Reserve the plan, if two accountants agree on it.

        Raises:
            PolicyRefusal: the data set has no budget, or not so much left.
        """
        self._ledger, self._delta = open_ledger(policy, data_set, relation)
        self._job_id, self._evidence = job_id, evidence
        try:
            self.quote = self._ledger.open_job(job_id, plan, ends_with_process=True)
        except PrivacyError as error:
            raise PolicyRefusal(str(error)) from None

    def pay(self, query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
        """Return a release, or the reply that the same query got before; it was charged durably before this returns.

        Args:
            query: words, then "; rows " and a hash of the rows where the answer is to be replayed for them alone; the
                hash stays out of the evidence.

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
        except PrivacyError as error:
            raise PolicyRefusal(str(error)) from None
        except OSError as error:
            problem = type(error).__name__
            raise JobAborted(f"the privacy ledger cannot be written ({problem}): nothing was sent") from None
        text = event_text(drawn) if drawn else "replayed: paid for before, no charge"
        self._evidence.spend(query.partition("; rows ")[0], text, self.spent(), self._delta)
        return value

    def spent(self) -> float:
        """Return epsilon, at the budget's delta, of all that this job has released at this site."""
        return self._ledger.job_spent(self._job_id).epsilon(self._delta)

    def close(self) -> None:
        """End the job: what it has not used is free again, and cached replies are deleted."""
        try:
            self._ledger.close_job(self._job_id)
        except OSError as error:
            log_unclosed(self._job_id, error)
