from __future__ import annotations

import pytest

from nvflare_plugins.growth.arithmetic import why_not_own
from nvflare_plugins.growth.metrics import _COX, _LOSSES
from nvflare_plugins.growth.objectives import _FORMULAS, _SOFTMAX
from nvflare_plugins.growth.ranking import _OF_LISTS, RANK_OBJECTIVES
from nvflare_plugins.wire.envelope import CURVE_METRICS
from nvflare_plugins.xgb.objectives import _METRICS, COX, OBJECTIVES
from nvflare_plugins.xgb.parameters import _ALLOWED, _DART_ONLY, check_parameters


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, None),
        ({"objective": "binary:logistic", "booster": "gbtree", "multi_strategy": "one_output_per_tree"}, None),
        ({"objective": "multi:softprob", "num_class": 3, "base_score": [0.1, 0.2, 0.7], "max_leaves": 5}, None),
        (
            {"monotone_constraints": {"a": 1}, "interaction_constraints": [["a", "b"]], "seed_per_iteration": True},
            None,
        ),
        ({"booster": "dart", "rate_drop": 0.1}, "booster=dart"),
        ({"objective": "multi:softprob", "num_class": 3, "multi_strategy": "multi_output_tree"}, "multi_strategy"),
    ],
)
def test_what_the_grower_does_not_do_is_named(params: dict[str, object], reason: str | None) -> None:
    found = why_not_own(check_parameters(params, ["a", "b"], []))
    assert found is None if reason is None else found is not None and reason in found


def test_every_parameter_that_a_job_may_have_is_decided() -> None:
    """A parameter that is new is refused until someone says that the grower reads it."""
    from nvflare_plugins.growth.arithmetic import _ANY, _TAKEN

    elsewhere = {"nthread", "verbosity", "validate_parameters", "disable_default_eval_metric", "process_type"}
    refused = {*_DART_ONLY, "sampling_method"}
    constraints = {"monotone_constraints", "interaction_constraints"}
    assert {*_ANY, *_TAKEN} - constraints == set(_ALLOWED) - elsewhere - refused


def test_every_objective_and_metric_has_its_formula() -> None:
    assert {*_FORMULAS, *_SOFTMAX, COX, *RANK_OBJECTIVES} == set(OBJECTIVES)
    of_all = {name for names in _METRICS.values() for name in names}
    assert {*_LOSSES, *CURVE_METRICS, _COX, *_OF_LISTS} == of_all
