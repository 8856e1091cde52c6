"""C1: how trees come to their splits: totally random, partially random, or by histograms."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights import UNIT

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


class GreedyQuery:
    """Asks for the noisy sums of a level's nodes and chooses their splits."""

    def __init__(
        self,
        pairs: NDArray[np.int64],
        features: Sequence[int],
        candidate_counts: Sequence[int],
        rule: GainRule,
        add_noise: AddNoise,
        histograms: Histograms,
    ) -> None:
        """Take what a tree is grown on.

        Shapes: pairs: int64[n_rows, n_coordinates], in grid steps.

        Args:
            pairs: what each row adds to sums.
            features: those that the tree may use.
            candidate_counts: of each feature, in use or not.
            rule: by which splits are compared.
            add_noise: makes a release of sums.
            histograms: of the features in use, with a bin more than the most candidates of one (``in_numpy``).
        """
        self._pairs, self._features, self.candidate_counts = pairs, list(features), candidate_counts
        self._rule, self._add_noise, self._histograms = rule, add_noise, histograms

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


# Histogram-based trees (C1): every candidate of every feature competes, on noisy histograms.


# Histogram-based trees (C1): every candidate of every feature competes, on noisy histograms.
#
# A tree costs one query per level and feature; its leaves follow from the last histograms. A tree of one feature costs
# one query in all (``one_feature_histogram``).


class HistogramQuery(GreedyQuery):
    """Noisy histograms of a level's nodes; see ``greedy.grow``.

    Privacy: every bin is noised, empty ones too; adding or removing a row changes one bin of each feature.

    Attributes:
        root_histograms: the root's, once they are released. Shapes: float64[n_features used, n_bins, n_coordinates].

    Reference: Maddock et al., section 4.3.1.
    """

    root_histograms: NDArray[np.float64] | None = None

    def root(self, rows: NDArray[np.intp]) -> Totals | None:
        """Return None: the root's sums are the mean over features of the first histogram's totals."""
        return None

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Release the nodes' histograms and return each one's best split.

        Bins outside a node hold no rows, only noise: they are left out. Both sides of a split are summed over the
        feature's own bins, so that neither carries the noise of the node's sums, which grows from level to level.
        """
        noisy = self._add_noise(self._histograms([node.rows for node in nodes])) / UNIT
        if self.root_histograms is None:
            self.root_histograms = noisy[0]
        return [self._best_of_node(of_node, node) for of_node, node in zip(noisy, nodes, strict=True)]

    def _best_of_node(self, noisy: NDArray[np.float64], node: OpenNode) -> tuple[Totals, Split | None]:
        low, high = node.ranges[self._features, 0, None], node.ranges[self._features, 1, None]
        bins, totals = np.arange(noisy.shape[1]), node.totals
        inside = np.where(((low <= bins) & (bins <= high))[..., None], noisy, 0.0)
        reached = np.cumsum(inside, axis=1)
        if totals is None:
            totals = reached[:, -1].mean(axis=0)
        divides = (low <= bins[:-1]) & (bins[:-1] < high)
        left, right = reached[:, :-1], reached[:, -1:] - reached[:, :-1]
        gained = self._rule.scores(left, right, totals) if divides.any() else None
        if gained is None:
            return totals, None
        scores = np.where(divides, gained, -np.inf)
        i, cut = np.unravel_index(int(np.argmax(scores)), scores.shape)
        return totals, Split(float(scores[i, cut]), self._features[i], int(cut), left[i, cut], right[i, cut])


# Histogram trees of one feature (C1 with A1, k = 1): the root's histogram answers for the whole tree.
#
# Every node of such a tree is an interval of the feature's bins, so that its histogram is a part of the root's: all
# levels, and the leaves, are post-processing of one query. Only with one feature is this so; with two, a split by one
# divides the bins of the other.


class OneFeatureHistogramQuery(HistogramQuery):
    """The noisy histogram of a tree's one feature; see ``greedy.grow``.

    Privacy: one query a tree, whatever its depth; rows are not looked at again below the root.
    Reference: Maddock et al., section 5.1. Their code takes fresh histograms without noise below the root.

    Raises:
        ValueError: unless there is one feature.
    """

    def root(self, rows: NDArray[np.intp]) -> None:
        """Return None, as for any histogram."""
        if len(self._features) != 1:
            raise ValueError("the root's histogram answers for the whole tree only where the tree has one feature")

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Release the root's histogram at the first call; return each node's best split by its part of that."""
        of_root = self.root_histograms
        return super().best(nodes) if of_root is None else [self._best_of_node(of_root, node) for node in nodes]


# Partially random trees (C1): one drawn candidate per feature, the best of them wins on noisy sums.
#
# A tree costs one query per level and feature, as greedy trees do, and one for the root's sums; but a query is a single
# sum and not a histogram, so the noise on what a split decides by is smaller.


