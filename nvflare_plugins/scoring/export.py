"""Copies of a finished model that may leave its site: XGBoost's own JSON without row counts, ONNX, treelite.

XGBoost writes into every node how much hessian its rows weigh (``sum_hessian``), from which row counts follow. A copy
for others has NaN there and says so in an attribute; structure, thresholds and leaves, which predictions need, stay
and go on telling something about the data. SHAP values weigh the paths of a tree by that hessian: from such a copy
XGBoost 3.2 gives NaN and 3.3 an error. Under any number, 0 among them, one of the two gives values that look right and
are not.

The forms of other libraries are for places that have neither VeilBoost nor XGBoost, and hold no hessian. What is
written answers as XGBoost does, and was asked before it is written: rows at, just below and just above the model's own
thresholds, and rows that lack values, must get XGBoost's predictions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.scoring.model import FinishedModel, ScoringError
from nvflare_plugins.xgb.model_json import bare_model, category_sets, model_bytes, tree_weights, trees_model

STRIPPED_ATTRIBUTE = "veilboost_sum_hessian"
STRIPPED_NOTE = "set to NaN before the model left its site; cover and SHAP values are not available"
_NO_MODEL = "this file is not a JSON model of XGBoost (a part of a vertical model is none: the action merge makes one)"
Floats = NDArray[np.float32]
_PROBES = 256
_TOLERANCE = 1e-5  # of max(1, |prediction|): other libraries add the same float32 leaves in another order
_DECIDED = 1e-4  # margins that a class hangs on must be so far apart to be compared
_LABELS = ("multi:softmax", "binary:hinge")
_WITHOUT_SETS = 15, 3, 8  # versions of operators, of those for trees, and of the file: read by runtimes from 2022 on
_WITH_SETS = 21, 5, 10  # by runtimes from 2024 on
_LESS, _MEMBER = 1, 6  # modes of nodes: BRANCH_LT, BRANCH_MEMBER
_LOGISTIC = ("binary:logistic", "reg:logistic")
_EXPONENTIAL = ("count:poisson", "reg:gamma", "reg:tweedie", "survival:aft", "survival:cox")


def strip_sum_hessian(model: bytes) -> bytes:
    """Return a JSON model with every ``sum_hessian`` set to NaN and an attribute that says so.

    Raises:
        ConfigurationError: not a JSON model of XGBoost.
    """
    try:
        document = json.loads(model)
        learner = document["learner"]
        trees = trees_model(learner)["trees"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigurationError(_NO_MODEL) from None
    try:
        for tree in trees:
            tree["sum_hessian"] = [float("nan")] * len(tree["sum_hessian"])
        learner.setdefault("attributes", {})[STRIPPED_ATTRIBUTE] = STRIPPED_NOTE
        return model_bytes(document)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigurationError("the model holds a tree that is none, or is damaged: copy it again") from None


def facts(model: FinishedModel) -> dict[str, Any]:
    """Return what a caller must know to fill in rows and read answers, as JSON values."""
    return {
        "features": [feature.name for feature in model.features],
        "categories": {one.name: list(one.categories) for one in model.features if one.categories is not None},
        "classes": None if model.classes is None else list(model.classes),
        "objective": model.objective,
        **({} if model.clipped_at is None else {"gradients_clipped_at": model.clipped_at}),
        "rows": "float32, columns in the order of features; categories by their position in the list; NaN is missing",
    }


def probes(model: FinishedModel) -> Floats:
    """Return rows on which two readers of a model would part. Shapes: result: float32[256, n_features]."""
    at: list[set[float]] = [{0.0} for _ in model.features]
    for tree in model.trees:
        nodes = zip(tree["left_children"], tree["split_indices"], tree["split_conditions"], strict=True)
        for left, feature, threshold in nodes:
            if left != -1:
                at[feature].add(float(threshold))
    draw = np.random.default_rng(0)  # any rows will do
    rows = np.empty((_PROBES, len(model.features)), dtype=np.float32)
    for place, feature in enumerate(model.features):
        if feature.categories is not None:
            rows[:, place] = draw.integers(0, len(feature.categories), _PROBES)
        else:
            exact = np.array(sorted(at[place]), dtype=np.float32)[draw.integers(0, len(at[place]), _PROBES)]
            around = [exact, np.nextafter(exact, np.float32(-np.inf)), np.nextafter(exact, np.float32(np.inf))]
            rows[:, place] = np.choose(draw.integers(0, 3, _PROBES), around)
        rows[draw.random(_PROBES) < 0.1, place] = np.nan
    return rows


def check(model: FinishedModel, library: str, answer: Callable[[Floats], Floats], *, labels: bool = True) -> None:
    """Refuse a conversion whose answers are not XGBoost's.

    Args:
        answer: float32[n_rows, n_features] -> XGBoost's ``predict`` of these rows, as converted.
        labels: objectives that predict classes give them; else the probabilities of these.

    Raises:
        ScoringError: an answer differs.
    """
    rows = probes(model)
    found = np.asarray(answer(rows), dtype=np.float64).reshape(len(rows), -1)
    as_labels = labels or model.objective != "multi:softmax"
    answers = model.predict(rows) if as_labels else model.probabilities(rows)
    wanted = answers.reshape(len(rows), -1).astype(np.float64)
    decided = np.ones(len(rows), dtype=np.bool_)
    if model.objective in _LABELS and as_labels:
        margins = model.predict(rows, output_margin=True).reshape(len(rows), -1).astype(np.float64)
        both = np.column_stack([margins, np.zeros(len(rows))]) if margins.shape[1] == 1 else margins
        ordered = np.sort(both, axis=1)
        decided = ordered[:, -1] - ordered[:, -2] > _DECIDED
    same_shape = found.shape == wanted.shape
    if not same_shape or not (np.abs(found - wanted) <= _TOLERANCE * np.maximum(1, np.abs(wanted)))[decided].all():
        raise ScoringError(
            f"{model.name} is not converted: {library} answers otherwise than XGBoost does for this model. Export a "
            "copy in XGBoost's own form (a name that ends in .json)"
        )


def refusal(model: FinishedModel, library: str, why: str) -> ScoringError:
    """Return the error for a model that a library cannot hold."""
    return ScoringError(
        f"{model.name} cannot be converted to {library}: {why}. Export a copy in XGBoost's own form (a name that ends "
        "in .json), or another format"
    )


def missing(library: str, extra: str, error: ImportError) -> ScoringError:
    """Return the error for a library that is not installed."""
    reason = printable(str(error), 200)
    return ScoringError(f"{library} is not installed ({reason}): pip install 'veilboost[{extra}]'")


# -- ONNX: one tree ensemble, then what XGBoost makes of the margin ---------------------------------------------------
#
# It is written from the trees themselves. onnxmltools' converter reads no dart models, and answers silently otherwise
# than XGBoost for binary:logitraw, binary:hinge, reg:logistic, and num_parallel_tree with several classes.
#
# Input ``features``: float32[n, n_features]. Outputs: ``prediction``, what XGBoost's ``predict`` gives; and, where the
# model has probabilities, ``probabilities``: float32[n, n_classes] in the order of the model's classes.


def to_onnx(model: FinishedModel) -> bytes:
    """Return the file; its metadata hold the facts on columns, categories and classes under ``veilboost``.

    Raises:
        ScoringError: onnx or onnxruntime is not installed, the model has vector leaves, or the file would answer
            otherwise than XGBoost.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise missing("ONNX", "onnx", error) from None
    if model.has_vector_leaves:
        raise refusal(model, "ONNX", "its leaves are vectors (multi_output_tree)")
    made = _graph(onnx.helper, onnx.TensorProto, model)
    entry = made.metadata_props.add()
    entry.key, entry.value = "veilboost", json.dumps(facts(model), ensure_ascii=False)
    onnx.checker.check_model(made)
    content: bytes = made.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    check(model, "ONNX", lambda rows: session.run(["prediction"], {"features": rows})[0])
    return content


