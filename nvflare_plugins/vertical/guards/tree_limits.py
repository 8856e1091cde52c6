"""How far a tree of a job may grow: what a passive party holds the active party to, node by node.

A passive party is told of every division of a node whose sums it gave, so that it knows each such node's depth. What
grows below nodes whose sums it kept, it neither hears of nor pays for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from he_processors.errors import ProtocolError

ROOT = 0


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """What the parameters of the job allow.

    Attributes:
        max_depth, max_leaves: as XGBoost's; 0 for no limit.
    """

    max_depth: int
    max_leaves: int

    @classmethod
    def from_effective(cls, effective: Mapping[str, str]) -> TreeLimits:
        """Read the settings that a probe Booster reported (xgb/parameters.py, ``effective``)."""
        return cls(int(effective["max_depth"]), int(effective["max_leaves"]))

    def most_splits(self, n_rows: int) -> int:
        """Return the most nodes of one tree that are split; a tree without limits has a leaf for each row at most."""
        limits = [n_rows]
        if self.max_leaves > 0:
            limits.append(self.max_leaves - 1)
        if 0 < self.max_depth < n_rows.bit_length():
            limits.append((1 << self.max_depth) - 1)
        return max(min(limits), 0)


NO_LIMITS = TreeLimits(0, 0)


@dataclass(slots=True)
class GrownNodes:
    """The nodes of one tree that a party knows, counted against the limits."""

    limits: TreeLimits
    most_splits: int
    _depth: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    _split: set[int] = field(default_factory=set)

    def divide(self, node: int, left: int, right: int) -> None:
        """Note a node whose children's sums are asked for. Raises: ProtocolError: the job's trees do not grow so far.

        XGBoost evaluates no children that it could not split: neither at the last depth, nor of a full tree.
        """
        depth = self._depth[node] + 1
        if 0 < self.limits.max_depth <= depth:
            raise ProtocolError("sums are asked for below the depth that the job's trees have")
        self.split(node)
        if 0 < self.limits.max_leaves <= len(self._split) + 1:
            raise ProtocolError("sums are asked for in a tree that has all its leaves")
        self._depth[left] = self._depth[right] = depth

    def split(self, node: int) -> None:
        """Note a node that is split, once. Raises: ProtocolError: the job's trees have fewer."""
        self._split.add(node)
        if len(self._split) > self.most_splits:
            raise ProtocolError("more nodes are split than the job's trees have")
