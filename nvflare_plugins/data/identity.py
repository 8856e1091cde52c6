"""Recognising a data set without storing it, and its rows by canonical ids."""

from __future__ import annotations

import hashlib
import logging
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet, IdForm
from nvflare_plugins.data.table import Table
from nvflare_plugins.data.tabular_files import TabularFile

# Canonical row ids: the same id must be the same bytes at every party, however its file writes it.
#
# * Type: whole numbers become their decimal digits, so that a Parquet file's 7 is a CSV file's "7". "007" is another
# id. * Unicode: NFC. Characters that cannot be seen (controls, zero-width marks, byte order marks), or that this
# version of Unicode does not know, are refused: two parties would wonder for long why nothing matches. * White space:
# none at either end, and one space for any run inside. * What the policy says besides (``IdForm``).
#
# Missing ids and ids that stand there twice are refused, at this site alone. Why, and which rows they are, goes into
# this site's own log, by row number; others read a fixed text (``DataRefusal``).


_log = logging.getLogger(__name__)
MAX_ID_BYTES = 1024
_SHOWN_ROWS = 10
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn"))  # control, format, surrogate, private use, unassigned


def load_ids(spec: DataSet) -> list[bytes]:
    """Read the canonical ids of a data set, in the order of its rows.

    Privacy: everything stays at the site.

    Raises:
        ConfigurationError: the policy names no id column for it, the file cannot be read, or an id is missing, stands
            there twice or is of a kind that cannot be compared.
    """
    if spec.id is None:
        raise ConfigurationError(
            f"data set {spec.name!r} has no id column to align rows by. Policy key: data_sets.{spec.name}.id."
        )
    file = TabularFile(spec)
    if spec.id not in file.column_names:
        raise ConfigurationError(f"data set {spec.name!r} lacks its id column. Policy key: data_sets.{spec.name}.id.")
    return canonical_ids(file.read([], [spec.id])[spec.id], spec.name, spec.missing, spec.id_form)


_AS_WRITTEN = IdForm()


def canonical_ids(
    column: pa.ChunkedArray | pa.Array, data_set: str, missing: Iterable[str] = (), form: IdForm = _AS_WRITTEN
) -> list[bytes]:
    """Return the ids of a column in canonical form, all present and all different.

    Args:
        data_set: its name, for messages.
        missing: texts that mean "missing", besides an empty one.
        form: what else makes ids equal.

    Raises:
        ConfigurationError: see the module.
    """
    texts = _texts(column, data_set)
    absent = {"", *missing}
    ids = ["" if text is None or text.strip() in absent else canonical(text, form) for text in texts]
    _refuse([row for row, text in enumerate(ids) if text in absent], "lacks ids in some rows", data_set)
    unclear = [row for row, text in enumerate(ids) if text is None]
    _refuse(unclear, f"holds ids with invisible or unknown characters, or longer than {MAX_ID_BYTES} bytes", data_set)
    encoded = [text.encode() for text in ids if text is not None]
    _refuse(_repeated(encoded), "holds some id more than once (after its forms are made equal)", data_set)
    return encoded


def usable_ids(column: pa.ChunkedArray | pa.Array, spec: DataSet) -> list[str | None]:
    """Return each row's id in canonical form, by itself; None where it has none. Ids may stand there twice.

    Raises:
        ConfigurationError: the column's declared type is none for ids.
    """
    if pa.types.is_floating(column.type):  # whole numbers with gaps, in many tools; the gaps must not change the others
        texts = [None if v is None or v != v else f"{v:.0f}" if v.is_integer() else repr(v) for v in column.to_pylist()]
    else:
        texts = _texts(column, spec.name)
    absent = {"", *spec.missing}
    ids = [None if text is None or text.strip() in absent else canonical(text, spec.id_form) for text in texts]
    return [None if one in absent else one for one in ids]


