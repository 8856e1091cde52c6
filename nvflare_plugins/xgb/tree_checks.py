"""Trees of a model document that others may have written: what XGBoost takes on trust.

A wrong child, column or output would have it read and write beyond the tree, the row or the answer, or go in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.xgb.model_json import trees_model

_CATEGORICAL_SPLIT = 1
_NODE_FIELDS = (
    "left_children",
    "right_children",
    "split_indices",
    "split_conditions",
    "default_left",
    "split_type",
    "parents",
)
_LARGEST = float(np.finfo(np.float32).max)
_NO_PARENT = (2**31 - 1, -1)  # XGBoost's; the second in trees of vectors


def check_trees(learner: Mapping[str, Any], n_features: int) -> set[int]:
    """Check all trees of a model; return the columns that they split by category.

    Args:
        learner: that part of XGBoost's document.

    Raises:
        ValueError: they are no trees over so many columns.
    """
    splits: set[int] = set()
    try:
        _check_rounds(learner)
        for tree in trees_model(learner)["trees"]:
            splits |= _categorical_splits(tree, n_features)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
        raise ValueError("not the trees of a model") from None
    return splits


def leaf_size(tree: Mapping[str, Any]) -> int:
    """Return how many values a leaf has."""
    return int(tree["tree_param"].get("size_leaf_vector", 1))


def _check_rounds(learner: Mapping[str, Any]) -> None:
    """Check to which round, and to which output, every tree belongs.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it does not follow.
    """
    model = trees_model(learner)
    n_trees, starts = len(model["trees"]), model.get("iteration_indptr", [0])
    if any(type(number) is not int or number < 0 for number in (*model["tree_info"], *starts)):
        raise ValueError
    if len(model["tree_info"]) != n_trees or int(model["gbtree_model_param"]["num_trees"]) != n_trees:
        raise ValueError
    if ("iteration_indptr" in model and (starts[0], starts[-1]) != (0, n_trees)) or sorted(starts) != starts:
        raise ValueError
    for holder in (learner["gradient_booster"], model):
        if "weight_drop" in holder:
            numbers_of(holder["weight_drop"], n_trees)
    n_classes = max(int(learner["learner_model_param"].get("num_class", 0)), 1)
    for number, tree in enumerate(model["trees"]):
        if tree.get("id", number) != number or leaf_size(tree) not in (0, 1, n_classes):
            raise ValueError


def _categorical_splits(tree: Mapping[str, Any], n_features: int) -> set[int]:
    """Check one tree; return the columns that it splits by category.

    Raises:
        ValueError, KeyError, TypeError, IndexError, OverflowError: it is no tree over so many columns.
    """
    n_nodes = int(tree["tree_param"]["num_nodes"])
    left, right, feature, condition, default, kind, parents = (numbers_of(tree[name], n_nodes) for name in _NODE_FIELDS)
    inner = left != -1
    children, unused = np.concatenate([left[inner], right[inner]]), int(tree["tree_param"].get("num_deleted", 0))
    # Each node but the root is the child of one node: then no path from the root goes in a circle.
    if not np.isin(children, np.arange(1, n_nodes)).all() or children.size != n_nodes - 1 - unused:
        raise ValueError
    children = children.astype(np.int64)
    if np.unique(children).size != children.size or parents[0] not in _NO_PARENT:
        raise ValueError
    # A leaf has no child; one of vectors names its vector there.
    n_vectors = numbers_of(tree["leaf_weights"]).size // leaf_size(tree) if leaf_size(tree) > 1 else 0
    if not np.isin(right[~inner], np.arange(n_vectors) if n_vectors else -1).all():
        raise ValueError
    if not np.array_equal(parents[children], np.concatenate([np.flatnonzero(inner)] * 2)):
        raise ValueError
    if not np.isin(feature[inner], np.arange(n_features)).all() or not np.isin([default, kind], (0, 1)).all():
        raise ValueError
    if (np.abs(condition[~inner]) > _LARGEST).any():
        raise ValueError
    by_category = inner & (kind == _CATEGORICAL_SPLIT)
    _check_category_sets(tree, np.flatnonzero(by_category))
    return set(feature[by_category].astype(int).tolist())


def _check_category_sets(tree: Mapping[str, Any], nodes: NDArray[np.int64]) -> None:
    sets, where = tree["categories"], tree["categories_nodes"]
    starts, sizes = tree["categories_segments"], tree["categories_sizes"]
    if sorted(where) != nodes.tolist() or not len(where) == len(starts) == len(sizes):
        raise ValueError
    for start, size in zip(starts, sizes, strict=True):
        if start < 0 or size < 1 or start + size > len(sets):
            raise ValueError
    if any(type(one) is not int or not 0 <= one < 2**24 for one in sets):
        raise ValueError


def numbers_of(values: Sequence[Any], n: int | None = None) -> NDArray[np.float64]:
    """Return a field of a tree. Shapes: result: float64[n]. Raises: ValueError, TypeError: it holds no such numbers."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (array.size if n is None else n,) or np.isnan(array).any():
        raise ValueError
    return array
