"""Training again with added rows: how many rows of a data set no earlier job has used, and which runs were checked.

The difference of two runs is the sum over the rows that only one of them had. Where a data set has only grown, and with
it those of the other sites, all such differences together tell no more than the sums over the rows that each job was
the first to use, be it for metrics: every earlier set is a sum of them. So a job may go on without a consent where
these rows are as many, and of as many sites, as a job of their own would need (``horizontal.added_rows``). A row that
went, or whose value changed, is another matter: of four large sets, each of which differs from the others by many rows,
one row can remain.

A run that is reserved and has not passed the count of its rows, added or not, has released nothing of them. Should it
be broken off there, they are still added rows for the next job: the memory keeps the numbers of such runs until they
have passed. Otherwise a job on one new row in a file of its own, broken off, would let that row join the earlier ones.

Privacy: purely local; hashes of rows, and numbers of runs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.data_sets.identity import DataRecord, Relation
from nvflare_plugins.site.memory import runs
from nvflare_plugins.site.memory.schema import UNCHECKED, load_counts, save_counts

_ALL = ""  # numbers of runs belong to no data set


def count_added(
    rows: NDArray[np.uint64], earlier: Iterable[NDArray[np.uint64]], released: Iterable[NDArray[np.uint64]]
) -> int | None:
    """Return how many rows are in no released version; None where an earlier version has a row that is not here.

    Rows that are alike count as often as they stand there.

    Shapes: all: uint64[n_rows], hashes of rows.
    """
    keys, counts = np.unique(rows, return_counts=True)
    for version in earlier:
        places, times = _placed(keys, version)
        if places is None or (times > counts[places]).any():
            return None
    used = np.zeros_like(counts)
    for version in released:
        places, times = _placed(keys, version)
        if places is not None:
            used[places] = np.maximum(used[places], times)
    return int((counts - used).sum())


def added_since(
    db: sqlite3.Connection, record: DataRecord, rows: NDArray[np.uint64], earlier: Sequence[runs.Terms]
) -> int | None:
    """Return how many rows of a version no earlier job has used; None where that cannot be told, or rows went.

    Args:
        record: the version that a job asks for, with ``rows``.
        earlier: of all earlier runs that concern these rows, among the same sites.
    """
    unchecked = set(load_counts(db, UNCHECKED, _ALL)["runs"].tolist())
    all_of, released = [], []
    for terms in earlier:
        comparable = _with_columns_of(db, record, terms.data)
        if comparable is None:
            return None
        version = runs.rows_of(db, comparable)
        all_of.append(version)
        if not runs.runs_under(db, terms) <= unchecked:
            released.append(version)
    return count_added(rows, all_of, released)


def note_unchecked(db: sqlite3.Connection, run: int) -> None:
    """Remember that a run has not passed the count of its rows."""
    found = load_counts(db, UNCHECKED, _ALL)["runs"]
    save_counts(db, UNCHECKED, _ALL, {"runs": np.append(found, np.int64(run))})


def forget_unchecked(db: sqlite3.Connection, run: int) -> None:
    """Remember that a run has passed, or is remembered no longer."""
    found = load_counts(db, UNCHECKED, _ALL)["runs"]
    if (found == run).any():
        save_counts(db, UNCHECKED, _ALL, {"runs": found[found != run]})


def _with_columns_of(db: sqlite3.Connection, record: DataRecord, data: int) -> int | None:
    """Return the version itself, or one of the same rows, that has the columns of ``record``: rows are hashed whole."""
    version = runs.data_of(db, data)
    for number in (data, *runs.all_data(db)):
        other = runs.data_of(db, number)
        if set(other.columns) == set(record.columns) and other.relation(version, 0) is Relation.SAME:
            return number
    return None


def _placed(
    keys: NDArray[np.uint64], version: NDArray[np.uint64]
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
    """Return where the distinct rows of a version stand among ``keys``, and how often each is in it."""
    theirs, times = np.unique(version, return_counts=True)
    places = np.searchsorted(keys, theirs)
    if (places == keys.size).any() or (keys[places] != theirs).any():
        return None, times
    return places, times
