"""Private trees over all sites: candidates, features of a tree, growing, and the finished model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.batched_updates import batch_sizes, tree_scale
from dp_components.feature_interactions import FeatureGains, alternating_features, cyclical_features, random_features
from dp_components.leaf_weights import UNIT, Number, SeveralClasses, Target, Times, leaf_outputs
from dp_components.split_candidates.candidates import (
    Candidates,
    Columns,
    FeatureBounds,
    as_candidates,
    bin_column,
    by_rule,
    logarithmic_candidates,
    non_private_quantile_candidates,
    uniform_candidates,
)
from dp_components.split_candidates.dp_quantiles import count_cells, cut_at_quantiles, public_grid, union
from dp_components.split_candidates.iterative_hessian import refine
from dp_components.split_methods.histogram import HistogramQuery, OneFeatureHistogramQuery
from dp_components.split_methods.partially_random import PartiallyRandomQuery
from dp_components.split_methods.totally_random import grow_totally_random
from dp_components.split_methods.tree import LEAF, GainRule, Tree, gain, grow
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.survival import AftLoss
from nvflare_plugins.kinds.private_trees.methods import CandidateSource, Interactions, Method, SplitMethod, WeightUpdate
from nvflare_plugins.kinds.private_trees.noisy_sums import node_histograms
from nvflare_plugins.kinds.private_trees.plan import (
    ROOT_LEVEL,
    AfterRound,
    OwnRows,
    PrivateTreesPlan,
    SumsOverSites,
    ignore_round,
    n_refining_trees,
)
from nvflare_plugins.wire.channel import SiteProgress
from nvflare_plugins.wire.envelope import Kind, Phase, TrainingStep
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.model_json import empty_tree_document, model_bytes, model_document, shortest_decimals, written

# Columns of private training: clipped values, candidates of splits, features of a tree, targets.


# The candidates that a method starts from (C3): public ones, and those that a first release pays for.


def agree_candidates(plan: PrivateTreesPlan, columns: Columns, sums: SumsOverSites) -> Candidates:
    """Return the split candidates that training starts from; paid ones cost one release.

    Shapes: columns: float32[n_features, n_rows].
    """
    method = plan.method
    if method.candidates is CandidateSource.QUANTILE:  # of the own rows, for benchmarks: no job may choose them
        lists = [non_private_quantile_candidates(c, method.n_candidates) for c in columns]
        return Candidates(tuple(as_candidates(points) for points in lists))
    public = public_candidates(method, plan.bounds)
    if not method.candidates.is_paid:
        return public
    grids = [public_grid(b) for b in plan.bounds]
    noisy = sums.release(Kind.CELL_COUNTS, -1, count_cells(columns, grids))
    [noise_std] = plan.releases.cell_noise.scaled(plan.trust.noise_factor).std
    mixed = method.candidates is CandidateSource.MIXED
    n_quantiles = method.n_candidates // 2 if mixed else method.n_candidates
    paid = cut_at_quantiles(noisy / UNIT, grids, noise_std, n_quantiles)
    return union(public, paid) if mixed else paid


def public_candidates(method: Method, bounds: Sequence[FeatureBounds]) -> Candidates:
    """Return public candidates; for mixed ones only the uniform half."""
    if method.candidates is CandidateSource.LOGARITHMIC:
        return by_rule(logarithmic_candidates, bounds, method.n_candidates)
    if method.candidates is CandidateSource.SPREAD:
        n = method.n_candidates // 2
        return union(by_rule(uniform_candidates, bounds, n), by_rule(logarithmic_candidates, bounds, n))
    n = method.n_candidates // 2 if method.candidates is CandidateSource.MIXED else method.n_candidates
    return by_rule(uniform_candidates, bounds, n)


# A site's values, clipped to their public bounds: held, or read whenever a feature is asked for.
#
# What is read again is clipped again, each value by itself, so that a training sees the same numbers either way. Bins,
# of one byte a value, are held in both.


def clipped(table: Table, bounds: Sequence[FeatureBounds]) -> Columns:
    """Clip every value to its public bounds, by itself; a missing value stays missing."""
    low, high = (np.array([getattr(b, end) for b in bounds], dtype=np.float32) for end in ("low", "high"))
    if table.passes is not None:
        return PassedColumns(table, low, high)
    return np.clip(np.ascontiguousarray(table.features.T), low[:, None], high[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class PassedColumns:
    """Clipped features of a table that is read in passes; see ``Columns``. Shapes: low, high: float32[n_features].

    Raises:
        DataRefusal: whatever reads: a file has changed since the data set was loaded.
    """

    table: Table
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the numbers of features and rows."""
        return self.low.size, self.table.n_rows

    def __getitem__(self, feature: int, /) -> NDArray[np.float32]:
        """Return one feature's values. Shapes: float32[n_rows]."""
        return np.clip(self.table.by_feature[feature], self.low[feature], self.high[feature])

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield each feature's values."""
        for column, low, high in zip(self.table.columns(), self.low, self.high, strict=True):
            yield np.clip(column, low, high)


