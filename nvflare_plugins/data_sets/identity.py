"""Recognising a data set, or a changed version of it, without storing it.

Three keyed hashes with a random key that never leaves the site:

* one per row (8 bytes), kept sorted in a local file of mode 0600: finds any overlap between two tables with the same
  columns, however the file is named;
* one per column, over its sorted values: finds that rows are unchanged when another job uses other columns, or the
  policy renames them;
* one over everything: the fingerprint.

They are made from values as they were read, not from the bytes of a file: an option of the policy's reader that changes
a value makes changed rows, and one that changes none (another encoding of the same text) leaves them the same.

Where the data set names an id column, a fourth one for each row, over values and id, tells rows apart that are alike by
chance. It only ever makes two versions of different names less related: the id is the site's own, and no job can choose
it. An id that is another one in each file (a line number) would hide that rows are the same.

They are combined with the data set's name and path in the policy, because a row whose every value was rescaled has
another hash and is still the same person. What is not found: the same people under another name and another path, if
neither a whole row nor a whole column (of many distinct values) is as it was: a part of the rows with one column more,
for example; and rows that swapped values in a job that takes other columns. Names and paths are the site's own, in its
policy; no job can choose them. Without the key the hashes tell nothing; with it a guessed row can be tested, which is
why key and hashes stay local. Chance that two different rows of n collide: n^2 / 2^65.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.row_ids import usable_ids
from nvflare_plugins.data_sets.table import Table

_IDENTIFYING_DISTINCT = 100


class Relation(Enum):
    """How a table relates to an earlier one."""

    SAME = "same rows"
    CHANGED = "changed rows"
    UNRELATED = "unrelated"


@dataclass(frozen=True, slots=True)
class DataRecord:
    """What the registry keeps of one version of a data set; JSON values only.

    Attributes:
        fingerprint: keyed hash of all rows, in any order.
        name: the data set's name in the policy.
        source: keyed hash of its path.
        n_rows: number of rows.
        columns: column name -> keyed hash of its values, in any order; label and weight included.
        identifying: columns with so many distinct values that equal hashes mean the same rows.
    """

    fingerprint: str
    name: str
    source: str
    n_rows: int
    columns: Mapping[str, str]
    identifying: tuple[str, ...]

    def relation(self, earlier: DataRecord, overlap: int) -> Relation:
        """Return how this version relates to an earlier one.

        Args:
            earlier: the other version.
            overlap: number of row hashes in common (0 if the columns differ).
        """
        if self.fingerprint == earlier.fingerprint:
            return Relation.SAME
        shared = set(self.columns) & set(earlier.columns)
        equal = {name for name in shared if self.columns[name] == earlier.columns[name]}
        same_origin = self.name == earlier.name or self.source == earlier.source
        # Under whatever name: a policy may rename columns.
        is_there = set(earlier.columns.values())
        same_people = same_origin or any(self.columns[name] in is_there for name in self.identifying)
        # With all columns alike the fingerprints decide: two rows may have swapped a value, which no column shows.
        other_columns = set(self.columns) != set(earlier.columns)
        if same_people and other_columns and shared and equal == shared and self.n_rows == earlier.n_rows:
            return Relation.SAME
        return Relation.CHANGED if same_people or overlap else Relation.UNRELATED


def identify(
    table: Table, spec: DataSet, key: bytes, ids: Sequence[bytes] | None = None
) -> tuple[DataRecord, NDArray[np.uint64]]:
    """Return the record of a table and its sorted row hashes.

    Args:
        ids: what names the rows, if something does; they count as part of the rows then.
    Shapes:   row hashes: uint64[n_rows].
    Security: the key stays at the site; so do the hashes.
    """
    names = _names(table)
    rows = np.sort(_row_hashes(table, key, None if ids is None else lambda places: [ids[place] for place in places]))
    hashes: dict[str, str] = {}
    many: set[str] = set()
    for name, column in _columns(table):
        values = np.sort(_canonical(column))
        hashes[name] = _hash(key, b"column", values.tobytes())
        if 1 + int(np.count_nonzero(values[1:] != values[:-1])) > _IDENTIFYING_DISTINCT:
            many.add(name)
    columns = {name: hashes[name] for name in names}
    identifying = [name for name in names if name in many]
    fingerprint = _hash(key, b"table", repr(names).encode(), rows.tobytes())
    source = _hash(key, b"path", str(spec.path.resolve()).encode())
    return DataRecord(fingerprint, spec.name, source, table.n_rows, columns, tuple(identifying)), rows


def named_rows(table: Table, spec: DataSet, key: bytes) -> NDArray[np.uint64] | None:
    """Return a keyed hash of each row's values and its id, sorted; None where not every row has an id.

    They tell rows apart that are alike in all columns: rows of few, coarse columns often are.

    Shapes:   result: uint64[n_rows].
    Security: as of ``identify``.
    """
    if table.ids is None:
        return None
    column = table.ids

    def names_of(places: NDArray[np.int64]) -> list[bytes]:
        named = usable_ids(column.take(pa.array(places)), spec)
        if None in named:
            raise _Unnamed
        return [one.encode() for one in named if one is not None]

    try:
        usable_ids(column.slice(0, 0), spec)
    except ConfigurationError:  # a column that cannot name rows, which nothing else here asks for
        return None
    try:
        return np.sort(_row_hashes(table, key, names_of))
    except _Unnamed:
        return None


def row_tags(table: Table, key: bytes) -> NDArray[np.uint64]:
    """Return a keyed hash of every row, in the rows' order. Shapes: result: uint64[n_rows]."""
    return _row_hashes(table, key, None)


