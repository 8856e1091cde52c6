"""Gradients, base scores, metrics and frames of models are XGBoost's: of the installed release and of stored ones."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.model import base_score_of, continued_model, new_model, predict_margins
from nvflare_plugins.growth.objectives import FirstEstimate, Objective
from nvflare_plugins.xgb.model_json import model_bytes
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters
from tests.support import xgboost_rows as oracle
from tests.support.survival import label_of

FOLDER = Path(__file__).parents[1] / "golden" / "growth"
RELEASES = sorted({"3.3.0", "3.4.1", xgb.__version__})
SETTINGS = [(name, weighted) for name in oracle.CASES for weighted in (False, True)]
CONTINUED = {
    "3.3": "682d91f1f2676628b8322fed5036514d603229cb2a2c83bdd6be92819e424ca2",
    "3.4": "0664fe499e44a2bfd2d4fb1d0c80992ec55239ce5e06dfa4e2bfe56301247e0b",
}
"""Hashes of the documents to which training adds that goes on from the stored models."""
PRINTED = {"aucpr": 1e-13}
"""Metrics that are not the same double: the logarithms in it are the C library's there and numpy's here."""


@functools.cache
def _facts(version: str) -> dict[str, Any]:
    stored = FOLDER / f"rows_{version[:3]}.json"
    found: dict[str, Any] = oracle.facts() if version == xgb.__version__ else json.loads(stored.read_text())
    assert found["version"] == version
    return found


def _objective(name: str, version: str) -> Objective:
    return Objective.of_job(_checked(name), version[:3])


def _checked(name: str) -> TrainingParameters:
    params, _ = oracle.CASES[name]
    return check_parameters(params, ["a"], [], label=label_of(params))


def _fact(version: str, name: str, weighted: bool) -> dict[str, Any]:
    found: dict[str, Any] = _facts(version)[f"{name}, {'weighted' if weighted else 'plain'}"]
    return found


def _numbers(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def _own_pairs(objective: Objective, name: str, weighted: bool) -> np.ndarray:
    """Each row by itself: a scale is then of one residual, as in a tree of one row."""
    margins, labels, weights = oracle.rows(name, oracle.N_ROWS, weighted)
    found = []
    for i in range(len(labels)):
        row = slice(i, i + 1)
        weight = None if weights is None else weights[row]
        total = 1.0 if weight is None else float(weight[0])
        roots = float(objective.scale_rows(margins[row], labels[row], weight)[0]) if objective.is_smooth else 0.0
        scale = objective.scale(roots, total)
        found.append(objective.gradients(margins[row], labels[row], weight, scale)[:, 0])
    return np.array(found).transpose(1, 0, 2)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(("name", "weighted"), SETTINGS)
def test_gradients_are_those_of_trees_of_one_row(version: str, name: str, weighted: bool) -> None:
    expected = _numbers(_fact(version, name, weighted)["pairs"])
    own = _own_pairs(_objective(name, version), name, weighted)
    # Hessians of millions, which squared logarithms have, do not vanish beside lambda.
    g, h = own[..., 0].astype(np.float64), own[..., 1].astype(np.float64)
    own[..., 0] = (g / (h + oracle.LAMBDA)).astype(np.float32) * np.float32(oracle.LAMBDA)
    assert own.tobytes() == expected.tobytes()


@pytest.mark.parametrize("version", [version for version in RELEASES if version >= "3.4"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["absolute", "quantile"])
def test_smooth_losses_share_the_scale_of_all_rows(version: str, name: str, weighted: bool) -> None:
    objective = _objective(name, version)
    margins, labels, weights = oracle.rows(name, oracle.N_ROWS, weighted)
    roots = objective.scale_rows(margins, labels, weights).astype(np.float64).sum()
    total = float(labels.size) if weights is None else float(weights.astype(np.float64).sum())
    pairs = objective.gradients(margins, labels, weights, objective.scale(roots, total))[0].astype(np.float64)
    own = np.stack([(-pairs[:, 0] / pairs[:, 1]), pairs[:, 1]], axis=1).astype(np.float32)
    expected = _numbers(_fact(version, name, weighted)["leaves"]).reshape(-1, 2)
    alone = ~np.isnan(expected).any(axis=1)
    assert np.count_nonzero(alone) >= oracle.N_ROWS // 2
    assert own[alone].tobytes() == expected[alone].tobytes()


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(("name", "weighted"), SETTINGS)
def test_base_scores_and_frames_of_models_are_those_of_training(version: str, name: str, weighted: bool) -> None:
    objective, expected = _objective(name, version), _fact(version, name, weighted)["frame"]
    _, labels, weights = oracle.rows(name, oracle.N_MANY, weighted)
    facts = _checked(name).objective
    estimate = FirstEstimate(objective, facts.base_score_source, 1)
    while estimate.due:
        estimate.take(estimate.local(labels, weights).astype(np.float64))
    score = estimate.base_score()
    if weighted and objective.n_outputs > 1:
        # XGBoost adds the weights of a class in float32, in the order of rows; here they are added exactly.
        assert np.abs(score - base_score_of(expected)).max() < 2e-6
        score = base_score_of(expected)
    frame = new_model(objective, score, is_given=False, feature_names=["0"] * objective.n_outputs, feature_types=[])
    frame["learner"]["feature_names"] = []
    model = frame["learner"]["gradient_booster"]["model"]
    model["gbtree_model_param"]["num_trees"] = str(objective.n_outputs)
    model["iteration_indptr"], model["tree_info"] = [0, objective.n_outputs], list(range(objective.n_outputs))
    assert frame == expected
    assert _sorted(frame)


def _sorted(document: Any) -> bool:
    """Whether fields stand in the order in which XGBoost writes them."""
    if isinstance(document, dict):
        return list(document) == sorted(document) and all(map(_sorted, document.values()))
    return not isinstance(document, list) or all(map(_sorted, document))


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(("name", "weighted"), SETTINGS)
def test_metrics_of_one_site_are_those_of_evaluation(version: str, name: str, weighted: bool) -> None:
    objective, (_, names) = _objective(name, version), oracle.CASES[name]
    rows = oracle.evaluated_rows(name, weighted)
    for metric, expected in zip(names, _fact(version, name, weighted)["metrics"], strict=True):
        own = Metric(metric, objective)
        value = own.value(own.parts(*rows))
        assert not np.isnan(expected) and np.float32(value) == np.float32(expected), metric
        assert value == pytest.approx(expected, rel=PRINTED.get(metric, 0.0), abs=0.0), metric


@pytest.mark.parametrize("release", ["3.3", "3.4"])
def test_a_model_of_another_release_goes_on_as_the_same_document_under_every_wheel(release: str) -> None:
    model = (FOLDER / f"model_{release}.ubj").read_bytes()
    columns, _ = oracle.small_model()
    params = {"objective": "multi:softprob", "num_class": oracle.CLASSES}
    names, types = ["Größe", "b", "c"], ["float", "float", "c"]
    objective = Objective.of_job(check_parameters(params, names, []), "3.4")
    document = continued_model(model, objective, feature_names=names, feature_types=types)
    own = model_bytes(document)
    assert hashlib.sha256(own).hexdigest() == CONTINUED[release]
    matrix = xgb.DMatrix(columns, feature_names=names, feature_types=types, enable_categorical=True)
    margins = predict_margins(document, objective.margins_of(base_score_of(document)), columns)
    for raw in (model, own):
        found = xgb.Booster(model_file=bytearray(raw)).predict(matrix, output_margin=True)
        assert found.tobytes() == margins.tobytes()
