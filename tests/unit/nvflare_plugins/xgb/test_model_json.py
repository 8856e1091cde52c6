"""A model keeps its columns' names and the meaning of its positions, whatever words they are made of."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.scoring.export import strip_sum_hessian
from nvflare_plugins.xgb.model_json import (
    CATEGORIES_ATTRIBUTE,
    CLASSES_ATTRIBUTE,
    check_lists,
    check_names_survive,
    model_bytes,
    trees_model,
    with_lists,
    with_positive_covers,
    without_lists,
)
from tests.support.scoring import check_covers_add_up

NAMES = ["Größe", "身長", "🦊 size", "say \"it\" 'so' \\ {now}", "é" * 200, "a(b)/c%"]
RNG = np.random.default_rng(3)


def booster_of(model: bytes) -> xgb.Booster:
    return xgb.Booster(model_file=bytearray(model))


@pytest.fixture(scope="module")
def plain() -> tuple[bytes, np.ndarray]:
    features = RNG.normal(size=(200, len(NAMES))).astype(np.float32)
    matrix = xgb.DMatrix(features, label=features[:, 0] > features[:, 2], feature_names=NAMES)
    return bytes(xgb.train({"objective": "binary:logistic"}, matrix, 2).save_raw("json")), features


def test_names_of_all_scripts_survive_a_rewritten_document(plain):
    model, features = plain
    matrix = xgb.DMatrix(features, feature_names=NAMES)
    for copy in (
        model_bytes(json.loads(model)),
        strip_sum_hessian(model),
        with_lists(model, NAMES, {}, ["nein", "ja"]),
    ):
        assert booster_of(copy).feature_names == NAMES
        assert np.array_equal(booster_of(copy).predict(matrix), booster_of(model).predict(matrix))


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.0, 1e-9, 1.0, 1e6]), lacks=st.booleans())
def test_covers_of_any_kind_become_positive_and_add_up_and_predictions_stay(plain, seed, scale, lacks):
    document, random = json.loads(plain[0]), np.random.default_rng(seed)
    for tree in trees_model(document["learner"])["trees"]:
        cover = scale * random.normal(size=len(tree["left_children"]))
        tree["sum_hessian"] = np.where(random.random(cover.size) < lacks / 2, np.nan, cover).tolist()
    raised = with_positive_covers(model_bytes(document))
    check_covers_add_up(json.loads(raised))
    matrix = xgb.DMatrix(plain[1], feature_names=NAMES)
    for options in ({}, {"output_margin": True}, {"pred_leaf": True}):
        ours = booster_of(raised).predict(matrix, **options)
        assert np.array_equal(ours, booster_of(plain[0]).predict(matrix, **options))


def test_a_model_without_lists_stays_as_it_is(plain):
    model, _ = plain
    assert with_lists(model, NAMES, {}, None) == model
    assert without_lists(model) == model


def coloured(colours: list, sizes: list) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Return a frame of words, the positions in the lists, and a label that needs them."""
    codes = np.column_stack([RNG.integers(0, len(colours), 400), RNG.integers(0, len(sizes), 400)])
    frame = pd.DataFrame(
        {
            "x": RNG.normal(size=400),
            "colour": [colours[c] for c in codes[:, 0]],
            "size": [sizes[c] for c in codes[:, 1]],
        }
    )
    positions = np.column_stack([frame.x, codes]).astype(np.float32)
    return frame, positions, (codes[:, 0] % 2) * 2.0 + (codes[:, 1] == 1)


def trained(frame: pd.DataFrame, positions: np.ndarray, label: np.ndarray, **params) -> tuple[bytes, xgb.DMatrix]:
    matrix = xgb.DMatrix(
        positions, label=label, feature_names=list(frame), feature_types=["float", "c", "c"], enable_categorical=True
    )
    return bytes(xgb.train({"max_depth": 4, **params}, matrix, 5).save_raw("json")), matrix


@pytest.mark.parametrize("params", [{}, {"booster": "dart"}, {"max_cat_to_onehot": 50}])
def test_stock_xgboost_reads_words_in_any_order(params):
    colours, sizes = ["red", "a colour", "green", "blue", 'q"x', "Red"], [7, -3, 10]
    frame, positions, label = coloured(colours, sizes)
    bare, matrix = trained(frame, positions, label, **params)
    model = with_lists(bare, list(frame), {"colour": colours, "size": sizes}, None)
    wanted = booster_of(bare).predict(matrix)
    ordered = frame.assign(colour=frame.colour.astype("category"), size=frame["size"].astype("category"))
    assert list(ordered.colour.cat.categories) != colours
    read = booster_of(model)
    assert np.array_equal(read.predict(xgb.DMatrix(ordered, enable_categorical=True)), wanted)
    assert np.array_equal(read.predict(matrix), wanted), "positions are read as ever"
    # The control: what a user of a model without lists got.
    assert not np.array_equal(booster_of(bare).predict(xgb.DMatrix(ordered, enable_categorical=True)), wanted)
    assert json.loads(read.attr(CATEGORIES_ATTRIBUTE)) == {"colour": colours, "size": sizes}


