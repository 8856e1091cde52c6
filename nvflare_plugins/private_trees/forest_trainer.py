"""Training with numpy on released sums: every combination of the framework's components.

It follows XGBoost's float32 arithmetic, and tests hold it to the federated path bit for bit where XGBoost trains the
same method. Every site of a job that XGBoost cannot train runs it on its own rows, and so does the simulation in one
process: both differ in what ``release`` is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.batched_updates.batches import batch_sizes, tree_scale
from dp_components.leaf_weights.interface import leaf_outputs
from dp_components.leaf_weights.query import UNIT
from dp_components.split_candidates import dp_quantiles
from dp_components.split_candidates.candidates import Candidates, FeatureBounds, as_candidates, bin_column
from dp_components.split_candidates.iterative_hessian import refine
from dp_components.split_candidates.quantile import non_private_quantile_candidates
from dp_components.split_methods.greedy import grow
from dp_components.split_methods.histogram import HistogramQuery
from dp_components.split_methods.partially_random import PartiallyRandomQuery
from dp_components.split_methods.totally_random import grow_totally_random
from dp_components.split_methods.tree import Tree
from nvflare_plugins.private_trees.candidates import paid_candidates, public_candidates
from nvflare_plugins.private_trees.features import tree_features
from nvflare_plugins.private_trees.methods import CandidateSource, Method, SplitMethod
from nvflare_plugins.private_trees.noise_plan import NoisePlan
from nvflare_plugins.wire.catalogue import Kind


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A finished tree. Shapes: outputs: float32[n_leaves]; sums: float64[n_leaves, 2], released."""

    tree: Tree
    candidates: Candidates
    outputs: NDArray[np.float32]
    sums: NDArray[np.float64]


ReleaseSums = Callable[[Kind, NDArray[np.int64], str, Sequence[int]], NDArray[np.int64]]
"""Returns the noisy sums over all rows of all sites: (kind, exact sums of the own rows, what is asked in words, number
of values of each query). Shapes: as the exact sums. Units: grid steps."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows to train on.

    Shapes: columns: float32[n_features, n_rows]; label: float32[n_rows]; factors: float64[n_rows] in [0, 1], the row
        weights in units of the largest, or None.
    """

    columns: NDArray[np.float32]
    label: NDArray[np.float32]
    factors: NDArray[np.float64] | None = None


