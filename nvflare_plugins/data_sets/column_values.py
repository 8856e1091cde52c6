"""From Arrow columns to XGBoost's float32: numbers, positions in public lists, labels, weights; and what is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.id_like import are_ids
from nvflare_plugins.data_sets.tabular_files import TabularFile
from nvflare_plugins.failures import DataRefusal

_log = logging.getLogger(__name__)
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
            self.feature(name, column) if public is None else self.codes(name, column, public, self.unknown_is_missing)
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
        self, name: str, column: pa.ChunkedArray, public: tuple[str, ...], unknown_is_missing: bool
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

    def label(self, name: str, column: pa.ChunkedArray, classes: tuple[str, ...] | None) -> NDArray[np.float32]:
        """Shapes: result: float32[n_rows], without missing values unless they are left out, or repaired."""
        if classes is None:
            values = self.floats(name, column)
        else:
            values = self.codes(name, column, classes, unknown_is_missing=self.repair)
        if not self.drops_unlabelled:
            self._refuse_missing("label", name, values)
        return values

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
        n_missing = int(np.count_nonzero(np.isnan(values)))
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
    encoded = column.combine_chunks()
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    position = {text: code for code, text in enumerate(public)}
    absent = {"", *missing} - set(public)
    # Positions in Arrow's dictionary -> positions in the public list; the last one is for missing values.
    table = np.array([code_of(value, position, absent) for value in encoded.dictionary.to_pylist()] + [-1])
    indices = encoded.indices.fill_null(len(table) - 1).to_numpy(zero_copy_only=False).astype(np.int64)
    result: NDArray[np.int64] = table[indices]
    return result


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
