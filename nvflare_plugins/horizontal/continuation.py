"""Checks a model that training is to continue from, before anything leaves the site.

XGBoost would take almost any model: one of other columns, or one whose kind of trees sends other messages. Under way,
with private sums already sent, is too late to find out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.horizontal.parameters import TrainingParameters


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
        learner = json.loads(bytes(booster.save_raw("json")))["learner"]
    except (xgb.core.XGBoostError, ValueError):
        raise ConfigurationError(f"input {name!r} is not a model that XGBoost {xgb.__version__} reads") from None
    if booster.num_features() != len(features) or list(booster.feature_names or features) != list(features):
        raise ConfigurationError(f"the model {name!r} was trained on other columns, or in another order, than the job's")
    objective = parameters.objective
    trees = learner["gradient_booster"].get("gbtree", learner["gradient_booster"]).get("model", {}).get("trees", [])
    if not trees:
        raise ConfigurationError(f"the model {name!r} has no trees to continue from")
    wants_vectors = parameters.agreed.get("multi_strategy") == "multi_output_tree"
    found_and_wanted = {
        "booster": (learner["gradient_booster"]["name"], parameters.agreed["booster"]),
        "objective": (learner["objective"]["name"], objective.name),
        "number of outputs": (max(1, int(learner["learner_model_param"]["num_class"])), objective.n_outputs),
        "values per leaf": (
            max(1, int(trees[0]["tree_param"]["size_leaf_vector"])),
            objective.n_outputs if wants_vectors else 1,
        ),
    }
    for what, (found, wanted) in found_and_wanted.items():
        if found != wanted:
            raise ConfigurationError(f"the model {name!r} has {what} {found}, the job {wanted}: give the job the model's")
