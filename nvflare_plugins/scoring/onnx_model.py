"""A finished model as an ONNX file: one tree ensemble, then what XGBoost makes of the margin.

It is written from the trees themselves. onnxmltools' converter reads no dart models, and answers silently otherwise
than XGBoost for binary:logitraw, binary:hinge, reg:logistic, and num_parallel_tree with several classes.

Input ``features``: float32[n, n_features]. Outputs: ``prediction``, what XGBoost's ``predict`` gives; and, where the
model has probabilities, ``probabilities``: float32[n, n_classes] in the order of the model's classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import logit

from nvflare_plugins.scoring.conversion import (
    as_text,
    check,
    facts,
    has_vector_leaves,
    missing,
    refusal,
    splits_by_sets,
)
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.model_json import tree_weights, trees_model

LIBRARY, EXTRA = "ONNX", "onnx"
_OPSET, _ML_OPSET, _IR = 15, 3, 8  # read by runtimes from 2022 on
_LOGISTIC = ("binary:logistic", "reg:logistic")
_EXPONENTIAL = ("count:poisson", "reg:gamma", "reg:tweedie")


def to_onnx(model: FinishedModel) -> bytes:
    """Return the file; its metadata hold the facts on columns, categories and classes under ``veilboost``.

    Raises:
        ScoringError: onnx or onnxruntime is not installed, the model splits by sets of categories or has vector leaves,
            or the file would answer otherwise than XGBoost.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise missing(LIBRARY, EXTRA, error) from None
    document = model.document()
    if splits_by_sets(document):
        raise refusal(
            model,
            LIBRARY,
            "it splits columns by sets of categories, which ONNX's trees do not have (a job whose max_cat_to_onehot is "
            "above the length of its lists splits by one category at a time)",
        )
    if has_vector_leaves(document):
        raise refusal(model, LIBRARY, "its leaves are vectors (multi_output_tree)")
    made = _graph(onnx.helper, onnx.TensorProto, model, document)
    entry = made.metadata_props.add()
    entry.key, entry.value = "veilboost", as_text(facts(model))
    onnx.checker.check_model(made)
    content: bytes = made.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    check(model, LIBRARY, lambda rows: session.run(["prediction"], {"features": rows})[0])
    return content


def _graph(helper: Any, types: Any, model: FinishedModel, document: dict[str, Any]) -> Any:
    n_outputs = len(model.classes or ()) if model.objective.startswith("multi:") else 1
    trees = helper.make_node(
        "TreeEnsembleRegressor", ["features"], ["margins"], domain="ai.onnx.ml", **_ensemble(document, n_outputs)
    )
    nodes = [trees, *_after(helper, types, model)]
    shape = [None, n_outputs] if model.objective == "multi:softprob" else [None]
    outputs = [helper.make_tensor_value_info("prediction", types.FLOAT, shape)]
    if model.has_probabilities:
        wide = [None, len(model.classes or ())]
        outputs.append(helper.make_tensor_value_info("probabilities", types.FLOAT, wide))
    given = helper.make_tensor_value_info("features", types.FLOAT, [None, len(model.features)])
    constants = [
        helper.make_tensor("one", types.FLOAT, [], [1.0]),
        helper.make_tensor("zero", types.FLOAT, [], [0.0]),
        helper.make_tensor("columns", types.INT64, [1], [1]),
    ]
    wanted = {name for node in nodes for name in node.input}
    used = [constant for constant in constants if constant.name in wanted]
    graph = helper.make_graph(nodes, "veilboost", [given], outputs, used)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("ai.onnx.ml", _ML_OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR, producer_name="veilboost")