class PartiallyRandomQuery(GreedyQuery):
    """Noisy left sums of a level's nodes; see ``greedy.grow``.

    Privacy: ``draws`` is public. Adding or removing a row changes the left sum of each feature in one node of a level.
    Reference: Maddock et al., section 4.3.2.
    """

    def __init__(
        self,
        pairs: NDArray[np.int64],
        features: Sequence[int],
        candidate_counts: Sequence[int],
        rule: GainRule,
        add_noise: AddNoise,
        histograms: Histograms,
        draws: random.Random,
    ) -> None:
        """Take what a tree is grown on; ``draws`` is the public source of candidates."""
        super().__init__(pairs, features, candidate_counts, rule, add_noise, histograms)
        self._draws = draws

    def root(self, rows: NDArray[np.intp]) -> Totals:
        """Release the sums over all rows."""
        totals: Totals = self._add_noise(self._pairs[rows].sum(axis=0, keepdims=True))[0] / UNIT
        return totals

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Release one left sum per node and feature that can still divide it, and return each node's best split."""
        drawn = [self._draw(node) for node in nodes]
        noisy = np.empty((0, self._pairs.shape[1]))
        if any(drawn):
            asked = [(node.rows, cuts) for node, cuts in zip(nodes, drawn, strict=True) if cuts]
            sums = self._histograms([rows for rows, _ in asked])
            exact = [self._left_sums(of_node, cuts) for of_node, (_, cuts) in zip(sums, asked, strict=True)]
            noisy = self._add_noise(np.concatenate(exact)) / UNIT
        of_node = np.split(noisy, np.cumsum([len(cuts) for cuts in drawn])[:-1])
        return [self._best_of_node(*parts) for parts in zip(nodes, drawn, of_node, strict=True)]

    def _draw(self, node: OpenNode) -> list[tuple[int, int]]:
        """Draw one candidate of each feature that can still divide the node."""
        ranges = node.ranges
        return [
            (f, self._draws.randrange(int(ranges[f, 0]), int(ranges[f, 1])))
            for f in self._features
            if ranges[f, 0] < ranges[f, 1]
        ]

    def _left_sums(self, sums: NDArray[np.int64], cuts: list[tuple[int, int]]) -> NDArray[np.int64]:
        places = [self._features.index(feature) for feature, _ in cuts]
        reached: NDArray[np.int64] = np.cumsum(sums, axis=1)[places, [candidate for _, candidate in cuts]]
        return reached

    def _best_of_node(
        self, node: OpenNode, cuts: list[tuple[int, int]], left: NDArray[np.float64]
    ) -> tuple[Totals, Split | None]:
        totals = node.totals
        if totals is None:
            raise ValueError("partially random trees start from released root sums")
        right = totals - left
        scores = self._rule.scores(left, right, totals) if cuts else None
        if scores is None:
            return totals, None
        i = int(np.argmax(scores))
        return totals, Split(float(scores[i]), *cuts[i], left[i], right[i])


# Totally random trees (C1): feature and candidate of every split are drawn, no data is asked.
#
# Only the leaves cost privacy: one query per tree, since a row lies in one leaf.


def grow_totally_random(
    candidate_counts: Sequence[int],
    features: Sequence[int],
    depth: int,
    draws: random.Random,
    weights: Sequence[float] | None = None,
) -> Tree:
    """Draw a tree's structure.

    At each node a feature is drawn among those that can still be split there, then one of its candidates that lie
    inside the node. A branch ends at ``depth``, or where no feature has a candidate left.

    Privacy: touches no data. ``draws`` and ``weights`` are public: every site draws the same trees.

    Args:
        candidate_counts: number of candidates of each feature.
        features: the features this tree may use.
        weights: how often each feature is drawn, all above 0; None for all alike.

    Reference: Maddock et al., section 4.3.2.
    """
    builder = TreeBuilder()
    open_nodes = [(0, {f: (0, candidate_counts[f]) for f in features})]
    for _ in range(depth):
        below = []
        for node, ranges in open_nodes:
            splittable = [f for f, (low, high) in ranges.items() if low < high]
            if not splittable:
                continue
            feature = (
                splittable[draws.randrange(len(splittable))]
                if weights is None
                else weighted_choice(splittable, weights, draws)
            )
            low, high = ranges[feature]
            candidate = draws.randrange(low, high)
            left, right = builder.split(node, feature, candidate)
            below.append((left, {**ranges, feature: (low, candidate)}))
            below.append((right, {**ranges, feature: (candidate + 1, high)}))
        open_nodes = below
    return builder.build()


def weighted_choice(items: Sequence[int], weights: Sequence[float], draws: random.Random) -> int:
    """Draw one of the items in proportion to ``weights[item]``, which are above 0: alike on every machine."""
    left = draws.random() * math.fsum(weights[item] for item in items)
    for item in items:
        left -= weights[item]
        if left < 0:
            return item
    return items[-1]
