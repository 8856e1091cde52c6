"""Scores of words in any order equal XGBoost's own on the positions of training, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.cli.main import main
from nvflare_plugins.scoring import VeilBoostClassifier, VeilBoostRegressor, load_model
from tests.support.scoring import CLASSES, changed, frame, matrix_of, positions, train

THREE = {"objective": "multi:softprob", "num_class": 3}
CLASSIFIERS = {
    "binary": {"objective": "binary:logistic"},
    "base score": {"objective": "binary:logistic", "base_score": 0.2},
    "dart": {"objective": "binary:logistic", "booster": "dart", "rate_drop": 0.5, "one_drop": 1},
    "parallel trees": {"objective": "binary:logistic", "num_parallel_tree": 3, "subsample": 0.5},
    "partitions": {"objective": "binary:logistic", "max_cat_to_onehot": 1},
    "multiclass": THREE,
    "multiclass dart": {**THREE, "booster": "dart", "rate_drop": 0.5},
}
REGRESSIONS = {
    "squared error": {"objective": "reg:squarederror"},
    "base score": {"objective": "reg:squarederror", "base_score": 1e6},
    "dart": {"objective": "reg:squarederror", "booster": "dart", "rate_drop": 0.5},
    "poisson": {"objective": "count:poisson"},
    "gamma": {"objective": "reg:gamma"},
    "tweedie": {"objective": "reg:tweedie"},
    "cox": {"objective": "survival:cox"},
    "squared log error": {"objective": "reg:squaredlogerror"},
    "pseudo-Huber": {"objective": "reg:pseudohubererror"},
    "absolute error": {"objective": "reg:absoluteerror"},
    "quantile": {"objective": "reg:quantileerror", "quantile_alpha": 0.3},
    "logistic regression": {"objective": "reg:logistic"},
}


def others() -> tuple[pd.DataFrame, xgb.DMatrix]:
    """Return rows that were not trained on: words with columns shuffled, and positions."""
    rows = frame(500, seed=9)
    return rows[[*rows.columns[::-1]]], matrix_of(positions(rows))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(tmp_path: Path, name: str) -> None:
    trained = train(tmp_path, CLASSIFIERS[name])
    rows, matrix = others()
    wanted = trained.booster.predict(matrix)
    model = load_model(trained.path)
    assert isinstance(model, VeilBoostClassifier)
    found = model.predict_proba(rows)
    assert found.dtype == np.float32
    if wanted.ndim == 1:
        wanted = np.column_stack([1 - wanted, wanted])
    assert np.array_equal(found, wanted)
    assert np.array_equal(model.predict(rows), wanted.argmax(axis=1))
    # The control: rows whose categories are read in another order are scored otherwise.
    assert not np.array_equal(model.predict_proba(rows.assign(colour=rows.colour[::-1].to_numpy())), wanted)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(tmp_path: Path, name: str) -> None:
    values = positions(frame())
    label = np.abs(values[:, 0]) + (np.nan_to_num(values[:, 3]) == 1) + 0.1
    label = label / label.max() if "logistic" in name else label
    trained = train(tmp_path, REGRESSIONS[name], label)
    rows, matrix = others()
    model = load_model(trained.path)
    assert isinstance(model, VeilBoostRegressor)
    assert np.array_equal(model.predict(rows), trained.booster.predict(matrix))


def test_probabilities_of_a_model_that_predicts_classes_are_those_of_its_twin(tmp_path: Path) -> None:
    for folder in ("class", "probability"):
        (tmp_path / folder).mkdir()
    classes = train(tmp_path / "class", {**THREE, "objective": "multi:softmax"})
    twin = train(tmp_path / "probability", THREE)
    rows, matrix = others()
    model = load_model(classes.path)
    assert np.array_equal(model.predict(rows), classes.booster.predict(matrix))
    np.testing.assert_allclose(model.predict_proba(rows), load_model(twin.path).predict_proba(rows), rtol=1e-6)


def test_probabilities_of_raw_margins_are_their_sigmoid(tmp_path: Path) -> None:
    trained = train(tmp_path, {"objective": "binary:logitraw"})
    rows, matrix = others()
    margin, model = trained.booster.predict(matrix), load_model(trained.path)
    np.testing.assert_allclose(model.predict_proba(rows)[:, 1], 1 / (1 + np.exp(-margin.astype(float))), rtol=1e-6)
    assert np.array_equal(model.predict(rows), (margin > 0).astype(int))


def test_a_hinge_predicts_classes_and_no_probabilities(tmp_path: Path) -> None:
    trained = train(tmp_path, {"objective": "binary:hinge"}, classes=CLASSES)
    rows, matrix = others()
    model = load_model(trained.path)
    assert np.array_equal(model.predict(rows), np.array(CLASSES)[trained.booster.predict(matrix).astype(int)])
    assert not hasattr(model, "predict_proba")


def test_the_best_round_is_where_early_stopping_stopped(tmp_path: Path) -> None:
    trained = train(tmp_path, {"objective": "binary:logistic"})
    rows, matrix = others()
    changed(trained.path, lambda document: document["learner"]["attributes"].update(best_iteration="2"))
    best = load_model(trained.path, rounds="best").predict_proba(rows)[:, 1]
    assert np.array_equal(best, trained.booster.predict(matrix, iteration_range=(0, 3)))
    assert np.array_equal(load_model(trained.path).predict_proba(rows)[:, 1], trained.booster.predict(matrix))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("params", [CLASSIFIERS["binary"], CLASSIFIERS["dart"], THREE, {"objective": "count:poisson"}])
def test_files_of_scores_and_explanations(tmp_path: Path, params: dict[str, object], suffix: str) -> None:
    trained = train(tmp_path, params)
    rows, matrix = others()
    data, out = tmp_path / f"rows.{suffix}", tmp_path / f"out.{suffix}"
    rows.to_csv(data, index=False) if suffix == "csv" else rows.to_parquet(data)
    assert main(["predict", str(trained.path), str(data), "--out", str(out), "--explain"]) == 0
    table = pd.read_csv(out) if suffix == "csv" else pd.read_parquet(out)
    wanted, n_outputs = trained.booster.predict(matrix), int(params.get("num_class", 1))  # type: ignore[call-overload]
    names = [name for name in table if name.startswith("probability.")]
    names = {"binary:logistic": names[1:], "count:poisson": ["prediction"]}.get(str(params["objective"]), names)
    assert np.array_equal(table[names].to_numpy(np.float32).reshape(wanted.shape), wanted)
    shap = table[[name for name in table if name.startswith("shap")]].to_numpy(np.float32)
    contributions = trained.booster.predict(matrix, pred_contribs=True)
    assert np.array_equal(shap, contributions.reshape(len(rows), -1))
    margin = trained.booster.predict(matrix, output_margin=True).reshape(len(rows), -1)
    np.testing.assert_allclose(shap.reshape(len(rows), n_outputs, -1).sum(axis=2), margin, atol=1e-4)
