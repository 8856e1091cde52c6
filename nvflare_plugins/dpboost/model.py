"""Released trees as an ordinary XGBoost model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np

from dp_components.dpboost.ensemble_of_ensembles import DpBoostModel
from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS
from dp_components.dpboost.losses import SquaredLoss
from dp_components.dpboost.split_selection import SplitTable
from dp_components.split_methods.tree import LEAF, Tree
from nvflare_plugins.private_trees.forest import Forest, initial_model
from nvflare_plugins.private_trees.methods import Method, SplitMethod, WeightUpdate
from nvflare_plugins.xgb.model_json import model_bytes

_STRUCTURE = Method("dpboost", SplitMethod.HISTOGRAM, WeightUpdate.NEWTON)  # names the objective, nothing else


def xgboost_model(model: DpBoostModel, feature_names: Sequence[str]) -> bytes:
    """Return a model in XGBoost's JSON form that predicts what ``DpBoostModel.predict`` does, to float32's precision.

    A regression's predictions are not clamped to the label's public bounds by XGBoost.

    Privacy: post-processing of released trees; nothing else of the rows is in it.
    """
    table = SplitTable.of(model.candidates)
    forest = Forest(tuple(_structure(tree, table) for tree in model.trees), model.candidates, 1)
    document = json.loads(initial_model(forest, _STRUCTURE, feature_names))
    learner, unit = document["learner"], 1.0
    if isinstance(model.loss, SquaredLoss):
        low, high = model.loss.label_bounds.low, model.loss.label_bounds.high
        unit = (high - low) / 2
        learner["objective"]["name"] = "reg:squarederror"
        start = (low + high) / 2 + math.ldexp(model.start, -LEAF_BITS) * unit
        learner["learner_model_param"]["base_score"] = f"[{start:.9E}]"
    for written, tree in zip(learner["gradient_booster"]["model"]["trees"], model.trees, strict=True):
        n_leaves = (tree.size + 1) // 2
        weights = np.ldexp(tree[-n_leaves:].astype(np.float64), -LEAF_BITS) * model.learning_rate * unit
        written["split_conditions"][-n_leaves:] = [float(str(weight)) for weight in weights.astype(np.float32)]
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
