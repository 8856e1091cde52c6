"""The best split of a node among all features, on sums that are exact integers.

Within a feature the scan upwards, with missing values on the right, comes before the scan downwards, with them on the
left; the latter is made only where the feature misses values in the node. A later candidate wins only if its loss
change is strictly larger; features come in ascending order.

Reference: XGBoost 3.2, src/tree/hist/evaluate_splits.h (EnumerateSplit), src/tree/param.h (SplitEntryContainer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.row_blocks import default_threads, row_blocks, run_blocks
from nvflare_plugins.growth._native import BEST, NUMPY, growth
from nvflare_plugins.growth.arithmetic import GradientUnit, NodeToSplit, SplitFormula, loss_changes
from nvflare_plugins.growth.bins import BinLayout
from nvflare_plugins.growth.categories import CategoryBlock, CategoryEvaluator, CategorySplit

_LEAST_WORK = 1 << 14
"""Bins that are worth a thread of their own."""


@dataclass(frozen=True, slots=True, repr=False)
class Split:
    """The best split of a node.

    Units: left: sums (g, h) of the rows that go left, as integers on the tree's grid.

    Attributes:
        bin: the last bin of the feature that goes left; -1 if only rows without a value do.
        right_categories: of a categorical feature, those that go right, ascending; ``bin`` then says nothing.
    """

    loss_change: np.float32
    feature: int
    bin: int
    default_left: bool
    left: tuple[int, int]
    right_categories: tuple[int, ...] | None = None


class SplitFinder:
    """Finds the best splits of the nodes of a tree."""

    def __init__(self, layout: BinLayout, formula: SplitFormula, unit: GradientUnit, variant: str = BEST) -> None:
        """Prepare for one tree.

        Args:
            variant: of ``_native.variants``; results are the same.
        """
        self._variant = variant
        self._layout = layout
        self._formula = formula
        self._unit = unit
        monotone = np.zeros(layout.n_features, dtype=np.int8)
        given = formula.params.monotone[: layout.n_features]
        monotone[: len(given)] = given
        self._monotone = monotone
        self._feature = np.repeat(np.arange(layout.n_features), layout.bins_of_feature)
        self._categories = {
            int(feature): CategoryEvaluator(formula, unit, int(monotone[feature]))
            for feature in np.flatnonzero(layout.is_categorical)
        }

    def best(self, histograms: NDArray[np.int64], nodes: Sequence[NodeToSplit]) -> list[Split | None]:
        """Return each node's best split with a positive loss change, or None.

        Shapes: histograms: int64[n_nodes, n_bins, 2].
        """
        by_threshold = self._in_numpy if self._variant == NUMPY else self._in_c
        best = by_threshold(histograms, nodes)
        for feature in self._categories:
            best = [_better(*pair) for pair in zip(best, self._by_category(feature, histograms, nodes), strict=True)]
        return best

    def _in_c(self, histograms: NDArray[np.int64], nodes: Sequence[NodeToSplit]) -> list[Split | None]:
        """Return each node's best split of the columns of numbers."""
        n = len(nodes)
        totals, allowed = _totals(nodes), self._allowed(nodes)
        limits = np.array([(o.root_gain, o.bounds.lower, o.bounds.upper) for o in nodes], dtype=np.float32)
        changes, found = np.zeros(n, dtype=np.float32), np.zeros((n, 5), dtype=np.int64)
        rule = self._formula.rule(self._unit)

        def run(rows: slice) -> None:
            asked = histograms[rows], totals[rows], limits[rows], allowed[rows].view(np.uint8)
            growth.best(self._variant, rule, self._layout.starts, self._monotone, *asked, changes[rows], found[rows])

        threads = max(1, min(default_threads(), n * self._layout.n_bins // _LEAST_WORK))
        run_blocks(run, row_blocks(n, threads, 1), threads)
        return [
            Split(change, split[0], split[1], bool(split[2]), (split[3], split[4])) if change > 0 else None
            for change, split in zip(changes, found.tolist(), strict=True)
        ]

    def _allowed(self, nodes: Sequence[NodeToSplit]) -> NDArray[np.bool_]:
        """Return the columns of numbers that may split each node. Shapes: bool[n_nodes, n_features]."""
        return np.stack([node.allowed for node in nodes]) & ~self._layout.is_categorical

    def _in_numpy(self, histograms: NDArray[np.int64], nodes: Sequence[NodeToSplit]) -> list[Split | None]:
        """Return each node's best split of the columns of numbers."""
        total = _totals(nodes)
        allowed = self._allowed(nodes)[:, self._feature]
        starts = self._layout.starts
        running = np.cumsum(histograms, axis=1)
        before = np.concatenate([np.zeros_like(running[:, :1]), running], axis=1)[:, starts]
        left = running - before[:, :-1][:, self._feature]
        forward = self._loss_changes(left, total, nodes, allowed)
        best = [self._first(changes, left[i], False) for i, changes in enumerate(forward)]
        missing = total[:, None] - np.diff(before, axis=1)
        has_missing = (missing != 0).any(axis=-1)
        if has_missing.any():
            # The same bins with the rows that lack the value on the left: bin i then splits below itself.
            left += missing[:, self._feature] - histograms
            backward = self._loss_changes(left, total, nodes, allowed & has_missing[:, self._feature])
            found = [self._first(changes, left[i], True) for i, changes in enumerate(backward)]
            best = [_better(*pair) for pair in zip(best, found, strict=True)]
        return best

    def _loss_changes(
        self,
        left: NDArray[np.int64],
        total: NDArray[np.int64],
        nodes: Sequence[NodeToSplit],
        allowed: NDArray[np.bool_],
    ) -> NDArray[np.float32]:
        """Return the loss change of every split; -inf where there is none. Shapes: float32[n_nodes, n_bins]."""
        g, h = left[None, ..., 0], left[None, ..., 1]
        totals = (total[None, :, None, 0], total[None, :, None, 1])
        return loss_changes(
            self._formula, self._unit, (g, h), totals, list(nodes), self._monotone[self._feature], allowed
        )

    def _first(self, changes: NDArray[np.float32], left: NDArray[np.int64], is_backward: bool) -> Split | None:
        """Take the first of the largest loss changes: of the lowest feature, then along its scan."""
        slot = int(np.argmax(changes))
        if not changes[slot] > 0:
            return None
        feature = int(self._feature[slot])
        start, end = (int(bound) for bound in self._layout.starts[feature : feature + 2])
        if is_backward:
            slot = end - 1 - int(np.argmax(changes[start:end][::-1]))
        sums = int(left[slot, 0]), int(left[slot, 1])
        return Split(changes[slot], feature, slot - start - is_backward, is_backward, sums)

    def _by_category(
        self, feature: int, histograms: NDArray[np.int64], nodes: Sequence[NodeToSplit]
    ) -> list[Split | None]:
        bins = histograms[None, :, self._layout.starts[feature] : self._layout.starts[feature + 1]]
        total = _totals(nodes)[None, :, None]
        missing = total - bins.sum(axis=2, keepdims=True)
        allowed = np.array([node.allowed[feature] for node in nodes])
        block = CategoryBlock(
            *(bins[..., 0], bins[..., 1], total[..., 0], total[..., 1], missing[..., 0], missing[..., 1]), allowed
        )
        found = self._categories[feature].best_splits(block, list(nodes))
        return [None if split is None else _as_split(feature, split) for split in found]


def _as_split(feature: int, split: CategorySplit) -> Split:
    left = int(split.left_g[0]), int(split.left_h[0])
    return Split(split.loss_change, feature, -1, split.default_left, left, split.right)


def _totals(nodes: Sequence[NodeToSplit]) -> NDArray[np.int64]:
    return np.array([(node.total.g, node.total.h) for node in nodes], dtype=np.int64)


def _better(one: Split | None, other: Split | None) -> Split | None:
    """Compare two splits: on a tie that of the lower feature wins, and the first of two of the same feature."""
    if one is None or other is None:
        return one or other
    if one.loss_change == other.loss_change:
        return other if other.feature < one.feature else one
    return other if other.loss_change > one.loss_change else one
