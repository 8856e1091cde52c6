"""Which files a data set consists of: one, the newest snapshot of a folder, or all Parquet files of folder or pattern.

The order of rows: files by name (by code point, as ``sorted`` does; capital letters before small ones, and part-10
before part-2), the rows of each as they stand. A pattern is a path whose last part has ``*``, ``?`` or ``[``, unless a
file has that very name. Names that begin with ``.`` or ``_`` are left out, as Spark and Arrow write their own notes
under such names. Links and folders are refused: a link would bring in what lies elsewhere, under another data set's
name perhaps, and the columns of a folder such as ``year=2026`` stand in its name and in none of its files.
"""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.snapshot_files import newest_in, snapshots_in

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
