"""The same training in one process with numpy alone: for experiments, and as the naive twin of the federated path.

Tests hold it to the federated path bit for bit where XGBoost trains the same method.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.batched_updates.batches import batch_sizes, tree_scale
from dp_components.leaf_weights.interface import leaf_outputs
from dp_components.leaf_weights.noise_ridge import noise_proportional_ridge
from dp_components.leaf_weights.query import UNIT
from dp_components.mechanisms.gaussian import add_gaussian_noise
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
from nvflare_plugins.private_trees.noise_plan import Mechanism, NoisePlan, PlannedNoise


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to train on or to score. Shapes: columns: float32[n_features, n_rows]; label: float32[n_rows]."""

    columns: NDArray[np.float32]
    label: NDArray[np.float32]


class Simulation:
    """One training; ``run`` returns the scores of the test rows."""

    def __init__(
        self, method: Method, train: Table, test: Table, bounds: Sequence[FeatureBounds], plan: NoisePlan, seed: int,
        mechanism: Mechanism = add_gaussian_noise, noise_factor: float = 1.0,
    ):  # fmt: skip
        """Args: noise_factor: total over needed noise where sites add shares (the sum of shares is drawn at once)."""
        self._method, self._train, self._test, self._bounds = method, train, test, list(bounds)
        self._n_features = train.columns.shape[0]
        self._plan, self._mechanism, self._noise_factor = plan, mechanism, noise_factor
        self._draws = random.Random(seed)
        self._weights = method.weight_update.weights()
        self._ridge = noise_proportional_ridge(method.ridge, method.noise_ridge, plan.gradient_std * noise_factor)
        self._fresh: dict[int, NDArray[np.float64]] = {}
        self._totals: dict[int, float] = {}
        self.trees: list[tuple[Tree, NDArray[np.float32]]] = []

    def run(self) -> NDArray[np.float32]:
        """Train and score. Shapes: result: float32[n_test_rows], raw scores."""
        self.candidates = self._start_candidates()
        n_train = self._train.label.size
        # Rows to train on first, then those to score: one walk through a tree serves both.
        self._all_bins = self.candidates.bin_rows(np.concatenate([self._train.columns, self._test.columns], axis=1))
        self._bins = self._all_bins[:, :n_train]
        margin, scores = (np.zeros(table.label.size, dtype=np.float32) for table in (self._train, self._test))
        number = 0
        for size in batch_sizes(self._method.n_trees, self._method.batch_size):
            pairs = self._weights.row_statistics(margin, self._train.label, self._method.query).values
            scale = tree_scale(self._method.learning_rate, size)
            added = margin.copy()
            for tree_number in range(number, number + size):
                tree, leaf, sums = self._tree(tree_number, pairs)
                outputs = leaf_outputs(self._weights.repaired(sums), self._ridge, self._method.clip, scale)
                added += outputs[leaf[:n_train]]
                scores += outputs[leaf[n_train:]]
                self.trees.append((tree, outputs))
            margin, number = added, number + size
        return scores

    def _tree(
        self, number: int, pairs: NDArray[np.int64]
    ) -> tuple[Tree, NDArray[np.uint8], NDArray[np.float64]]:
        """Return a tree, the leaf of every row to train on and to score, and the noisy sums of the leaves."""
        method = self._method
        self._refine_candidates(number)
        features = tree_features(method, number, self._n_features, self._draws)
        if number < method.hessian_histogram_trees(self._n_features):
            self._release_hessians(features, pairs)
        counts = self.candidates.counts
        if method.split_method is SplitMethod.TOTALLY_RANDOM:
            tree = grow_totally_random(counts, features, method.depth, self._draws)
            leaf = tree.leaf_of_rows(self._all_bins)
            return tree, leaf, self._noisy(_leaf_sums(leaf[: len(pairs)], tree.leaves.size, pairs)) / UNIT
        common = (self._bins, pairs, features, counts, self._ridge, method.clip, self._noisy)
        if method.split_method is SplitMethod.HISTOGRAM:
            query = HistogramQuery(*common)
        else:
            query = PartiallyRandomQuery(*common, self._draws)
        grown = grow(self._bins, query, method.depth)
        return grown.tree, grown.tree.leaf_of_rows(self._all_bins), grown.leaf_sums

    def _noisy(self, sums: NDArray[np.int64], planned: PlannedNoise | None = None) -> NDArray[np.int64]:
        planned = planned or self._plan.leaves
        return self._mechanism(sums, planned.sensitivity, planned.multiplier * self._noise_factor).value

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _start_candidates(self) -> Candidates:
        method = self._method
        if method.candidates is CandidateSource.QUANTILE:
            lists = [non_private_quantile_candidates(c, method.n_candidates) for c in self._train.columns]
            return Candidates(tuple(as_candidates(points) for points in lists))
        public = public_candidates(method, self._bounds)
        if not method.candidates.is_paid:
            return public
        grids = [dp_quantiles.public_grid(b) for b in self._bounds]
        noisy = self._noisy(dp_quantiles.count_cells(self._train.columns, grids), self._plan.cells)
        return paid_candidates(method, public, noisy, grids, self._plan, self._noise_factor)

    def _release_hessians(self, features: Sequence[int], pairs: NDArray[np.int64]) -> None:
        for feature in features:
            n_bins = self.candidates.counts[feature] + 1
            exact = np.bincount(self._bins[feature], weights=pairs[:, 1], minlength=n_bins).astype(np.int64)
            noisy = self._noisy(exact, self._plan.hessians) / UNIT
            self._fresh[feature] = noisy
            self._totals[feature] = float(np.maximum(noisy, 0.0).sum())

    def _refine_candidates(self, number: int) -> None:
        method = self._method
        last = method.hessian_histogram_trees(self._n_features) - method.as_published
        if not self._fresh or number > last:
            return
        target = float(np.mean(list(self._totals.values()))) / method.n_candidates
        for feature, hessians in self._fresh.items():
            present = self.candidates.of_feature[feature]
            cuts = refine(present, hessians, target, method.n_candidates, method.as_published)
            self.candidates = self.candidates.replaced(feature, cuts)
            cuts = self.candidates.of_feature[feature]
            column = np.concatenate([self._train.columns[feature], self._test.columns[feature]])
            self._all_bins[feature] = bin_column(column, cuts)
        self._fresh = {}


def _leaf_sums(leaf: NDArray[np.uint8], n_leaves: int, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    # Sums of integers below 2^53: exact in any order.
    sums = [np.bincount(leaf, weights=pairs[:, i], minlength=n_leaves) for i in range(2)]
    return np.stack(sums, axis=1).astype(np.int64)
