"""Models in the form of other libraries answer as XGBoost does, or are refused by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.cli.main import main
from nvflare_plugins.scoring import export as conversion
from nvflare_plugins.scoring.model import FinishedModel, ScoringError
from tests.oracle.test_scoring_equals_xgboost import CLASSIFIERS, REGRESSIONS, others
from tests.support.examples import quick
from tests.support.scoring import CATEGORIES, CLASSES, NAMES, changed, frame, matrix_of, positions, train

THREE = CLASSIFIERS["multiclass"]
MODELS: dict[str, dict[str, Any]] = {
    **CLASSIFIERS,
    **{f"regression: {name}": params for name, params in REGRESSIONS.items()},
    "lossguide": {"objective": "binary:logistic", "grow_policy": "lossguide"},
    "parallel multiclass": {**THREE, "num_parallel_tree": 2},
    "softmax": {**THREE, "objective": "multi:softmax"},
    "raw margins": {"objective": "binary:logitraw"},
    "hinge": {"objective": "binary:hinge"},
}
FAR_AWAY = ("regression: base score",)  # whose leaves are lost beside it
ONE_BY_ONE, SETS = {"max_cat_to_onehot": 100}, {"max_cat_to_onehot": 1}
KINDS = {"categories": ONE_BY_ONE, "sets": SETS}


def trained_as(folder: Path, name: str, **more: Any) -> Any:
    values, label = positions(frame()), None
    if name.startswith("regression"):
        label = np.abs(values[:, 0]) + (np.nan_to_num(values[:, 3]) == 1) + 0.1
        label = label / label.max() if "logistic" in name else label
    return train(folder, {**MODELS[name], **more}, label)


def near(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [ONE_BY_ONE, SETS], ids=["categories", "sets"])
def test_treelite(tmp_path: Path, name: str, kind: dict[str, int]) -> None:
    treelite = pytest.importorskip("treelite")
    trained = trained_as(tmp_path, name, **kind)
    out = tmp_path / "model.treelite"
    assert main(["export", str(trained.path), str(out)]) == 0
    rows = positions(others()[0][NAMES])
    found = np.asarray(treelite.gtil.predict(treelite.Model.deserialize(str(out)), rows))
    wanted = trained.booster.predict(matrix_of(rows))
    if name == "softmax":
        wanted = FinishedModel.read(trained.path).probabilities(rows)
    near(found, wanted)
    # The control: rows of other categories get other answers.
    rows[:, 3] = (rows[:, 3] + 1) % 3
    others_found = np.asarray(treelite.gtil.predict(treelite.Model.deserialize(str(out)), rows))
    assert name in FAR_AWAY or not np.allclose(others_found, found)


@pytest.mark.parametrize(
    ("kind", "name"),
    quick(itertools.product(KINDS, MODELS), *zip(itertools.cycle(KINDS), MODELS, strict=False)),
)
def test_onnx(tmp_path: Path, name: str, kind: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    trained = trained_as(tmp_path, name, **KINDS[kind])
    out = tmp_path / "model.onnx"
    assert main(["export", str(trained.path), str(out)]) == 0
    session = runtime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    model, rows = FinishedModel.read(trained.path), positions(others()[0][NAMES])
    answers = dict(zip([one.name for one in session.get_outputs()], session.run(None, {"features": rows}), strict=True))
    near(answers["prediction"], trained.booster.predict(matrix_of(rows)))
    assert ("probabilities" in answers) == model.has_probabilities
    if model.has_probabilities:
        near(answers["probabilities"], model.probabilities(rows))
    rows[:, 3] = (rows[:, 3] + 1) % 3
    others_found = session.run(["prediction"], {"features": rows})[0]
    assert name in FAR_AWAY or not np.allclose(others_found, answers["prediction"])


def test_vector_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    treelite = pytest.importorskip("treelite")
    pytest.importorskip("onnxruntime")
    values = positions(frame())[:, :3]
    matrix = xgb.DMatrix(values, label=np.arange(300) % 3, feature_names=NAMES[:3])
    booster = xgb.train({**THREE, "multi_strategy": "multi_output_tree", "nthread": 1}, matrix, 3)
    path, out = tmp_path / "model.json", tmp_path / "model.treelite"
    booster.save_model(path)
    assert main(["export", str(path), str(out)]) == 0
    near(np.asarray(treelite.gtil.predict(treelite.Model.deserialize(str(out)), values)), booster.predict(matrix))
    assert main(["export", str(path), str(tmp_path / "model.onnx")]) == 1
    assert "vectors (multi_output_tree)" in capsys.readouterr().err and not (tmp_path / "model.onnx").exists()


def test_sets_of_many_categories_and_trees_of_one_leaf(tmp_path: Path) -> None:
    """Runtimes keep small sets as bits and large ones as chains; a set may hold the first category and the last."""
    runtime = pytest.importorskip("onnxruntime")
    draw = np.random.default_rng(3)
    rows = np.stack([draw.integers(0, 90, 3000), draw.normal(size=3000)], axis=1).astype(np.float32)
    rows[draw.random(3000) < 0.1, 0] = np.nan
    label = (np.nan_to_num(rows[:, 0] * 7919 % 13, nan=3) > 5).astype(np.float32)
    matrix = xgb.DMatrix(rows, label, feature_names=["c", "x"], feature_types=["c", "float"], enable_categorical=True)
    for gamma in (0, 1e6):
        params = {"objective": "binary:logistic", "max_cat_to_onehot": 1, "max_depth": 4, "gamma": gamma}
        booster = xgb.train({**params, "nthread": 1, "base_score": 0.3}, matrix, 5)
        booster.set_attr(veilboost_categories=json.dumps({"c": [f"k{one}" for one in range(90)]}))
        booster.save_model(tmp_path / "model.json")
        sizes = [
            s
            for t in json.loads((tmp_path / "model.json").read_text())["learner"]["gradient_booster"]["model"]["trees"]
            for s in t["categories_sizes"]
        ]
        assert not sizes if gamma else max(sizes) > 32
        assert main(["export", str(tmp_path / "model.json"), str(tmp_path / "model.onnx")]) == 0
        session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
        near(session.run(["prediction"], {"features": rows})[0], booster.predict(matrix))


def test_files_say_what_their_columns_and_classes_are_and_hold_no_row_counts(tmp_path: Path) -> None:
    onnx, treelite = pytest.importorskip("onnx"), pytest.importorskip("treelite")
    trained = train(tmp_path, {"objective": "binary:logistic", **ONE_BY_ONE}, classes=CLASSES)
    for suffix in ("onnx", "treelite"):
        assert main(["export", str(trained.path), str(tmp_path / f"model.{suffix}")]) == 0
    read = onnx.load(tmp_path / "model.onnx")
    model = treelite.Model.deserialize(str(tmp_path / "model.treelite"))
    said = [
        json.loads({one.key: one.value for one in read.metadata_props}["veilboost"]),
        json.loads(model.get_header_accessor().get_field("attributes"))["veilboost"],
    ]
    for facts in said:
        assert facts["features"] == NAMES and facts["classes"] == CLASSES
        assert facts["categories"] == {name: [str(one) for one in public] for name, public in CATEGORIES.items()}
    document = json.loads(model.dump_as_json(pretty_print=False))
    hessians = [node.get("sum_hess", 0.0) for tree in document["trees"] for node in tree["nodes"]]
    assert set(hessians) == {0.0}


def test_an_answer_that_differs_is_refused(tmp_path: Path) -> None:
    trained = train(tmp_path, {"objective": "binary:logistic"})
    model = FinishedModel.read(trained.path)
    conversion.check(model, "X", model.predict)
    with pytest.raises(ScoringError, match="X answers otherwise"):
        conversion.check(model, "X", lambda rows: model.predict(rows) + np.float32(1e-4))
    with pytest.raises(ScoringError, match="X answers otherwise"):
        conversion.check(model, "X", lambda rows: model.predict(np.nan_to_num(rows)))
    with pytest.raises(ScoringError, match="X answers otherwise"):  # thresholds read as "at most" in place of "below"
        conversion.check(model, "X", lambda rows: model.predict(np.nextafter(rows, np.float32(-np.inf))))


def test_what_is_no_whole_model_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = train(tmp_path, {"objective": "binary:logistic"})
    changed(trained.path, lambda document: document["learner"]["attributes"].update(veilboost_part="a part"))
    for suffix in ("onnx", "treelite"):
        assert main(["export", str(trained.path), str(tmp_path / f"model.{suffix}")]) == 1
        assert "part of a vertical model" in capsys.readouterr().err


@pytest.mark.parametrize(("library", "suffix"), [("treelite", "treelite"), ("onnxruntime", "onnx")])
def test_a_library_that_is_not_there_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: str, suffix: str
) -> None:
    trained = train(tmp_path, {"objective": "binary:logistic"})
    monkeypatch.setitem(__import__("sys").modules, library, None)
    assert main(["export", str(trained.path), str(tmp_path / f"model.{suffix}")]) == 1
    assert f"veilboost[{suffix}]" in capsys.readouterr().err
