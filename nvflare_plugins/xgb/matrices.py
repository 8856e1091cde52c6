"""XGBoost's matrices of one site's rows."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.errors import HeldElsewhere
from nvflare_plugins.base.files import make_folder
from nvflare_plugins.data.declaration import EXTERNAL, DataSet
from nvflare_plugins.data.table import BLOCK_VALUES, Table
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import Cuts, reference_table

# XGBoost's matrices of one site, built outside any communicator so that XGBoost sends nothing about them.


_PAGE_VALUES = 1 << 22
"""Values of a file of bins, one of which is in memory at a time (or a few, where XGBoost reads ahead)."""


def as_weighed(table: Table) -> Table:
    """Return the table, with one row of no weight in the place of no rows at all where rows have weights.

    XGBoost takes weights of no row for no weights: its messages would then not be those of the other sites. A row of
    weight 0, which misses all values, adds nothing to any sum.
    """
    if table.weight is None or table.n_rows:
        return table
    nothing = np.full((1, len(table.feature_names)), np.nan, dtype=np.float32)
    one = np.ones(1, dtype=np.float32)  # a label that every objective takes
    return dataclasses.replace(table, features=nothing, passes=None, label=one, weight=np.zeros(1, dtype=np.float32))


def _binned(table: Table, reference: xgb.DMatrix, max_bin: int, pages: Path | None) -> xgb.DMatrix:
    """Bin rows by the cuts of another matrix; if they are read in passes, without ever holding them.

    Args:
        pages: an empty folder for the bins, if they are not to be held either.
    """
    common: dict[str, Any] = {"ref": reference, "max_bin": max_bin, "enable_categorical": True}
    layout = {"feature_names": list(table.feature_names), "feature_types": list(table.feature_types)}
    if table.passes is None or not table.n_rows:
        return xgb.QuantileDMatrix(table.features, label=table.label, weight=table.weight, **layout, **common)
    from nvflare_plugins.xgb.row_blocks import RowBlocks

    most_values, prefix = (BLOCK_VALUES, None) if pages is None else (_PAGE_VALUES, str(pages / "bins"))
    rows = RowBlocks(lambda: table.blocks(most_values), table.label, table.weight, layout, prefix)
    return (xgb.QuantileDMatrix if pages is None else xgb.ExtMemQuantileDMatrix)(rows, **common)


def reference_matrix(table: Table, cuts: Cuts, max_bin: int) -> xgb.QuantileDMatrix:
    """Return a matrix that holds the agreed cuts, and none of the rows."""
    reference = reference_table(cuts, n_categories(table))
    return xgb.QuantileDMatrix(reference, **_layout(table), max_bin=max_bin)


def training_matrix(table: Table, cuts: Cuts, max_bin: int, pages: Path | None = None) -> xgb.DMatrix:
    """Bin the rows by the agreed cuts.

    Args:
        pages: an empty folder for the bins of a table that is read in passes, if they are not to be held.

    Raises:
        ProtocolError: XGBoost did not take over the cuts; another site's bins would then mean something else.
    """
    reference = reference_matrix(table, cuts, max_bin)
    matrix = _binned(table, reference, max_bin, pages)
    (ends, values), by_category = matrix.get_quantile_cut(), n_categories(table)
    for feature, inner in enumerate(cuts.of_feature):
        found = values[int(ends[feature]) + 1 : int(ends[feature + 1]) - 2]
        if feature not in by_category and not np.array_equal(found, inner):
            raise ProtocolError("XGBoost did not take over the agreed cut points")
    return matrix


def evaluation_matrix(table: Table, training: xgb.DMatrix, max_bin: int, pages: Path | None = None) -> xgb.DMatrix:
    """Hold rows to be scored: as they are, or, of a table that is read in passes, their bins.

    All thresholds of the job's trees, and of a model that it continues, are among the cuts of the training matrix: a
    row's bin tells on which side of each it is.

    Args:
        pages: as of ``training_matrix``; another folder than that of the training matrix.
    """
    if table.passes is not None:
        return _binned(table, training, max_bin, pages)
    return xgb.DMatrix(table.features, label=table.label, weight=table.weight, **_layout(table))


def unlabelled_blocks(table: Table) -> Iterator[xgb.DMatrix]:
    """Yield the rows to be scored once, some at a time."""
    for block in table.blocks():
        yield xgb.DMatrix(block, **_layout(table))


def every_nth(table: Table, n: int) -> xgb.DMatrix:
    """Hold the first of every n rows, to be scored again and again."""
    found = [(places[places % n == 0], block[places % n == 0]) for places, block in table.placed_blocks()]
    order = np.argsort(np.concatenate([places for places, _ in found]))
    return xgb.DMatrix(np.concatenate([block for _, block in found])[order], **_layout(table))


def bin_starts(matrix: xgb.DMatrix, table: Table) -> NDArray[np.int64]:
    """Return where each feature's bins begin in a histogram. Shapes: result: int64[n_features + 1]."""
    listed = np.diff(matrix.get_quantile_cut()[0].astype(np.int64))
    # XGBoost lists one bound more than bins for a feature of numbers: the one below all values.
    is_numeric = np.array([kind != "c" for kind in table.feature_types])
    return np.concatenate([[0], np.cumsum(listed - is_numeric)])


def n_categories(table: Table) -> dict[int, int]:
    """Return the number of categories of each categorical column, by its place."""
    return {i: len(table.categories[name]) for i, name in enumerate(table.feature_names) if name in table.categories}


def _layout(table: Table) -> dict[str, Any]:
    return {
        "feature_names": list(table.feature_names),
        "feature_types": list(table.feature_types),
        "enable_categorical": True,
    }


# The folder in which XGBoost keeps the bins of a run that are not held in memory.
#
# They say in which bin each value of each row lies. XGBoost would make files that others may read: the folder is for
# this site's user alone (0700), and while it is in use the process makes files for its user alone (umask 077). It goes
# when the run ends, however it ends; of a process that was killed, when the site begins its next horizontal run. A
# lock, which the system gives back when a process ends, tells folders in use from those left behind.


FOLDER = "pages"
_LOCK = "lock"


class _PrivateFiles:
    """The process's umask, which sites of a simulator share."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = os.umask(0o077)
            self._users += 1

    def __exit__(self, *exception: object) -> None:
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
        raise HeldElsewhere(f"the bins of run {run.name} are in use by another process: wait for it, or end it")
    with _private_files:
        make_folder(folder, is_new=True)
        with (folder / _LOCK).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                yield folder
            finally:
                gc.collect()  # XGBoost removes a matrix's files with the matrix, and complains of files that are gone
                shutil.rmtree(folder, ignore_errors=True)


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
