"""Checks a model that training is to continue from, before anything leaves the site.

XGBoost would take almost any model: one of other columns, or one whose kind of trees sends other messages. Under way,
with private sums already sent, is too late to find out.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb import model_json
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import LARGEST_VALUE, Cuts
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.versions import installed_wheel

_NUMBERS = 0  # XGBoost's split_type of a threshold; 1 is a set of categories
_DROPPED = re.compile(rb'weight_drop(": *)?\[')  # as a key, of JSON or UBJSON


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
        learner = model_json.read_document(model)["learner"]
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
    if _DROPPED.search(model) and not model_json.tree_weights(learner):
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
    _check_thresholds(model, name, parameters, features)


def _check_thresholds(model: bytes, name: str, parameters: TrainingParameters, features: Sequence[str]) -> None:
    for column, thresholds in zip(features, _thresholds(model, len(features)), strict=True):
        if thresholds.size > _most_cuts(parameters.max_bin):
            raise ConfigurationError(
                f"the model {name!r} has {thresholds.size} thresholds on column {column!r}: max_bin must be at least "
                f"{thresholds.size + 2} to continue it"
            )


def _booster(learner: Mapping[str, Any], wanted: str) -> str:
    """Return the kind of a model's trees; ``wanted`` where it may be of either (``Wheel.names_dart``)."""
    if model_json.tree_weights(learner):
        return "dart"
    return str(learner["gradient_booster"]["name"]) if installed_wheel().names_dart else wanted


def _check_trees(learner: Mapping[str, Any], name: str, n_features: int) -> None:
    """Refuse trees in which XGBoost would lose its way, and take the process with it."""
    try:
        if _trees(learner):
            model_json.check_trees(learner, n_features)
            n_outputs = max(1, int(learner["learner_model_param"]["num_class"]))
            if max(model_json.trees_model(learner)["tree_info"]) >= n_outputs:
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
    for tree in _trees(model_json.read_document(model)["learner"]):
        columns = ("left_children", "split_indices", "split_conditions", "split_type")
        for child, feature, threshold, kind in zip(*(tree[column] for column in columns), strict=True):
            # Beyond the outermost cuts lie the thresholds of splits that send only missing values aside.
            if child != -1 and kind == _NUMBERS and abs(threshold) < LARGEST_VALUE:
                found[feature].add(threshold)
    return [np.unique(np.array(sorted(thresholds), dtype=np.float32)) for thresholds in found]


def _trees(learner: Mapping[str, Any]) -> list[dict[str, Any]]:
    booster = learner["gradient_booster"]
    result: list[dict[str, Any]] = booster.get("gbtree", booster).get("model", {}).get("trees", [])
    return result


# What is done to a model after its rounds: probabilities after clipping, weighed leaves.


# From the answers of a model that was trained on clipped gradients to probabilities.
#
# Training with |g| <= C balances clipped gradients: where a share q of like rows is positive, it ends at a p with q
# min(1 - p, C) = (1 - q) min(p, C). So q = p / (p + C) for p below 1 - C, q = C / (1 - p + C) for p above C, and q = p
# in between. A model file of XGBoost has no place for that, so the model carries C as an attribute, which stock XGBoost
# reads over: its own answers are p. The order of rows, and which side of 1/2 they are on, is the same for both.


CLIPPING_ATTRIBUTE = "veilboost_gradients_clipped_at"


def with_clipping(model: bytes, clipped_at: float) -> bytes:
    """Return a model that says where the gradients of its training were clipped. Privacy: it stands in the job."""
    return model_json.with_attribute(model, CLIPPING_ATTRIBUTE, f"{clipped_at:g}")


def clipping_of(attributes: Mapping[str, str]) -> float | None:
    """Return C as a model carries it; None if it carries none. Raises: ValueError: it is no such number."""
    if CLIPPING_ATTRIBUTE not in attributes:
        return None
    clipped_at = float(attributes[CLIPPING_ATTRIBUTE])
    if not (math.isfinite(clipped_at) and 0.5 <= clipped_at <= 1.0):  # below 1/2 p would not follow from q
        raise ValueError("gradients are clipped at 1/2 to 1")
    return clipped_at


