"""One tree as it grows: the order of its nodes, and its arrays."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth._native import BEST
from nvflare_plugins.growth.arithmetic import Arithmetic, GradientUnit, SplitFormula, TreeParameters, WeightBounds
from nvflare_plugins.growth.bins import BinLayout
from nvflare_plugins.growth.rows import ROOT, NodeSplit, Rows
from nvflare_plugins.growth.sampling import ColumnSampler
from nvflare_plugins.growth.splits import Entry, NodeConstraints, Question, Split, SplitFinder
from nvflare_plugins.xgb.model_json import category_fields

# XGBoost's order of growth of one tree: which nodes are split next, and how their children are numbered.
#
# Reference: XGBoost 3.2, src/tree/driver.h, src/tree/hist/expand_entry.h (IsValidImpl),
# src/tree/updater_quantile_hist.cc (UpdateTree).


MAX_BATCH = 256
SMALLEST_CHANGE = np.float32(1e-6)


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True)
class AppliedSplit(Generic[E]):
    """A node that is split now."""

    entry: E
    left: int
    right: int
    evaluates_children: bool


class TreeDriver(Generic[E]):
    """The queue of nodes of one tree."""

    def __init__(self, params: TreeParameters):
        self._params = params
        self._queue: list[tuple[tuple[float, ...], E]] = []
        self._n_leaves = self.n_nodes = 1  # of the tree so far

    def push(self, entries: list[E]) -> None:
        """Enter evaluated nodes; the root always waits in the queue, others only if their split gains anything."""
        for entry in entries:
            if entry.node == 0 or np.float32(entry.loss_change) > SMALLEST_CHANGE:
                key = (-entry.loss_change, entry.node) if self._params.lossguide else (entry.node,)
                heapq.heappush(self._queue, (key, entry))

    def pop(self) -> list[AppliedSplit[E]]:
        """Take the nodes that are split next; none ends the tree, even if others still wait.

        Those of a level come together; under ``lossguide`` the best one comes alone, and an invalid one ends the tree.
        """
        batch: list[E] = []
        level, lossguide = self._queue[0][1].depth if self._queue else 0, self._params.lossguide
        while self._queue and self._queue[0][1].depth == level and len(batch) < MAX_BATCH:
            entry = heapq.heappop(self._queue)[1]
            if self._is_valid(entry):
                self._n_leaves += 1
                batch.append(entry)
            if lossguide:
                break
        return [self._apply(entry) for entry in batch]

    def _is_valid(self, entry: E) -> bool:
        params, change = self._params, np.float32(entry.loss_change)
        if change <= SMALLEST_CHANGE or entry.left_sum[1] == 0 or entry.right_sum[1] == 0:
            return False
        if change < params.min_split_loss or (params.max_depth > 0 and entry.depth == params.max_depth):
            return False
        return not (params.max_leaves > 0 and self._n_leaves == params.max_leaves)

    def _apply(self, entry: E) -> AppliedSplit[E]:
        left, params = self.n_nodes, self._params
        self.n_nodes += 2
        is_too_deep = params.max_depth > 0 and entry.depth + 1 >= params.max_depth
        is_full = params.max_leaves > 0 and self._n_leaves >= params.max_leaves
        return AppliedSplit(entry, left, left + 1, not is_too_deep and not is_full)


# One tree, grown from sums that all sites add up.
#
# Level by level, one exchange brings the histograms of the children with the smaller hessian, the others are what they
# lack to their parents; under ``lossguide`` one exchange does so for each split. The sum of all rows rides on the
# root's.
#
# Reference: XGBoost 3.2, src/tree/updater_quantile_hist.cc, src/tree/hist/evaluate_splits.h (ApplyTreeSplit).


NO_THRESHOLD = np.finfo(np.float32).smallest_subnormal
"""What stands for the threshold of a split by categories."""
_NO_CHILD = -1
_NO_PARENT = 2**31 - 1


AddUp = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Adds up integers over all sites. Shapes: int64[n] each."""


