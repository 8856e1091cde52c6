"""A site's values, clipped to their public bounds: held, or read whenever a feature is asked for.

What is read again is clipped again, each value by itself, so that a training sees the same numbers either way. Bins, of
one byte a value, are held in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Columns, FeatureBounds
from nvflare_plugins.data_sets.table import Table


def clipped(table: Table, bounds: Sequence[FeatureBounds]) -> Columns:
    """Clip every value to its public bounds, by itself; a missing value stays missing."""
    low, high = (np.array([getattr(b, end) for b in bounds], dtype=np.float32) for end in ("low", "high"))
    if table.passes is not None:
        return PassedColumns(table, low, high)
    return np.clip(np.ascontiguousarray(table.features.T), low[:, None], high[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class PassedColumns:
    """Clipped features of a table that is read in passes; see ``Columns``. Shapes: low, high: float32[n_features].

    Raises:
        DataRefusal: whatever reads: a file has changed since the data set was loaded.
    """

    table: Table
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the numbers of features and rows."""
        return self.low.size, self.table.n_rows

    def __getitem__(self, feature: int, /) -> NDArray[np.float32]:
        """Return one feature's values. Shapes: float32[n_rows]."""
        return np.clip(self.table.by_feature[feature], self.low[feature], self.high[feature])

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield each feature's values."""
        for column, low, high in zip(self.table.columns(), self.low, self.high, strict=True):
            yield np.clip(column, low, high)