def _graph(helper: Any, types: Any, model: FinishedModel) -> Any:
    learner = model.document()["learner"]
    n_outputs = len(model.classes or ()) if model.objective.startswith("multi:") else 1
    has_sets = any(size > 1 for tree in model.trees for size in tree["categories_sizes"])
    grown = (_ensemble_of_sets if has_sets else _ensemble)(helper, types, learner, n_outputs)
    nodes = [*grown, *_after(helper, types, model)]
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
        helper.make_tensor("base", types.FLOAT, [n_outputs], base_margins(learner, n_outputs)),
    ]
    wanted = {name for node in nodes for name in node.input}
    used = [constant for constant in constants if constant.name in wanted]
    graph = helper.make_graph(nodes, "veilboost", [given], outputs, used)
    opset, ml_opset, ir = _WITH_SETS if has_sets else _WITHOUT_SETS
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", ml_opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir, producer_name="veilboost")


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


def _ensemble_of_sets(helper: Any, types: Any, learner: dict[str, Any], n_outputs: int) -> list[Any]:
    """Return the operators of trees that split by sets: leaves are in a list of their own, and nothing is added."""
    trees = trees_model(learner)
    scales = tree_weights(learner) or [1.0] * len(trees["trees"])
    roots: list[int] = []
    nodes: list[tuple[Any, ...]] = []
    leaves: list[tuple[int, float]] = []
    members: list[float] = []
    for tree, output, scale in zip(trees["trees"], trees["tree_info"], scales, strict=True):
        sets, reached = category_sets(tree), _reached(tree)
        inner = [place for place in reached if tree["left_children"][place] != -1]
        roots.append(len(nodes))
        way_to = {place: (len(nodes) + number, 0) for number, place in enumerate(inner)}
        for place in reached:
            if place not in way_to:
                way_to[place] = len(leaves), 1
                leaves.append((output, float(np.float32(scale) * np.float32(tree["split_conditions"][place]))))
        if not inner:  # a tree of one leaf: it is where both ways go
            nodes.append((0, 0.0, _LESS, *way_to[0], *way_to[0], 0))
        for place in inner:
            to_left, to_right = way_to[tree["left_children"][place]], way_to[tree["right_children"][place]]
            feature, goes_left = tree["split_indices"][place], int(tree["default_left"][place])
            if place in sets:
                members += [*map(float, sets[place]), float("nan")]
                nodes.append((feature, 0.0, _MEMBER, *to_right, *to_left, 1 - goes_left))
            else:
                below = float(np.float32(tree["split_conditions"][place]))
                nodes.append((feature, below, _LESS, *to_left, *to_right, goes_left))

    def tensor(kind: int, values: list[Any]) -> Any:
        return helper.make_tensor("values", kind, [len(values)], values)

    given = _by_name(_SET_NODES, nodes)
    given |= {
        "nodes_splits": tensor(types.FLOAT, given["nodes_splits"]),
        "nodes_modes": tensor(types.UINT8, given["nodes_modes"]),
        "membership_values": tensor(types.FLOAT, members),
        "leaf_targetids": [output for output, _ in leaves],
        "leaf_weights": tensor(types.FLOAT, [weight for _, weight in leaves]),
    }
    domain, names = "ai.onnx.ml", (["features"], ["sums"])
    grown = helper.make_node("TreeEnsemble", *names, domain=domain, tree_roots=roots, n_targets=n_outputs, **given)
    return [grown, helper.make_node("Add", ["sums", "base"], ["margins"])]


