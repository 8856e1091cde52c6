"""What is done to a model after its rounds: probabilities after clipping, weighed leaves."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb.model_json import model_bytes, trees_model

# From the answers of a model that was trained on clipped gradients to probabilities.
#
# Training with |g| <= C balances clipped gradients: where a share q of like rows is positive, it ends at a p with q
# min(1 - p, C) = (1 - q) min(p, C). So q = p / (p + C) for p below 1 - C, q = C / (1 - p + C) for p above C, and q = p
# in between. A model file of XGBoost has no place for that, so the model carries C as an attribute, which stock XGBoost
# reads over: its own answers are p. The order of rows, and which side of 1/2 they are on, is the same for both.


CLIPPING_ATTRIBUTE = "veilboost_gradients_clipped_at"


def with_clipping(model: bytes, clipped_at: float) -> bytes:
    """Return a model that says where the gradients of its training were clipped. Privacy: it stands in the job."""
    document = json.loads(model)
    document["learner"].setdefault("attributes", {})[CLIPPING_ATTRIBUTE] = f"{clipped_at:g}"
    return model_bytes(document)


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
    low = p / (p + np.float32(clipped_at))
    high = np.float32(clipped_at) / (np.float32(1.0) - p + np.float32(clipped_at))
    result: NDArray[np.float32] = np.where(
        p < np.float32(1.0 - clipped_at), low, np.where(p > np.float32(clipped_at), high, p)
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
    within = trees_model(document["learner"])
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
    return model_bytes(document)


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