@dataclass(frozen=True, slots=True, repr=False)
class Tree:
    """A finished tree, in the fields of XGBoost's model document.

    Shapes: all arrays [n_nodes], the root first.

    Attributes:
        left, right: children; -1 of a leaf.
        parent: 2^31 - 1 of the root.
        feature: ``split_indices``; 0 of a leaf.
        conditions: ``split_conditions``: thresholds, and the values of leaves.
        base_weights: of a leaf its value, else the weight before the learning rate.
        splits: the divisions, parents before children.
    """

    left: NDArray[np.int32]
    right: NDArray[np.int32]
    parent: NDArray[np.int32]
    feature: NDArray[np.int32]
    conditions: NDArray[np.float32]
    default_left: NDArray[np.bool_]
    base_weights: NDArray[np.float32]
    loss_changes: NDArray[np.float32]
    sum_hessian: NDArray[np.float32]
    splits: tuple[NodeSplit, ...]

    @property
    def n_nodes(self) -> int:
        """Return the number of nodes."""
        return int(self.left.size)

    @property
    def leaves(self) -> NDArray[np.int32]:
        """Return the numbers of the leaves, ascending. Shapes: int32[n_leaves]."""
        return np.flatnonzero(self.left == _NO_CHILD).astype(np.int32)

    def fields(self) -> dict[str, Any]:
        """Return what XGBoost's model document says of the tree."""
        sets = {s.node: s.right_categories for s in self.splits if s.right_categories is not None}
        return {
            "left_children": self.left,
            "right_children": self.right,
            "parents": self.parent,
            "split_indices": self.feature,
            "default_left": self.default_left,
            "split_conditions": self.conditions,
            "base_weights": self.base_weights,
            "loss_changes": self.loss_changes,
            "sum_hessian": self.sum_hessian,
            "split_type": np.isin(np.arange(self.n_nodes), list(sets)),
            **category_fields(sets),
        }

    def with_leaf_values(self, values: NDArray[np.float32]) -> Tree:
        """Return the tree with other values of its leaves, as XGBoost sets adaptive ones: base weights stay.

        Shapes: values: float32[n_leaves], of ``leaves``, times the learning rate.
        """
        conditions = self.conditions.copy()
        conditions[self.leaves] = values
        return dataclasses.replace(self, conditions=conditions)


@dataclass(slots=True, repr=False)
class _Node:
    """A node that may be divided. Shapes: sums: int64[n_bins, 2]."""

    depth: int
    constraints: NodeConstraints
    sums: NDArray[np.int64]


@dataclass(slots=True, repr=False)
class _Entry(Entry):
    split: Split


@dataclass(frozen=True, slots=True)
class TreeGrower:
    """Grows the trees of one training.

    Attributes:
        eta: learning rate of one tree: XGBoost divides it, as float32, by the number of parallel trees.
        variant: of ``_native.variants``; results are the same.
    """

    layout: BinLayout
    params: TreeParameters
    arithmetic: Arithmetic
    eta: np.float32
    variant: str = BEST

    def grow(self, rows: Rows, add_up: AddUp, unit: GradientUnit, sampler: ColumnSampler, slack: int = 0) -> Tree:
        """Grow one tree from rows that are all in the root; afterwards they are in the leaves.

        Args:
            rows: this site's, after ``begin_tree``; pairs of rows that are not sampled are zero.
            unit: of the pairs.
            sampler: after ``begin_tree``.
            slack: by how much the bins of a feature may miss their node's sum though it has no missing value, where
                sums are rounded on their way; 0 where they are exact.
        """
        growth = _Growth(self, rows, add_up, unit, sampler, slack)
        growth.begin()
        while batch := growth.driver.pop():
            growth.divide(batch)
        return growth.tree()


