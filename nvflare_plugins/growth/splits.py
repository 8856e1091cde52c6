"""The best split of a node: numeric, one-hot and by sets of categories, under constraints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import default_threads, row_blocks, run_blocks
from he_processors.histogram.sums import NodeTotal
from nvflare_plugins.growth._native import BEST, NUMPY, growth
from nvflare_plugins.growth.arithmetic import (
    GradientUnit,
    NodeToSplit,
    SplitFormula,
    TreeParameters,
    WeightBounds,
    loss_changes,
)
from nvflare_plugins.growth.bins import BinLayout

# XGBoost's search for the best split of a categorical column, on sums that are exact integers.
#
# A column of few categories is split one category against all others. One of more is sorted by the weight that each
# category's rows would have as a leaf, and cut in two along that order, from both ends. Categories of the split go
# right; rows without a value go left or right, whichever gains more.
#
# Reference: XGBoost 3.2, src/tree/hist/evaluate_splits.h (EnumerateOneHot, EnumeratePart), src/common/categorical.h.


_NO_BOUNDS = WeightBounds()


@dataclass(frozen=True, slots=True, repr=False)
class CategoryBlock:
    """The sums of one categorical feature in several nodes.

    Shapes: g, h: int64[n_words, n_nodes, n_categories]; total_g, total_h: int64[n_words, n_nodes, 1], of the nodes;
        missing_g, missing_h: as the totals, of the rows without a value; allowed: bool[n_nodes].
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]
    total_g: NDArray[np.int64]
    total_h: NDArray[np.int64]
    missing_g: NDArray[np.int64]
    missing_h: NDArray[np.int64]
    allowed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, repr=False)
class CategorySplit:
    """The best split of a node by categories.

    Shapes: left_g, left_h: int64[n_words].

    Attributes:
        right: the categories that go right, ascending.
    """

    loss_change: np.float32
    right: tuple[int, ...]
    default_left: bool
    left_g: NDArray[np.int64]
    left_h: NDArray[np.int64]


