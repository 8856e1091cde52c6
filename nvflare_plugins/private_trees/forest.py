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
from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.split_score import gain
from dp_components.split_methods.totally_random import grow_totally_random
from dp_components.split_methods.tree import LEAF, Tree
from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.features import tree_features
from nvflare_plugins.private_trees.methods import Method, SplitMethod, WeightUpdate
from nvflare_plugins.xgb.model_json import model_bytes

_NO_PARENT = 2**31 - 1
_XGBOOST_VERSION = [3, 2, 0]


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
    trees = [_tree_json(number, tree, forest.candidates) for number, tree in enumerate(forest.trees)]
    return _document(trees, forest.batch_size, len(forest.candidates.of_feature), method, feature_names)


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A finished tree. Shapes: outputs: float32[n_leaves]; sums: float64[n_leaves, 2], released."""

    tree: Tree
    candidates: Candidates
    outputs: NDArray[np.float32]
    sums: NDArray[np.float64]


def finished_model(
    trees: Sequence[GrownTree], method: Method, ridge: float, feature_names: Sequence[str] = ()
) -> bytes:
    """Return trees that were grown outside XGBoost as its model JSON.

    Random trees carry the gains and inner weights that XGBoost's refresh would give them, so that it does not matter
    who has trained them; greedy ones carry none.

    Privacy: inner nodes carry the sums of their noisy leaves.
    """
    is_random = method.split_method is SplitMethod.TOTALLY_RANDOM
    documents = []
    for number, grown in enumerate(trees):
        tree, document = grown.tree, _tree_json(number, grown.tree, grown.candidates)
        sums = node_sums(tree, grown.sums)
        weights, gains = _refreshed(tree, sums, method.clip, ridge) if is_random else _not_refreshed(grown)
        thresholds = np.array(document["split_conditions"], dtype=np.float32)
        thresholds[tree.leaves] = grown.outputs  # XGBoost keeps a leaf's answer in the place of a threshold
        document |= {
            "base_weights": _decimals(weights),
            "loss_changes": _decimals(gains),
            "split_conditions": _decimals(thresholds),
            "sum_hessian": _decimals(sums[:, 1].astype(np.float32)),
        }
        documents.append(document)
    n_features = len(trees[0].candidates.of_feature)
    return _document(documents, method.batch_size, n_features, method, feature_names)


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


def _document(
    trees: list[dict[str, Any]], batch_size: int, n_features: int, method: Method, feature_names: Sequence[str]
) -> bytes:
    averaging = method.weight_update is WeightUpdate.AVERAGING
    objective = {
        "name": "reg:squarederror" if averaging else "binary:logistic",
        "reg_loss_param": {"scale_pos_weight": "1"},
    }
    document = {
        "version": _XGBOOST_VERSION,
        "learner": {
            "attributes": {},
            "feature_names": list(feature_names),
            "feature_types": [],
            "gradient_booster": {
                "name": "gbtree",
                "model": {
                    "cats": {"enc": [], "feature_segments": [], "sorted_idx": []},
                    "gbtree_model_param": {"num_parallel_tree": str(batch_size), "num_trees": str(len(trees))},
                    "iteration_indptr": list(range(0, len(trees) + 1, batch_size)),
                    "tree_info": [0] * len(trees),
                    "trees": trees,
                },
            },
            "learner_model_param": {
                "base_score": "[0E0]" if averaging else "[5E-1]",
                "boost_from_average": "0",
                "num_class": "0",
                "num_feature": str(n_features),
                "num_target": "1",
            },
            "objective": objective,
        },
    }
    return model_bytes(document)


def _tree_json(number: int, tree: Tree, candidates: Candidates) -> dict[str, Any]:
    n_nodes = tree.feature.size
    zeros, is_leaf = [0.0] * n_nodes, tree.feature == LEAF
    parents = np.full(n_nodes, _NO_PARENT)
    for children in (tree.left, tree.right):
        parents[children[~is_leaf]] = np.flatnonzero(~is_leaf)
    return {
        "base_weights": zeros,
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "default_left": [0] * n_nodes,
        "id": number,
        "left_children": tree.left.tolist(),
        "loss_changes": zeros,
        "parents": parents.tolist(),
        "right_children": tree.right.tolist(),
        "split_conditions": _thresholds(tree, candidates),
        "split_indices": np.where(is_leaf, 0, tree.feature).tolist(),
        "split_type": [0] * n_nodes,
        "sum_hessian": zeros,
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(len(candidates.of_feature)),
            "num_nodes": str(n_nodes),
            "size_leaf_vector": "1",
        },
    }


def _thresholds(tree: Tree, candidates: Candidates) -> list[float]:
    """XGBoost sends x < threshold to the left, the candidates x <= c: the threshold is the next float32 above c."""
    values: NDArray[np.float32] = np.zeros(tree.feature.size, dtype=np.float32)
    for node in np.flatnonzero(tree.feature != LEAF):
        cut = candidates.of_feature[tree.feature[node]][tree.candidate[node]]
        values[node] = np.nextafter(cut, np.float32(np.inf))
    return _decimals(values)


def _decimals(values: NDArray[np.float32]) -> list[float]:
    """Return the shortest decimals that read back as the same float32."""
    return [float(str(v)) for v in values]
