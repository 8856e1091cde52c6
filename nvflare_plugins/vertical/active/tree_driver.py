"""Follows XGBoost through the growth of one tree: which nodes it splits next, and how it numbers their children.

Reference: XGBoost 3.2, src/tree/driver.h, src/tree/hist/expand_entry.h (IsValidImpl), src/tree/updater_quantile_hist.cc
(UpdateTree).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from nvflare_plugins.vertical.active.tree_parameters import TreeParameters
from nvflare_plugins.wire.expand_entries import ExpandEntry

MAX_BATCH = 256
_SMALLEST_CHANGE = np.float32(1e-6)


@dataclass(frozen=True, slots=True)
class AppliedSplit:
    """A node that XGBoost splits now."""

    entry: ExpandEntry
    left: int
    right: int
    evaluates_children: bool


class TreeDriver:
    """The queue of nodes of one tree."""

    def __init__(self, params: TreeParameters):
        self._params = params
        self._queue: list[tuple[tuple[float, ...], ExpandEntry]] = []
        self._n_leaves = 1
        self._n_nodes = 1

    @property
    def n_nodes(self) -> int:
        """Nodes of the tree so far."""
        return self._n_nodes

    def push(self, entries: list[ExpandEntry]) -> None:
        """Enter evaluated nodes; the root always waits in the queue, others only if their split gains anything."""
        for entry in entries:
            if entry.node == 0 or np.float32(entry.loss_change) > _SMALLEST_CHANGE:
                key = (-entry.loss_change, entry.node) if self._params.lossguide else (entry.node,)
                heapq.heappush(self._queue, (key, entry))

    def pop(self) -> list[AppliedSplit]:
        """Take the nodes that XGBoost splits next; none ends the tree, even if others still wait."""
        batch = self._pop_best() if self._params.lossguide else self._pop_level()
        return [self._apply(entry) for entry in batch]

    def _pop_best(self) -> list[ExpandEntry]:
        if not self._queue:
            return []
        entry = heapq.heappop(self._queue)[1]
        if not self._is_valid(entry):
            return []
        self._n_leaves += 1
        return [entry]

    def _pop_level(self) -> list[ExpandEntry]:
        batch: list[ExpandEntry] = []
        level = self._queue[0][1].depth if self._queue else 0
        while self._queue and self._queue[0][1].depth == level and len(batch) < MAX_BATCH:
            entry = heapq.heappop(self._queue)[1]
            if self._is_valid(entry):
                self._n_leaves += 1
                batch.append(entry)
        return batch

    def _is_valid(self, entry: ExpandEntry) -> bool:
        params, change = self._params, np.float32(entry.loss_change)
        if change <= _SMALLEST_CHANGE or entry.left_sum[1] == 0 or entry.right_sum[1] == 0:
            return False
        if change < params.min_split_loss or (params.max_depth > 0 and entry.depth == params.max_depth):
            return False
        return not (params.max_leaves > 0 and self._n_leaves == params.max_leaves)

    def _apply(self, entry: ExpandEntry) -> AppliedSplit:
        left = self._n_nodes
        self._n_nodes += 2
        params = self._params
        is_too_deep = params.max_depth > 0 and entry.depth + 1 >= params.max_depth
        is_full = params.max_leaves > 0 and self._n_leaves >= params.max_leaves
        return AppliedSplit(entry, left, left + 1, not is_too_deep and not is_full)