class _Growth:
    """One tree as it grows."""

    def __init__(
        self, of: TreeGrower, rows: Rows, add_up: AddUp, unit: GradientUnit, sampler: ColumnSampler, slack: int
    ) -> None:
        self._layout, self._params, self._eta = of.layout, of.params, of.eta
        self._rows, self._add_up, self._unit, self._sampler, self._slack = rows, add_up, unit, sampler, slack
        self._formula = SplitFormula(of.params, of.arithmetic)
        self._finder = SplitFinder(of.layout, self._formula, unit, of.variant)
        self.driver: TreeDriver[_Entry] = TreeDriver(of.params)
        self._nodes: dict[int, _Node] = {}
        self._splits: list[NodeSplit] = []
        self._changes: list[float] = []  # of the splits
        self._bounds: list[WeightBounds] = []  # of the nodes that were divided
        self._totals: list[tuple[int, int]] = []  # of all nodes

    def begin(self) -> None:
        """Evaluate the root."""
        added = self._add_up(np.concatenate([self._rows.histograms([ROOT]).ravel(), self._rows.total()]))
        self._totals.append((int(added[-2]), int(added[-1])))
        root = _Node(0, NodeConstraints(), added[:-2].reshape(-1, 2))
        self._evaluate([ROOT], [root], [root.constraints.bounds])

    def divide(self, batch: Sequence[AppliedSplit[_Entry]]) -> None:
        """Divide nodes, and evaluate their children where these may be divided in turn."""
        divisions = [_division(split) for split in batch]
        self._rows.apply(divisions)
        self._splits += divisions
        parents = [self._nodes.pop(split.entry.node) for split in batch]
        for split, parent in zip(batch, parents, strict=True):
            left, (g, h) = split.entry.split.left, self._totals[split.entry.node]
            self._totals += [left, (g - left[0], h - left[1])]
            self._changes.append(split.entry.loss_change)
            self._bounds.append(parent.constraints.bounds)
        evaluated = [pair for pair in zip(batch, parents, strict=True) if pair[0].evaluates_children]
        if evaluated:
            self._evaluate_children(evaluated)

    def _evaluate_children(self, divided: Sequence[tuple[AppliedSplit[_Entry], _Node]]) -> None:
        # Of two children that with the smaller hessian is built; the left one if they are equal.
        is_right = [split.entry.right_sum[1] < split.entry.left_sum[1] for split, _ in divided]
        built = [split.right if right else split.left for (split, _), right in zip(divided, is_right, strict=True)]
        added = self._add_up(self._rows.histograms(built).ravel()).reshape(len(built), -1, 2)
        others = np.empty_like(added)
        children: list[_Node] = []
        for i, (split, parent) in enumerate(divided):
            np.subtract(parent.sums, added[i], out=others[i])
            constraints = parent.constraints.of_children(split.entry, self._params, self._formula)
            sides = (others[i], added[i]) if is_right[i] else (added[i], others[i])
            children += [_Node(parent.depth + 1, *both) for both in zip(constraints, sides, strict=True)]
        numbers = [child for split, _ in divided for child in (split.left, split.right)]
        # XGBoost takes the gain of a new node under the bounds of its parent.
        self._evaluate(numbers, children, [parent.constraints.bounds for _, parent in divided for _ in range(2)])

    def _evaluate(self, numbers: Sequence[int], nodes: Sequence[_Node], bounds: Sequence[WeightBounds]) -> None:
        """Find the best splits of nodes and enter them.

        Args:
            bounds: of the nodes' parents.
        """
        totals = np.array([self._totals[number] for number in numbers], dtype=np.int64)
        if self._slack:
            self._take_up_rounding(totals, nodes)
        gains = self._formula.gain(*self._decode(totals), WeightBounds(*_limits(self._formula, bounds)))
        limits = _limits(self._formula, [node.constraints.bounds for node in nodes])
        question = Question(totals, gains, *limits, self._allowed(nodes))
        found = [
            (number, node, split)
            for number, node, split in zip(
                numbers, nodes, self._finder.best([node.sums for node in nodes], question), strict=True
            )
            if split is not None
        ]
        self._nodes.update((number, node) for number, node, _ in found)
        left = np.array([split.left for *_, split in found], dtype=np.int64).reshape(-1, 2)
        right = np.array([self._totals[number] for number, *_ in found], dtype=np.int64).reshape(-1, 2) - left
        left_g, left_h, right_g, right_h = (x.tolist() for side in (left, right) for x in self._decode(side))
        self.driver.push(
            [
                _Entry(number, node.depth, split.loss_change, split.feature, lower, upper, split)
                for (number, node, split), lower, upper in zip(
                    found, zip(left_g, left_h, strict=True), zip(right_g, right_h, strict=True), strict=True
                )
            ]
        )

    def _take_up_rounding(self, totals: NDArray[np.int64], nodes: Sequence[_Node]) -> None:
        """Add to each feature's last bin what rounding has left of the node's sum: it is no missing value."""
        starts = self._layout.starts
        for total, node in zip(totals, nodes, strict=True):
            rest = total - np.add.reduceat(node.sums, starts[:-1], axis=0)
            is_rounding = (np.abs(rest) <= self._slack).all(axis=-1, keepdims=True)
            node.sums[starts[1:] - 1] += np.where(is_rounding, rest, 0)

    def _decode(self, totals: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return sums as doubles. Shapes: totals: int64[n, 2]; results: float64[n]."""
        return self._unit.decode(totals[None, :, 0], totals[None, :, 1])

    def _allowed(self, nodes: Sequence[_Node]) -> NDArray[np.bool_]:
        """Return which columns may split each node; the sampler draws for them in their order."""
        n_columns = self._layout.n_features
        if not self._sampler.samples_nodes and self._params.interactions is None:
            return np.broadcast_to(self._sampler.tree_columns(), (len(nodes), n_columns))
        sampled = [self._sampler.node_columns(node.depth) for node in nodes]
        allowed = [node.constraints.allowed_columns(self._params, n_columns) for node in nodes]
        return np.stack(sampled) & np.stack(allowed)

    def tree(self) -> Tree:
        """Return the finished tree."""
        thresholds = [
            self._layout.threshold(s.feature, s.bin) if s.right_categories is None else NO_THRESHOLD
            for s in self._splits
        ]
        sums = self._decode(np.array(self._totals, dtype=np.int64))
        return finished_tree(self._formula, self._eta, self._splits, thresholds, self._changes, self._bounds, sums)


def finished_tree(
    formula: SplitFormula,
    eta: np.float32,
    splits: Sequence[NodeSplit],
    thresholds: Sequence[np.float32],
    changes: Sequence[float],
    bounds_of_splits: Sequence[WeightBounds],
    sums: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> Tree:
    """Return a tree from its divisions, parents before children, and the sums of its nodes.

    Shapes: thresholds, changes, bounds_of_splits: of each division; sums: (g, h), float64[n_nodes] each.
    """
    g, h = sums
    n = g.size
    left, right = np.full((2, n), _NO_CHILD, dtype=np.int32)
    parent, feature = np.full(n, _NO_PARENT, dtype=np.int32), np.zeros(n, dtype=np.int32)
    loss_changes, conditions = np.zeros((2, n), dtype=np.float32)
    default_left = np.zeros(n, dtype=bool)
    bounds = [WeightBounds()] * n  # a divided node has its own, a leaf those of its parent
    for split, threshold, change, own in zip(splits, thresholds, changes, bounds_of_splits, strict=True):
        node = split.node
        left[node], right[node], feature[node] = split.left, split.right, split.feature
        parent[split.left] = parent[split.right] = node
        default_left[node] = split.default_left
        loss_changes[node], conditions[node] = change, threshold
        bounds[node] = bounds[split.left] = bounds[split.right] = own
    weights = formula.weight(g, h, WeightBounds(*_limits(formula, bounds)))
    is_leaf = left == _NO_CHILD
    values = weights * np.float32(eta)
    conditions[is_leaf] = values[is_leaf]
    is_child = is_leaf & (parent != _NO_PARENT)
    weights[is_child] = values[is_child]
    hessians = h.astype(np.float32)
    return Tree(left, right, parent, feature, conditions, default_left, weights, loss_changes, hessians, tuple(splits))


def _limits(formula: SplitFormula, bounds: Sequence[WeightBounds]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the lower and upper bounds of several nodes. Shapes: float32[n_nodes] each."""
    if not formula.is_constrained:
        bounds = (WeightBounds(),) * len(bounds)
    lower, upper = ([getattr(one, side) for one in bounds] for side in ("lower", "upper"))
    return np.array(lower, dtype=np.float32), np.array(upper, dtype=np.float32)


def _division(split: AppliedSplit[_Entry]) -> NodeSplit:
    found = split.entry.split
    return NodeSplit(
        split.entry.node, split.left, split.right, found.feature, found.bin, found.default_left, found.right_categories
    )
