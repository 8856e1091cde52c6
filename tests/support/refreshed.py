"""What stock XGBoost's refresh makes of a private method's forest: random trees without noise must be these."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.leaf_weights import TWO_CLASSES, UNIT
from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.totally_random import grow_totally_random
from dp_components.split_methods.tree import Tree
from nvflare_plugins.kinds.private_trees.forest import public_candidates, tree_features
from nvflare_plugins.kinds.private_trees.methods import Method
from nvflare_plugins.kinds.private_trees.plan import OwnRows, PrivateTreesPlan
from nvflare_plugins.xgb.model_json import empty_tree_document, model_bytes, model_document

Objective = Callable[[NDArray[np.float32], xgb.DMatrix], tuple[NDArray[np.float32], NDArray[np.float32]]]


def drawn_trees(method: Method, candidates: Candidates, seed: int) -> list[Tree]:
    """Draw the structures of a method's totally random trees."""
    draws, counts = random.Random(seed), candidates.counts
    return [
        grow_totally_random(counts, tree_features(method, number, len(counts), draws), method.depth, draws)
        for number in range(method.n_trees)
    ]


def empty_model(trees: list[Tree], candidates: Candidates, batch_size: int) -> bytes:
    """Return trees as an XGBoost model whose leaves are 0."""
    documents = [empty_tree_document(number, tree, candidates) for number, tree in enumerate(trees)]
    return model_bytes(
        model_document(
            documents,
            len(candidates.of_feature),
            batch_size=batch_size,
            objective="binary:logistic",
            base_score="[5E-1]",
            n_classes=TWO_CLASSES.n_outputs,
        )
    )


def bounded_objective(plan: PrivateTreesPlan, rows: OwnRows) -> Objective:
    """Return the objective of the plan's row statistics."""

    def objective(margin: NDArray[np.float32], _: xgb.DMatrix) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        pairs = rows.statistics(margin, plan) * np.float32(1 / UNIT)
        return pairs[:, 0].astype(np.float32), pairs[:, 1].astype(np.float32)  # exact: at most 2^20 grid steps

    return objective


def refresh_parameters(plan: PrivateTreesPlan) -> dict[str, object]:
    """Return XGBoost's parameters for a refresh of the plan's forest."""
    return {
        "process_type": "update",
        "updater": "refresh",
        "refresh_leaf": 1,
        "nthread": 1,
        "num_parallel_tree": plan.method.batch_size,
        "learning_rate": plan.method.learning_rate,
        "lambda": plan.ridge,
        "max_delta_step": plan.method.clip,
        "min_child_weight": 0,
        "verbosity": 0,
    }


def empty_forest(plan: PrivateTreesPlan) -> bytes:
    """Return the plan's trees over public candidates as an XGBoost model whose leaves are 0."""
    candidates = public_candidates(plan.method, plan.bounds)
    return empty_model(drawn_trees(plan.method, candidates, plan.structure_seed), candidates, plan.method.batch_size)


def refreshed(plan: PrivateTreesPlan, rows: OwnRows) -> bytes:
    """Refresh the plan's forest on all rows, with XGBoost alone; the model names the release that the sites' names."""
    matrix = xgb.DMatrix(np.column_stack(list(rows.columns)), label=rows.label, nthread=1)
    booster = xgb.Booster(refresh_parameters(plan), [matrix], model_file=bytearray(empty_forest(plan)))
    booster.set_param(refresh_parameters(plan))
    for number in range(plan.method.n_trees // plan.method.batch_size):
        booster.update(matrix, number, fobj=bounded_objective(plan, rows))
    return re.sub(rb'"version":\[[0-9,]+\]', b'"version":[3,2,0]', bytes(booster.save_raw("json")))
