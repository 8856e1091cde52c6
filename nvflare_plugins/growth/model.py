"""XGBoost's model document in a frame of our own, so that sites with unlike wheels write the same bytes.

A document has the fields that XGBoost 3.2 to 3.4 write, in their order; the version follows from the arithmetic that
the sites agreed on, not from a wheel. Training that goes on from a model takes over its trees and its base score.

Reference: XGBoost 3.2 to 3.4, src/learner.cc (SaveModel), src/gbm/gbtree_model.cc, src/tree/tree_model.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth.float32 import Floats
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.xgb import model_json
from nvflare_plugins.xgb import stock as xgb

VERSIONS = {"3.2": [3, 2, 0], "3.3": [3, 3, 0], "3.4": [3, 4, 1]}
"""Arithmetic -> the version that models of it carry."""

_REALS = ("base_weights", "loss_changes", "split_conditions", "sum_hessian")
_INTEGERS = ("default_left", "left_children", "parents", "right_children", "split_indices", "split_type")
_CATEGORICAL = 1  # XGBoost's split_type of a set of categories
_LEAF = -1

Trees = Sequence[Mapping[str, Any]]


def new_model(
    objective: Objective,
    base_score: Floats,
    *,
    is_given: bool,
    feature_names: Sequence[str],
    feature_types: Sequence[str],
    num_parallel_tree: int = 1,
) -> dict[str, Any]:
    """Return the document of a model without trees.

    Args:
        base_score: as the model holds it, before the objective's link.
        is_given: it is the job's, not an estimate.
        feature_types: XGBoost's, such as "float" and "c"; empty where the model shall name none.
        num_parallel_tree: trees of a round for each output.

    Shapes: base_score: float32[n_outputs], or float32[1] for all outputs.
    """
    scores = np.broadcast_to(np.asarray(base_score, np.float32), (objective.n_outputs,))
    learner = model_json.model_document(
        (),
        len(feature_names),
        batch_size=num_parallel_tree,
        objective=objective.name,
        base_score="[]",
        feature_names=feature_names,
        n_classes=objective.n_outputs,
    )["learner"]
    learner |= {"feature_types": list(feature_types), "objective": objective_section(objective)}
    learner["gradient_booster"] = dict(sorted(learner["gradient_booster"].items()))  # as XGBoost writes it
    said = {"base_score": f"[{','.join(map(_scientific, scores))}]", "boost_from_average": "0" if is_given else "1"}
    learner["learner_model_param"] |= said
    return {"learner": learner, "version": list(VERSIONS[objective.arithmetic])}


def objective_section(objective: Objective) -> dict[str, Any]:
    """Return what a model says of its objective."""
    if objective.rules is not None:
        return {"lambdarank_param": objective.rules.section(), "name": objective.name}
    return dict(sorted({"name": objective.name, **_parameters_of(objective)}.items()))


def _parameters_of(objective: Objective) -> dict[str, Any]:
    name, section = objective.name, dict[str, Any]()
    if name in ("binary:logistic", "reg:logistic", "binary:logitraw", "reg:squarederror", "reg:gamma"):
        section = {"reg_loss_param": {"scale_pos_weight": _decimal(objective.scale_pos_weight)}}
    elif name == "count:poisson":
        section = {"poisson_regression_param": {"max_delta_step": _decimal(objective.max_delta_step)}}
    elif name == "reg:tweedie":
        power = _decimal(objective.tweedie_variance_power)
        section = {"tweedie_regression_param": {"tweedie_variance_power": power}}
    elif name == "reg:pseudohubererror":
        section = {"pseudo_huber_param": {"huber_slope": _decimal(objective.huber_slope)}}
    elif name == "reg:quantileerror":
        section = {"quantile_loss_param": {"quantile_alpha": f"[{_scientific(objective.quantile_alpha)}]"}}
    elif name == "survival:aft":
        section = objective.aft.section()
    elif name.startswith("multi:"):
        section = {"softmax_multiclass_param": {"num_class": str(objective.n_outputs)}}
    return section


def continued_model(
    model: bytes, objective: Objective, *, feature_names: Sequence[str], feature_types: Sequence[str], parallel: int = 1
) -> dict[str, Any]:
    """Return the document to which training adds that goes on from a (checked) model of any release.

    Its trees, base score and attributes stay; what belongs to the job is the job's.

    Args:
        model: in either of XGBoost's formats (xgb/continuation.py checks it).
        parallel: trees of a round for each output, of the job.

    Raises:
        ConfigurationError: a model of which trees were dropped, with vector leaves, or with another number of parallel
            trees than the job, for which XGBoost would go on with the model's.
    """
    document = model_json.read_document(model)
    learner = document["learner"]
    # Each release keeps the weights of dropped trees in another place, and loses those that it does not look for.
    if learner["gradient_booster"]["name"] != "gbtree" or b"weight_drop" in model:
        raise ConfigurationError("a model of booster dart goes on under engine xgboost only")
    if any(
        tree["tree_param"]["size_leaf_vector"] not in ("0", "1") for tree in model_json.trees_model(learner)["trees"]
    ):
        raise ConfigurationError("a model with vector leaves goes on under engine xgboost only")
    found = model_json.trees_model(learner)["gbtree_model_param"]["num_parallel_tree"]
    if int(found) != parallel:
        raise ConfigurationError(
            f"the model has num_parallel_tree={found}, the job {parallel}: give the job the model's"
        )
    learner |= {"feature_names": list(feature_names), "feature_types": list(feature_types)}
    learner["objective"] = objective_section(objective)
    document["version"] = list(VERSIONS[objective.arithmetic])
    return document


def add_round(document: dict[str, Any], trees: Sequence[Trees]) -> None:
    """Add the trees of one round to a document.

    Args:
        trees: for each output its parallel trees, each with XGBoost's fields as lists or arrays: ``base_weights``,
            ``loss_changes``, ``split_conditions``, ``sum_hessian``, ``default_left``, ``left_children``, ``parents``,
            ``right_children``, ``split_indices``, ``split_type``, ``categories``, ``categories_nodes``,
            ``categories_segments`` and ``categories_sizes``.
    """
    learner = document["learner"]
    model, n_features = model_json.trees_model(learner), int(learner["learner_model_param"]["num_feature"])
    for output, parallel in enumerate(trees):
        for tree in parallel:
            model["trees"].append(_tree(tree, len(model["trees"]), n_features))
            model["tree_info"].append(output)
    model["iteration_indptr"].append(len(model["trees"]))
    model["gbtree_model_param"]["num_trees"] = str(len(model["trees"]))


def n_rounds_of(document: Mapping[str, Any]) -> int:
    """Return how many rounds a model has."""
    return len(model_json.trees_model(document["learner"])["iteration_indptr"]) - 1


def largest_margin(document: Mapping[str, Any], base_margin: Floats) -> float:
    """Return what no row's margin exceeds: the sum of each tree's largest leaf. Shapes: base_margin: float32[1]."""
    total = float(base_margin[0])
    for tree in model_json.trees_model(document["learner"])["trees"]:
        is_leaf = np.array(tree["left_children"]) == _LEAF
        total += float(np.array(tree["split_conditions"], np.float64)[is_leaf].max())
    return total


def base_score_of(document: Mapping[str, Any]) -> Floats:
    """Return a model's base score, before the objective's link. Shapes: float32[n_outputs]."""
    text = document["learner"]["learner_model_param"]["base_score"]
    return np.array([np.float32(number) for number in text.strip("[]").split(",")])


def _tree(fields: Mapping[str, Any], number: int, n_features: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        name: model_json.shortest_decimals(np.asarray(fields[name], np.float32)) for name in _REALS
    }
    document |= {
        name: np.asarray(fields[name], np.int64).tolist() for name in (*_INTEGERS, *model_json.CATEGORY_FIELDS)
    }
    document |= {"id": number, "tree_param": model_json.tree_param(n_features, len(fields["left_children"]))}
    return dict(sorted(document.items()))


def _scientific(value: np.float32) -> str:
    """Return XGBoost's shortest text of a float32: 5E-1."""
    return np.format_float_scientific(value, trim="-", exp_digits=1).replace("e+", "e").upper()


