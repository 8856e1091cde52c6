"""The least number of rows in every node of a tree, kept by min_child_weight where hessians are bounded."""

from __future__ import annotations

import dataclasses
import logging

from he_processors.errors import PolicyRefusal
from nvflare_plugins.xgb.parameters import TrainingParameters

_DEFAULT_CHILD_WEIGHT = 1.0  # XGBoost's

_log = logging.getLogger(__name__)


def obeys_child_weight(parameters: TrainingParameters) -> bool:
    """Tell whether min_child_weight can keep nodes large: hessians are bounded, and XGBoost looks at it."""
    is_vector = parameters.agreed.get("multi_strategy") == "multi_output_tree"
    return parameters.objective.hessian_bound is not None and not is_vector


def child_weight(parameters: TrainingParameters) -> float:
    """Return the min_child_weight in effect."""
    return float(parameters.agreed.get("min_child_weight", _DEFAULT_CHILD_WEIGHT))  # type: ignore[arg-type]


def with_floor(parameters: TrainingParameters, rows_per_node: int, largest: float = 1.0) -> TrainingParameters:
    """Return the parameters with a min_child_weight under which no node holds fewer rows.

    A row's hessian is at most the objective's bound times its weight, so a node whose hessians add up to k times the
    largest such product holds at least k rows.

    Args:
        rows_per_node: k; 0 for no floor.
        largest: no weight exceeds it.

    Raises:
        PolicyRefusal: the job gives a smaller number itself.
    """
    if rows_per_node == 0 or not obeys_child_weight(parameters):
        return parameters
    needed = rows_per_node * float(parameters.objective.hessian_bound or 0.0) * largest
    is_given = "min_child_weight" in parameters.agreed
    if is_given and child_weight(parameters) < needed:
        raise PolicyRefusal(
            f"min_child_weight={child_weight(parameters):g} does not keep nodes from holding fewer than "
            f"{rows_per_node} rows. Policy key: min_rows_per_node. Remedy: give at least {needed:.9g}, leave it out, "
            "or ask the sites to lower the key."
        )
    if is_given or needed <= _DEFAULT_CHILD_WEIGHT:
        return parameters
    _log.info("min_child_weight is %g, so that every node holds at least %d rows", needed, rows_per_node)
    return dataclasses.replace(
        parameters,
        agreed={**parameters.agreed, "min_child_weight": needed},
        effective={**parameters.effective, "min_child_weight": f"{needed:.9g}"},
    )