# Which features each tree of a method may use (A1), from the method's public description.


def tree_features(method: Method, tree: int, n_features: int, draws: random.Random) -> list[int]:
    """Return the features that one tree may use. Privacy: touches no data; ``draws`` is public."""
    k = method.features_per_tree(n_features)
    if method.interactions in (Interactions.ALTERNATING, Interactions.INFORMED):
        return alternating_features(tree, n_features)
    if k == n_features:
        return list(range(n_features))
    if method.interactions is Interactions.CYCLICAL:
        return cyclical_features(tree, n_features, k)
    return random_features(n_features, k, draws)


# A finished forest as an XGBoost model: the same bytes at every site.


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A finished tree, whose structure all classes share.

    Shapes: outputs: float32[n_leaves], or float32[n_leaves, K]; sums: float64[n_leaves, 2 K], released: all G, all H.
    """

    tree: Tree
    candidates: Candidates
    outputs: NDArray[np.float32]
    sums: NDArray[np.float64]

    def of_class(self, k: int) -> GrownTree:
        """Return the tree of one class alone."""
        n = self.sums.shape[1] // 2
        return GrownTree(self.tree, self.candidates, self.outputs.reshape(-1, n)[:, k], self.sums[:, [k, n + k]])


def finished_model(trees: Sequence[GrownTree], plan: PrivateTreesPlan) -> bytes:
    """Return trees as XGBoost's model JSON.

    The names come from the schema that the sites agreed on, never from a site's own table. Random trees carry the gains
    and inner weights that XGBoost's refresh would give them; greedy ones carry none. Of several classes each has a tree
    of its own in every place, as XGBoost keeps them: all have the same splits.

    Privacy: inner nodes carry the sums of their noisy leaves.
    """
    method, target = plan.method, plan.target
    documents: list[dict[str, Any]] = []
    class_of_tree: list[int] = []
    for first in range(0, len(trees), method.batch_size):
        batch = trees[first : first + method.batch_size]
        for k in range(target.n_outputs):  # of a round, XGBoost has the trees of the first class first
            for grown in batch:
                documents.append(_document(len(documents), grown.of_class(k), plan))
                class_of_tree.append(k)
    objective, base_score = _objective(target, method)
    document = model_document(
        documents,
        len(trees[0].candidates.of_feature),
        batch_size=method.batch_size,
        objective=objective,
        base_score=base_score,
        feature_names=plan.feature_names,
        n_classes=target.n_outputs,
        class_of_tree=class_of_tree,
    )
    if isinstance(target, Times):
        loss = target.loss
        document["learner"]["objective"] = {"name": objective, **(loss.section() if isinstance(loss, AftLoss) else {})}
    return model_bytes(document)


def _objective(target: Target, method: Method) -> tuple[str, str]:
    """Return the objective under which XGBoost answers what was trained, and its base score."""
    if isinstance(target, SeveralClasses):
        return "multi:softprob", "[0E0]"
    if isinstance(target, Times):
        return "survival:aft", f"[{target.middle:.9E}]"
    if isinstance(target, Number):
        return "reg:squarederror", f"[{target.start:.9E}]"
    if method.weight_update is WeightUpdate.AVERAGING:
        return "reg:squarederror", "[0E0]"
    return "binary:logistic", "[5E-1]"


def _document(number: int, grown: GrownTree, plan: PrivateTreesPlan) -> dict[str, Any]:
    tree, document = grown.tree, empty_tree_document(number, grown.tree, grown.candidates)
    sums = node_sums(tree, grown.sums)
    is_random = plan.method.split_method is SplitMethod.TOTALLY_RANDOM
    weights, gains = _refreshed(tree, sums, plan.method.clip, plan.ridge) if is_random else _not_refreshed(grown)
    thresholds = np.array(document["split_conditions"], dtype=np.float32)
    thresholds[tree.leaves] = grown.outputs  # XGBoost keeps a leaf's answer in the place of a threshold
    return document | {
        "base_weights": shortest_decimals(weights),
        "loss_changes": shortest_decimals(gains),
        "split_conditions": shortest_decimals(thresholds),
        "sum_hessian": shortest_decimals(sums[:, 1].astype(np.float32)),
    }


def node_sums(tree: Tree, leaf_sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return every node's sums, those of inner nodes from their leaves. Shapes: float64[n_leaves or n_nodes, 2]."""
    sums = np.zeros((tree.feature.size, 2))
    sums[tree.leaves] = leaf_sums
    for node in np.flatnonzero(tree.feature != LEAF)[::-1]:  # children follow their parent
        sums[node] = sums[tree.left[node]] + sums[tree.right[node]]
    return sums


