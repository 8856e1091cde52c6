"""The folder in which XGBoost keeps the bins of a run that are not held in memory.

They say in which bin each value of each row lies. XGBoost would make files that others may read: the folder is for
this site's user alone (0700), and while it is in use the process makes files for its user alone (umask 077). It goes
when the run ends, however it ends; of a process that was killed, when the site begins its next horizontal run. A lock,
which the system gives back when a process ends, tells folders in use from those left behind.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import EXTERNAL, DataSet
from nvflare_plugins.files import make_folder

FOLDER = "pages"
_LOCK = "lock"


class _PrivateFiles:
    """The process's umask, which sites of a simulator share."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, 0

    def begin(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = os.umask(0o077)
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                os.umask(self._before)


_private_files = _PrivateFiles()


@contextmanager
def page_files(run: Path) -> Iterator[Path]:
    """Make the folder in that of a run, and remove it at the end.

    Raises:
        ConfigurationError: another process works on this run, or something else is in the folder's place.
    """
    folder = run / FOLDER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigurationError(
            f"{FOLDER} in run {run.name} is a link or a file, where the folder for bins belongs, and is not followed. "
            "Data set key: memory. Remedy: remove it (not what it points to), or leave memory at its default"
        )
    if not _removed(folder):
        raise ConfigurationError(f"the bins of run {run.name} are in use by another process: wait for it, or end it")
    _private_files.begin()
    try:
        make_folder(folder, is_new=True)
        with (folder / _LOCK).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                yield folder
            finally:
                gc.collect()  # XGBoost removes a matrix's files with the matrix, and complains of files that are gone
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        _private_files.end()


def remove_left_behind(runs: Path) -> None:
    """Remove folders of processes that are no more. Args: runs: the site's folder of runs."""
    for folder in runs.glob(f"*/{FOLDER}"):
        _removed(folder)


def _removed(folder: Path) -> bool:
    """Remove a folder that nobody uses. Returns whether it is gone."""
    if folder.is_symlink() or not folder.is_dir():
        return not os.path.lexists(folder)
    try:
        with (folder / _LOCK).open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except OSError:
        return False
    return True


def bins_below(pages: Path | None, use: str, spec: DataSet) -> Path | None:
    """Return where the bins of a data set go; None if they are held."""
    if pages is None or spec.memory != EXTERNAL:
        return None
    return make_folder(pages / use, is_new=True)
