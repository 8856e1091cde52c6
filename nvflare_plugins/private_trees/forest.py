"""A forest whose structure is public, as an XGBoost model with empty leaves.

Every site writes the same bytes from the same public seed; XGBoost's refresh updater then fills the leaves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import leaf_outputs
from dp_components.leaf_weights.target import TWO_CLASSES, Number, SeveralClasses, Target
from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.split_score import gain
from dp_components.split_methods.totally_random import grow_totally_random
from dp_components.split_methods.tree import LEAF, Tree
from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.features import tree_features
from nvflare_plugins.private_trees.methods import Method, SplitMethod, WeightUpdate
from nvflare_plugins.private_trees.training import PrivateTreesPlan
from nvflare_plugins.xgb.model_json import model_bytes
from nvflare_plugins.xgb.tree_documents import empty_tree_document, model_document, shortest_decimals


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees in the order of boosting, ``batch_size`` of them per round, over common candidates."""

    trees: tuple[Tree, ...]
    candidates: Candidates
    batch_size: int

    @property
    def n_rounds(self) -> int:
        """Boosting rounds, each with one message."""
        return len(self.trees) // self.batch_size

    def of_round(self, number: int) -> tuple[Tree, ...]:
        """Return the trees that one round refreshes."""
        return self.trees[number * self.batch_size : (number + 1) * self.batch_size]


def draw_forest(method: Method, candidates: Candidates, seed: int) -> Forest:
    """Draw the structure of every tree.

    Privacy: touches no data; the seed is public and must not seed any noise.

    Raises:
        ConfigurationError: the batches do not fill the forest: XGBoost knows one batch size only.
    """
    if method.n_trees % method.batch_size:
        raise ConfigurationError("the number of trees must be a multiple of the batch size")
    draws = random.Random(seed)  # noqa: S311 - the splits are public, and every site must draw the same
    counts = candidates.counts
    trees = tuple(
        grow_totally_random(counts, tree_features(method, number, len(counts), draws), method.depth, draws)
        for number in range(method.n_trees)
    )
    return Forest(trees, candidates, method.batch_size)


def initial_model(forest: Forest, method: Method, feature_names: Sequence[str] = ()) -> bytes:
    """Return the forest as XGBoost model JSON; all leaves are 0.

    The names come from the schema that the sites agreed on, never from a site's own table.
    """
    trees = [empty_tree_document(number, tree, forest.candidates) for number, tree in enumerate(forest.trees)]
    return _model(trees, len(forest.candidates.of_feature), method, feature_names, TWO_CLASSES)


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
    """Return trees that were grown outside XGBoost as its model JSON.

    Random trees carry the gains and inner weights that XGBoost's refresh would give them, so that it does not matter
    who has trained them; greedy ones carry none. Of several classes each has a tree of its own in every place, as
    XGBoost keeps them: all have the same splits.

    Privacy: inner nodes carry the sums of their noisy leaves.
    """
    method, n_classes = plan.method, plan.target.n_outputs
    documents: list[dict[str, Any]] = []
    class_of_tree: list[int] = []
    for first in range(0, len(trees), method.batch_size):
        batch = trees[first : first + method.batch_size]
        for k in range(n_classes):  # of a round, XGBoost has the trees of the first class first
            for grown in batch:
                documents.append(_document(len(documents), grown.of_class(k), plan))
                class_of_tree.append(k)
    n_features = len(trees[0].candidates.of_feature)
    return _model(documents, n_features, plan.method, plan.feature_names, plan.target, class_of_tree)


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


def _model(
    trees: Sequence[dict[str, Any]],
    n_features: int,
    method: Method,
    feature_names: Sequence[str],
    target: Target,
    class_of_tree: Sequence[int] = (),
) -> bytes:
    objective, base_score = "binary:logistic", "[5E-1]"
    if isinstance(target, SeveralClasses):
        objective, base_score = "multi:softprob", "[0E0]"
    elif isinstance(target, Number):
        objective, base_score = "reg:squarederror", f"[{target.start:.9E}]"
    elif method.weight_update is WeightUpdate.AVERAGING:
        objective, base_score = "reg:squarederror", "[0E0]"
    document = model_document(
        trees,
        n_features,
        batch_size=method.batch_size,
        objective=objective,
        base_score=base_score,
        feature_names=feature_names,
        n_classes=target.n_outputs,
        class_of_tree=class_of_tree,
    )
    return model_bytes(document)