def _decimal(value: np.float32) -> str:
    """Return XGBoost's text of a parameter."""
    return f"{float(np.float32(value)):.9g}"


def predict_margins(document: Mapping[str, Any], base_margin: Floats, rows: Floats) -> Floats:
    """Return the margins of rows, as XGBoost adds them up: in float32, tree after tree.

    Args:
        base_margin: ``Objective.margins_of(base_score_of(document))``.

    Shapes: base_margin: float32[n_outputs]; rows: float32[n_rows, n_features], categories as positions, missing as
        no number; result: float32[n_rows, n_outputs].
    """
    model = model_json.trees_model(document["learner"])
    margins = np.tile(np.asarray(base_margin, np.float32), (len(rows), 1))
    for tree, output in zip(model["trees"], model["tree_info"], strict=True):
        values = np.array(tree["split_conditions"], np.float32)
        margins[:, output] += values[leaves_of(tree, rows)]
    return margins


def leaves_of(tree: Mapping[str, Any], rows: Floats) -> NDArray[np.int64]:
    """Return the leaf that each row comes to in a tree of a document. Shapes: rows: float32[n_rows, n_features]."""
    left, right, feature = (np.array(tree[name]) for name in ("left_children", "right_children", "split_indices"))
    default_left, types = np.array(tree["default_left"], bool), np.array(tree["split_type"])
    thresholds = np.array(tree["split_conditions"], np.float32)
    sets = model_json.category_sets(tree)
    at = np.zeros(len(rows), np.int64)
    for node in range(left.size):  # parents come before their children
        here = np.flatnonzero(at == node) if left[node] != _LEAF else at[:0]
        if not here.size:
            continue
        value = rows[here, feature[node]]
        goes_left = ~np.isin(value, np.array(sets[node])) if types[node] == _CATEGORICAL else value < thresholds[node]
        goes_left = np.where(np.isnan(value), default_left[node], goes_left)
        at[here] = np.where(goes_left, left[node], right[node])
    return at


