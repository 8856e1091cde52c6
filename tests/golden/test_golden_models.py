"""Every kind of job gives, with the same randomness, the model that it gave when the golden files were written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from he_processors.curve.registry import available_backends
from tests.golden.jobs import JOBS, MODELS
from tests.golden.write import MANIFEST

RECORDED = json.loads(MANIFEST.read_text())


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
    if xgb.__version__ != RECORDED["xgboost"]:
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
