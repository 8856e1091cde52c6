"""Dated files of rows in a folder: what they are called, and which one a data set reads.

The rule: a data set whose path is a folder reads the snapshot whose name has the latest time, and no other file. All
snapshots of a folder are of one name. Times are UTC: ``NAME-20261122T201500Z.parquet``.
"""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

from he_processors.errors import ConfigurationError

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