class ForestGrower:
    """One training. Privacy: rows are seen only through ``release``."""

    def __init__(
        self,
        method: Method,
        rows: OwnRows,
        bounds: Sequence[FeatureBounds],
        plan: NoisePlan,
        seed: int,
        release: ReleaseSums,
        ridge: float,
        noise_factor: float = 1.0,
    ):
        """Args: seed: public; ridge: noise-proportional; noise_factor: total over needed noise (shares of sites)."""
        self._method, self._rows, self._bounds = method, rows, list(bounds)
        self._plan, self._release, self._noise_factor = plan, release, noise_factor
        self._ridge = ridge
        self._draws = random.Random(seed)  # noqa: S311 - public draws, which every site must make alike
        self._weights = method.weight_update.weights()
        self._fresh: dict[int, NDArray[np.float64]] = {}
        self._totals: dict[int, float] = {}

    def run(self, after_batch: Callable[[int, list[GrownTree]], None], before_batch: Callable[[int], None]) -> None:
        """Train; the callbacks get the number of each batch, and its trees when they are finished."""
        rows, method = self._rows, self._method
        self._candidates = self._start_candidates()
        self._bins = self._candidates.bin_rows(rows.columns)
        margin = np.zeros(rows.label.size, dtype=np.float32)
        number = 0
        for batch, size in enumerate(batch_sizes(method.n_trees, method.batch_size)):
            before_batch(batch)
            trees = self._batch(batch, range(number, number + size), self._pairs(margin))
            # Candidates may have changed within the batch: the leaf of each row was noted when the tree was grown.
            for grown, leaf_of_rows in trees:
                margin = margin + grown.outputs[leaf_of_rows]
            after_batch(batch, [grown for grown, _ in trees])
            number += size

    def _pairs(self, margin: NDArray[np.float32]) -> NDArray[np.int64]:
        values = self._weights.row_statistics(margin, self._rows.label, self._method.query).values
        if self._rows.factors is None:
            return values
        return np.trunc(values * self._rows.factors[:, None]).astype(np.int64)

    def _batch(self, batch: int, numbers: range, pairs: NDArray[np.int64]) -> list[tuple[GrownTree, NDArray[np.uint8]]]:
        structures = [self._structure(number, pairs) for number in numbers]
        released = [sums for _, _, _, sums in structures]
        if self._method.split_method is SplitMethod.TOTALLY_RANDOM:
            released = self._leaf_sums(batch, [(tree, leaves) for tree, _, leaves, _ in structures], pairs)
        scale = tree_scale(self._method.learning_rate, len(numbers))
        trees = []
        for (tree, candidates, leaves, _), sums in zip(structures, released, strict=True):
            repaired = self._weights.repaired(sums)
            outputs = leaf_outputs(repaired, self._ridge, self._method.clip, scale)
            trees.append((GrownTree(tree, candidates, outputs, repaired), leaves))
        return trees

    def _structure(
        self, number: int, pairs: NDArray[np.int64]
    ) -> tuple[Tree, Candidates, NDArray[np.uint8], NDArray[np.float64]]:
        """Grow a tree; the sums of its leaves are released with it, unless it is random."""
        method = self._method
        self._refine_candidates(number)
        n_features = len(self._candidates.of_feature)
        features = tree_features(method, number, n_features, self._draws)
        if number < method.hessian_histogram_trees(n_features):
            self._release_hessians(number, features, pairs)
        counts = self._candidates.counts
        sums = np.empty((0, 2))
        if method.split_method is SplitMethod.TOTALLY_RANDOM:
            tree = grow_totally_random(counts, features, method.depth, self._draws)
        else:
            tree, sums = self._greedy(number, features, pairs)
        return tree, self._candidates, tree.leaf_of_rows(self._bins), sums

    def _greedy(self, number: int, features: list[int], pairs: NDArray[np.int64]) -> tuple[Tree, NDArray[np.float64]]:
        method, counts = self._method, self._candidates.counts
        noise = LevelNoise(self._release, f"tree {number}", len(features), method)
        common = (self._bins, pairs, features, counts, self._ridge, method.clip, noise)
        if method.split_method is SplitMethod.HISTOGRAM:
            grown = grow(self._bins, HistogramQuery(*common), method.depth)
        else:
            grown = grow(self._bins, PartiallyRandomQuery(*common, self._draws), method.depth)
        return grown.tree, grown.leaf_sums

    def _leaf_sums(
        self, batch: int, trees: list[tuple[Tree, NDArray[np.uint8]]], pairs: NDArray[np.int64]
    ) -> list[NDArray[np.float64]]:
        exact = []
        for tree, leaves in trees:
            # Sums of integers below 2^53: exact in any order.
            of_tree = [
                np.bincount(leaves.astype(np.intp), weights=pairs[:, i], minlength=tree.leaves.size) for i in range(2)
            ]
            exact.append(np.stack(of_tree, axis=1).astype(np.int64))
        sizes = [of_tree.size for of_tree in exact]
        noisy = self._release(Kind.NODE_STATS, np.concatenate(exact), f"leaf sums of round {batch}", sizes) / UNIT
        return np.split(noisy, np.cumsum([len(of_tree) for of_tree in exact])[:-1])

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _start_candidates(self) -> Candidates:
        method = self._method
        if method.candidates is CandidateSource.QUANTILE:
            lists = [non_private_quantile_candidates(c, method.n_candidates) for c in self._rows.columns]
            return Candidates(tuple(as_candidates(points) for points in lists))
        public = public_candidates(method, self._bounds)
        if not method.candidates.is_paid:
            return public
        grids = [dp_quantiles.public_grid(b) for b in self._bounds]
        counts = dp_quantiles.count_cells(self._rows.columns, grids)
        noisy = self._release(Kind.CELL_COUNTS, counts, "rows per public cell", [counts.size])
        return paid_candidates(method, public, noisy, grids, self._plan, self._noise_factor)

    def _release_hessians(self, number: int, features: Sequence[int], pairs: NDArray[np.int64]) -> None:
        sizes = [self._candidates.counts[feature] + 1 for feature in features]
        exact = [
            np.bincount(self._bins[feature], weights=pairs[:, 1], minlength=n_bins).astype(np.int64)
            for feature, n_bins in zip(features, sizes, strict=True)
        ]
        noisy = self._release(Kind.HESSIANS, np.concatenate(exact), f"Hessians before tree {number}", sizes) / UNIT
        for feature, of_feature in zip(features, np.split(noisy, np.cumsum(sizes)[:-1]), strict=True):
            self._fresh[feature] = of_feature
            self._totals[feature] = float(np.maximum(of_feature, 0.0).sum())

    def _refine_candidates(self, number: int) -> None:
        method = self._method
        last = method.hessian_histogram_trees(len(self._candidates.of_feature)) - method.as_published
        if not self._fresh or number > last:
            return
        target = float(np.mean(list(self._totals.values()))) / method.n_candidates
        for feature, hessians in self._fresh.items():
            present = self._candidates.of_feature[feature]
            cuts = refine(present, hessians, target, method.n_candidates, method.as_published)
            self._candidates = self._candidates.replaced(feature, cuts)
            self._bins[feature] = bin_column(self._rows.columns[feature], self._candidates.of_feature[feature])
        self._fresh = {}


class LevelNoise:
    """Releases a greedy tree's sums, level by level. Nodes of a level hold other rows each: a feature is one query."""

    def __init__(self, release: ReleaseSums, tree: str, n_features: int, method: Method):
        self._release, self._tree, self._n_features = release, tree, n_features
        is_histogram = method.split_method is SplitMethod.HISTOGRAM
        self._kind = Kind.HISTOGRAM if is_histogram else Kind.LEFT_SUMS
        self._level = 0 if is_histogram else -1  # partially random trees begin with the root's sums

    def __call__(self, sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the level's noisy sums. Shapes: int64[..., 2]."""
        level, self._level = self._level, self._level + 1
        if level < 0:
            return self._release(self._kind, sums, f"root sums of {self._tree}", [sums.size])
        n_queries = self._n_features
        # As many queries as features; how many values each has does not change its price, but for the slack.
        sizes = [-(-sums.size // (2 * n_queries)) * 2] * n_queries
        return self._release(self._kind, sums, f"sums of level {level} of {self._tree}", sizes)
