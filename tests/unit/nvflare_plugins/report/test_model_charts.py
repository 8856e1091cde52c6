"""Figures of a model: curves from counts are those of the rows, and every mark says the number it stands for."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import xgboost as xgb
from sklearn.metrics import confusion_matrix, precision_recall_curve, roc_curve

from nvflare_plugins.pages.charts import WIDTH
from nvflare_plugins.pages.model_charts import (
    beeswarm,
    class_figures,
    counted_scores,
    tree_chart,
    waterfall,
)


def titles(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter("title")]


def test_curves_from_counts_are_those_of_the_rows() -> None:
    rng = np.random.default_rng(3)
    scores, label = np.round(rng.random(300), 2), rng.random(300) < 0.4
    scores[label] = np.minimum(np.round(scores[label] + 0.2, 2), 1)
    found = class_figures(counted_scores(scores, label, 1000), "ill")
    fall_out, recall, _ = roc_curve(label, scores, drop_intermediate=False)
    assert {f"ROC, false positive rate {x:.4g}: {y:.4g}" for x, y in zip(fall_out, recall, strict=True)} <= set(
        titles(found.roc)
    )
    precision, recall, _ = precision_recall_curve(label, scores)
    drawn = set(titles(found.precision_recall))
    expected = {f"precision, recall {x:.4g}: {y:.4g}" for x, y in zip(recall[:-1], precision[:-1], strict=True)}
    assert len(expected - drawn) <= 1  # the threshold 0 is no score of a row
    for threshold, _, confusion in found.thresholds:
        assert confusion == tuple(confusion_matrix(label, scores >= threshold).ravel())
    assert found.thresholds[0][0] == pytest.approx(0.5, abs=0.01)


def test_a_group_of_a_calibration_curve_tells_its_rows() -> None:
    found = class_figures([(0.0, 30, 10), (0.5, 10, 30)], "ill")
    assert titles(found.calibration)[2:] == [
        "10 of 40 rows are ill, probability 0: 0.25",
        "10 of 40 rows are ill, probability 0.5: 0.25",
        "30 of 40 rows are ill, probability 0.5: 0.75",
        "30 of 40 rows are ill, probability 1: 0.75",
    ]


def test_a_swarm_has_a_dot_for_each_row_and_the_strongest_features_first() -> None:
    shap = np.array([[0.1, -2.0], [0.2, 1.0], [-0.1, 3.0]])
    values = np.array([[1.0, 5.0], [np.nan, 6.0], [2.0, 7.0]])
    svg = beeswarm(["weak <b>", "strong"], shap, values)
    assert titles(svg)[:3] == ["strong 5: -2", "strong 6: +1", "strong 7: +3"]
    assert "weak <b> missing: +0.2" in titles(svg)
    dots = list(ElementTree.fromstring(svg).iter("circle"))
    places = [float(dot.get("cx", "")) for dot in dots[:3]]
    assert places == sorted(places) and all(0 <= place <= WIDTH for place in places)
    assert "var(--c5) 0%" in svg and "var(--c5) 100%" in svg and svg.count('fill="var(--c6)"') == 1
    many = beeswarm(["a"], np.zeros((5000, 1)), np.zeros((5000, 1)))
    assert len(titles(many)) == 300


def test_a_waterfall_goes_from_the_bias_to_the_margin() -> None:
    contributions = np.array([0.5, -2.0, *([0.01] * 12)])
    svg = waterfall([f"f{n}" for n in range(14)], contributions, np.arange(14.0), 1.0)
    said = titles(svg)
    assert len(said) == 12 and said[0].startswith("3 other features: +0.03, from 1 to 1.03")
    assert said[-1] == "f1 = 1: -2, from 1.62 to -0.38"  # 1 + the sum of all


def test_a_tree_is_drawn_with_its_splits_its_leaves_and_its_categories() -> None:
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.random(400), rng.integers(0, 3, 400)]).astype(np.float32)
    label = (rows[:, 0] > 0.5) ^ (rows[:, 1] == 1)
    matrix = xgb.DMatrix(
        rows, label, feature_types=["float", "c"], feature_names=["x", "town"], enable_categorical=True
    )
    booster = xgb.train({"max_depth": 6, "objective": "binary:logistic", "nthread": 1}, matrix, 1)
    tree = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]["trees"][0]
    said = titles(tree_chart(tree, ["x", "town"], {"town": ("Ulm", "K\u00f6ln", "Kiel")}))
    assert "town not in K\u00f6ln" in said and any(re.match(r"x < 0\.[45]", one) for one in said)
    assert any(one.startswith("leaf: ") for one in said) and len(said) <= 15
