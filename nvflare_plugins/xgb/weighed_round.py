"""A state beside a model's: the leaves of its last round count half, and one and a half times, in turn.

Sums of training belong to a state of the model. Where a state must not be used again, training goes on from one beside
it, which every site computes alike from the model alone. Were all leaves worth half, sums at the new state would lie
midway between those of the last two rounds and could be told from them to less than a hundredth; with leaves weighed in
turn they can be told about as closely as those of the next round.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb.model_json import model_bytes, trees_model

_LEAF = -1
_WEIGHTS = ((0.5, 1.5), (1.5, 0.5), (0.75, 1.25), (1.25, 0.75))
MOST_STEPS = len(_WEIGHTS)


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

    Args:
        model: in XGBoost's JSON form, with trees of one value per leaf.
        step: which of the states, up to ``MOST_STEPS``; 0 returns the model as it is.

    Raises:
        ConfigurationError: some leaf of the last round is 0, so that its rows would stay where they are.
    """
    if step == 0:
        return model
    document = json.loads(model)
    within = trees_model(document["learner"])
    first, last = within["iteration_indptr"][-2:]
    for tree in within["trees"][first:last]:
        _weigh(tree, _WEIGHTS[step - 1])
    return model_bytes(document)


def _weigh(tree: dict[str, Any], weights: tuple[float, float]) -> None:
    leaves = np.flatnonzero(np.array(tree["left_children"]) == _LEAF)
    of_leaf = np.resize(np.array(weights, dtype=np.float32), leaves.size)
    for name in ("split_conditions", "base_weights"):  # a leaf's value, and the weight that it was made from
        values = np.array(tree[name], dtype=np.float32)
        values[leaves] *= of_leaf
        if name == "split_conditions" and (values[leaves] == 0).any():
            raise ConfigurationError("a leaf of the last round is 0: its rows would stay at a state that is used up")
        tree[name] = [float(value) for value in values]
