"""The tables of a site's memory, and the arrays in them.

Arrays (hashes of rows, counts, cut points) are stored in parts, each with a hash of its bytes: SQLite notices damage to
its own structures, but not to what it was given. Lists of names are JSON.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

APPLICATION = int.from_bytes(b"VeiB", "big")
FORMAT = 3

# What standing scoring has shown of rows, per data set (a hash of its name), by keyed hashes: too many to be rewritten.
_SCORED_TABLES = (
    "CREATE TABLE scored_sets (id INTEGER PRIMARY KEY, data_set TEXT NOT NULL UNIQUE, day INTEGER NOT NULL, "
    "rows INTEGER NOT NULL)",
    "CREATE TABLE scored_answers (data_set INTEGER NOT NULL REFERENCES scored_sets, answer INTEGER NOT NULL, "
    "PRIMARY KEY (data_set, answer)) WITHOUT ROWID",
    "CREATE TABLE scored_rows (data_set INTEGER NOT NULL REFERENCES scored_sets, row INTEGER NOT NULL, "
    "bits INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (data_set, row)) WITHOUT ROWID",
)
STATEMENTS = (
    "CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL)",
    # Of versions up to 0.10, which copied files of versions before 0.3.
    "CREATE TABLE earlier_version (name TEXT PRIMARY KEY, digest BLOB NOT NULL)",
    "CREATE TABLE arrays (id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, length INTEGER NOT NULL)",
    "CREATE TABLE array_parts (array INTEGER NOT NULL REFERENCES arrays ON DELETE CASCADE, part INTEGER NOT NULL, "
    "digest BLOB NOT NULL, content BLOB NOT NULL, PRIMARY KEY (array, part))",
    # Runs: which data, with which sites, under which parameters.
    "CREATE TABLE data_versions (id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, name TEXT NOT NULL, "
    "source TEXT NOT NULL, n_rows INTEGER NOT NULL, columns TEXT NOT NULL, identifying TEXT NOT NULL, "
    "row_hashes INTEGER NOT NULL REFERENCES arrays, UNIQUE (fingerprint, name, source))",
    "CREATE TABLE terms (id INTEGER PRIMARY KEY, data INTEGER NOT NULL REFERENCES data_versions, sites TEXT NOT NULL, "
    "parameters TEXT NOT NULL, draw TEXT NOT NULL, UNIQUE (data, sites, parameters, draw))",
    "CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, "
    "terms INTEGER NOT NULL REFERENCES terms, started TEXT NOT NULL, "
    "state TEXT NOT NULL CHECK (state IN ('reserved', 'complete')), "
    "trees INTEGER NOT NULL CHECK (typeof(trees) = 'integer' AND trees >= 0))",
    "CREATE INDEX runs_by_terms ON runs (terms, id)",
    "CREATE INDEX runs_by_job ON runs (job_id, id)",
    # Quantile searches: the keyed hashes of their columns, and the cuts once they have ended.
    "CREATE TABLE searches (id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER REFERENCES runs, sites TEXT NOT NULL, "
    "settings TEXT NOT NULL, n_rows INTEGER NOT NULL)",
    "CREATE INDEX searches_by_run ON searches (run)",
    "CREATE TABLE searched_columns (search INTEGER NOT NULL REFERENCES searches, feature TEXT NOT NULL, "
    "hash TEXT NOT NULL, cuts INTEGER REFERENCES arrays, PRIMARY KEY (search, feature))",
    "CREATE INDEX searched_columns_by_hash ON searched_columns (hash)",
    "CREATE TABLE alignments (id INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, data_set TEXT NOT NULL, "
    "sites TEXT NOT NULL, started TEXT NOT NULL, is_sent INTEGER NOT NULL, ids INTEGER NOT NULL REFERENCES arrays)",
    # Released sums and counts of predictions: per data set (a hash of its name) some arrays.
    "CREATE TABLE row_counts (purpose TEXT NOT NULL, data_set TEXT NOT NULL, name TEXT NOT NULL, "
    "array INTEGER NOT NULL REFERENCES arrays, PRIMARY KEY (purpose, data_set, name))",
    "CREATE TABLE sent_rows (id INTEGER PRIMARY KEY, job_id TEXT NOT NULL, data_set TEXT, "
    "row_hashes INTEGER NOT NULL REFERENCES arrays)",
    "CREATE TABLE refusals (question TEXT NOT NULL, data_set TEXT NOT NULL, at REAL NOT NULL)",
    "CREATE INDEX refusals_by_data_set ON refusals (question, data_set, at)",
    "CREATE TABLE policy_keys (name TEXT PRIMARY KEY, hash TEXT NOT NULL)",
    *_SCORED_TABLES,
)

RELEASED_SUMS, TOLD_BITS, PREDICTIONS = "released sums", "told split bits", "predictions"
UNCHECKED, PERSONS = "runs whose added rows were not checked", "persons of budgets"
UNNAMED, NAMED_ROWS = "spent without noting on whom", "rows by values and id"  # the latter by version's number
FORGETTING = "persons to forget"
COUNTS: Mapping[str, Mapping[str, str]] = {
    RELEASED_SUMS: {
        "keys": "<u8",
        "sums": "<i4",
        "share": "<f4",
        "split_bits": "<i4",
        "sizes": "<i8",
        "fingerprints": "<i4",
    },
    TOLD_BITS: {"answers": "<u8"},
    PREDICTIONS: {"keys": "<u8", "counts": "<i8"},
    UNCHECKED: {"runs": "<i8"},
    PERSONS: {"keys": "<u8"},
    UNNAMED: {"is_spent": "<i8"},
    NAMED_ROWS: {"keys": "<u8"},
    FORGETTING: {
        "keys": "<u8",
        "since": "<i8",
        "members": "<u8",
        "batch": "<i4",
        "rows": "<u8",
        "row_batch": "<i4",
        "document": "|u1",
    },
}
"""The arrays that are kept for each data set, by purpose and name."""

_KINDS = ("<u8", "<i8", "<i4", "<f4", "|u1")
_PART_BYTES = 1 << 19  # SQLite takes no value beyond 10^9 bytes, and a changed part is written whole


class DamagedArray(ValueError):
    """An array is not what was stored."""


def insert(db: sqlite3.Connection, statement: str, values: Sequence[Any]) -> int:
    """Insert one row and return its number."""
    number = db.execute(statement, values).lastrowid
    if number is None:
        raise ValueError("nothing was inserted")
    return number


def store_array(db: sqlite3.Connection, values: NDArray[Any]) -> int:
    """Store a new array and return its number. Shapes: values: one dimension."""
    kind = values.dtype.str
    if kind not in _KINDS or values.ndim != 1:
        raise TypeError(f"arrays of {kind} with {values.ndim} dimensions are not stored")
    number = insert(db, "INSERT INTO arrays (kind, length) VALUES (?, 0)", (kind,))
    _write(db, number, values)
    return number


def load_array(db: sqlite3.Connection, number: int, kind: str, length: int | None = None) -> NDArray[Any]:
    """Return a stored array.

    Args:
        kind: what it must hold, as NumPy writes it.
        length: what it must have; None for any.

    Raises:
        DamagedArray: it is not there as it was stored, or is another one.
    """
    found = db.execute("SELECT kind, length FROM arrays WHERE id = ?", (number,)).fetchone()
    if found is None or found[0] != kind or length not in (None, found[1]):
        raise DamagedArray("an array is missing, or is not what belongs there")
    parts = []
    for position, (part, digest, content) in enumerate(
        db.execute("SELECT part, digest, content FROM array_parts WHERE array = ? ORDER BY part", (number,))
    ):
        if part != position or not isinstance(content, bytes) or _digest(content) != digest:
            raise DamagedArray("an array is damaged")
        parts.append(content)
    content = b"".join(parts)
    if len(content) != found[1] * np.dtype(kind).itemsize:
        raise DamagedArray("an array is damaged: it has another length")
    return np.frombuffer(content, dtype=kind)


def drop_array(db: sqlite3.Connection, number: int) -> None:
    """Forget an array; nothing may refer to it any more."""
    db.execute("DELETE FROM arrays WHERE id = ?", (number,))


def load_counts(db: sqlite3.Connection, purpose: str, data_set: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a data set by name, empty ones where nothing was counted; each may be changed.

    Args:
        data_set: see ``counted``.

    Raises:
        DamagedArray: an array is damaged, or another one than these.
    """
    rows = "SELECT name, array FROM row_counts WHERE purpose = ? AND data_set = ?"
    numbers, kinds = dict(db.execute(rows, (purpose, data_set))), COUNTS[purpose]
    if not numbers:
        return {name: np.empty(0, dtype=kind) for name, kind in kinds.items()}
    if numbers.keys() != kinds.keys():
        raise DamagedArray("an array is missing, or is not what belongs there")
    return {name: load_array(db, numbers[name], kind).copy() for name, kind in kinds.items()}


