"""Models that jobs wrote are scored by whoever has the file alone; one party's part is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.scoring import ScoringError, load_model
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.continuation import recalibrated
from nvflare_plugins.xgb.model_json import CATEGORIES_ATTRIBUTE
from tests.golden.jobs import MODELS

WHOLE = sorted(path for path in MODELS.glob("*/*.json") if path.name in ("model.json", "merged_model.json"))
PARTS = sorted(path for path in MODELS.glob("vertical_plain/site-*.json"))
WITHOUT_COVERS = ("bagging", "dpboost", "private")


def of_job(path: Path) -> str:
    return path.parent.name


def test_there_are_models_of_every_kind() -> None:
    kinds = ("horizontal", "bagging", "dpboost", "private", "vertical_merge")
    assert all(any(of_job(path).startswith(kind) for path in WHOLE) for kind in kinds)
    assert len(PARTS) == 3


@pytest.mark.parametrize("path", WHOLE, ids=of_job)
def test_whole_models_are_scored_as_xgboost_does(path: Path) -> None:
    booster, model = xgb.Booster(model_file=path), load_model(path)
    lists = json.loads(booster.attr(CATEGORIES_ATTRIBUTE) or "{}")
    rng = np.random.default_rng(0)
    values = rng.normal(scale=3, size=(200, booster.num_features())).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    rows = pd.DataFrame(values, columns=model.feature_names_in_)
    for place, name in enumerate(model.feature_names_in_):
        if name in lists:
            values[:, place] = rng.integers(0, len(lists[name]), 200)
            rows[name] = np.array([str(one) for one in lists[name]])[values[:, place].astype(int)]
    names = None if booster.feature_names is None else list(booster.feature_names)
    matrix = xgb.DMatrix(values, feature_names=names, feature_types=booster.feature_types, enable_categorical=True)
    wanted = booster.predict(matrix)
    scored = model.predict(rows) if not hasattr(model, "predict_proba") else model.predict_proba(rows)
    if scored.ndim > wanted.ndim:
        scored = scored[:, model.classes_.tolist().index(model.model_.classes[1])]
    if model.model_.clipped_at is not None:
        wanted = recalibrated(wanted, model.model_.clipped_at)
    assert np.array_equal(scored, wanted)
    if of_job(path).startswith(WITHOUT_COVERS):
        with pytest.raises(ScoringError, match="cannot be explained"):
            model.model_.contributions(values)
    else:
        shap = model.model_.contributions(values)
        assert np.array_equal(shap.reshape(-1), booster.predict(matrix, pred_contribs=True).reshape(-1))


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_parts_are_refused(path: Path) -> None:
    with pytest.raises(ScoringError, match="one party's part of a vertical model"):
        FinishedModel.read(path)
