"""What is no whole model is refused in words, before XGBoost reads beyond a tree; SHAP values only where they hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.scoring import ScoringError, load_model
from nvflare_plugins.scoring.export import strip_sum_hessian, to_onnx, to_treelite
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.model_json import marked_as_part, model_bytes, tree_weights
from tests.support.scoring import CLASSES, NAMES, changed, frame, in_form_of, matrix_of, positions, train

BINARY = {"objective": "binary:logistic"}
WRONG = (None, -1, 2**31, 1e39, float("nan"), "x", "", "-5", "999999999", [], {}, True, [[1]])


def refusal(content: bytes) -> str:
    with pytest.raises(ScoringError) as error:
        FinishedModel(content, "m.json")
    return str(error.value)


def stock(params: dict[str, Any], label: Any, names: list[str] | None = None, **matrix: Any) -> bytes:
    values = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    rows = xgb.DMatrix(values, label=label, feature_names=names, **matrix)
    return bytes(xgb.train({"nthread": 1, "max_depth": 2, **params}, rows, 2).save_raw("json"))


def test_text_that_is_none_is_damage(tmp_path: Path) -> None:
    """Half of a pair of surrogates stands in JSON as an escape, and in no file of XGBoost's."""
    model = train(tmp_path, {"objective": "binary:logistic"})
    document = json.loads(model.path.read_bytes())
    document["learner"]["attributes"]["note"] = "\ud800"
    model.path.write_text(json.dumps(document))
    with pytest.raises(ScoringError, match="cannot be read by XGBoost"):
        FinishedModel.read(model.path)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    whole = train(tmp_path, BINARY, classes=CLASSES).path.read_bytes()
    assert "m.json is empty" in refusal(b"")
    assert "cut off or damaged: copy it again" in refusal(whole[: len(whole) // 2])
    for content in (b"PK\x03\x04", b"tree\nversion=v4\n", b"{}", b"[1]", b'{"learner": {}}', b"null", b"\xff\xfe{"):
        assert "no JSON model of XGBoost" in refusal(content), content
    assert "no JSON model of XGBoost" in refusal(bytes(xgb.Booster(model_file=bytearray(whole)).save_raw("ubj")))
    with pytest.raises(ScoringError, match=r"is a folder: name the model\.json in it"):
        load_model(tmp_path)
    with pytest.raises(ScoringError, match="cannot be read"):
        load_model(tmp_path / "absent.json")


def test_a_part_of_a_vertical_model_is_refused_with_the_way_to_a_whole_one(tmp_path: Path) -> None:
    masked = marked_as_part(train(tmp_path, BINARY).path.read_bytes())
    for part in (masked, b'{"format": "veilboost-vertical-part-1", "part": {}}'):
        assert "VerticalInferenceRecipe" in refusal(part)
        assert "merge, if every party consents" in refusal(part)
    unmarked = train(tmp_path, BINARY).path.rename(tmp_path / "masked_model.json")
    with pytest.raises(ScoringError, match="one party's part"):
        load_model(unmarked)


def test_stock_models_are_scored_if_their_columns_have_names() -> None:
    label = np.arange(100) % 2
    assert FinishedModel(stock(BINARY, label, ["a", "b"]), "m").classes == (0, 1)
    assert "set feature_names" in refusal(stock(BINARY, label))
    assert "whose predictions VeilBoost does not know" in refusal(
        stock(BINARY, label, ["a", "b"]).replace(b"binary:logistic", b"binary:loglogloss")
    )
    assert "is a linear model" in refusal(stock({"booster": "gblinear"}, label, ["a", "b"]))
    several = {"objective": "reg:squarederror", "multi_strategy": "one_output_per_tree"}
    assert "one for each class" in refusal(stock(several, np.column_stack([label, label]), ["a", "b"]))
    quantiles = {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]}
    assert "one for each class" in refusal(stock(quantiles, label, ["a", "b"]))


def test_categories_without_their_words_are_refused(tmp_path: Path) -> None:
    path = changed(train(tmp_path, BINARY).path, lambda document: document["learner"]["attributes"].clear())
    assert "splits 2 columns by category without the lists" in refusal(path.read_bytes())


def test_classes_that_are_not_the_models_outputs_are_refused(tmp_path: Path) -> None:
    for classes in (["no"], ["no", "yes", "perhaps"], ["no", "no"]):
        model = train(tmp_path, BINARY, classes=classes).path
        assert "label classes that are not the 2 of its outputs" in refusal(model.read_bytes())


def places(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where something stands in a document; of lists the first place."""
    if place:
        yield place
    inner = node.items() if isinstance(node, dict) else enumerate(node[:1]) if isinstance(node, list) else ()
    for key, child in inner:
        yield from places(child, (*place, key))


@pytest.mark.parametrize(
    "params",
    [BINARY, {"objective": "multi:softprob", "num_class": 3, "booster": "dart"}],
    ids=["binary", "multiclass dart"],
)
def test_whatever_is_changed_in_a_model_is_refused_or_scored(tmp_path: Path, params: dict[str, Any]) -> None:
    document = json.loads(train(tmp_path, {**params, "max_depth": 2}, rounds=1).path.read_bytes())
    values, n_refused, n_scored = positions(frame(20)), 0, 0
    for place in places(document):
        for wrong in (*WRONG, "delete"):
            other = copy.deepcopy(document)
            parent = other
            for key in place[:-1]:
                parent = parent[key]
            if wrong == "delete":
                del parent[place[-1]]
            else:
                parent[place[-1]] = wrong
            try:
                scores = FinishedModel(model_bytes(other), "m.json").predict(values)
            except ScoringError:
                n_refused += 1
            else:
                n_scored += 1
                assert len(scores) == 20
    assert n_refused > 500
    assert n_scored > 50


def test_a_loop_in_a_tree_is_refused(tmp_path: Path) -> None:
    def loop(document: Any) -> None:
        tree = document["learner"]["gradient_booster"]["model"]["trees"][0]
        tree["left_children"][tree["left_children"][0]] = 0

    assert "holds a tree that is none" in refusal(changed(train(tmp_path, BINARY).path, loop).read_bytes())


def test_shap_values_of_covers_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    path = train(tmp_path, BINARY).path
    whole, values = FinishedModel.read(path), positions(frame(10))
    assert np.isfinite(whole.contributions(values)).all()
    exported = FinishedModel(strip_sum_hessian(path.read_bytes()), "copy.json")
    assert np.array_equal(exported.predict(values), whole.predict(values))

    def scale_leaves(document: Any) -> None:  # as noise does: every cover above zero, parents no sums
        tree = document["learner"]["gradient_booster"]["model"]["trees"][0]
        is_leaf = [left == -1 for left in tree["left_children"]]
        pairs = zip(tree["sum_hessian"], is_leaf, strict=True)
        tree["sum_hessian"] = [cover * 1.5 if leaf else cover for cover, leaf in pairs]

    def forget_gains(document: Any) -> None:  # as of trees that the sites grow themselves from noised sums
        for tree in document["learner"]["gradient_booster"]["model"]["trees"]:
            tree["loss_changes"] = [0.0] * len(tree["loss_changes"])

    copied = tmp_path / "copied.json"
    copied.write_bytes(path.read_bytes())
    no_gains = FinishedModel(changed(copied, forget_gains).read_bytes(), "private.json")
    noised = FinishedModel(changed(path, scale_leaves).read_bytes(), "noised.json")
    for model, n_trees in ((exported, 6), (no_gains, 6), (noised, 1)):
        with pytest.raises(ScoringError, match=f"in {n_trees} of 6 trees the covers"):
            model.contributions(values)


def test_vector_leaves_are_scored_and_not_explained() -> None:
    label = np.arange(100) % 3
    params = {"objective": "multi:softprob", "num_class": 3, "multi_strategy": "multi_output_tree"}
    content = stock(params, label, ["a", "b"])
    values = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    wanted = xgb.Booster(model_file=bytearray(content)).predict(xgb.DMatrix(values, feature_names=["a", "b"]))
    model = FinishedModel(content, "m.json")
    assert np.array_equal(model.probabilities(values), wanted)
    with pytest.raises(ScoringError, match="vectors for leaves"):
        model.contributions(values)


def test_rounds_are_all_or_the_best(tmp_path: Path) -> None:
    path = train(tmp_path, BINARY).path
    values = positions(frame(5))
    with pytest.raises(ScoringError, match="without early stopping"):
        FinishedModel.read(path).predict(values, "best")
    with pytest.raises(ScoringError, match="rounds: all, or best"):
        FinishedModel.read(path).predict(values, "some")


def test_names_and_lists_are_the_models(tmp_path: Path) -> None:
    model = FinishedModel.read(train(tmp_path, BINARY, classes=CLASSES).path)
    assert [feature.name for feature in model.features] == NAMES
    assert model.features[4].categories == ("7", "-3", "10")
    assert model.classes == tuple(CLASSES)


@pytest.mark.parametrize("form", ["3.2", "3.3", "3.4"])
def test_weights_of_trees_count_whichever_release_has_written_them(tmp_path: Path, form: str) -> None:
    """A release of XGBoost that is earlier than a model takes all weights for 1, without a word."""
    trained = train(tmp_path, {**BINARY, "booster": "dart", "rate_drop": 0.9, "one_drop": 1})
    document, values = json.loads(trained.path.read_bytes()), positions(frame(20))
    weights = tree_weights(document["learner"])
    assert weights is not None and any(one != 1 for one in weights)
    wanted = FinishedModel(model_bytes(document), "m.json").predict(values)
    assert np.array_equal(wanted, trained.booster.predict(matrix_of(values)))
    written = in_form_of(form, document)
    found = FinishedModel(model_bytes(written), "m.json")
    assert np.array_equal(found.predict(values), wanted)
    to_onnx(found), to_treelite(found)  # which compare themselves with the model
    holder = written["learner"]["gradient_booster"]
    (holder if "weight_drop" in holder else holder["model"])["weight_drop"].pop()
    assert "m.json" in refusal(model_bytes(written))
