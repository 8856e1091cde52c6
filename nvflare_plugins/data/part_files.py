"""Which files a data set consists of: one, the newest snapshot of a folder, or all of a pattern."""

from __future__ import annotations

import fnmatch
import os
import re
from datetime import datetime
from pathlib import Path

from he_processors.errors import ConfigurationError

# Dated files of rows in a folder: what they are called, and which one a data set reads.
#
# The rule: a data set whose path is a folder reads the snapshot whose name has the latest time, and no other file. All
# snapshots of a folder are of one name. Times are UTC: ``NAME-20261122T201500Z.parquet``.


_NAME = re.compile(r"(.+)-(\d{8}T\d{6}Z)\.parquet")


def snapshot_name(name: str, moment: datetime) -> str:
    """Return the name of a snapshot's file. Args: moment: in UTC."""
    return f"{name}-{moment:%Y%m%dT%H%M%SZ}.parquet"


def snapshots_in(folder: Path) -> dict[Path, str]:
    """Return the snapshots of a folder, the oldest first, each with its name; links are none.

    What cannot be listed, for whatever reason, has none.
    """
    found = {}
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    for name in names:
        path = folder / name
        matched = _NAME.fullmatch(name)
        if matched and path.is_file() and not path.is_symlink():
            found[path] = (matched[2], matched[1])
    return {path: found[path][1] for path in sorted(found, key=lambda one: (found[one][0], one.name))}


def newest_in(folder: Path, data_set: str) -> Path:
    """Return the snapshot that a data set reads.

    Raises:
        ConfigurationError: the folder has none, or some of several names.
    """
    found = snapshots_in(folder)
    if not found:
        raise ConfigurationError(
            f"data set {data_set!r} is a folder without a snapshot that can be read: take one (`veilboost snapshot`). "
            f"Policy key: data_sets.{data_set}.path."
        )
    if len(set(found.values())) > 1:
        raise ConfigurationError(
            f"data set {data_set!r} is a folder with snapshots of several names: give each a folder of its own. Policy "
            f"keys: data_sets.{data_set}.path, snapshots.NAME.folder."
        )
    return list(found)[-1]


# Which files a data set consists of: one, the newest snapshot of a folder, or all Parquet files of folder or pattern.
#
# The order of rows: files by name (by code point, as ``sorted`` does; capital letters before small ones, and part-10
# before part-2), the rows of each as they stand. A pattern is a path whose last part has ``*``, ``?`` or ``[``, unless
# a file has that very name. Names that begin with ``.`` or ``_`` are left out, as Spark and Arrow write their own notes
# under such names. Links and folders are refused: a link would bring in what lies elsewhere, under another data set's
# name perhaps, and the columns of a folder such as ``year=2026`` stand in its name and in none of its files.


_WILD = frozenset("*?[")


def is_pattern(path: Path) -> bool:
    """Tell whether the last part of a path stands for many files."""
    return bool(_WILD & set(path.name)) and not os.path.lexists(path)


def is_in_parts(path: Path) -> bool:
    """Tell whether a path stands for Parquet files that are read as one: a pattern, or a folder without snapshots."""
    return is_pattern(path) or (os.path.isdir(path) and not snapshots_in(path))


def files_of(path: Path, data_set: str) -> tuple[Path, ...]:
    """Return the files of a data set in the order of their rows.

    Raises:
        ConfigurationError: a folder or pattern without files, or with links or folders among them; snapshots of several
            names.
    """
    if not is_in_parts(path):
        return (newest_in(path, data_set) if os.path.isdir(path) else path,)
    return tuple(_parts(path, data_set))


def known_files(path: Path) -> tuple[Path, ...]:
    """Return what lies at a path now, links followed: for those who compare data sets. Raises nothing."""
    if not is_in_parts(path):
        return (path, *snapshots_in(path))
    try:
        return (path, *(entry for entry in _listed(path) if not os.path.isdir(entry)))
    except OSError:
        return (path,)


def _listed(path: Path) -> list[Path]:
    folder, pattern = (path.parent, path.name) if is_pattern(path) else (path, "*")
    names = sorted(name for name in os.listdir(folder) if name[0] not in "._")
    return [folder / name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _parts(path: Path, data_set: str) -> list[Path]:
    found = _listed(path)
    key = f"Policy key: data_sets.{data_set}.path."
    if not found:
        raise ConfigurationError(
            f"data set {data_set!r} is a folder or a pattern without a file: put Parquet files there, or take a "
            f"snapshot (`veilboost snapshot`). {key}"
        )
    for entry in found:
        if entry.is_symlink():
            what, remedy = "a link", "put the file itself there"
        elif entry.is_dir():
            what, remedy = "a folder (such as year=2026)", "write the column into the files and put them side by side"
        elif not entry.is_file():
            what, remedy = "something that is no file", "take it out"
        else:
            continue
        raise ConfigurationError(f"data set {data_set!r} holds {what} among its files: {remedy}. {key}")
    return found
