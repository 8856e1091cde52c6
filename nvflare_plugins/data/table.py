"""From a site's data set to the float32 table that XGBoost trains on, held whole or read in passes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Columns
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.base.formatting import near_name
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.labels import Label, columns_of, has_event, is_labelled, survival_bounds, words_of_label
from nvflare_plugins.data.parquet_parts import ParquetParts
from nvflare_plugins.data.tabular_files import TabularFile, distinct_values

# A column of which nothing is kept but how its values compare with some numbers: one or two bytes each.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ComparedColumn:
    """A column's values up to what comparisons with known numbers tell of them.

    Shapes: stand_ins: float32[n_numbers + 2], for each place among the numbers a value that lies there, the last for
        missing values; places: unsigned integers[n_rows].
    """

    stand_ins: NDArray[np.float32]
    places: NDArray[Any]

    @classmethod
    def compare(cls, values: NDArray[np.float32], numbers: NDArray[np.float32]) -> Self:
        """Compare a column. Shapes: values: float32[n_rows], NaN is missing; numbers: float32[any], ascending."""
        stand_ins = np.concatenate([[-np.inf], numbers, [np.nan]]).astype(np.float32)
        places = np.searchsorted(numbers, values, side="right")
        places[np.isnan(values)] = numbers.size + 1
        return cls(stand_ins, places.astype(np.min_scalar_type(numbers.size + 1)))

    def of(self, rows: NDArray[np.bool_] | NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Return values that are below the same numbers as those of some rows; missing ones are missing.

        So v < t holds for one where it holds for the other, for each of the numbers t. Values that are among the
        numbers are returned as they are.

        Shapes: float32[some rows].
        """
        result: NDArray[np.float32] = self.stand_ins[self.places[rows]]
        return result


# From Arrow columns to XGBoost's float32: numbers, positions in public lists, labels, weights; and what is refused.


