"""Charts: round ticks, marks inside the picture, text escaped, well-formed SVG."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, precision_recall_curve, roc_curve

from nvflare_plugins.pages.charts import (
    WIDTH,
    Bar,
    Line,
    horizontal_bars,
    legend,
    line_chart,
    number,
    paired_bars,
    stacked_bars,
    ticks,
    timeline,
)
from nvflare_plugins.pages.model_charts import (
    beeswarm,
    class_figures,
    counted_scores,
    tree_chart,
    waterfall,
)
from nvflare_plugins.pages.run_record import RoundRow, RunRecord


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_the_data_in_equal_steps(low, width):
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 9
    slack = 1e-6 * (1 + abs(low) + width)
    assert found[0] <= low + slack and found[-1] >= low + width - slack
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-6, abs=1e-8 * (1 + abs(low)))


def test_ticks_known_answers():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(0.971, 0.998) == [0.97, 0.98, 0.99, 1.0]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.123456, "0.1235"), (12345, "12,345"), (1.5e7, "1.5e+07"), (1e-6, "1e-06")]
)
def test_numbers_as_people_read_them(value, text):
    assert number(value) == text


def test_line_chart_is_well_formed_and_draws_each_point():
    lines = [Line("a <b>", 1, ((0, 0.5), (1, 0.75), (2, 0.6))), Line("c", 2, ((0, 0.5),), style="wide")]
    root = ElementTree.fromstring(line_chart(lines, "round", "auc & more"))
    polylines = [e for e in root if e.tag == "polyline"]
    assert polylines[0].get("class") == "wide"  # behind the others
    points = [tuple(map(float, p.split(","))) for p in polylines[1].get("points").split()]
    assert len(points) == 3 and points[1][1] < points[2][1] < points[0][1]  # higher values stand higher
    assert all(0 <= x <= WIDTH and 0 <= y <= 300 for x, y in points)
    assert "a <b>, round 1: 0.75" in [t.text for t in root.iter("title")]


def test_a_long_line_is_drawn_to_its_end() -> None:
    line = Line("a", 1, tuple((float(x), x / 1000) for x in range(2000)))
    (drawn,) = ElementTree.fromstring(line_chart([line], "round", "auc")).iter("polyline")
    assert len([tuple(map(float, point.split(","))) for point in drawn.get("points").split()]) == 2000


@given(st.integers(1, 500), st.integers(0, 1000))
def test_stacked_bars_show_all_rounds_in_few_bars(n, first):
    values = [float(i % 7) for i in range(n)]
    root = ElementTree.fromstring(stacked_bars(range(first, first + n), [("x", 1, values), ("y", 2, values)], "r", "s"))
    bars = list(root.iter("rect"))
    assert len(bars) == 2 * min(n, -(-n // (-(-n // 60)))) and len(bars) <= 120
    assert all(-0.1 <= float(b.get("x")) <= WIDTH and float(b.get("height")) >= 0 for b in bars)


def test_bars_share_a_scale_and_its_mark() -> None:
    few, many = horizontal_bars([Bar("a", 1.0, "")], 4.0, 2.0), horizontal_bars([Bar("a", 4.0, "")], 4.0, 2.0)
    short, long = (float(next(ElementTree.fromstring(one).iter("rect")).get("width", "")) for one in (few, many))
    assert long == pytest.approx(4 * short)
    for one in (few, many):
        assert float(next(ElementTree.fromstring(one).iter("line")).get("x1", "")) == pytest.approx(190 + long / 2)


def test_shares_stand_in_pairs_of_one_scale() -> None:
    bars = list(ElementTree.fromstring(paired_bars(["a", "<b>"], [(0.5, 0.25), (0.5, 0.75)])).iter("rect"))
    widths = [float(bar.get("width", "")) for bar in bars]
    assert [w / widths[3] for w in widths] == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1], rel=0.01)


def test_bars_and_legend_escape_foreign_names():
    bars = horizontal_bars([Bar("<script>", 2.0, "two"), Bar("x" * 80, 1.0, "one")])
    root = ElementTree.fromstring(bars)
    widths = [float(r.get("width")) for r in root.iter("rect")]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01) and "<script>" not in bars
    assert not re.search("<script", legend([("<script>", 1)]))


# -- figures of a model ------------------------------------------------------------------------------------------------


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


# -- strips of stages --------------------------------------------------------------------------------------------------


SPANS = (("encrypt", 0.0, 1.0), ("prepare", 0.5, 3.0), ("unknown", 0.0, 4.0), ("decrypt", 3.0, 4.0))


def html(*rows: RoundRow) -> str:
    return "".join(timeline(rows))


def test_stages_stand_where_they_ran():
    drawn = html(RoundRow(0, 4.0, spans=SPANS))
    titles = re.findall(r"<title>(.*?)</title>", drawn)
    assert titles == ["encryption: 0 to 1 s", "decryption: 3 to 4 s", "made ahead: 0.5 to 3 s"]
    left, width = zip(*re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn), strict=True)
    assert float(left[0]) < float(left[2]) < float(left[1])
    assert float(width[0]) == float(width[1]) and abs(float(width[2]) - 2.5 * float(width[0])) < 0.2


def test_of_many_rounds_some_are_shown_the_first_and_the_last_among_them():
    drawn = html(*(RoundRow(i, 4.0, spans=SPANS) for i in range(100)))
    shown = [int(n) for n in re.findall(r">round (\d+)<", drawn)]
    assert len(shown) == 12 and shown[0] == 1 and shown[-1] == 100 and shown == sorted(set(shown))
    assert "12 of 100 rounds" in drawn


def test_rounds_without_spans_draw_nothing():
    assert html() == html(RoundRow(0, 1.0)) == html(RoundRow(0, 1.0, spans=(("unknown", 0.0, 1.0),))) == ""


def test_spans_are_kept_in_the_record(tmp_path):
    record = RunRecord("job", "a", "s", ("s",), "elgamal", rounds=(RoundRow(0, 4.0, spans=SPANS), RoundRow(1, 1.0)))
    record.write(tmp_path)
    assert RunRecord.read(tmp_path) == record
