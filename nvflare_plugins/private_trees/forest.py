"""A finished forest as an XGBoost model: the same bytes at every site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import leaf_outputs
from dp_components.leaf_weights.target import Number, SeveralClasses
from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.split_score import gain
from dp_components.split_methods.tree import LEAF, Tree
from nvflare_plugins.private_trees.methods import SplitMethod, WeightUpdate
from nvflare_plugins.private_trees.training import PrivateTreesPlan
from nvflare_plugins.xgb.model_json import model_bytes
from nvflare_plugins.xgb.tree_documents import empty_tree_document, model_document, shortest_decimals


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
    objective, base_score = "binary:logistic", "[5E-1]"
    if isinstance(target, SeveralClasses):
        objective, base_score = "multi:softprob", "[0E0]"
    elif isinstance(target, Number):
        objective, base_score = "reg:squarederror", f"[{target.start:.9E}]"
    elif method.weight_update is WeightUpdate.AVERAGING:
        objective, base_score = "reg:squarederror", "[0E0]"
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
    return model_bytes(document)


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
