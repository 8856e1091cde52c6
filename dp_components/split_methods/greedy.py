"""What the two data-dependent split methods share: level by level, noisy sums in, the best split out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.split_methods.tree import MIN_GAIN, Totals, Tree, TreeBuilder, split_scores

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
