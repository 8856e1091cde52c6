"""The registry's tables as values: versions of data sets, runs over them, quantile searches."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.data.identity import DataRecord
from nvflare_plugins.site.memory.schema import (
    NAMED_ROWS,
    insert,
    load_array,
    load_counts,
    save_counts,
    store_array,
)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a run releases about: the same terms are the same release.

    Attributes:
        data: number of the version of the data set.
        fingerprint: of its rows.
        sites: in order.
        parameters: hash of the agreed parameters.
        draw: which of the rows took part and how much, see ``registry.describe_draw``.
    """

    data: int
    fingerprint: str
    sites: tuple[str, ...]
    parameters: str
    draw: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: ``state`` is "reserved" from the reservation on, and "complete" at the end."""

    number: int
    job_id: str
    terms: Terms
    started: str
    state: str = "reserved"
    trees: int = 0


_RUN = (
    "SELECT runs.id, job_id, data, fingerprint, sites, parameters, draw, started, state, trees FROM runs "
    "JOIN terms ON terms.id = terms JOIN data_versions ON data_versions.id = data "
)


def add_data(db: sqlite3.Connection, record: DataRecord, rows: NDArray[np.uint64]) -> int:
    """Remember a version of a data set with the hashes of its rows, once; return its number."""
    key = (record.fingerprint, record.name, record.source)
    same_rows = db.execute("SELECT row_hashes FROM data_versions WHERE fingerprint = ?", key[:1]).fetchone()
    found = db.execute("SELECT id FROM data_versions WHERE (fingerprint, name, source) = (?, ?, ?)", key).fetchone()
    if found is not None:
        return int(found[0])
    stored = store_array(db, rows) if same_rows is None else same_rows[0]
    names = json.dumps(dict(record.columns)), json.dumps(record.identifying)
    return insert(
        db,
        "INSERT INTO data_versions (fingerprint, name, source, n_rows, columns, identifying, row_hashes) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*key, record.n_rows, *names, stored),
    )


def data_of(db: sqlite3.Connection, data: int) -> DataRecord:
    """Return a version of a data set by its number."""
    row = db.execute(
        "SELECT fingerprint, name, source, n_rows, columns, identifying FROM data_versions WHERE id = ?", (data,)
    ).fetchone()
    fingerprint, name, source, n_rows, columns, identifying = row
    return DataRecord(fingerprint, name, source, n_rows, json.loads(columns), tuple(json.loads(identifying)))


def rows_of(db: sqlite3.Connection, data: int) -> NDArray[np.uint64]:
    """Return the hashes of a version's rows, sorted. Raises: DamagedArray."""
    number, n_rows = db.execute("SELECT row_hashes, n_rows FROM data_versions WHERE id = ?", (data,)).fetchone()
    return load_array(db, number, "<u8", n_rows)


def add_named_rows(db: sqlite3.Connection, data: int, named: NDArray[np.uint64]) -> None:
    """Remember the hashes of a version's rows with their ids, beside those under which it had other ids."""
    known = load_counts(db, NAMED_ROWS, str(data))["keys"]
    save_counts(db, NAMED_ROWS, str(data), {"keys": np.union1d(known, named).astype("<u8")})


def named_rows_of(db: sqlite3.Connection, data: int) -> NDArray[np.uint64]:
    """Return the hashes of a version's rows with their ids, sorted; none where not every row had one."""
    return load_counts(db, NAMED_ROWS, str(data))["keys"]


def all_data(db: sqlite3.Connection) -> list[int]:
    """Return the numbers of all versions of data sets, the oldest first."""
    return [number for (number,) in db.execute("SELECT id FROM data_versions ORDER BY id")]


def runs_under(db: sqlite3.Connection, terms: Terms) -> set[int]:
    """Return the numbers of all runs over a version of a data set, evaluations too, among the same sites and draws."""
    key = (terms.data, json.dumps(terms.sites), terms.draw)
    all_runs = "SELECT runs.id FROM runs JOIN terms ON terms.id = terms"
    found = db.execute(f"{all_runs} WHERE (data, sites, draw) = (?, ?, ?)", key)
    return {number for (number,) in found}


def trained_on(db: sqlite3.Connection, job_id: str) -> int | None:
    """Return the number of the version of a data set that a job trained on: the one that it named first."""
    found = db.execute(
        "SELECT data FROM runs JOIN terms ON terms.id = terms WHERE job_id = ? ORDER BY runs.id LIMIT 1", (job_id,)
    ).fetchone()
    return None if found is None else int(found[0])


def add_run(
    db: sqlite3.Connection, job_id: str, terms: Terms, started: str, trees: int = 0, state: str = "reserved"
) -> int:
    """Remember a run; return its number."""
    key = (terms.data, json.dumps(terms.sites), terms.parameters, terms.draw)
    db.execute("INSERT OR IGNORE INTO terms (data, sites, parameters, draw) VALUES (?, ?, ?, ?)", key)
    found = db.execute("SELECT id FROM terms WHERE (data, sites, parameters, draw) = (?, ?, ?, ?)", key).fetchone()
    run = (job_id, *found, started, state, trees)
    return insert(db, "INSERT INTO runs (job_id, terms, started, state, trees) VALUES (?, ?, ?, ?, ?)", run)


