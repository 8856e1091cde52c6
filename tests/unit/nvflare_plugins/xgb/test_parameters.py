"""The parameter check: refusals by name, normal forms, and agreement with the real wheel."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost

from he_processors.errors import ConfigurationError
from nvflare_plugins.wire.envelope import BaseScoreSource
from nvflare_plugins.xgb import objectives
from nvflare_plugins.xgb.objectives import COX, OBJECTIVES, LabelRule, Task
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters, effective_parameters, local_threads
from tests.support import survival
from tests.support.refusals import refused_for

NAMES = ["age", "bmi", "sex"]
EXTRA = {
    "multi:softprob": {"num_class": 3},
    "multi:softmax": {"num_class": 3},
    "reg:quantileerror": {"quantile_alpha": 0.3},
    "reg:pseudohubererror": {"huber_slope": 2.0},
    "reg:tweedie": {"tweedie_variance_power": 1.2},
}


def checked_of(objective: str, **more: object) -> TrainingParameters:
    params = {"objective": objective, **EXTRA.get(objective, {}), **more}
    return check_parameters(params, NAMES, label=survival.label_of(params))


def facts_of(objective: str, **more: object) -> objectives.ObjectiveFacts:
    return checked_of(objective, **more).objective


def labels_for(facts: objectives.ObjectiveFacts, rng: np.random.Generator, n: int) -> np.ndarray:
    if facts.name == COX:
        return rng.gamma(2.0, 2.0, (n, 1)).astype(np.float32) * np.array([[1, 1]], np.float32)
    if facts.task is Task.SURVIVAL:
        return rng.gamma(2.0, 2.0, (n, 1)).astype(np.float32) * np.array([[1, 2]], np.float32)
    if facts.task is not Task.REGRESSION:
        return rng.integers(0, max(2, facts.n_outputs), n).astype(np.float32)
    return rng.gamma(2.0, 2.0, n).astype(np.float32)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_and_metric_trains_with_the_wheel(objective: str) -> None:
    rng = np.random.default_rng(1)
    task = facts_of(objective).task
    needed = objectives._OBJECTIVE_OF_METRIC
    metrics = [
        {"error": "error@0.4", "tweedie-nloglik": "tweedie-nloglik@1.5"}.get(metric, metric)
        for metric in objectives._METRICS[task]
        if needed.get(metric, objective) == objective
    ]
    checked = checked_of(objective, eval_metric=metrics)
    label = labels_for(checked.objective, rng, 60)
    checked.objective.check_labels(label)
    fields = survival.as_fields(label, objective)
    train = xgboost.QuantileDMatrix(rng.normal(size=(60, 3)), **fields, feature_names=NAMES)
    history: dict[str, dict[str, list[float]]] = {}
    params = checked.for_booster(cores=2)
    xgboost.train(params, train, 2, evals=[(train, "train")], evals_result=history, verbose_eval=0)
    assert list(history["train"]) == metrics


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_default_metric_is_the_one_xgboost_chooses(objective: str) -> None:
    rng = np.random.default_rng(2)
    facts = facts_of(objective)
    label = labels_for(facts, rng, 30)
    fields = survival.as_fields(label, objective)
    train = xgboost.DMatrix(rng.normal(size=(30, 3)), **fields)
    history: dict[str, dict[str, list[float]]] = {}
    params = {"objective": objective, "nthread": 1, **EXTRA.get(objective, {})}
    xgboost.train(params, train, 1, evals=[(train, "t")], evals_result=history, verbose_eval=0)
    assert list(history["t"]) == [facts.default_metric]


def row_gradient(params: dict[str, object], margin: float, label: object, weight: float, k: int) -> list[tuple]:
    """Gradient and hessian of one row, from the root of a tree that XGBoost trains on that row alone."""
    row = xgboost.DMatrix(
        np.zeros((1, 1)), **survival.as_fields(np.array([label])), weight=[weight], base_margin=np.full((1, k), margin)
    )
    exact = {"reg_lambda": 0, "min_child_weight": 0, "max_delta_step": 0, "learning_rate": 1, "nthread": 1}
    model = json.loads(xgboost.train({**params, **exact}, row, 1).save_raw("json"))
    trees = model["learner"]["gradient_booster"]["model"]["trees"]
    return [(-t["base_weights"][0] * t["sum_hessian"][0], t["sum_hessian"][0]) for t in trees]


@pytest.mark.parametrize(
    ("objective", "more"),
    [(name, {}) for name in OBJECTIVES if name != COX]
    + [("binary:logistic", {"scale_pos_weight": 7.0}), ("binary:logitraw", {"scale_pos_weight": 0.1})],
)
def test_bounds_hold_for_the_gradients_of_the_wheel_and_are_nearly_reached(objective: str, more: dict) -> None:
    params = {"objective": objective, **EXTRA.get(objective, {}), **more}
    facts = facts_of(**params)
    labels = {
        Task.REGRESSION: (0.5, 1.0, 40.0),
        Task.SURVIVAL: ((1.0, 1.0), (40.0, np.inf), (0.0, 2.0), (2.0, 2.0000003)),
    }.get(facts.task, range(max(2, facts.n_outputs)))
    seen = [
        (abs(gradient), hessian)
        for margin in (-30.0, -4.0, 0.0, 0.7, 4.0, 30.0)
        for label in labels
        for gradient, hessian in row_gradient(params, margin, label, 2.0, facts.n_outputs)
    ]
    slack = 1 + 1e-5
    for position, bound in enumerate((facts.gradient_bound, facts.hessian_bound)):
        largest = max(pair[position] for pair in seen)
        if bound is not None and not (position == 0 and facts.adaptive_leaf):
            # Weight 2: the bound is per unit weight. Adaptive objectives replace the leaf, so G cannot be read back.
            assert largest <= 2 * bound * slack
        is_close = position == 0 or facts.usual_hessian is None
        if bound is not None and is_close and facts.n_outputs == 1 and not (position == 0 and facts.adaptive_leaf):
            assert largest >= 2 * bound * 0.5


@pytest.mark.parametrize(
    ("objective", "more", "message"),
    [
        ("binary:logistic", {}, BaseScoreSource.MEAN),
        ("binary:logistic", {"scale_pos_weight": 2.0}, BaseScoreSource.STUMP),
        ("binary:logistic", {"scale_pos_weight": 1.0}, BaseScoreSource.MEAN),
        ("binary:logistic", {"base_score": 0.5}, BaseScoreSource.GIVEN),
        ("multi:softprob", {}, BaseScoreSource.CLASSES),
        ("reg:absoluteerror", {}, BaseScoreSource.MEDIAN),
        ("reg:quantileerror", {}, BaseScoreSource.QUANTILE),
        ("reg:pseudohubererror", {}, BaseScoreSource.STUMP),
        ("count:poisson", {}, BaseScoreSource.MEAN),
    ],
)
def test_base_score_message(objective: str, more: dict, message: BaseScoreSource) -> None:
    assert facts_of(objective, **more).base_score_source is message


REFUSED = [
    ({"tree_method": "approx"}, "approx"),
    ({"tree_method": "exact"}, "exact"),
    ({"booster": "gblinear"}, "gblinear"),
    ({"device": "cuda"}, "GPU"),
    ({"process_type": "update"}, "process_type"),
    ({"updater": "grow_quantile_histmaker,refresh"}, "updater"),
    ({"sampling_method": "gradient_based"}, "sampling_method"),
    ({"feature_weights": [1, 2, 3]}, "feature_weights"),
    ({"base_margin": [0.0]}, "base_margin"),
    ({"debug_synchronize": True}, "debug_synchronize"),
    ({"max_cached_hist_node": 1}, "max_cached_hist_node"),
    ({"objective": "rank:ndcg", "lambdarank_unbiased": True}, "lambdarank_unbiased"),
    ({"objective": "rank:ndcg", "lambdarank_pair_method": "all"}, "topk or mean"),
    ({"objective": "rank:ndcg", "eval_metric": "ndcg@0"}, "ndcg@0"),
    ({"objective": "rank:ndcg", "eval_metric": "ndcg@5-"}, "ndcg@5-"),
    ({"objective": "rank:ndcg", "eval_metric": "rmse"}, "ndcg, map, pre"),
    ({"ndcg_exp_gain": False}, "read only by rank:ndcg"),
    ({"objective": "survival:cox"}, "survival"),
    ({"objective": "survival:aft"}, "needs times"),
    ({"objective": "reg:linear"}, "reg:squarederror"),
    ({"objective": "binary:logitsic"}, "supported are"),
    ({"eval_metric": "ndcg"}, "ndcg"),
    ({"eval_metric": "rmse@3"}, "no argument"),
    ({"eval_metric": ["rmse", "rmse"]}, "twice"),
    ({"eval_metric": "tweedie-nloglik"}, "@1.5"),
    ({"eval_metric": "mphe"}, "reg:pseudohubererror"),
    ({"objective": "binary:logistic", "eval_metric": "error@x"}, "error@x"),
    ({"objective": "binary:logistic", "eval_metric": "mlogloss"}, "mlogloss"),
    ({"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]}, "one quantile"),
    ({"objective": "reg:quantileerror"}, "quantile_alpha"),
    ({"objective": "multi:softprob"}, "num_class"),
    ({"num_class": 3}, "num_class"),
    ({"scale_pos_weight": 2.0}, "scale_pos_weight"),
    ({"learning_rte": 0.1}, "learning_rate"),
    ({"eta": 0.1, "learning_rate": 0.2}, "twice"),
    ({"learning_rate": "0.1"}, "number"),
    ({"learning_rate": float("nan")}, "finite"),
    ({"max_depth": 3.5}, "whole"),
    ({"max_depth": 31}, "max_depth"),
    ({"max_depth": 0}, "max_leaves"),
    ({"max_depth": True}, "whole"),
    ({"max_bin": 1}, "max_bin"),
    ({"subsample": 0.0}, "subsample"),
    ({"subsample": 1.5}, "subsample"),
    ({"rate_drop": 0.1}, "dart"),
    ({"base_score": [0.1, 0.2]}, "base_score"),
    ({"objective": "binary:logistic", "base_score": 1.0}, "base_score"),
    ({"objective": "reg:gamma", "base_score": 1e-60}, "base_score"),
    ({"multi_strategy": "multi_output_tree"}, "multi_output_tree"),
    ({"monotone_constraints": {"weight": 1}}, "weight"),
    ({"monotone_constraints": [1, 0]}, "2 directions"),
    ({"monotone_constraints": [1, 0, 2]}, "-1, 0 or 1"),
    ({"interaction_constraints": [["age", 3]]}, "3"),
    ({"interaction_constraints": "[[0,"}, "interaction_constraints"),
    ({"validate_parameters": False}, "validate_parameters"),
    ({"tweedie_variance_power": 2.0, "objective": "reg:tweedie"}, "tweedie_variance_power"),
]


@pytest.mark.parametrize(("params", "said"), REFUSED, ids=[json.dumps(params)[:50] for params, _ in REFUSED])
def test_refused_by_name(params: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("[", r"\[")):
        check_parameters(params, NAMES)


def test_normal_form_is_one_document_for_equal_jobs() -> None:
    one = check_parameters(
        {
            "eta": 0.1,
            "lambda": 2,
            "monotone_constraints": {"sex": -1},
            "interaction_constraints": [["bmi", "age"]],
            "nthread": 1,
        },
        NAMES,
    )
    two = check_parameters(
        {
            "interaction_constraints": "[[0,1]]",
            "monotone_constraints": "(0,0,-1)",
            "reg_lambda": 2.0,
            "learning_rate": 0.1,
            "verbosity": 0,
            "tree_method": "auto",
        },
        NAMES,
    )
    assert one.document() == two.document()
    assert json.loads(json.dumps(one.document())) == one.document()
    other = check_parameters({"eta": 0.1, "lambda": 2.5}, NAMES)
    assert other.document() != one.document()


def test_effective_parameters_come_from_xgboost_itself() -> None:
    assert check_parameters({"objective": "count:poisson"}, NAMES).effective["max_delta_step"].startswith("0.69")
    assert check_parameters({}, NAMES).effective["max_delta_step"] == "0"
    with pytest.raises(ConfigurationError, match=r"does not use.*bogus"):
        effective_parameters({"bogus": 1}, 3)
    with pytest.raises(ConfigurationError, match="refuses the parameters"):
        effective_parameters({"max_depth": -1}, 3)


def test_metrics_may_be_empty_and_default_metrics_are_off() -> None:
    checked = check_parameters({"objective": "binary:logistic"}, NAMES, metrics=[])
    assert checked.metrics == ()
    train = xgboost.DMatrix(np.zeros((4, 3)), label=[0, 1, 0, 1], feature_names=NAMES)
    booster = xgboost.train(checked.for_booster(cores=2), train, 1)
    assert booster.eval(train) == "[0]"


@pytest.mark.parametrize(
    ("requested", "cores", "expected"), [(0, 1, 1), (0, 2, 1), (0, 8, 7), (4, 8, 4), (16, 8, 7), (3, 2, 1)]
)
def test_a_core_is_left_for_the_mediator(requested: int, cores: int, expected: int) -> None:
    assert local_threads(requested, cores) == expected


@pytest.mark.parametrize(
    ("objective", "good", "bad"),
    [
        ("binary:logistic", [0, 0.5, 1], [-0.1, 1.1, np.nan]),
        ("binary:hinge", [0, 1], [0.5, 2, np.nan]),
        ("multi:softprob", [0, 1, 2], [3, 0.5, -1, np.inf]),
        ("reg:gamma", [0.1, 9], [0, -1, np.inf]),
        ("count:poisson", [0, 3], [-1, np.nan]),
        ("reg:squaredlogerror", [-0.9, 3], [-1, np.nan]),
        ("reg:squarederror", [-5, 3], [np.inf, np.nan]),
    ],
)
def test_labels_are_checked_without_a_value_or_count_in_the_error(objective: str, good: list, bad: list) -> None:
    facts = facts_of(objective)
    assert isinstance(facts.label_rule, LabelRule)
    facts.check_labels(np.array(good, np.float32))
    for more in range(1, len(bad) + 1):
        with refused_for("some are not") as refusal:
            facts.check_labels(np.array(good + bad[:more], np.float32))
        classes = "give label_classes, " if objective.startswith(("binary", "multi")) else ""
        assert refusal.value.reason == (
            f"{objective}: labels must be {facts.label_rule.value}; some are not. Correct the label column, "
            f"{classes}or choose another objective."
        )