_EXACT_INTEGERS = 2**24
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class ColumnLoader:
    """Turns Arrow columns into float32, collecting notes."""

    file: TabularFile
    spec: DataSet
    unknown_is_missing: bool
    repair: bool
    drops_unlabelled: bool
    notes: list[str]

    def checked(self, name: str, column: pa.ChunkedArray, public: tuple[str, ...] | None) -> NDArray[np.float32]:
        """Return a feature: numbers, or positions in its public list. Shapes: result: float32[n_rows]."""
        return (
            self.feature(name, column)
            if public is None
            else self.codes(name, column, public, unknown_is_missing=self.unknown_is_missing)
        )

    def feature(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float32]:
        """Shapes: result: float32[n_rows]; NaN is missing."""
        values = self.file.numbers(name, column)
        if name not in self.spec.dates and name not in self.spec.columns and are_ids(values, name):
            _log.warning(
                "column %r of data set %r looks like an id: nearly all of its numbers are whole and different. A model "
                "that splits on it tells who is who; leave it out of the job's features unless it is a measurement. "
                "Policy key: data_sets.%s.columns",
                name,
                self.spec.name,
                self.spec.name,
            )
        return self._narrow(name, values)

    def again(self, name: str, column: pa.ChunkedArray, public: tuple[str, ...] | None) -> NDArray[np.float32]:
        """Return what ``feature`` or ``codes`` have returned for these rows, without checks, notes and logs."""
        if public is not None:
            codes = positions_of(column, public, self.spec.missing)
            return np.where(codes < 0, np.nan, codes).astype(np.float32)
        values = self.file.numbers(name, column, each_by_itself=True)
        return (np.clip(values, -_LARGEST, _LARGEST) if self.repair else values).astype(np.float32)

    def floats(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float32]:
        """Shapes: result: float32[n_rows]; NaN is missing."""
        return self._narrow(name, self.file.numbers(name, column))

    def _narrow(self, name: str, values: NDArray[np.float64]) -> NDArray[np.float32]:
        if self.repair:
            values = np.clip(values, -_LARGEST, _LARGEST)
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        n_infinite = int(np.count_nonzero(np.isinf(narrow)))
        if n_infinite:
            log_count(f"infinite values in column {name!r}", n_infinite, values.size)
            raise DataRefusal(
                f"column {name!r} holds values that are infinite or beyond float32: mark them as missing or scale the "
                "column."
            )
        large = np.abs(values) > _EXACT_INTEGERS
        n_changed = int(np.count_nonzero(large & (values == np.floor(values)) & (narrow != values)))
        if n_changed:
            self.notes.append(
                f"Column {name!r} holds {n_changed} whole numbers beyond 2^24 that XGBoost's float32 rounds. If it is "
                "an identifier, leave it out of the features."
            )
        return narrow

    def codes(
        self, name: str, column: pa.ChunkedArray, public: tuple[str, ...], *, unknown_is_missing: bool
    ) -> NDArray[np.float32]:
        """Return positions in the public list; missing becomes NaN.

        Shapes: result: float32[n_rows].
        """
        self.file.check_has_texts(name, column)
        codes = positions_of(column, public, self.spec.missing)
        n_unknown = int(np.count_nonzero(codes == -2))
        if n_unknown and not unknown_is_missing:
            log_count(f"values of column {name!r} outside the public list", n_unknown, codes.size)
            raise DataRefusal(
                f"column {name!r} holds values that are not in the job's public list of {len(public)}: complete the "
                "list, or let the job count unknown categories as missing."
            )
        if n_unknown:
            self.notes.append(f"Column {name!r}: {n_unknown} values outside the public list count as missing.")
        return np.where(codes < 0, np.nan, codes).astype(np.float32)

    def label(
        self, label: Label, columns: Mapping[str, pa.ChunkedArray], classes: tuple[str, ...] | None
    ) -> NDArray[np.float32]:
        """Return labels, without missing ones unless these are left out, or repaired.

        Shapes: result: float32[n_rows], or float32[n_rows, 2] of a survival label (``survival_bounds``).
        """
        if not isinstance(label, str):
            values = self._times(label, columns)
        elif classes is None:
            values = self.floats(label, columns[label])
        else:
            values = self.codes(label, columns[label], classes, unknown_is_missing=self.repair)
        if not self.drops_unlabelled:
            self._refuse_missing("label", words_of_label(label), values)
        return values

    def _times(self, label: Mapping[str, str], columns: Mapping[str, pa.ChunkedArray]) -> NDArray[np.float32]:
        read = {name: self.file.numbers(name, columns[name]) for name in columns_of(label)}
        bounds, faults = survival_bounds(label, read)
        for text, is_bad in faults:
            if not self.repair:
                log_count(text, int(np.count_nonzero(is_bad)), is_bad.size)
                raise DataRefusal(f"{text}: correct these rows.")
            bounds[is_bad] = np.nan
        return bounds

    def weight(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float32]:
        """Return the weights; whether all are zero is for the job to judge, over all sites.

        Shapes: result: float32[n_rows], >= 0; if repairing, missing where it cannot be used.
        """
        values = self.floats(name, column)
        if self.repair:
            return np.where(values < 0, np.float32(np.nan), values)
        self._refuse_missing("weight", name, values)
        n_negative = int(np.count_nonzero(values < 0))
        if n_negative:
            log_count(f"negative weights in column {name!r}", n_negative, values.size)
            raise DataRefusal(f"weight column {name!r} holds negative values.")
        return values

    def _refuse_missing(self, role: str, name: str, values: NDArray[np.float32]) -> None:
        n_missing = int(np.count_nonzero(~is_labelled(values)))
        if n_missing and not self.repair:
            log_count(f"missing values in {role} column {name!r}", n_missing, values.size)
            key = f"data_sets.{self.spec.name}.drop_unlabelled"
            remedy = f", or have horizontal jobs leave them out. Policy key: {key}" if role == "label" else ""
            raise DataRefusal(f"{role} column {name!r} lacks values: remove those rows from the file{remedy}.")


