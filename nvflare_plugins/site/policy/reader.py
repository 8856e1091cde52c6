"""Reads ``veilboost.json``: what it leaves to be worked out, before its values are checked."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from he_processors.errors import ConfigurationError
from nvflare_plugins.checks import check_path_letters, check_plain
from nvflare_plugins.data_sets.declaration import DataSet, SnapshotSource, format_of
from nvflare_plugins.data_sets.part_files import is_pattern, known_files
from nvflare_plugins.declared import refuse_unknown
from nvflare_plugins.site.policy.values import FOLDERS, POLICY_FILE, REMOVED_PROFILES

_log = logging.getLogger(__name__)
_Whole: TypeAlias = Callable[[str, object], object]
"""Makes the path that stands under a key whole."""


def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object. Raises: ConfigurationError, if a key stands there twice."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"{POLICY_FILE}: key {name!r} stands there twice.")
    return dict(pairs)


def file_values(document: object, known: Sequence[str], workspace: Path, site: str) -> dict[str, Any]:
    """Return the values of a policy as its file states them, with whole paths and formats of files.

    Args:
        known: the keys that a file may have.
        workspace: start of relative paths.
        site: takes the place of ``{site}`` in paths.

    Raises:
        ConfigurationError: an unknown key.
    """
    if not isinstance(document, dict):
        raise ConfigurationError("the policy must be an object")
    check_plain("the policy", document)
    refuse_unknown("the policy", document, known)

    def whole(key: str, value: object) -> object:
        if not isinstance(value, str) or not value:
            return value
        check_path_letters(key, value)
        return workspace / value.replace("{site}", site)

    values = {**FOLDERS, **document}
    profiles = values.get("allowed_profiles")
    if isinstance(profiles, list):
        for name in (one for one in profiles if isinstance(one, str) and one in REMOVED_PROFILES):
            _log.warning(
                "%s: profile %s was removed, and to allow it does nothing. Policy key: allowed_profiles. Remedy: allow "
                "%s in its place, which is faster",
                site,
                name,
                REMOVED_PROFILES[name],
            )
        values["allowed_profiles"] = [one for one in profiles if one not in list(REMOVED_PROFILES)]
    for key in (*FOLDERS, "ledger_heads"):
        if key in values:
            values[key] = whole(key, values[key])
    if isinstance(values["ledgers"], Path):
        values.setdefault("ledger_heads", values["ledgers"] / "heads")
    values["cluster"] = _cluster("cluster", values.get("cluster"), whole)
    sources = values.get("snapshots")
    if isinstance(sources, dict):
        fields = [name for name in SnapshotSource.__dataclass_fields__ if name != "name"]
        values["snapshots"] = {name: _snapshot(name, entry, fields, whole) for name, entry in sources.items()}
    sets = values.get("data_sets")
    if isinstance(sets, dict):
        fields = [name for name in DataSet.__dataclass_fields__ if name != "name"]
        folders = _folders(values.get("snapshots"))
        values["data_sets"] = {name: _data_set(name, entry, fields, whole, folders) for name, entry in sets.items()}
    return values


def _snapshot(name: object, entry: object, fields: Sequence[str], whole: _Whole) -> object:
    if not isinstance(entry, dict):
        return entry
    refuse_unknown(f"snapshots.{name}", entry, fields)
    for key in ("url", "query", "folder"):
        if entry.get(key) is None:
            raise ConfigurationError(f"snapshots.{name} lacks {key}")
    paths = {key: whole(f"snapshots.{name}.{key}", entry[key]) for key in ("folder", "password_file") if key in entry}
    return {**entry, "name": name, **paths}


def _cluster(name: str, entry: object, whole: _Whole) -> object:
    security = entry.get("security") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(security, dict):
        return entry
    return {**entry, "security": {key: whole(f"{name}.security.{key}", value) for key, value in security.items()}}


def _folders(snapshots: object) -> list[object]:
    """Return the folders that snapshots go to, whether they are there yet or not."""
    entries = snapshots.values() if isinstance(snapshots, dict) else ()
    return [entry["folder"] for entry in entries if isinstance(entry, dict)]


def _data_set(name: object, entry: object, fields: Sequence[str], whole: _Whole, folders: list[object]) -> object:
    if not isinstance(entry, dict):
        return entry
    refuse_unknown(f"data_sets.{name}", entry, fields)
    values: dict[str, Any] = {**entry, "name": name, "path": whole(f"data_sets.{name}.path", entry.get("path"))}
    if "cluster" in entry:
        values["cluster"] = _cluster(f"data_sets.{name}.cluster", entry["cluster"], whole)
    if values["path"] is None:
        raise ConfigurationError(f"data_sets.{name} lacks path")
    if "format" not in entry and isinstance(values["path"], Path):
        path = values["path"]
        is_folder = path in folders or os.path.isdir(path) or is_pattern(path)  # Path.is_dir raises
        by_loader = "csv" if entry.get("loader") else None
        values["format"] = "parquet" if is_folder else format_of(path) or by_loader
    return values


def refuse_shared_files(data_sets: Iterable[DataSet]) -> None:
    """Refuse two data sets on one file: each has budgets, caps and counts of its own, and the rows would have both.

    Raises:
        ConfigurationError: two paths lead to one file, after ``{site}``, links and ``..`` are resolved; or two names
            are hard links to one.
    """
    owners: dict[object, str] = {}
    for data_set in data_sets:
        real = os.path.realpath(data_set.path)
        marks: list[object] = []
        for file in (real, *map(os.path.realpath, known_files(data_set.path))):
            marks.append(file)
            with contextlib.suppress(OSError):
                status = os.stat(file)
                marks.append((status.st_dev, status.st_ino))
        for mark in marks:
            other = owners.setdefault(mark, data_set.name)
            if other != data_set.name:
                raise ConfigurationError(
                    f"data_sets.{other} and data_sets.{data_set.name} are one file: its rows would have two "
                    "budgets and two memories of what was released. Keep one of the names and use it in all jobs; "
                    "other rows need a file of their own."
                )
