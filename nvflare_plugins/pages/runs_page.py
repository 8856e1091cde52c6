"""``veilboost runs``: all runs of a site, in a table, on a page that sorts and compares, and how long they stay.

Privacy: the site's own record of its jobs, without rows or counts of them; for this site's people. Sent nowhere.
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
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from nvflare_plugins.base.files import sync_folder
from nvflare_plugins.base.formatting import human_bytes, human_seconds, number, printable, table_lines
from nvflare_plugins.pages.charts import Line, environment, line_chart, page
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
