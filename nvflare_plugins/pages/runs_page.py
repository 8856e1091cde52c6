"""``veilboost runs``: all runs of a site, in a table, on a page that sorts and compares, and how long they stay.

Privacy: the site's own record of its jobs, without rows or counts of them; for this site's people. Sent nowhere.

``veilboost ledger --html``: what was spent of a site's privacy budgets, over time, on a page for people.

Privacy: no id of a row, a person or a job; jobs are numbered in the order in which they were opened. For the site's own
people.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dp_components.accounting import PrivacyCost
from dp_components.events import NeighbouringRelation
from dp_components.ledger import JobSpending, LedgerHistory
from nvflare_plugins.base.files import sync_folder
from nvflare_plugins.base.formatting import counted, human_bytes, human_seconds, number, printable, table_lines
from nvflare_plugins.pages.charts import Axis, Line, environment, labelled_lines, line_chart, page
from nvflare_plugins.pages.run_record import FILE_NAME, RunRecord, is_number
from nvflare_plugins.site.policy_values import Retention

_MOST_COMPARED, _SHOWN_FIRST = 24, 4
_SCRIPT = "runs.js"


def facts_of(run: RunRecord, folder: str, models: Sequence[str] = (), replaced_by: str | None = None) -> dict[str, Any]:
    """Return what is told of a run, as JSON values.

    Args:
        folder: name of the run's folder.
        models: names of its model, NAME@VERSION.
        replaced_by: the job that trained it again without persons who are forgotten.
    """
    best, last = run.best(), run.rounds[-1].metrics if run.rounds else {}
    return {
        "job": folder,
        "name": run.called,
        "title": run.title,
        "status": run.status if replaced_by is None else f"forgotten, see {replaced_by}",
        "replaced_by": replaced_by,
        "finished": run.finished,
        "seconds": _seconds(run),
        "profile": run.profile,
        "sites": list(run.sites),
        "data_set": run.data[0].name if run.data else "",
        "rounds": len(run.rounds),
        "metric": best.metric if best else "",
        "best": best.value if best else None,
        "best_round": best.round + 1 if best else None,
        "metrics": {name: value for name, value in last.items() if is_number(value)},
        "bytes_sent": sum(row.bytes_out for row in run.traffic),
        "epsilon": run.settings.get("epsilon"),
        "params": run.params,
        "models": list(models),
    }


def _seconds(run: RunRecord) -> float | None:
    try:
        return (datetime.fromisoformat(run.finished) - datetime.fromisoformat(run.started)).total_seconds()
    except (ValueError, TypeError):
        return None


def describe(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return runs as a table for a person."""
    rows = [("finished", "name", "profile", "data set", "rounds", "best", "status", "model", "job")]
    for one in runs:
        score = "" if one["best"] is None else f"{one['metric']} {one['best']:.5g} in round {one['best_round']}"
        names = (one["finished"][:19], one["name"], one["profile"], one["data_set"], str(one["rounds"]), score)
        rows.append((*names, one["status"], ", ".join(one["models"]), one["job"]))
    return "\n".join(table_lines([[printable(cell, 60) for cell in row] for row in rows], right=(4,)))


