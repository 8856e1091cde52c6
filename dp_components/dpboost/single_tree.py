"""TrainSingleTree: one complete tree of noised choices and noised leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS, clip_released, release_leaves
from dp_components.dpboost.gradient_based_data_filtering import filter_by_gradient, gradient_sensitivity
from dp_components.dpboost.split_selection import SplitTable, choose_splits
from dp_components.events import ComposedEvent, Release, RepeatedEvent
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.sensitivity import GRID_BITS

Sums = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """What a tree is grown with.

    Units: ridge: lambda in 2^-GRID_BITS rows; leaf_bound: 2^-LEAF_BITS.
    """

    depth: int
    ridge: int
    leaf_bound: int
    split_epsilon: float
    leaf_epsilon: float


class TreeRows:
    """One site's rows of one tree. Only sums over nodes and bins leave it, under secure aggregation."""

    def __init__(self, bins: NDArray[np.uint8], grad: NDArray[np.float64], table: SplitTable) -> None:
        """Shapes: bins: uint8[n_features, n_rows]; grad: float64[n_rows]."""
        filtered = filter_by_gradient(grad)
        self._bins = bins[:, filtered.is_kept]
        self._grad = filtered.clipped.values[:, 0].astype(np.float64)
        self._node = np.zeros(self._grad.size, dtype=np.int64)
        self._table = table

    def bin_sums(self, n_nodes: int) -> Sums:
        """Sum gradients and rows per node of the level and bin. Shapes: int64[n_nodes, n_bins] each."""
        sums = np.zeros((2, n_nodes, self._table.n_bins), dtype=np.int64)
        for feature, bins in enumerate(self._table.bins_of_feature):
            width = bins.stop - bins.start
            place = self._node * width + self._bins[feature]
            # Whole numbers below 2^53: exact in doubles.
            of_grad = np.bincount(place, self._grad, minlength=n_nodes * width)
            of_rows = np.bincount(place, minlength=n_nodes * width)
            sums[0, :, bins] = of_grad.reshape(n_nodes, width)
            sums[1, :, bins] = of_rows.reshape(n_nodes, width)
        return sums[0], sums[1]

    def move_down(self, splits: NDArray[np.int64]) -> None:
        """Follow the splits of a level. Shapes: splits: int64[n_nodes], numbers in the table."""
        self._node = step_down(self._table, splits, self._bins, self._node)

    def leaf_sums(self, n_leaves: int) -> Sums:
        """Sum gradients and rows per leaf. Shapes: int64[n_leaves] each."""
        of_grad = np.bincount(self._node, self._grad, minlength=n_leaves)
        return of_grad.astype(np.int64), np.bincount(self._node, minlength=n_leaves)


class TreeAggregator:
    """The trusted side of one tree: turns exact sums into noised choices and noised leaves."""

    def __init__(self, table: SplitTable, settings: TreeSettings, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._table, self._settings, self._randomness = table, settings, randomness
        self._gradients = gradient_sensitivity()

    def choose(self, grad_sums: NDArray[np.int64], counts: NDArray[np.int64]) -> Release:
        """Choose the splits of one level. Shapes: as ``choose_splits``."""
        ridge = math.ldexp(self._settings.ridge, -GRID_BITS)
        return choose_splits(
            self._table, grad_sums, counts, self._gradients, ridge, self._settings.split_epsilon, self._randomness
        )

    def leaves(self, grad_sums: NDArray[np.int64], counts: NDArray[np.int64]) -> Release:
        """Release the leaf weights, clipped once more after the noise. Shapes: int64[n_leaves]."""
        settings = self._settings
        noised = release_leaves(
            grad_sums,
            counts,
            self._gradients,
            settings.ridge,
            settings.leaf_bound,
            settings.leaf_epsilon,
            self._randomness,
        )
        return Release(clip_released(noised.value, settings.leaf_bound), noised.event)


def train_single_tree(
    sites: Sequence[TreeRows],
    table: SplitTable,
    settings: TreeSettings,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Grow one complete tree from the sites' sums.

    Shapes:  value: int64[2^depth - 1 + 2^depth]: the splits level by level, then the leaf weights.
    Units:   splits: numbers in the table; leaf weights: 2^-LEAF_BITS.
    Privacy: depth * split_epsilon + leaf_epsilon. The aggregator sees exact sums and is trusted with them.

    Reference: DPBoost, Algorithm 1 (the slides' TrainSingleTree).
    """
    aggregator = TreeAggregator(table, settings, randomness)
    parts: list[Release] = []
    for level in range(settings.depth):
        parts.append(aggregator.choose(*_add([site.bin_sums(1 << level) for site in sites])))
        for site in sites:
            site.move_down(parts[-1].value)
    leaves = aggregator.leaves(*_add([site.leaf_sums(1 << settings.depth) for site in sites]))
    event = ComposedEvent((RepeatedEvent(parts[0].event, settings.depth), leaves.event))
    return Release(np.concatenate([part.value for part in parts] + [leaves.value]), event)


def step_down(
    table: SplitTable, splits: NDArray[np.int64], bins: NDArray[np.uint8], node: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return each row's node one level below. Shapes: splits: int64[n_nodes]; node, result: int64[n_rows]."""
    chosen = splits[node]
    goes_right = bins[table.feature[chosen], np.arange(node.size)] > table.candidate[chosen]
    return 2 * node + goes_right


def tree_outputs(table: SplitTable, tree: NDArray[np.int64], bins: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return a released tree's leaf weight for each row.

    Shapes: tree: as ``train_single_tree`` gives it; bins: uint8[n_features, n_rows]; result: float64[n_rows].
    """
    depth = tree.size.bit_length() - 1
    node = np.zeros(bins.shape[1], dtype=np.int64)
    for level in range(depth):
        first = (1 << level) - 1
        node = step_down(table, tree[first : first + (1 << level)], bins, node)
    return np.ldexp(tree[(1 << depth) - 1 :][node].astype(np.float64), -LEAF_BITS)


def _add(sums: Sequence[Sums]) -> Sums:
    grads, counts = zip(*sums, strict=True)
    return sum(grads[1:], grads[0]), sum(counts[1:], counts[0])
