from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth import model as growth_model
from nvflare_plugins.growth.model import (
    VERSIONS,
    add_round,
    base_score_of,
    check_predictor,
    continued_model,
    n_rounds_of,
    new_model,
    predict_margins,
)
from nvflare_plugins.growth.objectives import ARITHMETICS, Objective
from nvflare_plugins.xgb.model_json import model_bytes, trees_model
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters

NAMES, TYPES = ["Größe", "b", "c"], ["float", "float", "c"]
N = 800
JOBS: dict[str, dict[str, Any]] = {
    "numbers": {"objective": "reg:squarederror", "max_depth": 4},
    "sets of categories": {"objective": "binary:logistic", "max_cat_to_onehot": 1, "max_depth": 5},
    "one category each": {"objective": "binary:logistic", "max_cat_to_onehot": 100, "scale_pos_weight": 2.3},
    "a forest a round": {"objective": "count:poisson", "num_parallel_tree": 3, "colsample_bynode": 0.7},
    "several classes": {"objective": "multi:softprob", "num_class": 3, "num_parallel_tree": 2, "max_depth": 3},
    "a given start": {"objective": "reg:gamma", "base_score": 0.123456, "grow_policy": "lossguide", "max_leaves": 9},
    "starts of classes": {"objective": "multi:softmax", "num_class": 3, "base_score": [0.1, 0.2, 0.7]},
}


def _release() -> str:
    return ".".join(xgb.__version__.split(".")[:2])


def _data(n_classes: int = 0) -> tuple[np.ndarray, xgb.DMatrix]:
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(N, 3)).astype(np.float32)
    rows[:, 2] = rng.integers(0, 9, N)
    rows[rng.random((N, 3)) < 0.1] = np.nan
    label = rng.integers(0, n_classes, N) if n_classes else (np.nan_to_num(rows[:, 0]) > 0.2) + 0.0
    return rows, xgb.DMatrix(rows, label=label, **_columns())


def _columns() -> dict[str, Any]:
    return {"feature_names": NAMES, "feature_types": TYPES, "enable_categorical": True}


def _trained(job: dict[str, Any], matrix: xgb.DMatrix, n_rounds: int, start: bytes | None = None) -> xgb.Booster:
    labels = np.abs(matrix.get_label()) + (0.1 if job["objective"] == "reg:gamma" else 0)
    matrix.set_label(labels)
    given = None if start is None else bytearray(start)
    booster = xgb.Booster({**job, "nthread": 1, "tree_method": "hist"}, [matrix], model_file=given)
    for number in range(n_rounds):
        booster.update(matrix, number)
    return booster


def _document(booster: xgb.Booster) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(bytes(booster.save_raw("json")))
    return document


def _rounds(document: dict[str, Any], first: int = 0) -> list[list[list[dict[str, Any]]]]:
    """Return XGBoost's own trees as the grower hands them over: arrays, without what the frame knows."""
    model, rounds = trees_model(document["learner"]), []
    n_outputs = max(1, int(document["learner"]["learner_model_param"]["num_class"]))
    for number in range(first, len(model["iteration_indptr"]) - 1):
        outputs: list[list[dict[str, Any]]] = [[] for _ in range(n_outputs)]
        for index in range(*model["iteration_indptr"][number : number + 2]):
            fields = {
                key: np.array(value) for key, value in model["trees"][index].items() if key[:2] not in ("id", "tr")
            }
            outputs[model["tree_info"][index]].append(fields)
        rounds.append(outputs)
    return rounds


def _rebuilt(parameters: TrainingParameters, document: dict[str, Any], arithmetic: str) -> dict[str, Any]:
    objective = Objective.of_job(parameters, arithmetic)
    own = new_model(
        objective,
        base_score_of(document),
        is_given="base_score" in parameters.agreed,
        feature_names=NAMES,
        feature_types=TYPES,
        num_parallel_tree=int(parameters.effective["num_parallel_tree"]),
    )
    for trees in _rounds(document):
        add_round(own, trees)
    return own


@pytest.mark.parametrize("name", JOBS)
def test_a_model_of_xgboost_s_trees_is_xgboost_s_in_every_field(name: str) -> None:
    job = JOBS[name]
    rows, matrix = _data(job.get("num_class", 0))
    booster = _trained(job, matrix, 4)
    expected = _document(booster)
    expected["version"] = VERSIONS[_release()]
    parameters = check_parameters(job, NAMES, [])
    own = _rebuilt(parameters, expected, _release())
    assert own == expected and n_rounds_of(own) == 4
    again = xgb.Booster(model_file=bytearray(model_bytes(own)))
    saved = _document(again)
    assert saved.pop("version") == _document(booster)["version"] and saved == {"learner": own["learner"]}
    assert again.predict(matrix).tobytes() == booster.predict(matrix).tobytes()
    margins = predict_margins(own, Objective.of_job(parameters, _release()).margins_of(base_score_of(own)), rows)
    assert margins.reshape(-1).tobytes() == booster.predict(matrix, output_margin=True).tobytes()
    if job["objective"] != "multi:softmax":  # which predicts classes
        seen = Objective.of_job(parameters, _release()).evaluated(margins)
        assert seen.reshape(-1).tobytes() == booster.predict(matrix).tobytes()


