"""The tables of what standing scoring has shown: one record for each answer and each row, looked up by key.

A charge reads and writes the records of its own rows alone, however many there are of others. SQLite notices damage to
its own structures; each record of a row says besides, by a hash, that it is what was written. An answer that is damaged
is not found, and charged again.

Concurrency: all of it within a transaction of the memory.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.site.memory.schema import DamagedArray, insert

_ANSWER = "SELECT answer FROM scored_answers WHERE data_set = ? AND answer = ?"
_ROW = "SELECT row, bits, digest FROM scored_rows WHERE data_set = ? AND row = ?"
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Day:
    """How many rows were charged on a day. Units: number: days of UTC since 1970."""

    number: int
    rows: int


class ScoredRows:
    """The records of one data set.

    Keys are hashes of 64 bits, as uint64.
    """

    def __init__(self, db: sqlite3.Connection, data_set: str) -> None:
        """Look the data set up. Args: data_set: see ``schema.counted``."""
        self._db = db
        found = db.execute("SELECT id, day, rows FROM scored_sets WHERE data_set = ?", (data_set,)).fetchone()
        self._name = data_set
        self._number: int | None = None if found is None else found[0]
        self.day = Day(0, 0) if found is None else Day(found[1], found[2])
        if min(self.day.number, self.day.rows) < 0:
            raise DamagedArray("its record of scored rows does not fit together")

    def is_answered(self, answers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which answers are on the record. Shapes: uint64[n] -> bool[n]."""
        found = {key for (key,) in self._look_up(_ANSWER, answers)}
        return np.array([key in found for key in _signed(answers)], dtype=bool)

    def bits(self, rows: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return how many bits each row has shown. Shapes: uint64[n] -> int64[n]. Raises: DamagedArray."""
        found = dict(self._checked(self._look_up(_ROW, rows)))
        return np.array([found.get(key, 0) for key in _signed(rows)], dtype=np.int64)

    def check_all(self) -> None:
        """Read every record of a row. Raises: DamagedArray: one is not what was written."""
        query = "SELECT row, bits, digest FROM scored_rows WHERE data_set = ?"
        for _ in self._checked(self._db.execute(query, (self._number,))):
            pass

    def add(self, answers: NDArray[np.uint64], rows: NDArray[np.uint64], bits: NDArray[np.int64], day: Day) -> None:
        """Write records, of rows in the place of those before.

        Args:
            bits: of each row in all.

        Shapes: answers: uint64[n]; rows: uint64[n_rows]; bits: int64[n_rows].
        """
        if self._number is None:
            self._number = insert(
                self._db, "INSERT INTO scored_sets (data_set, day, rows) VALUES (?, 0, 0)", [self._name]
            )
        number = self._number
        self._db.executemany("INSERT INTO scored_answers VALUES (?, ?)", ((number, key) for key in _signed(answers)))
        self._db.executemany(
            "INSERT OR REPLACE INTO scored_rows VALUES (?, ?, ?, ?)",
            ((number, key, n, _digest(key, n)) for key, n in zip(_signed(rows), bits.tolist(), strict=True)),
        )
        self._db.execute("UPDATE scored_sets SET day = ?, rows = ? WHERE id = ?", (day.number, day.rows, number))
        self.day = day

    def _look_up(self, query: str, keys: NDArray[np.uint64]) -> list[tuple[Any, ...]]:
        return [one for key in _signed(keys) for one in self._db.execute(query, (self._number, key))]

    @staticmethod
    def _checked(records: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, int]]:
        for row, bits, digest in records:
            if type(bits) is not int or bits < 0 or digest != _digest(row, bits):
                raise DamagedArray("its record of scored rows is damaged")
            yield row, bits


def _signed(keys: NDArray[np.uint64]) -> list[int]:
    """Return keys as SQLite's whole numbers, which have a sign."""
    numbers: list[int] = np.ascontiguousarray(keys, dtype="<u8").view("<i8").tolist()
    return numbers


def _digest(row: int, bits: int) -> bytes:
    return hashlib.blake2b(b"%d %d" % (row, bits), digest_size=_DIGEST_BYTES).digest()