def recalibrated(p: NDArray[np.float32], clipped_at: float) -> NDArray[np.float32]:
    """Return probabilities for answers p. Shapes: float32[n] -> float32[n]."""
    one, c = np.float32(1.0), np.float32(clipped_at)
    result: NDArray[np.float32] = np.where(
        p < np.float32(1.0 - clipped_at), p / (p + c), np.where(p > c, c / (one - p + c), p)
    ).astype(np.float32)
    return result


# A state beside a model's: the leaves of its last round count half, or one and a half times, or step away from 0.
#
# Sums of training belong to a state of the model. Where a state must not be used again, training goes on from one
# beside it, which every site computes alike from the model alone. Were all leaves worth half, sums at the new state
# would lie midway between those of the last two rounds and could be told from them to less than a hundredth; with
# leaves weighed in turn they can be told about as closely as those of the next round. A small leaf's rows would hardly
# move so: it steps away from 0 by a quarter of the round's largest leaf, by two in the second such state, and so on.
# Every row then moves by a quarter of that at least, from the model's state, from that of the round before, and from
# state to state.


_LEAF = -1
_WEIGHTS = ((0.5, 1.5), (1.5, 0.5), (0.75, 1.25), (1.25, 0.75))
MOST_STEPS = len(_WEIGHTS)
LEAST_PART = 0.25
"""How far each leaf moves at least, as a part of the largest leaf of the round."""
LEAST_MOVE = 1e-3
"""Below that a round moves no gradient to speak of: of a margin, in units of the slope where the objective has one."""


def state_of(model: bytes) -> str:
    """Return what names a model's state, whatever its attributes are: hex SHA-256 of trees and base score.

    Args:
        model: in XGBoost's JSON form.
    """
    learner = json.loads(model)["learner"]
    document = [learner["gradient_booster"], learner["learner_model_param"]["base_score"]]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def with_last_round_weighed(model: bytes, step: int) -> bytes:
    """Return the model at a state beside its own.

    Of the parallel trees of a round the first of each class is weighed: what others do could undo it.

    Args:
        model: in XGBoost's JSON form, with trees of one value per leaf.
        step: which of the states, up to ``MOST_STEPS``; 0 returns the model as it is.

    Raises:
        ConfigurationError: the last round is no step: its leaves are next to 0, or a tree is a single leaf, whose rows
            all move alike, so that their sums can be told from those before.
    """
    if step == 0:
        return model
    document = json.loads(model)
    within = model_json.trees_model(document["learner"])
    first, last = within["iteration_indptr"][-2:]
    of_class = dict(zip(reversed(within["tree_info"][first:last]), reversed(within["trees"][first:last]), strict=True))
    slope = document["learner"]["objective"].get("pseudo_huber_param", {}).get("huber_slope", 1.0)
    largest = max(float(np.abs(_leaves(tree)[1]).max()) for tree in of_class.values())
    if LEAST_PART * largest < LEAST_MOVE * float(slope):
        raise ConfigurationError("the leaves of the last round are next to 0: its rows would stay where they are")
    if any(_leaves(tree)[0].size < 2 for tree in of_class.values()):
        raise ConfigurationError("a tree of the last round is a single leaf, by which all rows would move alike")
    for tree in of_class.values():
        _weigh(tree, step, np.float32(LEAST_PART * largest))
    return model_json.model_bytes(document)


def _leaves(tree: dict[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return nodes and values of a tree's leaves. Shapes: int64[n_leaves]; float32[n_leaves]."""
    leaves = np.flatnonzero(np.array(tree["left_children"]) == _LEAF)
    return leaves, np.array(tree["split_conditions"], dtype=np.float32)[leaves]


def _weigh(tree: dict[str, Any], step: int, least: np.float32) -> None:
    leaves, values = _leaves(tree)
    of_leaf = np.resize(np.array(_WEIGHTS[step - 1], dtype=np.float32), leaves.size)
    is_small = np.abs(values) * np.minimum(of_leaf, np.abs(of_leaf - 1)) < least
    moved = np.where(is_small, values + np.where(values < 0, -step * least, step * least), values * of_leaf)
    for name in ("split_conditions", "base_weights"):  # a leaf's value, and the weight that it was made from
        all_values = np.array(tree[name], dtype=np.float32)
        all_values[leaves] = moved
        tree[name] = [float(value) for value in all_values]