def positions_of(column: pa.ChunkedArray, public: Sequence[str], missing: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each value in a public list: -1 where it is missing, -2 where it is not in the list.

    Args:
        missing: texts that mean "missing" unless they stand in the list, besides an empty one.

    Shapes: result: int64[n_rows].
    """
    values, codes = distinct_values(column)
    position = {text: code for code, text in enumerate(public)}
    absent = {"", *missing} - set(public)
    # Of each different value its position in the public list; the last one is for rows without a value.
    return np.array([*(code_of(value, position, absent) for value in values), -1], dtype=np.int64)[codes]


def log_count(what: str, count: int, of: int) -> None:
    """Tell this site's own log how many; an error, which travels, must not."""
    _log.info("%s: %d of %d", what, count, of)


def code_of(value: object, position: Mapping[str, int], missing: set[str]) -> int:
    """Return the position of one distinct value, -1 if it is missing, -2 if it is not in the list.

    Whole numbers may be written as 3 or 3.0: a column that once had gaps comes back from pandas as 3.0.
    """
    if value is None or value != value:
        return -1
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    if text in position:
        return position[text]
    if text in missing:
        return -1
    whole = re.fullmatch(r"(-?\d+)\.0+", text)
    return position.get(whole[1], -2) if whole else -2


# The features of a data set that is never held whole: read again for each pass, some rows or some columns at a time.
#
# A pass by columns is checked like a table that is held, so that the same values are refused, repaired and noted. A
# pass by blocks of rows comes after one by columns, and reads each value by itself: what a column as a whole decides
# (that its texts are true and false, say) has been checked by then, and does not change what a single value is read as.


BLOCK_VALUES = 1 << 20
"""Values of a block: 4 MiB of float32, and three times as much while it is read."""
_COLUMN_PASSES = 64
"""As many columns are read at once as that makes: of few, one at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class RowPasses:
    """Reads features again and again; see ``Columns``.

    Shapes:  rows: int64[n_rows], all different: numbers of the files' rows that count, in their order here; None for
             all, in the files' order.

    Attributes:
        loader: turns columns into numbers; what it finds it has noted once, when the data set was loaded.
        lists: public list of every categorical column.

    Raises:
        DataRefusal: whatever reads: a file has changed since the data set was loaded.
    """

    file: TabularFile
    loader: ColumnLoader
    names: tuple[str, ...]
    lists: Mapping[str, tuple[str, ...]]
    rows: NDArray[np.int64] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows that count."""
        return self.file.n_rows if self.rows is None else self.rows.size

    def first_look(self, *, may_be_empty: bool) -> Iterator[NDArray[np.float32]]:
        """Yield each column, checked. Shapes: float32[rows of the files]; NaN is missing. Raises: as ``load_table``."""
        for name, column in self._read(may_be_empty=may_be_empty):
            yield self.loader.checked(name, column, self.lists.get(name))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the numbers of features and rows."""
        return len(self.names), self.n_rows

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield each column. Shapes: float32[n_rows]; NaN is missing."""
        for name, column in self._read():
            yield self._wanted(self._values(name, column))

    def __getitem__(self, feature: int, /) -> NDArray[np.float32]:
        """Return one column. Shapes: float32[n_rows]; NaN is missing."""
        name = self.names[feature]
        return self._wanted(self._values(name, self.file.read(*self._by_kind([name]), may_be_empty=True)[name]))

    def _wanted(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values if self.rows is None else values[self.rows]

    def _read(self, *, may_be_empty: bool = True) -> Iterator[tuple[str, pa.ChunkedArray]]:
        step = max(1, len(self.names) // _COLUMN_PASSES)
        for start in range(0, len(self.names), step):
            names = self.names[start : start + step]
            columns = self.file.read(*self._by_kind(names), may_be_empty=may_be_empty)
            for name in names:
                yield name, columns.pop(name)

    def blocks(self, most_values: int = BLOCK_VALUES) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield some rows after the other, in the order of the files: their places here, and their values.

        Shapes: int64[some rows]; float32[some rows, n_features], C-contiguous.

        Args:
            most_values: of a block.
        """
        rows, order = self.rows, None
        if rows is not None and (rows[1:] < rows[:-1]).any():
            order = np.argsort(rows)
            rows = rows[order]
        most_rows, first = max(1, most_values // max(1, len(self.names))), 0
        for columns in self.file.batches(*self._by_kind(self.names), most_rows):
            n_rows = len(columns[self.names[0]])
            block = np.empty((n_rows, len(self.names)), dtype=np.float32)
            for position, name in enumerate(self.names):
                block[:, position] = self._values(name, columns[name])
            low, high = (first, first + n_rows) if rows is None else np.searchsorted(rows, [first, first + n_rows])
            places = np.arange(low, high) if order is None else order[low:high]
            yield places, block if rows is None or high - low == n_rows else block[rows[low:high] - first]
            first += n_rows

    def held(self) -> NDArray[np.float32]:
        """Read all values into one array, a block after the other. Shapes: result: float32[n_rows, n_features]."""
        features = np.empty(self.shape[::-1], dtype=np.float32)
        for places, block in self.blocks():
            features[places] = block
        return features

    def taken(self, places: NDArray[np.int64]) -> RowPasses:
        """Return passes over these rows in another order. Shapes: places: int64[any], all different."""
        return replace(self, rows=places if self.rows is None else self.rows[places])

    def _by_kind(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        text = [name for name in names if name in self.lists]
        return [name for name in names if name not in self.lists], text

    def _values(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float32]:
        return self.loader.again(name, column, self.lists.get(name))


# From a site's data set to the table that XGBoost trains on.
#
# What is refused here would otherwise stop XGBoost at one site in the middle of the job, or train on something else
# than the user believes. What rows decide is a ``DataRefusal``: others read a fixed text, because a job that asks for
# the wrong labels or categories on purpose would otherwise question rows of one site. Counts go into this site's own
# log.
#
# Differentially private jobs load with ``repair``: where one row would decide that the job ends, that row is repaired,
# or left out, by itself (``Table.kept``). No row changes what happens to another one, so that sensitivities stay what
# they are.


_log = logging.getLogger(__name__)
MAX_NAME = 256
NOT_IN_NAMES = frozenset("[]<")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows of one site, ready for XGBoost.

    Shapes:  features: float32[n_rows, n_features], C-contiguous, NaN is missing, categorical columns hold the
             position in their public list; label: float32[n_rows], float32[n_rows, 2] of a survival label
             (``survival_bounds``), or float32[0] with an empty ``label_name`` at a party of a vertical job that has
             none; weight: float32[n_rows] or None.

    Attributes:
        feature_types: "float" or "c" (categorical) per column, as XGBoost names them. Whether numbers happen to be
            whole at this site is not a type: it would differ between sites.
        n_missing: missing values per column.
        categories: public list of every categorical column.
        label_classes: public list of label classes, if the job gives one.
        notes: what a person at this site should know, in sentences; counts only.
        ids: the column of ids as it stands, of the same reading of the file; None unless asked for.
        groups: the column that says which rows belong together, likewise.
        passes: reads the features of a data set that is not held; ``features`` has no rows then.
    """

    features: NDArray[np.float32]
    feature_names: tuple[str, ...]
    feature_types: tuple[str, ...]
    label: NDArray[np.float32]
    label_name: str
    weight: NDArray[np.float32] | None = None
    weight_name: str | None = None
    n_missing: tuple[int, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    ids: pa.ChunkedArray | None = None
    groups: pa.ChunkedArray | None = None
    passes: RowPasses | None = None

    @property
    def n_rows(self) -> int:
        return int(self.features.shape[0]) if self.passes is None else self.passes.n_rows

    @property
    def by_feature(self) -> Columns:
        """Return the features, each float32[n_rows]: those that are held, or what reads them when it is asked."""
        return self.features.T if self.passes is None else self.passes

    def held_features(self) -> NDArray[np.float32]:
        """Return all features in one array, read now if they are not held. Shapes: float32[n_rows, n_features]."""
        return self.features if self.passes is None else self.passes.held()

    def columns(self) -> Iterator[NDArray[np.float32]]:
        """Yield the features one by one. Shapes: float32[n_rows]."""
        return iter(self.by_feature)

    def blocks(self, most_values: int = BLOCK_VALUES) -> Iterator[NDArray[np.float32]]:
        """Yield the rows in their order. Shapes: float32[some rows, n_features]. Args: most_values: of a block.

        Raises:
            ValueError: they are read in passes, and are not in the order of the files.
        """
        first = 0
        for places, block in self.placed_blocks(most_values):
            if places.size and (places[0] != first or places[-1] != first + places.size - 1):
                raise ValueError("rows that are read in passes have another order than in their files")
            first += places.size
            yield block

    def placed_blocks(self, most_values: int = BLOCK_VALUES) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield all rows in whatever order, some at a time, with their places here.

        Shapes: int64[some rows]; float32[some rows, n_features].
        """
        if self.passes is not None:
            yield from self.passes.blocks(most_values)
            return
        step = max(1, most_values // max(1, len(self.feature_names)))
        for first in range(0, self.n_rows, step):
            block = self.features[first : first + step]
            yield np.arange(first, first + len(block)), block

    def kept(self, is_usable: NDArray[np.bool_], why: str) -> Table:
        """Return the rows that a job can use; how many are left out stands in this site's own log.

        Shapes:  is_usable: bool[n_rows]; each row's must depend on that row alone.
        Args:    why: completes "rows left out, ...".
        """
        n_left_out = self.n_rows - int(np.count_nonzero(is_usable))
        if n_left_out == 0:
            return self
        _log.warning("rows left out, %s: %d of %d", why, n_left_out, self.n_rows)
        return self.part(is_usable)

    def taken(self, places: NDArray[np.int64]) -> Table:
        """Return rows in another order, ``n_missing`` stays that of all. Shapes: places: int64[any], all different."""
        found = self._rows_at(places)
        return replace(
            found,
            ids=None if self.ids is None else self.ids.take(pa.array(places)),
            groups=None if self.groups is None else self.groups.take(pa.array(places)),
        )

    def _rows_at(self, places: NDArray[np.int64]) -> Table:
        """Return rows in another order, but for ids and groups, which stay those of all."""
        return replace(
            self,
            features=self.features[places] if self.passes is None else self.features,
            passes=None if self.passes is None else self.passes.taken(places),
            label=self.label[places] if self.label_name else self.label,
            weight=None if self.weight is None else self.weight[places],
        )

    def group_numbers(self, missing: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
        """Return each row's group, numbered in the order in which groups first come, and what they are called.

        Shapes: int64[n_rows].
        Args: missing: texts that name no group, besides an empty one.

        Raises:
            DataRefusal: a row has no group.
        """
        if self.groups is None:
            raise ValueError("the table was loaded without groups")
        texts = pc.utf8_trim_whitespace(self.groups.combine_chunks().cast(pa.string())).dictionary_encode()
        names: list[str] = texts.dictionary.to_pylist()
        if texts.null_count or not {"", *missing}.isdisjoint(names):
            raise DataRefusal("a row has no group")
        numbers: NDArray[np.int64] = texts.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return numbers, names

    def part(self, chosen: NDArray[np.bool_]) -> Table:
        """Return some of the rows, in their order. Shapes: chosen: bool[n_rows]."""
        found, kept = self._rows_at(np.flatnonzero(chosen)), pa.array(chosen)
        return replace(
            found,
            n_missing=tuple(map(_missing_in, found.by_feature)),
            # A filter keeps the chunks of a column; what is taken by places becomes one, of 2 GiB of text at most.
            ids=None if self.ids is None else self.ids.filter(kept),
            groups=None if self.groups is None else self.groups.filter(kept),
        )


def load_table(  # noqa: PLR0913 - by name only: which columns, and what a kind of job bears
    spec: DataSet,
    *,
    label: Label | None,
    weight: str | None = None,
    group: str | None = None,
    features: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[object]] | None = None,
    label_classes: Sequence[object] | None = None,
    unknown_is_missing: bool = False,
    may_lack_features: bool = False,
    with_ids: bool = False,
    may_lack_ids: bool = False,
    may_lack_rows: bool = False,
    repair: bool = False,
    takes_passes: bool = False,
    held_by: str = "this kind of job holds all rows at once",
) -> Table:
    """Load a site's data set.

    Args:
        spec: from the site's policy.
        label: name of the label column, or of each part of a survival label; None for a party of a vertical job
            without it.
        weight: name of the column of row weights.
        group: name of the column that says which rows belong together; it is no feature.
        features: columns to train on, in this order; None takes all others in the order of the file, but for the
            column of ids.
        categories: column -> its public list of categories.
        label_classes: the label's public list of classes; the label becomes the position in it.
        unknown_is_missing: categories outside the list count as missing instead of being refused.
        may_lack_features: a table with nothing but the label will do (the party with the label of a vertical job).
        with_ids: read the policy's column of ids too, at once with the others: a file replaced between two readings
            would give rows the ids of others.
        may_lack_ids: a file without that column will do.
        may_lack_rows: there may be no rows at all, and rows without a label are left out where the policy says so; for
            jobs in which a row's place means nothing.
        repair: refuse nothing because of a row: values beyond float32 become its largest number, text where a number
            should be and categories outside the list are missing, and so are labels and weights that cannot be read, or
            are negative. The caller leaves such rows out (``Table.kept``). There may be no rows at all.
        takes_passes: the caller does without ``Table.features`` where the policy wants no data set held.
        held_by: why it does not.

    Privacy: everything stays at the site.

    Raises:
        ConfigurationError: the data set lacks a column; a ``DataRefusal``: it cannot be read, or holds what cannot be
            trained on.
    """
    lists = {name: _public_list(name, values) for name, values in (categories or {}).items()}
    classes = None if label_classes is None or label is None else _public_list(words_of_label(label), label_classes)
    file = TabularFile(spec, repair=repair)
    special = [*columns_of(label), *([] if weight is None else [weight])]
    groups = [] if group is None else [group]
    names = _feature_names(file, [*special, *groups], features, spec)
    if not names and not may_lack_features:
        raise ConfigurationError(f"data set {spec.name!r} has no feature columns.")
    for name in lists:
        if name not in names:
            raise ConfigurationError(f"a category list is given for {name!r}, which is not among the features.")
    of_classes = () if classes is None else columns_of(label)
    _refuse_lists_of_dates([*lists, *of_classes], spec)
    text = [name for name in (*names, *special) if name in lists or name in of_classes]
    numeric = [name for name in (*names, *special) if name not in text]
    ids = _id_column(file, spec, special, may_lack=may_lack_ids) if with_ids else []
    in_passes = spec.in_passes and bool(names)
    if names and not takes_passes:
        spec.check_may_be_held(held_by)
    held = special if in_passes else [*names, *special]
    asked = [name for name in text if name in held]
    columns = file.read(
        [name for name in numeric if name in held],
        list(dict.fromkeys([*asked, *ids, *groups])),
        may_be_empty=may_lack_rows,
    )
    drops_unlabelled = may_lack_rows and spec.drop_unlabelled
    loader = ColumnLoader(file, spec, unknown_is_missing or repair, repair, drops_unlabelled, [])
    passes = RowPasses(file, loader, tuple(names), lists) if in_passes else None
    if passes is None:
        matrix = np.empty((len(next(iter(columns.values()))), len(names)), dtype=np.float32)
        for position, name in enumerate(names):
            matrix[:, position] = loader.checked(name, columns[name], lists.get(name))
        n_missing = tuple(map(_missing_in, matrix.T))
    else:
        matrix = np.empty((0, len(names)), dtype=np.float32)
        n_missing = tuple(map(_missing_in, passes.first_look(may_be_empty=may_lack_rows)))
    table = Table(
        features=matrix,
        feature_names=tuple(names),
        feature_types=tuple("c" if name in lists else "float" for name in names),
        label=loader.label(label, columns, classes) if label is not None else np.empty(0, np.float32),
        label_name="" if label is None else words_of_label(label),
        weight=loader.weight(weight, columns[weight]) if weight else None,
        weight_name=weight,
        n_missing=n_missing,
        categories=lists,
        label_classes=classes,
        notes=tuple(loader.notes),
        ids=columns[ids[0]] if ids else None,
        groups=columns[groups[0]] if groups else None,
        passes=passes,
    )
    return table.kept(is_labelled(table.label), "without a label") if drops_unlabelled and table.label_name else table


def _missing_in(values: NDArray[np.float32]) -> int:
    return int(np.count_nonzero(np.isnan(values)))


def log_what_labels_lack(table: Table, data_set: str, *, is_classification: bool) -> None:
    """Tell this site's own log, and nobody else, that its rows alone teach nothing; the job goes on."""
    if not table.n_rows:
        _log.warning("data set %r has no row that this job can use: this site takes part without rows", data_set)
    elif table.label.ndim == 2:
        n_censored = int(np.count_nonzero(~has_event(table.label)))
        log_count(f"rows of data set {data_set!r} without an event at a known time", n_censored, len(table.label))
    elif is_classification and table.label.min() == table.label.max():
        _log.warning("the labels of all rows of data set %r that this job can use are of one class", data_set)


def column_names(
    spec: DataSet,
    label: Label | None,
    weight: str | None = None,
    features: Sequence[str] | None = None,
    group: str | None = None,
) -> tuple[str, ...]:
    """Return the features that ``load_table`` would load; reads the header alone, so that a job can be checked first.

    Raises:
        ConfigurationError: as ``load_table``, for columns that the data set lacks.
    """
    special = [*columns_of(label), *(name for name in (weight, group) if name is not None)]
    return tuple(_feature_names(TabularFile(spec), special, features, spec))


def _id_column(file: TabularFile, spec: DataSet, special: Sequence[str], *, may_lack: bool) -> list[str]:
    """Return the column of ids, none if the policy names none."""
    if spec.id is None or (may_lack and (spec.id in special or spec.id not in file.column_names)):
        return []
    if spec.id not in file.column_names:
        raise ConfigurationError(f"data set {spec.name!r} lacks its id column. Policy key: data_sets.{spec.name}.id.")
    if spec.id in special:
        raise ConfigurationError("label or weight name the column of ids.")
    return [spec.id]


def is_plain_text(text: str) -> bool:
    """Tell whether a name can stand in a schema document, a model and a log: 1 to 256 printable characters."""
    return 0 < len(text) <= MAX_NAME and text.isprintable()


def _public_list(name: str, values: Sequence[object]) -> tuple[str, ...]:
    """Return a category or class list as texts, without repeats."""
    if isinstance(values, str) or not values or not all(isinstance(v, (str, int)) for v in values):
        raise ConfigurationError(f"the list for column {name!r} must hold texts or whole numbers, at least one.")
    texts = tuple(str(value) for value in values)
    if len(set(texts)) != len(texts) or not all(is_plain_text(text) for text in texts):
        raise ConfigurationError(
            f"the list for column {name!r} holds an entry twice, or one that is not 1 to {MAX_NAME} printable "
            "characters."
        )
    return texts


def _refuse_lists_of_dates(listed: Sequence[str], spec: DataSet) -> None:
    for name in listed:
        for key, held, what in (("dates", spec.dates, "a date"), ("columns", spec.read_otherwise, "a number")):
            if name in held:
                raise ConfigurationError(
                    f"a list is given for {name!r}, which data set {spec.name!r} holds as {what}: leave the list out. "
                    f"Policy key: data_sets.{spec.name}.{key}."
                )


def _feature_names(file: TabularFile, special: list[str], features: Sequence[str] | None, spec: DataSet) -> list[str]:
    if len(set(special)) != len(special):
        raise ConfigurationError("label, weight and group must be different columns.")
    present = file.column_names
    no_features = [*special, spec.id]
    ids = spec.no_features - set(special)
    names = [name for name in present if name not in {*special, *ids}] if features is None else list(features)
    for name in (*special, *names):
        if name not in present:
            # A party without the label has aliases for its columns: a job must not find out their names by guessing.
            hint = near_name(name, present) if special else ""
            raise ConfigurationError(
                f"data set {spec.name!r} has no column {name!r}{_separator_hint(file, spec) or hint}"
            )
    if len(set(names)) != len(names) or set(names) & set(no_features):
        raise ConfigurationError("features name a column twice, or name the label, weight, group or id column.")
    if answered := sorted(ids & set(names)):
        raise ConfigurationError(
            f"features name {answered[0]!r}, which the policy answers is an id: leave it out. "
            f"Policy key: data_sets.{spec.name}.columns."
        )
    for name in (*special, *names):
        if not is_plain_text(name) or set(name) & NOT_IN_NAMES:
            raise ConfigurationError(
                f"column name {name[:40]!r}: names have 1 to {MAX_NAME} printable characters, without [ ] and <. "
                f"Policy key: data_sets.{spec.name}.rename, or leave it out of features."
            )
    return names


def _separator_hint(file: TabularFile, spec: DataSet) -> str:
    mark = file.other_separator()
    if mark is None:
        return ""
    return f", and only one: is {mark!r} its separator? Policy key: data_sets.{spec.name}.separator"


# Columns that seem to number rows or people: a model that splits on them learns who is who, not what is the case.


_NEARLY_ALL = 0.9
_LEAST_DISTINCT = 50
_NAMED_SHARE = 0.2
_WORDS = frozenset(("id", "ids", "pid", "uid", "uuid", "guid", "mrn", "ssn", "iban", "key", "nr", "number", "nummer"))
_FIRST_LOOK = 1000
_EXACT = 2.0**53


def are_ids(values: NDArray[np.float64], name: str) -> bool:
    """Tell whether numbers look like an id: whole, and nearly all different, or many different under such a name.

    Shapes: values: float64[n_rows]; NaN is missing.
    """
    first = values[:_FIRST_LOOK]
    if not np.array_equal(first, np.floor(first), equal_nan=True):  # most measurements end here
        return False
    present = values[np.isfinite(values)]
    if present.size < _LEAST_DISTINCT or not np.array_equal(present, np.floor(present)):
        return False
    # Beyond float64's whole numbers several ids are one number.
    n_distinct, is_merged = np.unique(present).size, np.abs(present).max() > _EXACT
    return seems_unique(n_distinct, present.size, "id" if is_merged else name)


def seems_unique(n_distinct: int, n_present: int, name: str) -> bool:
    """Tell whether so many different values are those of an id."""
    share = _NAMED_SHARE if is_named_like_id(name) else _NEARLY_ALL
    return n_distinct >= max(_LEAST_DISTINCT, share * n_present)


def is_named_like_id(name: str) -> bool:
    """Tell whether a column is called as ids are."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return not _WORDS.isdisjoint(re.split(r"[\W_\d]+", words.lower()))


# Rows of Parquet files that another process of the same site, a worker of its cluster, reads by itself.
#
# The site's process has looked at every value, so that what it hands out is a run of rows and what tells their files:
# size and a hash of the footer, in which Parquet keeps schema, rows and places of all columns. Both then hash the
# values as they read them. A worker that reaches another version of a file, or none, is told apart before it trains.


_READER = ("missing", "decimal", "thousands", "dates", "columns", "rename")


def plain_reading(passes: RowPasses, rows: slice) -> dict[str, Any]:
    """Return what a worker needs to read a run of rows, as plain values.

    Args:
        rows: from one number to another, of those that count; at least one.

    Privacy: paths, names of columns, what the policy says of them, and the lists of categories; which rows of the files
        count.
    """
    spec, own = passes.loader.spec, None if passes.rows is None else passes.rows[rows]
    first, end = (rows.start, rows.stop) if own is None else (int(own.min()), int(own.max()) + 1)
    return {
        "data_set": spec.name,
        "reader": {name: getattr(spec, name) for name in _READER},
        "parts": passes.file.parts_of(first, end),
        "rows": (first, end),
        "names": passes.names,
        "lists": dict(passes.lists),
        "unknown_is_missing": passes.loader.unknown_is_missing,
        "repair": passes.loader.repair,
        "counting": None if own is None else own - first,
    }


def passes_of(plain: dict[str, Any]) -> RowPasses:
    """Return passes over the rows that ``plain_reading`` has told of.

    Raises:
        ConfigurationError: a file is not there, or is another one.
    """
    parts = plain["parts"]
    path = Path(os.fsdecode(parts[0][0]))
    spec = DataSet(plain["data_set"], path, "parquet", memory="passes", **plain["reader"])
    file = TabularFile(spec, repair=plain["repair"], parts=ParquetParts.as_told(spec, parts, plain["rows"]))
    loader = ColumnLoader(file, spec, plain["unknown_is_missing"], plain["repair"], drops_unlabelled=False, notes=[])
    return RowPasses(file, loader, tuple(plain["names"]), plain["lists"], plain["counting"])


def table_read_by(plain: dict[str, Any], label: NDArray[np.float32]) -> Table:
    """Return a table of the features that ``plain_reading`` has told of. Raises: ConfigurationError: as ``passes_of``.

    Args:
        label: of its rows, which the site's process has read.
    """
    passes = passes_of(plain)
    types = tuple("c" if name in passes.lists else "float" for name in passes.names)
    return Table(np.empty((0, len(types)), np.float32), passes.names, types, label, "", passes=passes)


def values_digest(table: Table, go_on: Callable[[int], None] = lambda n_rows: None) -> bytes:
    """Return a hash of all features in the order of rows, as they are read now: a pass.

    Args:
        go_on: called with the rows of each block; what it raises ends the pass.
    """
    digest = hashlib.blake2b(digest_size=16)
    for block in table.blocks():
        go_on(len(block))
        digest.update(np.ascontiguousarray(block).data)
    return digest.digest()


@contextmanager
def reading_as_told() -> Iterator[None]:
    """Have what a worker finds amiss with files be said in words that no row decides: its errors travel.

    Raises:
        ConfigurationError: in the place of a ``DataRefusal``.
    """
    try:
        yield
    except DataRefusal:
        raise ConfigurationError(
            "a file has changed since the site's own process has read it, or cannot be read there. Policy keys: "
            "data_sets.<name>.path, cluster.workers_read. Remedy: write new rows elsewhere and put them there between "
            "jobs."
        ) from None