def test_the_container_is_what_stock_xgboost_writes_for_such_a_frame():
    colours, sizes = ["red", "green", "blue"], [7, -3, 10]
    frame, positions, label = coloured(colours, sizes)
    typed = frame.assign(
        colour=pd.Categorical(frame.colour, categories=colours), size=pd.Categorical(frame["size"], categories=sizes)
    )
    stock = xgb.train({}, xgb.DMatrix(typed, label=label, enable_categorical=True), 1).save_raw("json")
    ours = with_lists(trained(frame, positions, label)[0], list(frame), {"colour": colours, "size": sizes}, None)
    cats = [json.loads(bytes(m))["learner"]["gradient_booster"]["model"]["cats"] for m in (stock, ours)]
    assert cats[0] == cats[1]


def test_words_that_xgboost_would_mistake_are_refused_not_guessed():
    """XGBoost 3.2 takes lengths of words in characters and their content in bytes: beyond ASCII they shift."""
    colours, sizes = ["rot", "grün", "blau"], [1, 2]
    frame, positions, label = coloured(colours, sizes)
    bare, matrix = trained(frame, positions, label)
    model = booster_of(with_lists(bare, list(frame), {"colour": colours, "size": sizes}, None))
    typed = frame.assign(colour=frame.colour.astype("category"), size=frame["size"].astype("category"))
    with pytest.raises(xgb.core.XGBoostError, match="data type doesn't match"):
        model.predict(xgb.DMatrix(typed, enable_categorical=True))
    lists = json.loads(model.attr(CATEGORIES_ATTRIBUTE))
    frame["colour"] = pd.Categorical(frame.colour, categories=lists["colour"]).codes
    frame["size"] = pd.Categorical(frame["size"], categories=lists["size"]).codes
    by_hand = xgb.DMatrix(frame.to_numpy(np.float32), feature_names=list(frame))
    assert np.array_equal(model.predict(by_hand), booster_of(bare).predict(matrix))


def test_thresholds_on_positions_read_words_too():
    """Private trees split categories by position, as numbers."""
    colours, sizes = ["red", "green", "blue"], [7, -3, 10]
    frame, positions, label = coloured(colours, sizes)
    matrix = xgb.DMatrix(positions, label=label, feature_names=list(frame))
    bare = bytes(xgb.train({}, matrix, 3).save_raw("json"))
    typed = frame.assign(colour=frame.colour.astype("category"), size=frame["size"].astype("category"))
    model = booster_of(with_lists(bare, list(frame), {"colour": colours, "size": sizes}, None))
    assert np.array_equal(model.predict(xgb.DMatrix(typed, enable_categorical=True)), model.predict(matrix))


def test_classes_and_lists_are_compared_before_training_goes_on():
    colours, sizes = ["red", "green", "blue"], [7, -3]
    frame, positions, label = coloured(colours, sizes)
    bare, matrix = trained(frame, positions, label)
    lists = {"colour": colours, "size": sizes}
    model = with_lists(bare, list(frame), lists, ["no", "yes"])
    assert json.loads(booster_of(model).attr(CLASSES_ATTRIBUTE)) == ["no", "yes"]
    check_lists(model, "m.json", lists, ["no", "yes"])
    check_lists(bare, "m.json", {"colour": ["other"]}, None)
    with pytest.raises(ConfigurationError, match=r"'m.json' was trained with other categories"):
        check_lists(model, "m.json", {**lists, "colour": ["green", "red", "blue"]}, ["no", "yes"])
    with pytest.raises(ConfigurationError, match="other label_classes"):
        check_lists(model, "m.json", lists, ["yes", "no"])
    with pytest.raises(ConfigurationError, match="other label_classes"):
        check_lists(model, "m.json", lists, None)
    resumed = xgb.train({"max_depth": 4}, matrix, 2, xgb_model=booster_of(without_lists(model)))
    straight = xgb.train({"max_depth": 4}, matrix, 2, xgb_model=booster_of(bare))
    assert bytes(resumed.save_raw("json")) == bytes(straight.save_raw("json"))


def test_a_trial_model_is_read_before_anything_is_spent():
    check_names_survive(NAMES, {})
    check_names_survive(["a", "b"], {"b": ["x", "y"]})
    for name in ("a[0]", "a<b", "nul\0l"):
        with pytest.raises(ConfigurationError, match="rename columns"):
            check_names_survive([name], {})