def test_models_of_one_arithmetic_are_the_same_bytes_whatever_wheel_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    _, matrix = _data()
    document = _document(_trained(JOBS["numbers"], matrix, 2))
    parameters = check_parameters(JOBS["numbers"], NAMES, [])
    here = {arithmetic: model_bytes(_rebuilt(parameters, document, arithmetic)) for arithmetic in ARITHMETICS}
    assert len(set(here.values())) == len(ARITHMETICS)
    monkeypatch.setattr(xgb, "__version__", "9.9.9")
    assert {arithmetic: model_bytes(_rebuilt(parameters, document, arithmetic)) for arithmetic in ARITHMETICS} == here


@pytest.mark.parametrize("name", ["sets of categories", "a forest a round", "several classes", "a given start"])
@pytest.mark.parametrize("form", ["json", "ubj"])
def test_training_that_goes_on_adds_to_a_model_of_xgboost_s_own(name: str, form: str) -> None:
    job = JOBS[name]
    _, matrix = _data(job.get("num_class", 0))
    start = _trained(job, matrix, 2)
    start.set_attr(note="Ä")
    raw = bytes(start.save_raw(form))
    expected = _document(_trained(job, matrix, 3, raw))
    parameters = check_parameters(job, NAMES, [])
    objective = Objective.of_job(parameters, _release())
    parallel = int(parameters.effective["num_parallel_tree"])
    own = continued_model(raw, objective, feature_names=NAMES, feature_types=TYPES, parallel=parallel)
    assert n_rounds_of(own) == 2
    for trees in _rounds(expected, 2):
        add_round(own, trees)
    expected["version"] = VERSIONS[_release()]
    assert own == expected and own["learner"]["attributes"] == {"note": "Ä"}


def test_what_belongs_to_the_job_is_the_job_s_when_training_goes_on() -> None:
    _, matrix = _data()
    raw = bytes(_trained(JOBS["one category each"], matrix, 1).save_raw("ubj"))
    job = {**JOBS["one category each"], "scale_pos_weight": 0.4}
    objective = Objective.of_job(check_parameters(job, NAMES, []), "3.4")
    own = continued_model(raw, objective, feature_names=NAMES, feature_types=TYPES)
    assert own["version"] == [3, 4, 1]
    assert own["learner"]["objective"] == _document(_trained(job, matrix, 1, raw))["learner"]["objective"]
    with pytest.raises(ConfigurationError, match="num_parallel_tree=1, the job 2: give the job the model's"):
        continued_model(raw, objective, feature_names=NAMES, feature_types=TYPES, parallel=2)


@pytest.mark.parametrize(
    "more",
    [{"booster": "dart", "rate_drop": 0.5, "one_drop": True}, {"multi_strategy": "multi_output_tree", "num_class": 3}],
)
@pytest.mark.parametrize("form", ["json", "ubj"])
def test_models_that_only_xgboost_goes_on_with_are_refused(more: dict[str, Any], form: str) -> None:
    objective = "multi:softprob" if "num_class" in more else "binary:logistic"
    _, matrix = _data(more.get("num_class", 0))
    if "num_class" in more:  # XGBoost has no sets of categories with vector leaves
        matrix = xgb.DMatrix(np.zeros((N, 3)), label=matrix.get_label())
    raw = bytes(_trained({"objective": objective, **more}, matrix, 3).save_raw(form))
    job = Objective.of_job(check_parameters(JOBS["numbers"], NAMES, []), "3.3")
    with pytest.raises(ConfigurationError, match="goes on under engine xgboost only"):
        continued_model(raw, job, feature_names=NAMES, feature_types=TYPES)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_the_wheel_predicts_what_models_say(arithmetic: str) -> None:
    check_predictor(arithmetic)


def _last_bit(margins: np.ndarray) -> np.ndarray:
    return np.nextafter(margins, np.float32(np.inf))


def _other_form(margins: np.ndarray) -> np.ndarray:
    return margins.reshape(-1)


@pytest.mark.parametrize("change", [_last_bit, _other_form])
def test_a_wheel_that_predicts_otherwise_is_named(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = xgb.Booster.predict
    monkeypatch.setattr(xgb.Booster, "predict", lambda *args, **more: change(predict(*args, **more)))
    with pytest.raises(ConfigurationError, match=f"this site's xgboost {xgb.__version__} predicts other margins"):
        check_predictor("3.2")


def test_a_wheel_that_does_not_load_models_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_model.model_json, "model_bytes", lambda document: b"{}")
    with pytest.raises(ConfigurationError, match=f"this site's xgboost {xgb.__version__}"):
        check_predictor("3.2")


def test_numbers_are_written_as_xgboost_writes_them() -> None:
    rng = np.random.default_rng(7)
    values = rng.integers(0x00800000, 0x7F000000, 3_000, dtype=np.uint32).view(np.float32)
    one = Objective.of_job(check_parameters({"objective": "multi:softprob", "num_class": 3_000}, ["a"], []), "3.2")
    document = new_model(one, values, is_given=True, feature_names=["a"], feature_types=[])
    saved = _document(xgb.Booster(model_file=bytearray(model_bytes(document))))
    assert saved["learner"] == document["learner"]
