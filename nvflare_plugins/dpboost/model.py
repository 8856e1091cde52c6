"""Released trees as an ordinary XGBoost model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dp_components.dpboost.ensemble_of_ensembles import DpBoostModel
from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS
from dp_components.dpboost.losses import SquaredLoss
from dp_components.dpboost.split_selection import SplitTable
from dp_components.split_methods.tree import LEAF, Tree
from nvflare_plugins.xgb.model_json import model_bytes
from nvflare_plugins.xgb.tree_documents import empty_tree_document, model_document, shortest_decimals


def xgboost_model(model: DpBoostModel, feature_names: Sequence[str]) -> bytes:
    """Return a model in XGBoost's JSON form that predicts what ``DpBoostModel.predict`` does, to float32's precision.

    A regression's predictions are not clamped to the label's public bounds by XGBoost.

    Privacy: post-processing of released trees; nothing else of the rows is in it.
    """
    table, candidates = SplitTable.of(model.candidates), model.candidates
    objective, base_score, unit = "binary:logistic", "[5E-1]", 1.0
    if isinstance(model.loss, SquaredLoss):
        low, high = model.loss.label_bounds.low, model.loss.label_bounds.high
        unit = (high - low) / 2
        start = (low + high) / 2 + math.ldexp(model.start, -LEAF_BITS) * unit
        objective, base_score = "reg:squarederror", f"[{start:.9E}]"
    trees = []
    for number, tree in enumerate(model.trees):
        n_leaves = (tree.size + 1) // 2
        weights = np.ldexp(tree[-n_leaves:].astype(np.float64), -LEAF_BITS) * model.learning_rate * unit
        written = empty_tree_document(number, _structure(tree, table), candidates)
        written["split_conditions"][-n_leaves:] = shortest_decimals(weights.astype(np.float32))
        trees.append(written)
    document = model_document(
        trees,
        len(candidates.of_feature),
        batch_size=1,
        objective=objective,
        base_score=base_score,
        feature_names=feature_names,
    )
    return model_bytes(document)


def _structure(tree: np.ndarray, table: SplitTable) -> Tree:
    """Return a complete tree's structure, level by level. Shapes: tree: as ``train_single_tree`` gives it."""
    n_inner = tree.size // 2
    inner = np.arange(tree.size) < n_inner
    splits = np.where(inner, tree, 0)
    children = np.arange(tree.size) * 2 + 1
    arrays = (
        np.where(inner, table.feature[splits], LEAF),
        np.where(inner, table.candidate[splits], 0),
        np.where(inner, children, LEAF),
        np.where(inner, children + 1, LEAF),
    )
    return Tree(*(array.astype(np.int32) for array in arrays))