def _ensemble(helper: Any, types: Any, learner: dict[str, Any], n_outputs: int) -> list[Any]:
    """Return the operator of trees that split by numbers and single categories: an entry for each node and leaf."""
    trees = trees_model(learner)
    scales = tree_weights(learner) or [1.0] * len(trees["trees"])
    nodes: list[tuple[Any, ...]] = []
    leaves: list[tuple[Any, ...]] = []
    for number, (tree, output, scale) in enumerate(zip(trees["trees"], trees["tree_info"], scales, strict=True)):
        single = dict(zip(tree["categories_nodes"], tree["categories"], strict=True))
        for place in _reached(tree):
            nodes.append((number, place, *_node(tree, place, single)))
            if tree["left_children"][place] == -1:
                weight = np.float32(scale) * np.float32(tree["split_conditions"][place])
                leaves.append((number, place, output, float(weight)))
    entries = _by_name(_NODES, nodes) | _by_name(_LEAVES, leaves)
    given = {"n_targets": n_outputs, "aggregate_function": "SUM", "base_values": base_margins(learner, n_outputs)}
    names = (["features"], ["margins"])
    return [helper.make_node("TreeEnsembleRegressor", *names, domain="ai.onnx.ml", **entries, **given)]


def _by_name(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return the columns of a table of at least one row by their names."""
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


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
_SET_NODES = (
    "nodes_featureids",
    "nodes_splits",
    "nodes_modes",
    "nodes_truenodeids",
    "nodes_trueleafs",
    "nodes_falsenodeids",
    "nodes_falseleafs",
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


def base_margins(learner: dict[str, Any], n_outputs: int) -> list[float]:
    """Return the margin of no tree, for each output: XGBoost keeps it as a prediction."""
    text = str(learner["learner_model_param"]["base_score"]).strip("[]")
    scores = np.array([float(part) for part in text.split(",")])
    objective = learner["objective"]["name"]
    if objective in _LOGISTIC:
        scores = logit(scores)
    elif objective in _EXPONENTIAL:
        scores = np.log(scores)
    return [float(np.float32(score)) for score in np.broadcast_to(scores, n_outputs)]


# -- treelite's checkpoint, which ``treelite.Model.deserialize`` reads ------------------------------------------------
#
# Every objective and booster of horizontal jobs converts, categories and vector leaves included. ``multi:softmax``
# answers the probabilities of the classes, of which XGBoost predicts the largest.


def to_treelite(model: FinishedModel) -> bytes:
    """Return the checkpoint; its attributes hold the facts on columns, categories and classes under ``veilboost``.

    Raises:
        ScoringError: treelite is not installed, does not read the model, or would answer otherwise than XGBoost.
    """
    try:
        import treelite
        from treelite import gtil
    except ImportError as error:
        raise missing("treelite", "treelite", error) from None
    document = model.document()
    for tree in trees_model(document["learner"])["trees"]:
        del tree["sum_hessian"]
    try:
        converted = treelite.frontend.from_xgboost_json(bare_model(document))
    except treelite.TreeliteError:
        raise ScoringError(
            f"{model.name} cannot be converted: treelite {treelite.__version__} does not read it"
        ) from None
    converted.get_header_accessor().set_field("attributes", json.dumps({"veilboost": facts(model)}, ensure_ascii=False))

    def answer(rows: Floats) -> Floats:
        return np.asarray(gtil.predict(converted, rows), dtype=np.float32)

    check(model, "treelite", answer, labels=False)
    return converted.serialize_bytes()
