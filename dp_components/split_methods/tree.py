"""A tree's structure as a flat table of nodes, and how good a split is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# A tree's structure as a flat table of nodes, and how good a split is.


# A tree's structure as a flat table of nodes, and which leaf each row falls into.


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


# How good a split is, from noisy sums (equation 5, with clipped weights).


MIN_GAIN = 1e-7


Totals = NDArray[np.float64]
"""Noisy sums of one node, in the coordinates of rows. Shapes: float64[n_coordinates]."""


def gain(gradient: NDArray[np.float64], hessian: NDArray[np.float64], ridge: float, clip: float) -> NDArray[np.float64]:
    """Return a node's gain; where the weight would exceed the clip, that of the clipped weight; 0 without curvature.

    Shapes: float64 of any shape.
    Reference: Maddock et al., equation (5); XGBoost's ``max_delta_step``.
    """
    positive = hessian > 0
    curvature = np.where(positive, hessian + ridge, 1.0)
    weight = np.where(positive, np.clip(-gradient / curvature, -clip, clip), 0.0)
    result: NDArray[np.float64] = -(2.0 * gradient * weight + curvature * weight**2)
    return result


def split_scores(
    left: NDArray[np.float64], right: NDArray[np.float64], parent: NDArray[np.float64], ridge: float, clip: float
) -> NDArray[np.float64]:
    """Return half of what each split gains.

    Several classes are our extension: gains of the classes are added, as for XGBoost's trees of vectors.

    Shapes: left, right: float64[..., 2 K], all G before all H; parent: float64[2 K]; result: float64[...].
    """
    return 0.5 * (_gain_of(left, ridge, clip) + _gain_of(right, ridge, clip) - _gain_of(parent, ridge, clip))


def _gain_of(sums: NDArray[np.float64], ridge: float, clip: float) -> NDArray[np.float64]:
    n = sums.shape[-1] // 2
    result: NDArray[np.float64] = gain(sums[..., :n], sums[..., n:], ridge, clip).sum(axis=-1)
    return result
