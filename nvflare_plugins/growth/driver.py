"""XGBoost's order of growth of one tree: which nodes are split next, and how their children are numbered.

Reference: XGBoost 3.2, src/tree/driver.h, src/tree/hist/expand_entry.h (IsValidImpl), src/tree/updater_quantile_hist.cc
(UpdateTree).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from nvflare_plugins.growth.tree_parameters import TreeParameters

MAX_BATCH = 256
_SMALLEST_CHANGE = np.float32(1e-6)


class Expandable(Protocol):
    """The best split of a node. Units: loss_change is a float32 value; sums are (gradient, hessian) in any unit."""

    @property
    def node(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def loss_change(self) -> float: ...
    @property
    def left_sum(self) -> tuple[float, float]: ...
    @property
    def right_sum(self) -> tuple[float, float]: ...


Entry = TypeVar("Entry", bound=Expandable)


@dataclass(frozen=True, slots=True)
class AppliedSplit(Generic[Entry]):
    """A node that is split now."""

    entry: Entry
    left: int
    right: int
    evaluates_children: bool


class TreeDriver(Generic[Entry]):
    """The queue of nodes of one tree."""

    def __init__(self, params: TreeParameters):
        self._params = params
        self._queue: list[tuple[tuple[float, ...], Entry]] = []
        self._n_leaves = 1
        self._n_nodes = 1

    @property
    def n_nodes(self) -> int:
        """Nodes of the tree so far."""
        return self._n_nodes

    def push(self, entries: list[Entry]) -> None:
        """Enter evaluated nodes; the root always waits in the queue, others only if their split gains anything."""
        for entry in entries:
            if entry.node == 0 or np.float32(entry.loss_change) > _SMALLEST_CHANGE:
                key = (-entry.loss_change, entry.node) if self._params.lossguide else (entry.node,)
                heapq.heappush(self._queue, (key, entry))

    def pop(self) -> list[AppliedSplit[Entry]]:
        """Take the nodes that are split next; none ends the tree, even if others still wait."""
        batch = self._pop_best() if self._params.lossguide else self._pop_level()
        return [self._apply(entry) for entry in batch]

    def _pop_best(self) -> list[Entry]:
        if not self._queue:
            return []
        entry = heapq.heappop(self._queue)[1]
        if not self._is_valid(entry):
            return []
        self._n_leaves += 1
        return [entry]

    def _pop_level(self) -> list[Entry]:
        batch: list[Entry] = []
        level = self._queue[0][1].depth if self._queue else 0
        while self._queue and self._queue[0][1].depth == level and len(batch) < MAX_BATCH:
            entry = heapq.heappop(self._queue)[1]
            if self._is_valid(entry):
                self._n_leaves += 1
                batch.append(entry)
        return batch

    def _is_valid(self, entry: Entry) -> bool:
        params, change = self._params, np.float32(entry.loss_change)
        if change <= _SMALLEST_CHANGE or entry.left_sum[1] == 0 or entry.right_sum[1] == 0:
            return False
        if change < params.min_split_loss or (params.max_depth > 0 and entry.depth == params.max_depth):
            return False
        return not (params.max_leaves > 0 and self._n_leaves == params.max_leaves)

    def _apply(self, entry: Entry) -> AppliedSplit[Entry]:
        left = self._n_nodes
        self._n_nodes += 2
        params = self._params
        is_too_deep = params.max_depth > 0 and entry.depth + 1 >= params.max_depth
        is_full = params.max_leaves > 0 and self._n_leaves >= params.max_leaves
        return AppliedSplit(entry, left, left + 1, not is_too_deep and not is_full)
