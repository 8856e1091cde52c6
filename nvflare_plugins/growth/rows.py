"""Rows while a tree grows: which node each is in, and the sums of their gradients in bins.

Reference: XGBoost 3.2, src/tree/common_row_partitioner.h, src/tree/hist/histogram.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth.bins import BinLayout, BinnedTable, right_mask

ROOT = 0


@dataclass(frozen=True, slots=True)
class NodeSplit:
    """How the rows of a node are divided.

    Attributes:
        left: number of the left child; ``right`` of the right one.
        bin: the last bin of the feature that goes left; -1 if only rows without a value do.
        right_categories: of a categorical feature, those that go right; ``bin`` then says nothing.
    """

    node: int
    left: int
    right: int
    feature: int
    bin: int
    default_left: bool
    right_categories: tuple[int, ...] | None = None


class Rows(Protocol):
    """The rows of one site, or of a worker's share of it, while trees grow.

    Units: gradient pairs and their sums are integers (g, h) on the tree's grid.
    """

    def begin_tree(self, pairs: NDArray[np.int64]) -> None:
        """Put all rows into the root. Shapes: pairs: int64[n_rows, 2]; kept, not copied."""

    def total(self) -> NDArray[np.int64]:
        """Return the sum of all rows' pairs. Shapes: int64[2]."""

    def histograms(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        """Return the sums of the nodes' rows that have a value, in bins. Shapes: int64[n_nodes, n_bins, 2]."""

    def apply(self, splits: Sequence[NodeSplit]) -> None:
        """Divide the rows of nodes."""


class BinnedRows:
    """Rows that are held in bins; all of ``Rows``, and where each row is."""

    def __init__(self, layout: BinLayout, table: BinnedTable) -> None:
        self._layout = layout
        self._table = table
        self._pairs: NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)
        self._rows_of: dict[int, NDArray[np.int32]] = {}

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return int(self._table.codes.shape[0])

    def begin_tree(self, pairs: NDArray[np.int64]) -> None:
        """See ``Rows``."""
        self._pairs = pairs
        self._rows_of = {ROOT: np.arange(self.n_rows, dtype=np.int32)}

    def total(self) -> NDArray[np.int64]:
        """See ``Rows``."""
        return np.asarray(self._pairs.sum(axis=0))

    def histograms(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        """See ``Rows``."""
        found = np.zeros((len(nodes), self._layout.n_bins, 2), dtype=np.int64)
        for sums, node in zip(found, nodes, strict=True):
            rows = self._rows_of[node]
            codes, pairs = self._table.codes[rows], self._pairs[rows]
            for feature in range(self._layout.n_features):
                has_value = codes[:, feature] != self._table.missing[feature]
                bins = self._layout.starts[feature] + codes[has_value, feature]
                np.add.at(sums, bins, pairs[has_value])
        return found

    def apply(self, splits: Sequence[NodeSplit]) -> None:
        """See ``Rows``."""
        for split in splits:
            rows = self._rows_of.pop(split.node)
            goes_left = self._goes_left(split, self._table.codes[rows, split.feature])
            self._rows_of[split.left], self._rows_of[split.right] = rows[goes_left], rows[~goes_left]

    def _goes_left(self, split: NodeSplit, codes: NDArray[np.unsignedinteger]) -> NDArray[np.bool_]:
        is_missing = codes == self._table.missing[split.feature]
        if split.right_categories is None:
            is_left = codes.astype(np.int64) <= split.bin
        else:
            is_left = ~np.append(right_mask(self._layout, split.feature, split.right_categories), False)[codes]
        return np.where(is_missing, split.default_left, is_left)

    def rows_of(self, node: int) -> NDArray[np.int32]:
        """Return the rows of a node that was not divided, ascending. Shapes: int32[n_node_rows]."""
        return self._rows_of[node]

    def node_of_rows(self) -> NDArray[np.int32]:
        """Return the node that each row is in. Shapes: int32[n_rows]."""
        found = np.empty(self.n_rows, dtype=np.int32)
        for node, rows in self._rows_of.items():
            found[rows] = node
        return found

    def leaves(self, splits: Sequence[NodeSplit]) -> NDArray[np.int32]:
        """Send rows down a finished tree, without pairs. Shapes: result: int32[n_rows].

        Args:
            splits: of the tree, parents before children (``Tree.splits``).
        """
        found = np.zeros(self.n_rows, dtype=np.int32)
        for split in splits:
            rows = np.flatnonzero(found == split.node)
            goes_left = self._goes_left(split, self._table.codes[rows, split.feature])
            found[rows] = np.where(goes_left, split.left, split.right)
        return found