def drop_run(db: sqlite3.Connection, number: int) -> None:
    """Forget a run."""
    db.execute("DELETE FROM runs WHERE id = ?", (number,))


def run_of(db: sqlite3.Connection, number: int) -> Run:
    """Return a run. Raises: ValueError: it is not there."""
    row = db.execute(f"{_RUN} WHERE runs.id = ?", (number,)).fetchone()
    if row is None:
        raise ValueError("the run is not in the registry (was it cancelled?)")
    return _run(row)


def last_run_of(db: sqlite3.Connection, job_id: str, data_set: str) -> Run | None:
    """Return the last run of a job over a data set of this name."""
    row = db.execute(
        f"{_RUN} WHERE job_id = ? AND name = ? ORDER BY runs.id DESC LIMIT 1", (job_id, data_set)
    ).fetchone()
    return None if row is None else _run(row)


def of_job(db: sqlite3.Connection, job_id: str) -> tuple[int, ...]:
    """Return the numbers of a job's runs."""
    return tuple(number for (number,) in db.execute("SELECT id FROM runs WHERE job_id = ?", (job_id,)))


def all_runs(db: sqlite3.Connection) -> list[Run]:
    """Return all runs, the oldest first."""
    return [_run(row) for row in db.execute(f"{_RUN} ORDER BY runs.id")]


# Columns that stand beside MIN are those of the row that has it: SQLite says so.
_EARLIER_TERMS = """
SELECT data, fingerprint, sites, parameters, draw, job_id, MIN(first) AS oldest
FROM (
    SELECT terms.*, (
        SELECT id FROM runs WHERE terms = terms.id AND NOT instr(?, ',' || id || ',') ORDER BY id LIMIT 1
    ) AS first FROM terms
)
JOIN runs ON runs.id = first
JOIN data_versions ON data_versions.id = data
GROUP BY data, sites, draw, parameters = ?
ORDER BY oldest
"""


def earlier_terms(db: sqlite3.Connection, parameters: str, without: tuple[int, ...]) -> list[tuple[Terms, str]]:
    """Return under which terms runs took place, the oldest first, each with the job that was the first.

    Args:
        parameters: of all other parameters one stands for the rest, as none of them are these.
        without: numbers of runs that do not count.
    """
    listed = f",{','.join(map(str, without))},"
    return [(_terms(row[:5]), row[5]) for row in db.execute(_EARLIER_TERMS, (listed, parameters))]


def add_search(
    db: sqlite3.Connection,
    run: int | None,
    sites: tuple[str, ...],
    settings: str,
    n_rows: int,
    columns: Mapping[str, str],
) -> int:
    """Remember a quantile search over columns (name -> keyed hash) before it starts; return its number."""
    search = (run, json.dumps(sites), settings, n_rows)
    number = insert(db, "INSERT INTO searches (run, sites, settings, n_rows) VALUES (?, ?, ?, ?)", search)
    columns_of = [(number, feature, digest) for feature, digest in columns.items()]
    db.executemany("INSERT INTO searched_columns (search, feature, hash) VALUES (?, ?, ?)", columns_of)
    return number


def last_search_of(db: sqlite3.Connection, run: int) -> tuple[int | None, set[str]]:
    """Return the number and the columns of a run's last search; None if it planned none."""
    (search,) = db.execute("SELECT MAX(id) FROM searches WHERE run = ?", (run,)).fetchone()
    columns = db.execute("SELECT feature FROM searched_columns WHERE search = ?", (search,))
    return search, {feature for (feature,) in columns}


def earlier_searches(
    db: sqlite3.Connection, sites: tuple[str, ...], n_rows: int, feature: str, digest: str
) -> list[tuple[str, int | None]]:
    """Return the settings of all searches of a column among these sites, and the array of the cuts of each."""
    rows = db.execute(
        "SELECT settings, cuts FROM searched_columns JOIN searches ON searches.id = search "
        "WHERE (hash, feature, sites, n_rows) = (?, ?, ?, ?) ORDER BY search",
        (digest, feature, json.dumps(sites), n_rows),
    )
    return list(rows)


def set_cuts(db: sqlite3.Connection, search: int, feature: str, cuts: NDArray[np.float32]) -> None:
    """Keep the cuts that a search found for a column."""
    key = (search, feature)
    db.execute(
        "UPDATE searched_columns SET cuts = ? WHERE (search, feature) = (?, ?)",
        (store_array(db, np.asarray(cuts, dtype="<f4")), *key),
    )


def _run(row: tuple[Any, ...]) -> Run:
    return Run(row[0], row[1], _terms(row[2:7]), *row[7:])


def _terms(row: tuple[Any, ...]) -> Terms:
    return Terms(row[0], row[1], tuple(json.loads(row[2])), *row[3:])