class CategoryEvaluator:
    """Finds the best splits of one categorical feature."""

    def __init__(self, formula: SplitFormula, unit: GradientUnit, direction: int):
        """Args: direction: the feature's monotone constraint."""
        self._formula = formula
        self._unit = unit
        self._monotone = np.array([direction], dtype=np.int8)

    def best_splits(self, block: CategoryBlock, nodes: list[NodeToSplit]) -> list[CategorySplit | None]:
        """Return each node's best split with a positive loss change, or None."""
        if block.g.shape[-1] < self._formula.max_cat_to_onehot:
            return self._one_against_others(block, nodes)
        return self._sorted_cuts(block, nodes)

    def _one_against_others(self, block: CategoryBlock, nodes: list[NodeToSplit]) -> list[CategorySplit | None]:
        """Try each category, first with the rows without a value on the other side, then with them on its own."""
        left_g = _interleaved(block.total_g - block.g, block.total_g - block.g - block.missing_g)
        left_h = _interleaved(block.total_h - block.h, block.total_h - block.h - block.missing_h)
        return self._best((left_g, left_h), block, nodes, lambda i, best: ((best // 2,), best % 2 == 0))

    def _sorted_cuts(self, block: CategoryBlock, nodes: list[NodeToSplit]) -> list[CategorySplit | None]:
        """Cut the categories in two along their order, at most ``max_cat_threshold`` of them from either end."""
        n_categories = block.g.shape[-1]
        n_cuts = min(self._formula.max_cat_threshold, n_categories) - 1
        if n_cuts < 1:
            return [None] * len(nodes)
        order = np.argsort(
            self._formula.weight(*self._unit.decode(block.g, block.h), _NO_BOUNDS), axis=-1, kind="stable"
        )
        g, h = (np.take_along_axis(sums, order[None], axis=-1) for sums in (block.g, block.h))
        # From the lowest on: what is added up goes right, and rows without a value go left.
        low_g = block.total_g - np.cumsum(g[..., :n_cuts], axis=-1)
        low_h = block.total_h - np.cumsum(h[..., :n_cuts], axis=-1)
        # From the highest down: what is added up goes left, and rows without a value go right.
        high_g, high_h = (np.cumsum(sums[..., : -n_cuts - 1 : -1], axis=-1) for sums in (g, h))
        left_g, left_h = np.concatenate([low_g, high_g], axis=-1), np.concatenate([low_h, high_h], axis=-1)

        def meaning(i: int, best: int) -> tuple[tuple[int, ...], bool]:
            n_right = best + 1 if best < n_cuts else n_categories - 1 - (best - n_cuts)
            return tuple(sorted(order[i, :n_right].tolist())), best < n_cuts

        return self._best((left_g, left_h), block, nodes, meaning)

    def _best(
        self,
        left: tuple[NDArray[np.int64], NDArray[np.int64]],
        block: CategoryBlock,
        nodes: list[NodeToSplit],
        meaning: Callable[[int, int], tuple[tuple[int, ...], bool]],
    ) -> list[CategorySplit | None]:
        """Return each node's best split. Args: meaning: of a node's split, what goes right and the default side."""
        totals, allowed = (block.total_g, block.total_h), block.allowed[:, None]
        changes = loss_changes(self._formula, self._unit, left, totals, nodes, self._monotone, allowed)
        found: list[CategorySplit | None] = []
        for i, best in enumerate(changes.argmax(axis=-1).tolist()):
            left_g, left_h = (side[:, i, best] for side in left)
            split = CategorySplit(changes[i, best], *meaning(i, best), left_g, left_h)
            found.append(split if changes[i, best] > 0 else None)
        return found


def _interleaved(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)


# The best split of a node among all features, on sums that are exact integers.
#
# Within a feature the scan upwards, with missing values on the right, comes before the scan downwards, with them on the
# left; the latter is made only where the feature misses values in the node. A later candidate wins only if its loss
# change is strictly larger; features come in ascending order.
#
# Reference: XGBoost 3.2, src/tree/hist/evaluate_splits.h (EnumerateSplit), src/tree/param.h (SplitEntryContainer).


_LEAST_WORK = 1 << 14
"""Bins that are worth a thread of their own."""


class Split(NamedTuple):
    """The best split of a node.

    Units: loss_change is a float32 value; left: sums (g, h) of the rows that go left, as integers on the tree's grid.

    Attributes:
        bin: the last bin of the feature that goes left; -1 if only rows without a value do.
        right_categories: of a categorical feature, those that go right, ascending; ``bin`` then says nothing.
    """

    loss_change: float
    feature: int
    bin: int
    default_left: bool
    left: tuple[int, int]
    right_categories: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Question:
    """What the search must know about nodes.

    Shapes: totals: int64[n_nodes, 2]; root_gains, lower, upper: float32[n_nodes]; allowed: bool[n_nodes, n_features].

    Attributes:
        root_gains: of the nodes as they are, under the bounds of their parents.
        lower, upper: bounds of the nodes' weights.
        allowed: which features may split each node.
    """

    totals: NDArray[np.int64]
    root_gains: NDArray[np.float32]
    lower: NDArray[np.float32]
    upper: NDArray[np.float32]
    allowed: NDArray[np.bool_]

    @classmethod
    def of_nodes(cls, nodes: Sequence[NodeToSplit]) -> Question:
        """Put nodes together, one at least, whose sums fit 64 bits."""
        totals = np.array([(node.total.g, node.total.h) for node in nodes], dtype=np.int64)
        limits = [(node.root_gain, node.bounds.lower, node.bounds.upper) for node in nodes]
        gains, lower, upper = np.array(limits, dtype=np.float32).T
        return cls(totals, gains, lower, upper, np.stack([node.allowed for node in nodes]))

    def nodes(self) -> list[NodeToSplit]:
        """Return the nodes one by one."""
        rows = zip(self.totals.tolist(), self.root_gains, self.lower, self.upper, self.allowed, strict=True)
        return [
            NodeToSplit(NodeTotal(0, *total), gain, WeightBounds(lower, upper), allowed)
            for total, gain, lower, upper, allowed in rows
        ]


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
        self._rule = formula.rule(unit)
        monotone = np.zeros(layout.n_features, dtype=np.int8)
        given = formula.params.monotone[: layout.n_features]
        monotone[: len(given)] = given
        self._monotone = monotone
        self._feature = np.repeat(np.arange(layout.n_features), layout.bins_of_feature)
        self._categories = {
            int(feature): CategoryEvaluator(formula, unit, int(monotone[feature]))
            for feature in np.flatnonzero(layout.is_categorical)
        }

    def best(self, histograms: list[NDArray[np.int64]], asked: Question) -> list[Split | None]:
        """Return each node's best split with a positive loss change, or None.

        Shapes: histograms: int64[n_bins, 2] of each node.
        """
        by_threshold = self._in_numpy if self._variant == NUMPY else self._in_c
        best = by_threshold(histograms, asked)
        for feature in self._categories:
            found = self._by_category(feature, histograms, asked)
            best = [better(*pair) for pair in zip(best, found, strict=True)]
        return best

    def _in_c(self, histograms: list[NDArray[np.int64]], asked: Question) -> list[Split | None]:
        """Return each node's best split of the columns of numbers."""
        n = len(histograms)
        limits = np.stack([asked.root_gains, asked.lower, asked.upper], axis=1)
        allowed = (asked.allowed & ~self._layout.is_categorical).view(np.uint8)
        changes, found = np.zeros(n, dtype=np.float32), np.zeros((n, 5), dtype=np.int64)

        def run(rows: slice) -> None:
            nodes = histograms[rows], asked.totals[rows], limits[rows], allowed[rows]
            growth.best(
                self._variant, self._rule, self._layout.starts, self._monotone, *nodes, changes[rows], found[rows]
            )

        threads = max(1, min(default_threads(), n * self._layout.n_bins // _LEAST_WORK))
        run_blocks(run, row_blocks(n, threads, 1), threads)
        return [
            Split(change, feature, last_left, bool(default_left), (g, h)) if change > 0 else None
            for change, (feature, last_left, default_left, g, h) in zip(changes.tolist(), found.tolist(), strict=True)
        ]

    def _in_numpy(self, histograms: list[NDArray[np.int64]], asked: Question) -> list[Split | None]:
        """Return each node's best split of the columns of numbers."""
        nodes, total = asked.nodes(), asked.totals
        allowed = (asked.allowed & ~self._layout.is_categorical)[:, self._feature]
        starts = self._layout.starts
        sums = np.stack(histograms)
        running = np.cumsum(sums, axis=1)
        before = np.concatenate([np.zeros_like(running[:, :1]), running], axis=1)[:, starts]
        left = running - before[:, :-1][:, self._feature]
        monotone = self._monotone[self._feature]

        def changes_of(sums: NDArray[np.int64], usable: NDArray[np.bool_]) -> NDArray[np.float32]:
            pairs, totals = (sums[None, ..., 0], sums[None, ..., 1]), (total[None, :, None, 0], total[None, :, None, 1])
            return loss_changes(self._formula, self._unit, pairs, totals, nodes, monotone, usable)

        forward = changes_of(left, allowed)
        best = [self._first(changes, left[i], is_backward=False) for i, changes in enumerate(forward)]
        missing = total[:, None] - np.diff(before, axis=1)
        has_missing = (missing != 0).any(axis=-1)
        if has_missing.any():
            # The same bins with the rows that lack the value on the left: bin i then splits below itself.
            left += missing[:, self._feature] - sums
            backward = changes_of(left, allowed & has_missing[:, self._feature])
            found = [self._first(changes, left[i], is_backward=True) for i, changes in enumerate(backward)]
            best = [better(*pair) for pair in zip(best, found, strict=True)]
        return best

    def _first(self, changes: NDArray[np.float32], left: NDArray[np.int64], *, is_backward: bool) -> Split | None:
        """Take the first of the largest loss changes: of the lowest feature, then along its scan."""
        slot = int(np.argmax(changes))
        if not changes[slot] > 0:
            return None
        feature = int(self._feature[slot])
        start, end = (int(bound) for bound in self._layout.starts[feature : feature + 2])
        if is_backward:
            slot = end - 1 - int(np.argmax(changes[start:end][::-1]))
        sums = int(left[slot, 0]), int(left[slot, 1])
        return Split(float(changes[slot]), feature, slot - start - is_backward, is_backward, sums)

    def _by_category(self, feature: int, histograms: list[NDArray[np.int64]], asked: Question) -> list[Split | None]:
        """Return each node's best split of one categorical feature."""
        start, end = self._layout.starts[feature : feature + 2]
        bins = np.stack([sums[start:end] for sums in histograms])[None]
        total = asked.totals[None, :, None]
        missing = total - bins.sum(axis=2, keepdims=True)
        (g, total_g, missing_g), (h, total_h, missing_h) = (
            (bins[..., k], total[..., k], missing[..., k]) for k in range(2)
        )
        block = CategoryBlock(g, h, total_g, total_h, missing_g, missing_h, asked.allowed[:, feature])
        found = self._categories[feature].best_splits(block, asked.nodes())
        return [None if split is None else _as_split(feature, split) for split in found]


def _as_split(feature: int, split: CategorySplit) -> Split:
    left = int(split.left_g[0]), int(split.left_h[0])
    return Split(float(split.loss_change), feature, -1, split.default_left, left, split.right)


def better(one: Split | None, other: Split | None) -> Split | None:
    """Compare two splits: on a tie that of the lower feature wins, and the first of two of the same feature."""
    if one is None or other is None:
        return one or other
    if one.loss_change == other.loss_change:
        return other if other.feature < one.feature else one
    return other if other.loss_change > one.loss_change else one


# What monotone and interaction constraints allow in each node of a tree.
#
# Reference: XGBoost 3.2, src/tree/constraints.cc (SplitImpl), src/tree/split_evaluator.h (AddSplit).


@dataclass(slots=True, repr=False)
class Entry:
    """The best split of a node. Units: loss_change is a float32 value; sums are (gradient, hessian) as doubles.

    Attributes:
        feature: among the columns of all parties.
    """

    node: int
    depth: int
    loss_change: float
    feature: int
    left_sum: tuple[float, float]
    right_sum: tuple[float, float]


@dataclass(frozen=True, slots=True)
class NodeConstraints:
    """Constraints of one node: bounds of its weight, and the features on the path to it."""

    bounds: WeightBounds = WeightBounds()
    path_features: frozenset[int] = frozenset()

    def allowed_columns(self, params: TreeParameters, n_columns: int) -> NDArray[np.bool_]:
        """Return the columns that may split the node. Shapes: result: bool[n_columns], over all parties."""
        if params.interactions is None or not self.path_features:
            return np.ones(n_columns, dtype=bool)
        allowed = set(self.path_features)
        for group in params.interactions:
            if self.path_features <= group:
                allowed |= group
        mask = np.zeros(n_columns, dtype=bool)
        mask[[column for column in allowed if column < n_columns]] = True
        return mask

    def of_children(
        self, entry: Entry, params: TreeParameters, formula: SplitFormula
    ) -> tuple[NodeConstraints, NodeConstraints]:
        """Return the constraints of the left and the right child of a split."""
        if params.interactions is None and not formula.is_constrained:
            return self, self
        path = self.path_features | {entry.feature} if params.interactions is not None else self.path_features
        if not formula.is_constrained:
            child = NodeConstraints(self.bounds, path)
            return child, child
        left, right = self._bounds_of_children(entry, params, formula)
        return NodeConstraints(left, path), NodeConstraints(right, path)

    def _bounds_of_children(
        self, entry: Entry, params: TreeParameters, formula: SplitFormula
    ) -> tuple[WeightBounds, WeightBounds]:
        w_left, w_right = (
            np.float32(formula.weight(np.array(g), np.array(h), self.bounds))
            for g, h in (entry.left_sum, entry.right_sum)
        )
        middle = (w_left + w_right) / np.float32(2)
        direction = params.monotone[entry.feature] if entry.feature < len(params.monotone) else 0
        lower, upper = self.bounds.lower, self.bounds.upper
        if direction < 0:
            return WeightBounds(middle, upper), WeightBounds(lower, middle)
        if direction > 0:
            return WeightBounds(lower, middle), WeightBounds(middle, upper)
        return self.bounds, self.bounds
