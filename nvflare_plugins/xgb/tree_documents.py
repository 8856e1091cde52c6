"""Trees that are arrays as XGBoost's model document: for trees that XGBoost has not grown, or shall fill itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.tree import LEAF, Tree

_NO_PARENT = 2**31 - 1
_XGBOOST_VERSION = [3, 2, 0]  # whose form these documents have, and later ones read


def tree_document(
    number: int,
    n_features: int,
    left: NDArray[np.integer[Any]],
    right: NDArray[np.integer[Any]],
    feature: NDArray[np.integer[Any]],
    conditions: Sequence[float],
    default_left: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the document of one tree over columns of numbers, without statistics: these are zero.

    Shapes: left, right, feature: int[n_nodes], the root first. A leaf has no child (-1), its feature does not count.

    Args:
        number: of the tree in its model.
        conditions: thresholds, which send x < threshold to the left, and the values of leaves.
        default_left: 1 where missing values go to the left; None sends them to the right.
    """
    n_nodes, is_leaf = left.size, left == LEAF
    zeros, parents = [0.0] * n_nodes, np.full(n_nodes, _NO_PARENT)
    for children in (left, right):
        parents[children[~is_leaf]] = np.flatnonzero(~is_leaf)
    return {
        "base_weights": zeros,
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "default_left": [0] * n_nodes if default_left is None else list(default_left),
        "id": number,
        "left_children": left.tolist(),
        "loss_changes": zeros,
        "parents": parents.tolist(),
        "right_children": right.tolist(),
        "split_conditions": list(conditions),
        "split_indices": np.where(is_leaf, 0, feature).tolist(),
        "split_type": [0] * n_nodes,
        "sum_hessian": zeros,
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(n_features),
            "num_nodes": str(n_nodes),
            "size_leaf_vector": "1",
        },
    }


def empty_tree_document(number: int, tree: Tree, candidates: Candidates) -> dict[str, Any]:
    """Return the document of a tree's structure; all leaves are 0.

    XGBoost sends x < threshold to the left, the candidates x <= c: the threshold is the next float32 above c.
    """
    values: NDArray[np.float32] = np.zeros(tree.feature.size, dtype=np.float32)
    for node in np.flatnonzero(tree.feature != LEAF):
        cut = candidates.of_feature[tree.feature[node]][tree.candidate[node]]
        values[node] = np.nextafter(cut, np.float32(np.inf))
    n_features = len(candidates.of_feature)
    return tree_document(number, n_features, tree.left, tree.right, tree.feature, shortest_decimals(values))


def model_document(
    trees: Sequence[dict[str, Any]],
    n_features: int,
    *,
    batch_size: int,
    objective: str,
    base_score: str,
    feature_names: Sequence[str] = (),
    n_classes: int = 1,
    class_of_tree: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the document of a model.

    Args:
        trees: their documents, in the order of boosting: per round ``batch_size`` of them for each class; the last
            round may have fewer.
        objective: one without parameters of its own.
        base_score: of one output, as XGBoost writes it, such as "[5E-1]".
        n_classes: outputs of the model; 1 for two classes and for numbers.
        class_of_tree: which output each tree adds to; empty for a model with one.
    """
    is_multi = n_classes > 1
    return {
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
                    "iteration_indptr": [*range(0, len(trees), batch_size * n_classes), len(trees)],
                    "tree_info": list(class_of_tree or [0] * len(trees)),
                    "trees": list(trees),
                },
            },
            "learner_model_param": {
                "base_score": f"[{','.join([base_score[1:-1]] * n_classes)}]",
                "boost_from_average": "0",
                "num_class": str(n_classes) if is_multi else "0",
                "num_feature": str(n_features),
                "num_target": "1",
            },
            "objective": {"name": objective}
            | (
                {"softmax_multiclass_param": {"num_class": str(n_classes)}}
                if is_multi
                else {"reg_loss_param": {"scale_pos_weight": "1"}}
            ),
        },
    }


def shortest_decimals(values: NDArray[np.float32]) -> list[float]:
    """Return the shortest decimals that read back as the same float32."""
    return [float(str(value)) for value in values]


def written(booster: xgb.Booster) -> bytes:
    """Return a model of such trees as XGBoost writes it, as JSON that is the same whatever wheel has written it.

    XGBoost puts its own version at the end; the documents' stands there instead.
    """
    document = bytes(booster.save_raw("json"))
    version = ",".join(map(str, _XGBOOST_VERSION))
    return document[: document.rindex(b'"version":')] + f'"version":[{version}]}}'.encode()