def _refreshed(
    tree: Tree, sums: NDArray[np.float64], clip: float, ridge: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return weights and gains as XGBoost's refresh computes them (``updater_refresh.cc``)."""
    of_node = gain(sums[:, 0], sums[:, 1], np.float64(np.float32(ridge)), np.float64(np.float32(clip)) or np.inf)
    inner = tree.feature != LEAF
    gains = np.zeros(tree.feature.size)
    gains[inner] = of_node[tree.left[inner]] + of_node[tree.right[inner]] - of_node[inner]
    return leaf_outputs(sums, ridge, clip, 1.0), gains.astype(np.float32)


def _not_refreshed(grown: GrownTree) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    nothing = np.zeros(grown.tree.feature.size, dtype=np.float32)
    weights = nothing.copy()
    weights[grown.tree.leaves] = grown.outputs
    return weights, nothing


# The trainer of all methods: every site grows the same trees, from the same noisy sums.
#
# It follows the float32 arithmetic of XGBoost 3.2: random trees are those that its refresh would set, to the byte.


def train(
    plan: PrivateTreesPlan,
    channel: SiteProgress,
    sums: SumsOverSites,
    rows: OwnRows,
    after_round: AfterRound = ignore_round,
) -> bytes:
    """Train with the other sites; return the model in XGBoost's JSON form, the same bytes at all sites.

    Privacy: the sites and the server see the noisy sums that the plan lists, and nothing else of the rows.

    Raises:
        VeilBoostError: what ended the training.
    """
    plan.trust.check_sites(channel.world)
    trees: list[GrownTree] = []

    def begin(number: int) -> None:
        channel.moment = TrainingStep(Phase.UPDATE, number)

    def end(number: int, grown: list[GrownTree]) -> None:
        trees.extend(grown)
        after_round(number)

    ForestGrower(plan, rows, sums).run(begin, end)
    channel.moment = TrainingStep(Phase.FINISH, plan.releases.n_rounds)
    document = finished_model(trees, plan)
    return written(xgb.Booster(model_file=bytearray(document)))


class ForestGrower:
    """One training. Privacy: rows are seen only through ``sums``."""

    def __init__(self, plan: PrivateTreesPlan, rows: OwnRows, sums: SumsOverSites) -> None:
        self._plan, self._method, self._rows, self._sums = plan, plan.method, rows, sums
        self._draws = random.Random(plan.structure_seed)  # noqa: S311 - public draws, which every site must make alike
        self._weights = plan.weights
        self._n_refined = n_refining_trees(plan.method, len(plan.bounds))
        self._fresh: dict[int, NDArray[np.float64]] = {}
        self._totals: dict[int, float] = {}

    def run(self, before_round: Callable[[int], None], after_round: Callable[[int, list[GrownTree]], None]) -> None:
        """Train; the callbacks get the number of each round, and its trees when they are finished."""
        rows, method = self._rows, self._method
        self._candidates = agree_candidates(self._plan, rows.columns, self._sums)
        self._bins = self._candidates.bin_rows(rows.columns)
        is_informed = method.interactions is Interactions.INFORMED
        self._gains = FeatureGains(len(self._candidates.of_feature)) if is_informed else None
        target = self._plan.target
        shape = (len(rows.label),) if target.n_outputs == 1 else (len(rows.label), target.n_outputs)
        margin = np.full(shape, target.start, dtype=np.float32)
        first = 0
        for number, size in enumerate(batch_sizes(method.n_trees, method.batch_size)):
            before_round(number)
            trees = self._batch(number, range(first, first + size), rows.statistics(margin, self._plan))
            # Candidates may have changed within the batch: the leaf of each row was noted when the tree was grown.
            for grown, leaf_of_rows in trees:
                margin = margin + grown.outputs[leaf_of_rows]
            after_round(number, [grown for grown, _ in trees])
            first += size

    def _batch(self, number: int, trees: range, pairs: NDArray[np.int64]) -> list[tuple[GrownTree, NDArray[np.uint8]]]:
        structures = [self._structure(number, tree, pairs) for tree in trees]
        released = [sums for _, _, _, sums in structures]
        if self._method.split_method is SplitMethod.TOTALLY_RANDOM:
            released = self._leaf_sums(number, [(tree, leaves) for tree, _, leaves, _ in structures], pairs)
        scale = tree_scale(self._method.learning_rate, len(trees)) * self._plan.leaf_unit
        finished = []
        for (tree, candidates, leaves, _), sums in zip(structures, released, strict=True):
            repaired = self._weights.repaired(sums)
            outputs = leaf_outputs(repaired, self._plan.ridge, self._method.clip, scale)
            if self._gains is not None:
                self._gains.add(tree, repaired, self._plan.leaf_noise[0], self._plan.ridge)
            finished.append((GrownTree(tree, candidates, outputs, repaired), leaves))
        return finished

    def _structure(
        self, number: int, position: int, pairs: NDArray[np.int64]
    ) -> tuple[Tree, Candidates, NDArray[np.uint8], NDArray[np.float64]]:
        """Grow a tree; the sums of its leaves are released with it, unless it is random."""
        method = self._method
        self._refine_candidates(position)
        n_features = len(self._candidates.of_feature)
        weights = None if self._gains is None else self._gains.weights()
        features = tree_features(method, position, n_features, self._draws)
        if position < self._n_refined and method.split_method is not SplitMethod.HISTOGRAM:
            self._release_hessians(number, position, features, pairs)
        counts = self._candidates.counts
        sums = np.empty((0, pairs.shape[1]))
        if method.split_method is SplitMethod.TOTALLY_RANDOM:
            tree = grow_totally_random(counts, features, method.depth, self._draws, weights)
        else:
            tree, sums = self._greedy(number, position, features, pairs)
        return tree, self._candidates, tree.leaf_of_rows(self._bins), sums

    def _greedy(
        self, number: int, position: int, features: list[int], pairs: NDArray[np.int64]
    ) -> tuple[Tree, NDArray[np.float64]]:
        method, counts = self._method, self._candidates.counts
        is_histogram = method.split_method is SplitMethod.HISTOGRAM
        noise = LevelNoise(self._sums, number, position, is_histogram=is_histogram)
        rule = GainRule(self._plan.ridge, method.clip, self._weights.expanded)
        sums = node_histograms(self._bins, pairs, features, max(counts[f] for f in features) + 1)
        common = (pairs, features, counts, rule, noise, sums)
        if not is_histogram:
            grown = grow(self._bins, PartiallyRandomQuery(*common, self._draws), method.depth)
            return grown.tree, grown.leaf_sums
        histogram = (OneFeatureHistogramQuery if len(features) == 1 else HistogramQuery)(*common)
        grown = grow(self._bins, histogram, method.depth)
        if position < self._n_refined and histogram.root_histograms is not None:
            expanded = self._weights.expanded(histogram.root_histograms)
            hessians = expanded[..., self._plan.target.n_outputs :].sum(axis=-1)
            self._note_hessians(features, [of[: counts[f] + 1] for f, of in zip(features, hessians, strict=True)])
        return grown.tree, grown.leaf_sums

    def _leaf_sums(
        self, number: int, trees: list[tuple[Tree, NDArray[np.uint8]]], pairs: NDArray[np.int64]
    ) -> list[NDArray[np.float64]]:
        exact = []
        for tree, leaves in trees:
            # Sums of integers below 2^53: exact in any order.
            places, n_leaves = leaves.astype(np.intp), tree.leaves.size
            of_tree = [np.bincount(places, weights=values, minlength=n_leaves) for values in pairs.T]
            exact.append(np.stack(of_tree, axis=1).astype(np.int64))
        noisy = self._sums.release(Kind.NODE_STATS, number, np.concatenate(exact)) / UNIT
        return np.split(noisy, np.cumsum([len(of_tree) for of_tree in exact])[:-1])

    # -- refined candidates -------------------------------------------------------------------------------------------

    def _release_hessians(self, number: int, position: int, features: Sequence[int], pairs: NDArray[np.int64]) -> None:
        sizes = [self._candidates.counts[feature] + 1 for feature in features]
        curvatures = self._weights.curvature(pairs)
        exact = [
            np.bincount(self._bins[feature], weights=curvatures, minlength=n_bins).astype(np.int64)
            for feature, n_bins in zip(features, sizes, strict=True)
        ]
        noisy = self._sums.release(Kind.HESSIANS, number, np.concatenate(exact), position) / UNIT
        self._note_hessians(features, np.split(noisy, np.cumsum(sizes)[:-1]))

    def _note_hessians(self, features: Sequence[int], noisy: Sequence[NDArray[np.float64]]) -> None:
        for feature, of_feature in zip(features, noisy, strict=True):
            self._fresh[feature] = of_feature
            self._totals[feature] = float(np.maximum(of_feature, 0.0).sum())

    def _refine_candidates(self, position: int) -> None:
        method = self._method
        last = self._n_refined - method.as_published
        if not self._fresh or position > last:
            return
        target = float(np.mean(list(self._totals.values()))) / method.n_candidates
        for feature, hessians in self._fresh.items():
            present = self._candidates.of_feature[feature]
            cuts = refine(present, hessians, target, method.n_candidates, as_published=method.as_published)
            self._candidates = self._candidates.replaced(feature, cuts)
            self._bins[feature] = bin_column(self._rows.columns[feature], self._candidates.of_feature[feature])
        self._fresh = {}


class LevelNoise:
    """Releases a greedy tree's sums, level by level."""

    def __init__(self, sums: SumsOverSites, number: int, tree: int, *, is_histogram: bool) -> None:
        self._sums, self._number, self._tree = sums, number, tree
        self._kind = Kind.HISTOGRAM if is_histogram else Kind.LEFT_SUMS
        self._level = 0 if is_histogram else ROOT_LEVEL  # partially random trees begin with the root's sums

    def __call__(self, exact: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the level's noisy sums. Shapes: int64[..., n_coordinates]."""
        level, self._level = self._level, self._level + 1
        return self._sums.release(self._kind, self._number, exact, self._tree, level)