def check_predictor(arithmetic: str) -> None:
    """Have this site's wheel predict a small fixed model, and compare with what the model says.

    Raises:
        ConfigurationError: the wheel cannot load the model, or adds up other margins.
    """
    objective = Objective("multi:softprob", arithmetic, 2, *(np.float32(1),) * 5)
    scores = np.array([0.3, -1.7], np.float32)
    document = new_model(objective, scores, is_given=True, feature_names=["a", "b"], feature_types=["float", "c"])
    for number in range(3):
        add_round(document, [[_probe_tree(number)], [_probe_tree(number + 7)]])
    edges = [-3e38, -1.5, 0.1, 0.2, np.nextafter(np.float32(0.1), np.float32(1)), 0.3, np.nan, 3e38]
    rows = np.array([[a, b] for a in edges for b in (0, 1, 2, np.nan)], np.float32)
    try:
        booster = xgb.Booster({"nthread": 1}, model_file=bytearray(model_json.model_bytes(document)))
        matrix = xgb.DMatrix(rows, feature_names=["a", "b"], feature_types=["float", "c"], enable_categorical=True)
        found = booster.predict(matrix, output_margin=True)
    except xgb.core.XGBoostError:
        found = None
    expected = predict_margins(document, scores, rows)
    if found is None or found.shape != expected.shape or found.tobytes() != expected.tobytes():
        raise ConfigurationError(
            f"this site's xgboost {xgb.__version__} predicts other margins than the model of the check holds, so its "
            f"models would mean something else here: install a release of VeilBoost's list, such as 'xgboost=="
            f"{arithmetic}.*'"
        )


def _probe_tree(number: int) -> dict[str, Any]:
    """A split by a number, below it one by a set of categories; leaves whose sums are rounded."""
    leaves = np.array([1 / 3, -0.1, 1e-4], np.float32) * np.float32(number + 1)
    return {
        "base_weights": [0.0] * 5,
        "loss_changes": [1.0, 0.5, 0.0, 0.0, 0.0],
        "split_conditions": [0.1 * (number % 3 + 1), 1e-45, leaves[0], leaves[1], leaves[2]],
        "sum_hessian": [4.0, 2.0, 2.0, 1.0, 1.0],
        "default_left": [number % 2, 1 - number % 2, 0, 0, 0],
        "left_children": [1, 3, -1, -1, -1],
        "right_children": [2, 4, -1, -1, -1],
        "parents": [2**31 - 1, 0, 0, 1, 1],
        "split_indices": [0, 1, 0, 0, 0],
        "split_type": [0, 1, 0, 0, 0],
        **model_json.category_fields({1: (number % 3,)}),
    }
