"""The features of a data set that is never held whole: read again for each pass, some rows or some columns at a time.

A pass by columns is checked like a table that is held, so that the same values are refused, repaired and noted. A pass
by blocks of rows comes after one by columns, and reads each value by itself: what a column as a whole decides (that its
texts are true and false, say) has been checked by then, and does not change what a single value is read as.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nvflare_plugins.data_sets.column_values import ColumnLoader
from nvflare_plugins.data_sets.tabular_files import TabularFile

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

    def first_look(self, may_be_empty: bool) -> Iterator[NDArray[np.float32]]:
        """Yield each column, checked. Shapes: float32[rows of the files]; NaN is missing. Raises: as ``load_table``."""
        for name, column in self._read(may_be_empty):
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
        return self._wanted(self._values(name, self.file.read(*self._by_kind([name]), True)[name]))

    def _wanted(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values if self.rows is None else values[self.rows]

    def _read(self, may_be_empty: bool = True) -> Iterator[tuple[str, pa.ChunkedArray]]:
        step = max(1, len(self.names) // _COLUMN_PASSES)
        for start in range(0, len(self.names), step):
            names = self.names[start : start + step]
            columns = self.file.read(*self._by_kind(names), may_be_empty)
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

    def part(self, chosen: NDArray[np.bool_]) -> RowPasses:
        """Return passes over some of these rows, in their order. Shapes: chosen: bool[n_rows]."""
        return replace(self, rows=np.flatnonzero(chosen) if self.rows is None else self.rows[chosen])

    def taken(self, places: NDArray[np.int64]) -> RowPasses:
        """Return passes over these rows in another order. Shapes: places: int64[any], all different."""
        return replace(self, rows=places if self.rows is None else self.rows[places])

    def _by_kind(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        text = [name for name in names if name in self.lists]
        return [name for name in names if name not in self.lists], text

    def _values(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float32]:
        return self.loader.again(name, column, self.lists.get(name))