def _texts(column: pa.ChunkedArray | pa.Array, data_set: str) -> list[str | None]:
    """Return a column of whole numbers or text as text."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_integer(kind):
        column = column.cast(pa.string())
    elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise ConfigurationError(
            f"data set {data_set!r}: its id column holds {kind}; ids are text or whole numbers. (A column of whole "
            "numbers with gaps becomes one of floating point in many tools.)"
        )
    result: list[str | None] = column.to_pylist()
    return result


def canonical(text: str, form: IdForm = _AS_WRITTEN) -> str | None:
    """Return the canonical form of an id (see the module), or None if the text has none."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC" if form.nfkc else "NFC", text)
    text = " ".join(text.split())
    if form != _AS_WRITTEN:
        prefix = form.prefix
        if form.ignore_case:
            text, prefix = unicodedata.normalize("NFC", text.casefold()), prefix.casefold()
        text = text.removeprefix(prefix).strip()
        if form.ignore_padding:
            text = text.lstrip("0") or text[-1:]
    if text.isascii() and text.isprintable():  # nearly all ids
        return text if len(text) <= MAX_ID_BYTES else None
    if any(unicodedata.category(character) in _INVISIBLE for character in text):
        return None
    return text if len(text.encode()) <= MAX_ID_BYTES else None


def _repeated(ids: Sequence[bytes]) -> list[int]:
    """Return the rows whose id another row before them has, and that first row."""
    first: dict[bytes, int] = {}
    rows: list[int] = []
    for row, name in enumerate(ids):
        earlier = first.setdefault(name, row)
        if earlier != row:
            rows += [earlier, row]
    return sorted(set(rows))


def _refuse(rows: Sequence[int], what: str, data_set: str) -> None:
    if not rows:
        return
    shown = ", ".join(str(row + 1) for row in rows[:_SHOWN_ROWS])
    more = " and others" if len(rows) > _SHOWN_ROWS else ""
    # Not as an error: FLARE sends lines of that level to the server.
    _log.info("data set %r %s: rows %s%s (counted from 1, without a header)", data_set, what, shown, more)
    raise DataRefusal(f"data set {data_set!r} {what}; the line before says which rows.")


# Recognising a data set, or a changed version of it, without storing it.
#
# Three keyed hashes with a random key that never leaves the site:
#
# * one per row (8 bytes), kept sorted in a local file of mode 0600: finds any overlap between two tables with the same
# columns, however the file is named; * one per column, over its sorted values: finds that rows are unchanged when
# another job uses other columns, or the policy renames them; * one over everything: the fingerprint.
#
# They are made from values as they were read, not from the bytes of a file: an option of the policy's reader that
# changes a value makes changed rows, and one that changes none (another encoding of the same text) leaves them the
# same.
#
# Where the data set names an id column, a fourth one for each row, over values and id, tells rows apart that are alike
# by chance. It only ever makes two versions of different names less related: the id is the site's own, and no job can
# choose it. An id that is another one in each file (a line number) would hide that rows are the same.
#
# They are combined with the data set's name and path in the policy, because a row whose every value was rescaled has
# another hash and is still the same person. What is not found: the same people under another name and another path, if
# neither a whole row nor a whole column (of many distinct values) is as it was: a part of the rows with one column
# more, for example; and rows that swapped values in a job that takes other columns. Names and paths are the site's own,
# in its policy; no job can choose them. Without the key the hashes tell nothing; with it a guessed row can be tested,
# which is why key and hashes stay local. Chance that two different rows of n collide: n^2 / 2^65.


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
    return sorted({*table.feature_names, *_labels(table), *weight})


def _others(table: Table) -> dict[str, NDArray[np.float32]]:
    """Return the columns that are always held: label and weight."""
    others = _labels(table)
    if table.weight is not None and table.weight_name is not None:
        others[table.weight_name] = table.weight
    return others


def _labels(table: Table) -> dict[str, NDArray[np.float32]]:
    """Return the label's columns: one, or of times both bounds."""
    if not table.label_name:
        return {}
    if table.label.ndim == 1:
        return {table.label_name: table.label}
    return {f"{table.label_name} ({bound})": table.label[:, n] for n, bound in enumerate(("lower", "upper"))}


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
                data[row * width : (row + 1) * width] + (b"" if named is None else named[row]), digest_size=8, key=key
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
