"""A tree's structure as a flat table of nodes, and how good a split is.

What the two data-dependent split methods share: level by level, noisy sums in, the best split out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# What the two data-dependent split methods share: level by level, noisy sums in, the best split out.


Expand = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Sums in the coordinates of rows -> those that gains are made of, G of each output, then H of each; linear."""


def as_pairs(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums (G, H) of one output as they are."""
    return sums


@dataclass(frozen=True, slots=True)
class Split:
    """The best split of a node, with the noisy sums of both sides."""

    score: float
    feature: int
    candidate: int
    left: Totals
    right: Totals


Histograms = Callable[[Sequence[NDArray[np.intp]]], NDArray[np.int64]]
"""Rows of nodes -> sums of the rows' coordinates in bins. Shapes: intp[n_node_rows] for each node ->
int64[n_nodes, n_features used, n_bins, n_coordinates]. Units: grid steps."""

Ranges = NDArray[np.intp]
"""Which candidates can still divide a node: those from ``low`` up to, without, ``high``; its rows lie in the bins from
``low`` to ``high``. Follows from the splits above, which are public. Shapes: intp[n_features, 2] of (low, high)."""


@dataclass(frozen=True, slots=True)
class OpenNode:
    """A node that may be split. Shapes: rows: intp[n], those that it holds."""

    rows: NDArray[np.intp]
    ranges: Ranges
    totals: Totals | None


AddNoise = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Adds this query's noise to sums, (G, H) or vectors of several classes along the last axis. Units: grid steps."""


@dataclass(frozen=True, slots=True)
class GainRule:
    """How good a split is by noisy sums: XGBoost's gain, with lambda ``ridge`` and leaf weights of at most ``clip``."""

    ridge: float
    clip: float
    expand: Expand = as_pairs

    def scores(
        self, left: NDArray[np.float64], right: NDArray[np.float64], totals: Totals
    ) -> NDArray[np.float64] | None:
        """Return the gains of splits; None where the node's noisy Hessian sum, of all classes, is negative.

        Shapes: left, right: float64[..., n_coordinates]; result: float64[...].
        """
        parent = self.expand(totals)
        if not parent[parent.size // 2 :].sum() >= 0:
            return None
        return split_scores(self.expand(left), self.expand(right), parent, self.ridge, self.clip)


@dataclass(slots=True)
class GreedyQuery:
    """Asks for the noisy sums of a level's nodes and chooses their splits.

    Shapes: pairs: int64[n_rows, n_coordinates], in grid steps.

    Attributes:
        pairs: what each row adds to sums.
        features: those that the tree may use.
        candidate_counts: of each feature, in use or not.
        rule: by which splits are compared.
        add_noise: makes a release of sums.
        histograms: of the features in use, with a bin more than the most candidates of one (``in_numpy``).
    """

    pairs: NDArray[np.int64]
    features: Sequence[int]
    candidate_counts: Sequence[int]
    rule: GainRule
    add_noise: AddNoise
    histograms: Histograms

    def root(self, rows: NDArray[np.intp]) -> Totals | None:
        """Return the root's sums, or None if they follow from the first histogram."""
        raise NotImplementedError

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Ask once for all nodes of a level; return each one's sums and best split; None for a node that stays a leaf.

        A node whose noisy Hessian sum is negative, of several classes the sum of theirs, stays one.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A tree with the noisy sums of its leaves.

    Shapes: leaf_sums: float64[n_leaves, n_coordinates], in order of tree.leaves.
    """

    tree: Tree
    leaf_sums: NDArray[np.float64]


def grow(bins: NDArray[np.uint8], query: GreedyQuery, depth: int) -> GrownTree:
    """Grow a tree on noisy sums.

    Nodes of one level hold disjoint rows, so a level costs as many queries as one node.

    Shapes: bins: uint8[n_features, n_rows].
    """
    builder = TreeBuilder()
    everything = np.arange(bins.shape[1])
    whole = np.stack([np.zeros(bins.shape[0], dtype=np.intp), np.array(query.candidate_counts, dtype=np.intp)], axis=1)
    level: list[tuple[int, OpenNode]] = [(0, OpenNode(everything, whole, query.root(everything)))]
    sums: dict[int, Totals] = {}
    for _ in range(depth):
        if not level:
            break
        below = []
        found = query.best([open_node for _, open_node in level])
        for (node, at), (totals, split) in zip(level, found, strict=True):
            sums[node] = totals
            if split is None or split.score <= MIN_GAIN:
                continue
            left, right = builder.split(node, split.feature, split.candidate)
            goes_left = bins[split.feature, at.rows] <= split.candidate
            left_ranges, right_ranges = at.ranges.copy(), at.ranges.copy()
            left_ranges[split.feature, 1], right_ranges[split.feature, 0] = split.candidate, split.candidate + 1
            below += [
                (left, OpenNode(at.rows[goes_left], left_ranges, split.left)),
                (right, OpenNode(at.rows[~goes_left], right_ranges, split.right)),
            ]
            sums[left], sums[right] = split.left, split.right
        level = below
    tree = builder.build()
    return GrownTree(tree, np.array([sums[int(n)] for n in tree.leaves]))


def in_numpy(bins: NDArray[np.uint8], pairs: NDArray[np.int64], features: Sequence[int], n_bins: int) -> Histograms:
    """Return what sums the nodes of a tree; see ``histograms``."""
    return lambda nodes: np.stack([histograms(bins, pairs, rows, features, n_bins) for rows in nodes])


def histograms(
    bins: NDArray[np.uint8], pairs: NDArray[np.int64], rows: NDArray[np.intp], features: Sequence[int], n_bins: int
) -> NDArray[np.int64]:
    """Sum the rows' pairs (g, h) per feature and bin.

    Shapes: pairs: int64[n_rows, n_coordinates]; result: int64[n_features used, n_bins, n_coordinates]. Units: grid
        steps.
    """
    chosen = pairs[rows]
    n_coordinates = pairs.shape[1]
    result = np.empty((len(features), n_bins, n_coordinates), dtype=np.int64)
    for i, feature in enumerate(features):
        of_rows = bins[feature, rows]
        for coordinate in range(n_coordinates):
            sums = np.bincount(of_rows, weights=chosen[:, coordinate], minlength=n_bins)  # exact below 2^53
            result[i, :, coordinate] = sums
    return result
