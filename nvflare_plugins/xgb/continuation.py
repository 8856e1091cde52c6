"""Checks a model that training is to continue from, before anything leaves the site.

XGBoost would take almost any model: one of other columns, or one whose kind of trees sends other messages. Under way,
with private sums already sent, is too late to find out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb.cuts import LARGEST_VALUE, Cuts
from nvflare_plugins.xgb.model_json import check_trees, tree_weights, trees_model
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.versions import installed_wheel

_NUMBERS = 0  # XGBoost's split_type of a threshold; 1 is a set of categories
_WEIGHTS = re.compile(rb'weight_drop(": *)?\[')  # as a key, of JSON or UBJSON


def check_initial_model(model: bytes, name: str, parameters: TrainingParameters, features: Sequence[str]) -> None:
    """Refuse a model that the job cannot continue. Call it outside a communicator.

    Args:
        model: content of the file.
        name: name of the file, for messages.
        features: the job's columns, in order.

    Raises:
        ConfigurationError: not a model of this XGBoost, or one of other columns, booster, objective or classes.
    """
    try:
        booster = xgb.Booster(model_file=bytearray(model))
        learner = _learner(model)
    except (xgb.core.XGBoostError, ValueError):
        raise ConfigurationError(f"input {name!r} is not a model that XGBoost {xgb.__version__} reads") from None
    _check_trees(learner, name, booster.num_features())
    if booster.num_features() != len(features) or list(booster.feature_names or features) != list(features):
        raise ConfigurationError(
            f"the model {name!r} was trained on other columns, or in another order, than the job's"
        )
    objective = parameters.objective
    trees = _trees(learner)
    if not trees:
        raise ConfigurationError(f"the model {name!r} has no trees to continue from")
    if _WEIGHTS.search(model) and not tree_weights(learner):
        raise ConfigurationError(
            f"the model {name!r} weighs its trees in a form that XGBoost {xgb.__version__} does not read: continue it "
            "with the release that trained it"
        )
    wants_vectors = parameters.agreed.get("multi_strategy") == "multi_output_tree"
    kind = str(parameters.agreed["booster"])
    found_and_wanted = {
        "booster": (_booster(learner, kind), kind),
        "objective": (learner["objective"]["name"], objective.name),
        "number of outputs": (max(1, int(learner["learner_model_param"]["num_class"])), objective.n_outputs),
        "values per leaf": (
            max(1, int(trees[0]["tree_param"]["size_leaf_vector"])),
            objective.n_outputs if wants_vectors else 1,
        ),
    }
    for what, (found, wanted) in found_and_wanted.items():
        if found != wanted:
            raise ConfigurationError(
                f"the model {name!r} has {what} {found}, the job {wanted}: give the job the model's"
            )
    for column, thresholds in zip(features, _thresholds(model, len(features)), strict=True):
        if thresholds.size > _most_cuts(parameters.max_bin):
            raise ConfigurationError(
                f"the model {name!r} has {thresholds.size} thresholds on column {column!r}: max_bin must be at least "
                f"{thresholds.size + 2} to continue it"
            )


def _booster(learner: Mapping[str, Any], wanted: str) -> str:
    """Return the kind of a model's trees; ``wanted`` where it may be of either (``Wheel.names_dart``)."""
    if tree_weights(learner):
        return "dart"
    return str(learner["gradient_booster"]["name"]) if installed_wheel().names_dart else wanted


def _check_trees(learner: Mapping[str, Any], name: str, n_features: int) -> None:
    """Refuse trees in which XGBoost would lose its way, and take the process with it."""
    try:
        if _trees(learner):
            check_trees(learner, n_features)
            n_outputs = max(1, int(learner["learner_model_param"]["num_class"]))
            if max(trees_model(learner)["tree_info"]) >= n_outputs:
                raise ValueError
    except ValueError:
        raise ConfigurationError(f"the model {name!r} holds a tree that is none: copy it again from its run") from None


def keep_thresholds(cuts: Cuts, model: bytes, max_bin: int) -> Cuts:
    """Return cuts among which are all thresholds of the (checked) model that training continues from.

    XGBoost predicts the training rows from their bins, taking each bin's lower bound for the value: a threshold inside
    a bin would send rows to the wrong side, and the first gradients would be those of another model. Where there is no
    room for all agreed cuts, some of them go, evenly.
    """
    kept = []
    for agreed, needed in zip(cuts.of_feature, _thresholds(model, len(cuts.of_feature)), strict=True):
        others = np.setdiff1d(agreed, needed)
        room = min(others.size, _most_cuts(max_bin) - needed.size)
        chosen = others[np.linspace(0, others.size - 1, room).round().astype(np.int64)] if room else others[:0]
        kept.append(np.union1d(needed, chosen))
    return Cuts(tuple(kept))


def _most_cuts(max_bin: int) -> int:
    return max(max_bin - 2, 1)  # two bins belong to the outer bounds


def _thresholds(model: bytes, n_features: int) -> list[NDArray[np.float32]]:
    """Return the ascending thresholds on each column of numbers. Shapes: float32[n] each."""
    found: list[set[float]] = [set() for _ in range(n_features)]
    for tree in _trees(_learner(model)):
        columns = ("left_children", "split_indices", "split_conditions", "split_type")
        for child, feature, threshold, kind in zip(*(tree[column] for column in columns), strict=True):
            # Beyond the outermost cuts lie the thresholds of splits that send only missing values aside.
            if child != -1 and kind == _NUMBERS and abs(threshold) < LARGEST_VALUE:
                found[feature].add(threshold)
    return [np.unique(np.array(sorted(thresholds), dtype=np.float32)) for thresholds in found]


def _learner(model: bytes) -> dict[str, Any]:
    """Return the learner's part of a model file of either format."""
    document: dict[str, Any] = json.loads(bytes(xgb.Booster(model_file=bytearray(model)).save_raw("json")))["learner"]
    return document


def _trees(learner: Mapping[str, Any]) -> list[dict[str, Any]]:
    booster = learner["gradient_booster"]
    result: list[dict[str, Any]] = booster.get("gbtree", booster).get("model", {}).get("trees", [])
    return result
