"""Which runs a site's retention rule lets go, and their removal: run folders alone, never what the site remembers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from nvflare_plugins.base.files import sync_folder
from nvflare_plugins.pages.run_record import FILE_NAME, RunRecord
from nvflare_plugins.site.policy_values import Retention

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