def _after(helper: Any, types: Any, model: FinishedModel) -> list[Any]:
    """Return the nodes from ``margins``, float32[n, n_outputs], to the outputs."""
    node, objective = helper.make_node, model.objective
    if objective == "multi:softprob":
        return [
            node("Softmax", ["margins"], ["probabilities"], axis=1),
            node("Identity", ["probabilities"], ["prediction"]),
        ]
    if objective == "multi:softmax":
        return [
            node("Softmax", ["margins"], ["probabilities"], axis=1),
            node("ArgMax", ["margins"], ["position"], axis=1, keepdims=0),
            node("Cast", ["position"], ["prediction"], to=types.FLOAT),
        ]
    flat = node("Squeeze", ["margins", "columns"], ["margin"])
    if objective == "binary:hinge":
        is_second = node("Greater", ["margin", "zero"], ["second"])
        return [flat, is_second, node("Cast", ["second"], ["prediction"], to=types.FLOAT)]
    if objective in ("binary:logistic", "binary:logitraw"):
        last = "chance" if objective == "binary:logistic" else "margin"
        return [
            flat,
            node("Sigmoid", ["margins"], ["chances"]),
            node("Squeeze", ["chances", "columns"], ["chance"]),
            node("Sub", ["one", "chances"], ["others"]),
            node("Concat", ["others", "chances"], ["probabilities"], axis=1),
            node("Identity", [last], ["prediction"]),
        ]
    name = "Sigmoid" if objective == "reg:logistic" else "Exp" if objective in _EXPONENTIAL else "Identity"
    return [flat, node(name, ["margin"], ["prediction"])]


def _ensemble(document: dict[str, Any], n_outputs: int) -> dict[str, Any]:
    """Return the attributes of the ensemble: one entry for each node of each tree, and for each leaf."""
    learner = document["learner"]
    trees = trees_model(learner)
    scales = tree_weights(learner) or [1.0] * len(trees["trees"])
    nodes: dict[str, list[Any]] = {name: [] for name in _NODES}
    leaves: dict[str, list[Any]] = {name: [] for name in _LEAVES}
    for number, (tree, output, scale) in enumerate(zip(trees["trees"], trees["tree_info"], scales, strict=True)):
        single = dict(zip(tree["categories_nodes"], tree["categories"], strict=True))
        for place in _reached(tree):
            for name, value in zip(_NODES, (number, place, *_node(tree, place, single)), strict=True):
                nodes[name].append(value)
            if tree["left_children"][place] == -1:
                weight = np.float32(scale) * np.float32(tree["split_conditions"][place])
                for name, value in zip(_LEAVES, (number, place, output, float(weight)), strict=True):
                    leaves[name].append(value)
    base = _base_margins(learner, n_outputs)
    return {**nodes, **leaves, "n_targets": n_outputs, "aggregate_function": "SUM", "base_values": base}


_NODES = (
    "nodes_treeids",
    "nodes_nodeids",
    "nodes_featureids",
    "nodes_values",
    "nodes_modes",
    "nodes_truenodeids",
    "nodes_falsenodeids",
    "nodes_missing_value_tracks_true",
)
_LEAVES = ("target_treeids", "target_nodeids", "target_ids", "target_weights")


def _node(tree: dict[str, Any], place: int, single: dict[int, int]) -> tuple[Any, ...]:
    """Return a node's feature, value, mode, children by outcome, and whether missing values go the way of "true".

    Args:
        single: node -> the one category that it sends to the right, where it splits by category.
    """
    left, right = tree["left_children"][place], tree["right_children"][place]
    if left == -1:
        return 0, 0.0, "LEAF", 0, 0, 0
    feature, to_left = tree["split_indices"][place], int(tree["default_left"][place])
    if place in single:
        return feature, float(single[place]), "BRANCH_EQ", right, left, 1 - to_left
    return feature, float(np.float32(tree["split_conditions"][place])), "BRANCH_LT", left, right, to_left


def _reached(tree: dict[str, Any]) -> list[int]:
    """Return the nodes that a row can reach, parents first; XGBoost leaves pruned ones in the list."""
    found = [0]
    for place in found:
        if tree["left_children"][place] != -1:
            found += [tree["left_children"][place], tree["right_children"][place]]
    return found


def _base_margins(learner: dict[str, Any], n_outputs: int) -> list[float]:
    """Return the margin of no tree, for each output: XGBoost keeps it as a prediction."""
    text = str(learner["learner_model_param"]["base_score"]).strip("[]")
    scores = np.array([float(part) for part in text.split(",")])
    objective = learner["objective"]["name"]
    if objective in _LOGISTIC:
        scores = logit(scores)
    elif objective in _EXPONENTIAL:
        scores = np.log(scores)
    return [float(np.float32(score)) for score in np.broadcast_to(scores, n_outputs)]
