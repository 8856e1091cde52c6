"""The privacy ledger in words: what a plan would cost, what is too much, and a ledger with all its jobs."""

from __future__ import annotations

from collections import Counter

from dp_components.accounting.composition import PrivacyCost, compose
from dp_components.events import PricedEvent
from dp_components.ledger_records import MOST_UNPAID, Budget, LedgerIdentity, LedgerState, event_list, unpaid_jobs


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

    def priced(events: Counter[PricedEvent]) -> PrivacyCost:
        return compose(event_list(events)).for_person(identity.rows_per_person)

    spent = state.spent().for_person(identity.rows_per_person)
    held = state.held().for_person(identity.rows_per_person)
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
    spent_texts = [_text(priced(events), budget) for events in state.closed.spendings]
    for job_id, closed in state.closed.jobs.items():
        lines.append(f"  {job_id:<40} {'closed':<11} {closed.n_releases:>8} {spent_texts[closed.spending]:>16}")
    for job_id, job in state.jobs.items():
        spent_text, plan_text = (_text(priced(events), budget) for events in (job.spent, job.plan))
        job_state = "interrupted" if job.is_interrupted else "open"
        lines.append(f"  {job_id:<40} {job_state:<11} {job.n_releases:>8} {spent_text:>16} {plan_text:>16}")
    if any(state.lost.parts()):
        lost = _text(state.lost.for_person(identity.rows_per_person), budget)
        lines.append(f"  {'(records that are missing)':<61} {lost:>16}")
    unpaid = unpaid_jobs(state)
    if len(unpaid) >= MOST_UNPAID:
        lines.append(
            f"  {len(unpaid)} jobs that have released nothing are interrupted; the latest {MOST_UNPAID} of such are "
            f"kept. The next ones close the oldest, {unpaid[0]}: resume it before, or close others (veilboost ledger "
            "--close JOB)."
        )
    return "\n".join(lines)