def runs_html(site: str, runs: Sequence[tuple[RunRecord, Mapping[str, Any]]], links: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        runs: the newest first, each with its facts.
        links: folder -> address of its report, from where the page lies.
    """
    rows = [(f"r{n}" if n < _MOST_COMPARED else "", n % 6 + 1, run, one) for n, (run, one) in enumerate(runs)]
    compared, script = rows[:_MOST_COMPARED], environment().get_template(_SCRIPT).render()
    curves: dict[str, list[Line]] = defaultdict(list)  # by the metric that a run is judged by
    for key, colour, run, one in compared:
        values = ((row.round + 1.0, row.metrics.get(one["metric"], math.nan)) for row in run.rounds)
        points = tuple(point for point in values if is_number(point[1]))
        if points:
            curves[one["metric"]].append(Line(one["name"], colour, points, key=key))
    return page(
        "runs.html",
        site=site,
        runs=[(key, one, links.get(one["job"], "")) for key, _, _, one in rows],
        keys=[(key, colour, one) for key, colour, _, one in compared],
        shown=[key for key, *_, one in compared if one["metric"]][:_SHOWN_FIRST],
        curves=[(metric, line_chart(lines, "round", metric)) for metric, lines in curves.items()],
        settings=_settings([one for *_, one in compared]),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _settings(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (what it is, its value in each run): scores and times, then parameters in order of name."""
    rows = [
        ("score", [f"{one['metric']} {one['best']:.5g}" if one["best"] is not None else "" for one in runs]),
        ("rounds", [str(one["rounds"]) for one in runs]),
        ("best round", [str(one["best_round"] or "") for one in runs]),
        ("profile", [one["profile"] for one in runs]),
        ("data set", [one["data_set"] for one in runs]),
        ("sites", [", ".join(one["sites"]) for one in runs]),
        ("epsilon", ["" if one["epsilon"] is None else f"{one['epsilon']}" for one in runs]),
        ("time", ["" if one["seconds"] is None else human_seconds(one["seconds"]) for one in runs]),
        ("sent", [human_bytes(one["bytes_sent"]) for one in runs]),
    ]
    for name in sorted({name for one in runs for name in one["params"]}):
        rows.append((name, [_text(one["params"].get(name)) for one in runs]))
    return [(name, values) for name, values in rows if any(values)]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


_WITH_EVIDENCE = (FILE_NAME, "evidence")
"""What stays of a run until the evidence's term is over: its record, and the evidence."""
_GOING = ".removed-"


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes of one run.

    Attributes:
        whole: the folder; else all of it but record and evidence.
        n_bytes: of what goes.
    """

    folder: Path
    whole: bool
    n_bytes: int


def due(
    runs: Sequence[tuple[Path, RunRecord]], rule: Retention, named: Collection[str], now: datetime
) -> tuple[list[Removal], dict[str, str]]:
    """Return what may go now, and of runs that are old enough but stay, why.

    A run stays whole while its model has a name, while a run that stays was built on it, and while it is the newest of
    its kind on its data set. Runs without a record are not finished: they stay.

    Args:
        named: ids of the jobs whose models have a name.
    """
    ages = {folder.name: _age(run, now) for folder, run in runs}
    stay = {name: "its model has a name" for name in named if name in ages}
    stay |= {name: "its record does not say when it ended" for name, age in ages.items() if age == timedelta.max}
    newest: dict[tuple[str, ...], str] = {}
    for folder, run in sorted(runs, key=lambda one: ages[one[0].name]):
        key = (run.title, run.profile, *(each.name for each in run.data))
        if newest.setdefault(key, folder.name) == folder.name:
            stay.setdefault(folder.name, "it is the newest of its kind on its data set")
    term = timedelta(days=rule.run_days)
    stay |= {name: "it is not old enough" for name, age in ages.items() if age < term and name not in stay}
    _keep_sources(runs, stay)
    removals = []
    for folder, _ in runs:
        if folder.name in stay:
            continue
        whole = ages[folder.name] >= timedelta(days=rule.evidence_days)
        going = [folder] if whole else list(_beside_evidence(folder))
        if going:
            removals.append(Removal(folder, whole, sum(map(_size, going))))
    return removals, {name: why for name, why in stay.items() if ages[name] >= term}


def remove(removal: Removal) -> None:
    """Remove it. A removal that is broken off is finished by the next one. Raises: OSError."""
    if not removal.whole:
        for path in _beside_evidence(removal.folder):
            _delete(path)
        return
    going = removal.folder.with_name(_GOING + removal.folder.name)
    os.rename(removal.folder, going)
    sync_folder(going.parent)
    _delete(going)


def finish_removals(runs: Path) -> None:
    """Remove what earlier removals have left behind."""
    for path in runs.glob(f"{_GOING}*"):
        _delete(path)


def _keep_sources(runs: Sequence[tuple[Path, RunRecord]], stay: dict[str, str]) -> None:
    """Keep what runs that stay were built on: jobs that their settings name, and those of these."""
    settings = {folder.name: run.settings for folder, run in runs}
    waiting = list(stay)
    while waiting:
        for value in settings[waiting.pop()].values():
            if isinstance(value, str) and value in settings and value not in stay:
                stay[value] = "a run that stays was built on it"
                waiting.append(value)


def _age(run: RunRecord, now: datetime) -> timedelta:
    """Return how long ago a run ended; the longest time of all where its record does not say."""
    try:
        return now - datetime.fromisoformat(run.finished)
    except (ValueError, TypeError):
        return timedelta.max


def _beside_evidence(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.name not in _WITH_EVIDENCE)


def _size(path: Path) -> int:
    inside = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return sum(one.lstat().st_size for one in inside if not one.is_dir() or one.is_symlink())


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


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
