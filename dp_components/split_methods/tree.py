"""A tree's structure as a flat table of nodes, and which leaf each row falls into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAF = -1


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in the order of their creation; node 0 is the root.

    Shapes: all int32[n_nodes]. ``feature`` is LEAF at a leaf; ``candidate`` numbers the feature's split candidates; a
        row goes left if its bin is at most ``candidate``. Children follow their parent.
    """

    feature: NDArray[np.int32]
    candidate: NDArray[np.int32]
    left: NDArray[np.int32]
    right: NDArray[np.int32]

    @property
    def leaves(self) -> NDArray[np.intp]:
        """Node numbers of the leaves, ascending."""
        return np.flatnonzero(self.feature == LEAF)

    def leaf_of_rows(self, bins: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the position among ``leaves`` that each row falls into.

        Every node's choice is made for all rows at once on bytes; that is faster than following each row.

        Shapes: bins: uint8[n_features, n_rows]; result: uint8[n_rows].
        Capacity: 255 leaves.
        """
        place = {int(node): np.uint8(i) for i, node in enumerate(self.leaves)}
        answer: dict[int, NDArray[np.uint8] | np.uint8] = dict(place)
        for node in range(self.feature.size - 1, -1, -1):
            if self.feature[node] == LEAF:
                continue
            goes_right = (bins[self.feature[node]] > self.candidate[node]).view(np.uint8) * np.uint8(255)
            left, right = answer.pop(int(self.left[node])), answer.pop(int(self.right[node]))
            answer[node] = left ^ ((left ^ right) & goes_right)
        return np.broadcast_to(answer[0], bins.shape[1])


class TreeBuilder:
    """Collects nodes while a tree grows."""

    def __init__(self) -> None:
        self._feature, self._candidate, self._left, self._right = [LEAF], [0], [LEAF], [LEAF]

    def split(self, node: int, feature: int, candidate: int) -> tuple[int, int]:
        """Turn a leaf into an inner node and return its children."""
        first = len(self._feature)
        self._feature[node], self._candidate[node] = feature, candidate
        self._left[node], self._right[node] = first, first + 1
        for column, empty in ((self._feature, LEAF), (self._candidate, 0), (self._left, LEAF), (self._right, LEAF)):
            column += [empty, empty]
        return first, first + 1

    def build(self) -> Tree:
        """Return the finished tree."""
        return Tree(*(np.array(c, dtype=np.int32) for c in (self._feature, self._candidate, self._left, self._right)))
