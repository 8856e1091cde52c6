"""Charts: round ticks, marks inside the picture, text escaped, well-formed SVG."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
)


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
