"""``veilboost ledger --html``: what was spent of a site's privacy budgets, over time, on a page for people.

Privacy: no id of a row, a person or a job; jobs are numbered in the order in which they were opened. For the site's own
people.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from dp_components.accounting.composition import PrivacyCost
from dp_components.ledger_records import JobSpending, LedgerHistory
from dp_components.neighbouring import NeighbouringRelation
from nvflare_plugins.formatting import counted, markup
from nvflare_plugins.report.charts import Line, legend, line_chart
from nvflare_plugins.report.style import PRINTED, page

_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60
_FEW = 4  # of a unit of time: below, the next smaller one tells more
_MOST_JOBS = 200


def build_page(histories: Sequence[LedgerHistory], site: str, now: datetime) -> str:
    """Return the page as HTML. Args: now: with time zone; the curves end there."""
    body = [
        f"<header><p class=eyebrow>Privacy budgets</p><h1>{markup(site)}</h1><p class=muted>What all differentially "
        f"private jobs have spent on each data set, as of {now.astimezone(UTC):%Y-%m-%d %H:%M} UTC.</p></header>",
        *(part for history in histories for part in _data_set(history, now)),
        "<section><h2>How to read it</h2><ul>"
        "<li>Epsilon bounds how far all that was released can move anyone's odds on one person: by the factor "
        "e^epsilon, but with probability delta. It is stated at the budget's delta."
        "<li>Epsilons of jobs do not add up: the ledger adds what lies behind them, which is less. The column "
        "'together' is that sum, after each job."
        "<li>A job counts from the moment at which it was opened. What an open job may still spend is promised to it "
        "and counts against the budget, too. When a job ends, what it has not used is free again."
        "<li>Nothing that was spent comes back: a budget only grows by the site's decision, and new persons are a data "
        "set with a budget of their own.</ul></section>",
    ]
    footer = (
        "Written by VeilBoost at this site from its ledgers. Jobs are numbered as they were opened; "
        "<code>veilboost ledger</code> tells their ids."
    )
    return page(f"Privacy budgets: {site}", "\n".join(body), footer, PRINTED)


def protected(relation: str, rows_per_person: int) -> str:
    """Say what the ledger's epsilon is about, by the neighbouring relation of its events."""
    words = {
        NeighbouringRelation.ADD_OR_REMOVE_ROW.value: "adding or removing the {} of one person",
        NeighbouringRelation.REPLACE_ROW.value: "other values in the {} of one person",
        NeighbouringRelation.CHANGE_VALUE.value: "another value in one column of the {} of one person",
    }
    return words.get(relation, "changes of the {} of one person").format(counted(rows_per_person, "row"))


def _data_set(history: LedgerHistory, now: datetime) -> Iterator[str]:
    identity, budget = history.identity, history.budget
    spent, held = (cost.epsilon(budget.delta) for cost in (history.spent, history.held))
    share = spent / budget.epsilon if budget.epsilon else 1.0
    level = "good" if share < 0.5 else "warn" if share < 0.9 else "bad"
    yield f"<section><h2>Data set {markup(identity.data_set)}</h2>"
    yield (
        f"<p><span class='chip {level}'>{_epsilon(spent)} of {budget.epsilon:g} spent</span> at delta "
        f"{budget.delta:g}, "
        f"towards {protected(identity.relation.value, identity.rows_per_person)}. "
        f"With what open jobs may still spend: {_epsilon(held)}."
        + (f" Of the budget {budget.pure_epsilon:g} is kept for pure mechanisms." if budget.pure_epsilon else "")
        + "</p>"
    )
    totals = _totals(history)
    if totals:
        yield from _chart(history, totals, now)
        yield from _table(history, totals)
    else:
        yield "<p>No job was opened on it.</p>"
    if any(history.lost.parts()):
        lost = history.lost.epsilon(budget.delta)
        yield f"<p>In this is epsilon {_epsilon(lost)} for records of the ledger that are missing.</p>"
    yield "</section>"


def _totals(history: LedgerHistory) -> list[tuple[JobSpending, PrivacyCost]]:
    """Return each job with what was spent by it and all before it, missing records first."""
    total, found = history.lost, []
    for job in history.jobs:
        total = total + job.spent
        found.append((job, total))
    return found


def _chart(history: LedgerHistory, totals: Sequence[tuple[JobSpending, PrivacyCost]], now: datetime) -> Iterator[str]:
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
    yield legend([(line.name, line.colour) for line in lines])
    yield line_chart(
        lines, f"{unit} since {begin.astimezone(UTC):%Y-%m-%d %H:%M} UTC", f"epsilon at delta {delta:g}", at=unit
    )


def _table(history: LedgerHistory, totals: Sequence[tuple[JobSpending, PrivacyCost]]) -> Iterator[str]:
    delta = history.budget.delta
    yield "<div class=scroll><table class=messages><tr><th>job<th>opened<th>ended<th>state<th class=n>releases"
    yield "<th class=n>epsilon of it<th class=n>together</tr>"
    numbered = list(enumerate(totals, 1))
    for number, (job, total) in numbered[-_MOST_JOBS:]:
        yield (
            f"<tr><td>{number}<td>{_time(job.opened)}<td>{_time(job.closed)}<td>{markup(job.state)}"
            f"<td class=n>{job.n_releases:,}<td class=n>{_epsilon(job.spent.epsilon(delta))}"
            f"<td class=n>{_epsilon(total.epsilon(delta))}</tr>"
        )
    yield "</table></div>"
    if len(numbered) > _MOST_JOBS:
        yield f"<p class=fine>{len(numbered) - _MOST_JOBS:,} earlier jobs are in the curve and not in the table.</p>"


def _time(text: str) -> str:
    return markup(text.replace("T", " ").removesuffix("+00:00"))


def _epsilon(value: float) -> str:
    return f"{value:.4g}" if value < float("inf") else "unbounded"
