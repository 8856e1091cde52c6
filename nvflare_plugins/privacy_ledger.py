"""The way from a site's policy to the ledger of a data set."""

from __future__ import annotations

from collections.abc import Iterable

from dp_components.accounting.composition import count_events
from dp_components.errors import PrivacyError
from dp_components.events import Event, event_document
from dp_components.ledger import Budget, Ledger, LedgerIdentity
from dp_components.neighbouring import NeighbouringRelation
from he_processors.errors import PolicyRefusal
from nvflare_plugins.site_policy import SitePolicy


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
        return Ledger.open(policy.ledgers, identity, limits), budget.delta
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