def save_counts(db: sqlite3.Connection, purpose: str, data_set: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Store the arrays of a data set in the place of those before; what is the same stays as it is."""
    for name, values in arrays.items():
        key = (purpose, data_set, name)
        found = db.execute("SELECT array FROM row_counts WHERE (purpose, data_set, name) = (?, ?, ?)", key).fetchone()
        if found is None:
            db.execute("INSERT INTO row_counts VALUES (?, ?, ?, ?)", (*key, store_array(db, values)))
        else:
            _write(db, found[0], values)


def keyed_hashes(key: bytes, items: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return what stands for rows, persons or ids in the memory, item by item, under a secret of the site."""
    digests = b"".join(hashlib.blake2b(one, digest_size=8, key=key).digest() for one in items)
    return np.frombuffer(digests, dtype="<u8")


def counted(data_set: str) -> str:
    """Return what stands for the name of a data set beside its counts."""
    return hashlib.sha256(data_set.encode()).hexdigest()[:32]


def _write(db: sqlite3.Connection, number: int, values: NDArray[Any]) -> None:
    content = np.ascontiguousarray(values).data.cast("B")
    known = dict(db.execute("SELECT part, digest FROM array_parts WHERE array = ?", (number,)))
    for part, start in enumerate(range(0, len(content), _PART_BYTES)):
        piece = content[start : start + _PART_BYTES]
        digest = _digest(piece)
        if known.pop(part, None) != digest:
            db.execute("INSERT OR REPLACE INTO array_parts VALUES (?, ?, ?, ?)", (number, part, digest, piece))
    for part in known:
        db.execute("DELETE FROM array_parts WHERE array = ? AND part = ?", (number, part))
    db.execute("UPDATE arrays SET length = ? WHERE id = ?", (len(values), number))


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
