"""A model that leaves its site says how many rows its nodes hold no longer, and predicts the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.scoring.export import STRIPPED_ATTRIBUTE, strip_sum_hessian


@pytest.mark.parametrize("params", [{}, {"booster": "dart", "rate_drop": 0.5}, {"num_parallel_tree": 2}])
def test_a_stripped_model_predicts_the_same_without_hessians(params):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 4)).astype(np.float32)
    data = xgb.DMatrix(features, label=features[:, 0] > 0)
    booster = xgb.train({"objective": "binary:logistic", "seed": 1, **params}, data, 4)
    model = bytes(booster.save_raw("json"))
    stripped = strip_sum_hessian(model)
    again = xgb.Booster(model_file=bytearray(stripped))
    assert np.array_equal(again.predict(data), xgb.Booster(model_file=bytearray(model)).predict(data))
    text = stripped.decode()
    assert np.isnan(_hessians(json.loads(text))).all()
    assert again.attr(STRIPPED_ATTRIBUTE)
    # Stock XGBoost knows nothing of the attribute: what it cannot compute any more must not look like an answer.
    for kind in ("pred_contribs", "pred_interactions"):
        try:
            explained = again.predict(data, **{kind: True})
        except xgb.core.XGBoostError:  # 3.3
            continue
        assert np.isnan(explained).any(axis=-1).all()


def _hessians(node) -> list[float]:
    if isinstance(node, dict):
        own = node.get("sum_hessian", [])
        return list(own) + [h for key, child in node.items() if key != "sum_hessian" for h in _hessians(child)]
    return [h for child in node for h in _hessians(child)] if isinstance(node, list) else []


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"learner": {"gradient_booster": {"name": "gblinear"}}}'])
def test_what_is_no_tree_model_is_refused(content):
    with pytest.raises(ConfigurationError):
        strip_sum_hessian(content)


def test_a_part_of_a_vertical_model_is_refused_with_the_way_to_a_whole_one():
    with pytest.raises(ConfigurationError, match="the action merge makes one"):
        strip_sum_hessian(b'{"format": "vertical model"}')


def test_command_writes_the_copy(tmp_path, capsys):
    booster = xgb.train({}, xgb.DMatrix(np.eye(4), label=[0, 1, 0, 1]), 1)
    booster.save_model(tmp_path / "model.json")
    assert main(["export", str(tmp_path / "model.json"), str(tmp_path / "copy.json")]) == 0
    assert STRIPPED_ATTRIBUTE in (tmp_path / "copy.json").read_text()
    assert main(["export", str(tmp_path / "absent.json"), str(tmp_path / "copy.json")]) == 1
    assert "cannot read" in capsys.readouterr().err


def _model(path: Path) -> dict[str, Any]:
    booster = xgb.train({}, xgb.DMatrix(np.eye(4), label=[0, 1, 0, 1]), 1)
    booster.save_model(path)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def _damaged(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for trees in ([1], "text", {"a": 1}, [{"sum_hessian": 3}], [{}], [["sum_hessian"]]):
        damaged = copy.deepcopy(document)
        damaged["learner"]["gradient_booster"]["model"]["trees"] = trees
        yield damaged
    for learner in ({"gradient_booster": 3}, 3, [], {"gradient_booster": {"gbtree": 3}}):
        yield {**document, "learner": learner}
    yield {**document, "learner": {**document["learner"], "attributes": 3}}
    yield {**document, "learner": {**document["learner"], "feature_names": ["\ud800"]}}


def test_damaged_models_are_refused_in_words(tmp_path, capsys):
    document = _model(tmp_path / "model.json")
    contents = [json.dumps(one) for one in _damaged(document)] + ["[" * 100_000]
    for content in contents:
        (tmp_path / "model.json").write_text(content)
        assert main(["export", str(tmp_path / "model.json"), str(tmp_path / "copy.json")]) == 1
        assert capsys.readouterr().err.startswith("veilboost export: ")
    assert [path.name for path in tmp_path.iterdir()] == ["model.json"]


def test_the_copy_goes_nowhere_but_into_a_file_of_its_own(tmp_path, capsys):
    _model(tmp_path / "model.json")
    before = (tmp_path / "model.json").read_bytes()
    (tmp_path / "again.json").hardlink_to(tmp_path / "model.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "model.json")
    (tmp_path / "folder.json").mkdir()
    for name, said in (
        ("model.json", "the model itself"),
        ("again.json", "the model itself"),
        ("link.json", "the model itself"),
        ("folder.json", "is a folder"),
        ("absent/copy.json", "make it first"),
        ("x" * 300 + ".json", "ENAMETOOLONG"),
        ("customers.csv", "must end in .json or .onnx or .treelite"),
        ("copy.ubj", "must end in .json"),
    ):
        assert main(["export", str(tmp_path / "model.json"), str(tmp_path / name)]) == 1
        assert said in capsys.readouterr().err
    assert (tmp_path / "model.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again.json",
        "folder.json",
        "link.json",
        "model.json",
    ]
