"""``veilboost ledger --html``: what was spent of a site's privacy budgets, over time, on a page for people.

Privacy: no id of a row, a person or a job; jobs are numbered in the order in which they were opened. For the site's own
people.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from dp_components.accounting import PrivacyCost
from dp_components.events import NeighbouringRelation
from dp_components.ledger import JobSpending, LedgerHistory
from nvflare_plugins.base.formatting import counted
from nvflare_plugins.pages.charts import Axis, Line, labelled_lines, page

_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60
_FEW = 4  # of a unit of time: below, the next smaller one tells more


def ledger_html(histories: Sequence[LedgerHistory], site: str, now: datetime) -> str:
    """Return the page as HTML. Args: now: with time zone; the curves end there."""
    data_sets = [_data_set(history, now) for history in histories]
    return page("ledger.html", site=site, now=f"{now.astimezone(UTC):%Y-%m-%d %H:%M}", data_sets=data_sets)


def protected(relation: str, rows_per_person: int) -> str:
    """Say what the ledger's epsilon is about, by the neighbouring relation of its events."""
    words = {
        NeighbouringRelation.ADD_OR_REMOVE_ROW.value: "adding or removing the {} of one person",
        NeighbouringRelation.REPLACE_ROW.value: "other values in the {} of one person",
        NeighbouringRelation.CHANGE_VALUE.value: "another value in one column of the {} of one person",
    }
    return words.get(relation, "changes of the {} of one person").format(counted(rows_per_person, "row"))


def _data_set(history: LedgerHistory, now: datetime) -> dict[str, Any]:
    """Return what the page shows of one ledger."""
    identity, budget, lost = history.identity, history.budget, history.lost
    spent = history.spent.epsilon(budget.delta)
    share = spent / budget.epsilon if budget.epsilon else 1.0
    totals = _totals(history)
    return {
        "history": history,
        "spent": spent,
        "held": history.held.epsilon(budget.delta),
        "lost": lost.epsilon(budget.delta) if any(lost.parts()) else None,
        "level": "good" if share < 0.5 else "warn" if share < 0.9 else "bad",
        "towards": protected(identity.relation.value, identity.rows_per_person),
        "figure": _chart(history, totals, now) if totals else "",
        "jobs": [
            (number, job, job.spent.epsilon(budget.delta), total.epsilon(budget.delta))
            for number, (job, total) in enumerate(totals, 1)
        ],
    }


def _totals(history: LedgerHistory) -> list[tuple[JobSpending, PrivacyCost]]:
    """Return each job with what was spent by it and all before it, missing records first."""
    total, found = history.lost, []
    for job in history.jobs:
        total = total + job.spent
        found.append((job, total))
    return found


def _chart(history: LedgerHistory, totals: Sequence[tuple[JobSpending, PrivacyCost]], now: datetime) -> str:
    """Draw the curve over time, as steps, and the budget."""
    begin = datetime.fromisoformat(totals[0][0].opened)
    span_s = max((now - begin).total_seconds(), 1.0)
    unit_s, unit = next(
        ((one, name) for one, name in ((_DAY_S, "days"), (_HOUR_S, "hours")) if span_s >= _FEW * one),
        (_MINUTE_S, "minutes"),
    )
    delta = history.budget.delta
    points = [(0.0, 0.0)]
    for job, total in totals:
        at = max(0.0, (datetime.fromisoformat(job.opened) - begin).total_seconds() / unit_s)
        points += [(at, points[-1][1]), (at, total.epsilon(delta))]
    points.append((max(span_s / unit_s, 1.0), points[-1][1]))
    limit = ((0.0, history.budget.epsilon), (points[-1][0], history.budget.epsilon))
    lines = [Line("spent", 1, tuple(points)), Line("budget", 5, limit)]
    since = f"{unit} since {begin.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return labelled_lines(lines, Axis(since, unit), f"epsilon at delta {delta:g}")