def overlap_of(mine: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> int:
    """Return how many distinct row hashes two tables share.

    Shapes: both: uint64, sorted.
    """
    return int(np.intersect1d(mine, theirs).size)


class _Unnamed(Exception):
    """A row has no id."""


def _names(table: Table) -> list[str]:
    weight = [] if table.weight is None or table.weight_name is None else [table.weight_name]
    return sorted({*table.feature_names, *([table.label_name] if table.label_name else []), *weight})


def _others(table: Table) -> dict[str, NDArray[np.float32]]:
    """Return the columns that are always held: label and weight."""
    others = {table.label_name: table.label} if table.label_name else {}
    if table.weight is not None and table.weight_name is not None:
        others[table.weight_name] = table.weight
    return others


def _columns(table: Table) -> Iterator[tuple[str, NDArray[np.float32]]]:
    yield from _others(table).items()
    yield from zip(table.feature_names, table.columns(), strict=True)


def _canonical(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return values as bit patterns with one zero and one NaN. Shapes: those of values."""
    canonical = values + np.float32(0)  # -0.0 + 0.0 is 0.0
    canonical[np.isnan(canonical)] = np.nan
    return np.ascontiguousarray(canonical, dtype="<f4").view("<u4")


def _row_hashes(
    table: Table, key: bytes, ids: Callable[[NDArray[np.int64]], Sequence[bytes]] | None
) -> NDArray[np.uint64]:
    """Return a keyed hash of every row over all columns in order of name, some rows at a time.

    Args:
        ids: returns what names the rows in some places, if something does.
    """
    names, others = _names(table), _others(table)
    hashes = np.empty(table.n_rows, dtype="<u8")
    for places, block in table.placed_blocks():
        by_name = dict(zip(table.feature_names, block.T, strict=True))
        by_name.update({name: column[places] for name, column in others.items()})
        data = _canonical(np.column_stack([by_name[name] for name in names])).tobytes()
        width, named = 4 * len(names), None if ids is None else ids(places)
        digests = b"".join(
            hashlib.blake2b(
                data[row * width : (row + 1) * width] + (b"" if named is None else named[row]),
                digest_size=8,
                key=key,
            ).digest()
            for row in range(places.size)
        )
        hashes[places] = np.frombuffer(digests, dtype="<u8")
    return hashes


def _hash(key: bytes, purpose: bytes, *parts: bytes) -> str:
    digest = hashlib.blake2b(key=key, digest_size=16, person=purpose)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
