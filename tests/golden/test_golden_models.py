"""Every kind of job gives, with the same randomness, the model that it gave when the golden files were written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from he_processors.curve.registry import available_backends
from nvflare_plugins.scoring.model import FinishedModel, ScoringError
from nvflare_plugins.xgb.model_json import COVERS_ATTRIBUTE, LEAST_XGBOOST, LEAST_XGBOOST_ATTRIBUTE
from tests.golden.jobs import JOBS, MODELS
from tests.golden.write import MANIFEST
from tests.support.scoring import check_covers_add_up

RECORDED = json.loads(MANIFEST.read_text())
ON_EVERY_WHEEL = ("alignment", "dpboost", "grown", "private_trees", "profile", "vertical_merge", "vertical_predict")
"""Of the others XGBoost itself grows the trees or computes the contributions, and each release does so otherwise."""


def trees_of(model: bytes) -> list[dict]:
    return json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]


def leaf_difference(ours: bytes, golden: bytes) -> float:
    """Return the largest difference of leaves relative to max(1, |leaf|); infinite where trees or cut points differ."""
    worst = 0.0
    if len(trees_of(ours)) != len(trees_of(golden)):
        return np.inf
    for mine, theirs in zip(trees_of(ours), trees_of(golden), strict=True):
        if any(
            mine[name] != theirs[name] for name in ("left_children", "right_children", "split_indices", "default_left")
        ):
            return np.inf
        is_leaf = np.array(theirs["left_children"]) < 0
        a, b = np.array(mine["split_conditions"]), np.array(theirs["split_conditions"])
        if (a[~is_leaf] != b[~is_leaf]).any():
            return np.inf
        worst = max(worst, float((np.abs(a - b) / np.maximum(1, np.abs(b)))[is_leaf].max()))
    return worst


def cases() -> list:
    return [pytest.param(name, marks=[pytest.mark.slow] if job.is_slow else []) for name, job in JOBS.items()]


@pytest.mark.parametrize("name", cases())
def test_the_job_gives_the_golden_model(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    if xgb.__version__ != RECORDED["xgboost"] and not name.startswith(ON_EVERY_WHEEL):
        pytest.skip(f"the golden models are of XGBoost {RECORDED['xgboost']}, this is {xgb.__version__}")
    if job.needs_curve and available_backends()[0] == "reference":
        pytest.skip("the C extension was not built")
    found = job.run(tmp_path)
    assert set(found) == set(RECORDED["files"][name])
    for file, content in found.items():
        golden = (MODELS / name / file).read_bytes()
        if job.leaf_tolerance is None:
            assert content == golden, f"{file} differs"
        else:
            assert leaf_difference(content, golden) <= job.leaf_tolerance


def test_the_golden_files_are_those_of_the_manifest() -> None:
    found = {
        folder.name: {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in MODELS.iterdir()
        if folder.is_dir()
    }
    assert found == RECORDED["files"]
    assert set(found) == set(JOBS)


WHOLE = sorted(MODELS.glob("*/*model.json"), key=lambda path: path.parent.name)


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.parent.name)
def test_covers_are_positive_and_add_up_and_ours_are_explained_where_they_are_of_rows(path: Path) -> None:
    document = json.loads(path.read_bytes())
    attributes = document["learner"]["attributes"]
    check_covers_add_up(document)
    assert attributes[LEAST_XGBOOST_ATTRIBUTE] == LEAST_XGBOOST
    is_private = path.parent.name.startswith(("private_trees", "dpboost", "bagging"))
    assert (COVERS_ATTRIBUTE in attributes) == is_private
    model = FinishedModel(path.read_bytes(), path.name)
    if is_private:
        with pytest.raises(ScoringError, match="are not those of training rows"):
            model.check_explainable()
    else:
        model.check_explainable()


@pytest.mark.slow
@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.parent.name)
def test_shap_explains_every_model(path: Path) -> None:
    shap = pytest.importorskip("shap", reason="shap is not installed")
    booster = xgb.Booster(model_file=path)
    rows = np.random.default_rng(0).normal(10, 8, (50, booster.num_features())).astype(np.float32)
    margins = booster.predict(xgb.DMatrix(rows, feature_names=booster.feature_names), output_margin=True)
    explainer = shap.TreeExplainer(booster)
    found = explainer.shap_values(rows).sum(axis=1) + explainer.expected_value
    np.testing.assert_allclose(found, margins, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["leaf", "cut", "tree"])
def test_a_changed_model_is_noticed_under_a_tolerance_too(change: str) -> None:
    golden = (MODELS / "horizontal_ckks" / "model.json").read_bytes()
    document = json.loads(golden)
    trees = document["learner"]["gradient_booster"]["model"]["trees"]
    leaf = trees[0]["left_children"].index(-1)
    if change == "tree":
        del trees[-1]
    else:
        trees[0]["split_conditions"][leaf if change == "leaf" else 0] += 1e-4
    assert leaf_difference(golden, golden) == 0
    assert leaf_difference(json.dumps(document).encode(), golden) > 1e-5
