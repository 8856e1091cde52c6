"""What a model does with rows, as figures: a tree, SHAP values of rows, how well scores tell classes or times apart.

Privacy: a tree and pooled counts are the same at all sites. ``beeswarm`` and ``waterfall`` show values of single rows,
and each step of a Kaplan-Meier curve is the time of a row's event: they belong on pages that stay at the rows' site.
References: Lundberg et al., From local explanations to global understanding with explainable AI for trees (2020);
Kaplan and Meier, Nonparametric estimation from incomplete observations (1958).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.base.formatting import number
from nvflare_plugins.pages.charts import (
    HALF,
    WIDTH,
    Axis,
    Line,
    Mark,
    figure,
    labelled_lines,
    line_chart,
    shortened,
    text_mark,
    ticks,
)
from nvflare_plugins.xgb.model_json import category_sets

_GROUPS = ("predicted early", "predicted in between", "predicted late")
_CALIBRATED, _LEAST_OF_GROUP = 10, 20  # groups of a calibration curve, and the fewest rows of one
_POINTS = 200
Floats64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeFigures:
    """Kaplan-Meier and calibration curves as markup. Attributes: words: which rows they are about."""

    kaplan_meier: str
    calibration: str
    words: str


def kaplan_meier(time: Floats64, event: NDArray[np.bool_]) -> tuple[Floats64, Floats64]:
    """Return the times of events, ascending, and the share of rows that live beyond each.

    Shapes: time: float64[n_rows]; event: bool[n_rows], whether it was seen then; result: float64[n_times] each.
    """
    times, at = np.unique(time, return_inverse=True)
    deaths, rows = (np.bincount(at, weights=one, minlength=times.size) for one in (event, np.ones(time.size)))
    at_risk = np.cumsum(rows[::-1])[::-1]
    is_event = deaths > 0
    shares: Floats64 = np.cumprod(1.0 - deaths[is_event] / at_risk[is_event], dtype=np.float64)
    return times[is_event], shares


def time_figures(
    bounds: NDArray[np.float32], predicted: Floats64, survival: Callable[[float], Floats64] | None
) -> TimeFigures | None:
    """Draw what is known of rows' times beside what a model says of them; None where no row has an event.

    Shapes: bounds: float32[n_rows, 2]; predicted: float64[n_rows], larger for later.

    Args:
        survival: time -> the chance of each row to live beyond it; None of hazards, which say none. Shapes:
            float64[n_rows].
    """
    lower, upper = bounds.astype(np.float64).T
    usable = (upper == lower) | np.isinf(upper)
    time, event, predicted = lower[usable], upper[usable] == lower[usable], predicted[usable]
    if not event.any():
        return None
    left_out = f" {int((~usable).sum()):,} rows whose time lies in an interval are not in them." * bool((~usable).any())
    words = f"{time.size:,} rows of this site, {int(event.sum()):,} of them with an event.{left_out}"
    last, lines, calibration = float(time.max()), [Line("all rows", 1, _steps(time, event, float(time.max())))], ""
    if survival is not None:
        horizon = float(np.median(time[event]))
        grid = np.linspace(last / 60, last, 60).tolist()
        mean = ((0.0, 1.0), *((at, float(survival(at)[usable].mean())) for at in grid))
        lines.append(Line("the model's mean", 6, mean, "dashed"))
        calibration = _calibration(time, event, survival(horizon)[usable], horizon)
    lines += _by_group(time, event, predicted, last)
    curves = labelled_lines(lines, Axis("time", "time", (0.0, last)), "share without an event")
    return TimeFigures(curves, calibration, words)


def _by_group(time: Floats64, event: NDArray[np.bool_], predicted: Floats64, last: float) -> Iterator[Line]:
    ends = np.searchsorted(np.quantile(predicted, (1 / 3, 2 / 3)), predicted, side="right")
    for place, name in enumerate(_GROUPS):
        rows = ends == place
        if rows.sum() >= _LEAST_OF_GROUP:
            yield Line(name, place + 2, _steps(time[rows], event[rows], last), "faint")


def _steps(time: Floats64, event: NDArray[np.bool_], last: float) -> tuple[tuple[float, float], ...]:
    times, shares = kaplan_meier(time, event)
    chosen = np.unique(np.linspace(0, max(times.size - 1, 0), min(times.size, _POINTS)).astype(np.int64))
    points, level = [(0.0, 1.0)], 1.0
    for at, share in zip(times[chosen].tolist(), shares[chosen].tolist(), strict=True):
        points += [(at, level), (at, share)]
        level = share
    return (*points, (last, level))


def _calibration(time: Floats64, event: NDArray[np.bool_], chance: Floats64, horizon: float) -> str:
    lines = [Line("calibrated", 6, ((0, 0), (1, 1)), "dashed")]
    n_groups = max(1, min(_CALIBRATED, time.size // _LEAST_OF_GROUP))
    points = []
    for rows in np.array_split(np.argsort(chance, kind="stable"), n_groups):
        times, shares = kaplan_meier(time[rows], event[rows])
        before = int(np.searchsorted(times, horizon, side="right"))
        points.append((float(chance[rows].mean()), float(shares[before - 1]) if before else 1.0))
    lines.append(Line(f"rows by their predicted chance to be without an event at {number(horizon)}", 1, tuple(points)))
    return line_chart(lines, Axis("predicted chance", "chance", (0.0, 1.0)), "share without an event")


_MOST_FEATURES, _MOST_ROWS = 12, 300
_LANE, _LEFT, _RIGHT = 30, 230, 24
_DOT = 3.0
_TREE_DEPTH, _LEVEL, _BOX = 3, 84, 26

Floats = NDArray[np.floating]
Lists = Mapping[str, Sequence[str]]
_NO_LISTS: Lists = {}


ScoreCounts = Sequence[tuple[float, int, int]]
"""Rows of two classes by ascending bins of a score up to 1: the lower end, rows of the first class, of the second."""


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """ROC, precision-recall and calibration curves as markup, and (threshold, what it is, confusion) for thresholds.

    A confusion is (true negatives, false positives, false negatives, true positives).
    """

    roc: str
    precision_recall: str
    calibration: str
    thresholds: tuple[tuple[float, str, tuple[int, int, int, int]], ...]
    name: str


@dataclass(frozen=True, slots=True)
class RowFigures:
    """What a model makes of rows of one site.

    Attributes:
        classes: of two classes with probabilities.
        confusion: (class, rows of it by predicted class) where there are no such curves.
        swarm, row: SHAP values of rows, and of one of them; "" where there are none.
        words: what they explain, or why there are none.
        times: of a survival model.
    """

    classes: ClassFigures | None
    confusion: tuple[tuple[str, tuple[int, ...]], ...]
    swarm: str
    row: str
    words: str
    times: TimeFigures | None = None


def class_figures(counts: ScoreCounts, name: str) -> ClassFigures:
    """Draw what the counts tell: all points are exact, and nothing is known between two ends of bins.

    Args:
        name: of the second class.
    """
    lows, negative, positive = map(np.array, zip(*counts, strict=True))
    # At and above each bin, and above all.
    false, true = (np.append(np.cumsum(one[::-1])[::-1], 0) for one in (negative, positive))
    n_negative, n_positive = max(int(false[0]), 1), max(int(true[0]), 1)
    recall, fall_out, precision = true / n_positive, false / n_negative, true[:-1] / np.maximum(true + false, 1)[:-1]
    share = n_positive / (n_positive + n_negative)
    roc = [_curve("ROC", fall_out, recall), Line("chance", 6, ((0, 0), (1, 1)), "dashed")]
    by_recall = [_curve("precision", recall[:-1], precision), Line("chance", 6, ((0, share), (1, share)), "dashed")]
    ends = np.append(lows[1:], 1.0)
    groups = [Line("calibrated", 6, ((0, 0), (1, 1)), "dashed")]
    for part in filter(np.size, np.array_split(np.arange(negative.size), _CALIBRATED)):
        rows, of_class = int((negative + positive)[part].sum()), int(positive[part].sum())
        if rows:
            hint, high = f"{of_class:,} of {rows:,} rows are {name}", of_class / rows
            groups.append(Line(hint, 1, ((float(lows[part[0]]), high), (float(ends[part[-1]]), high))))
    best = int(np.argmax(2 * true[:-1] / np.maximum(true[:-1] + false[:-1] + n_positive, 1)))
    half = int(np.argmin(np.abs(lows - 0.5)))
    thresholds = []
    for place, what in ((half, "the end of a bin that is nearest to 0.5"), (best, "the largest F1")):
        f, t = int(false[place]), int(true[place])
        thresholds.append((float(lows[place]), what, (n_negative - f, f, n_positive - t, t)))
    return ClassFigures(
        _shares(roc, "false positive rate", "true positive rate"),
        _shares(by_recall, "recall", "precision"),
        _shares(groups, "probability", f"share {name}"),
        tuple(thresholds),
        name,
    )


def _shares(lines: Sequence[Line], x: str, y_label: str) -> str:
    return line_chart(lines, Axis(x, x, (0.0, 1.0), width=HALF), y_label, 260)


def _curve(name: str, xs: Floats, ys: Floats) -> Line:
    return Line(name, 1, tuple(zip(xs.tolist(), ys.tolist(), strict=True)))


def counted_scores(scores: Floats, is_positive: NDArray[np.bool_], most: int = 200) -> ScoreCounts:
    """Count rows of one site by their scores. Shapes: float[n_rows], bool[n_rows]."""
    lows = np.unique(np.append(0.0, np.quantile(scores, np.arange(1, most) / most)))
    places = np.searchsorted(lows, scores, side="right") - 1
    negative, positive = (np.bincount(places[one], minlength=lows.size) for one in (~is_positive, is_positive))
    return list(zip(lows.tolist(), negative.tolist(), positive.tolist(), strict=True))


# -- SHAP values ------------------------------------------------------------------------------------------------------


def beeswarm(names: Sequence[str], contributions: Floats, values: Floats, categories: Lists = _NO_LISTS) -> str:
    """Draw SHAP values of rows, a lane for each of the strongest features; low values blue, high ones red.

    Shapes: contributions, values: float[n_rows, n_features]; of more than 300 rows some are drawn.

    Args:
        categories: name -> its public list; such features are grey.
    """
    chosen = np.linspace(0, len(values) - 1, min(len(values), _MOST_ROWS)).astype(int)
    shap, values = contributions[chosen], values[chosen]
    order = np.argsort(-np.abs(contributions).mean(axis=0), kind="stable")[:_MOST_FEATURES]
    if not order.size or not len(values):
        return ""
    lanes = _Lanes(float(shap[:, order].min()), float(shap[:, order].max()), len(order))
    for lane, feature in enumerate(order):
        middle = _LANE * (lane + 0.5)
        lanes.marks.append(text_mark(_LEFT - 12, middle + 4, shortened(names[feature], 24), "end", "label"))
        taken: dict[int, int] = {}
        for value, of_row, rank in zip(values[:, feature], shap[:, feature], _ranks(values[:, feature]), strict=True):
            x = lanes.x(float(of_row))
            n = taken[round(x / _DOT)] = taken.get(round(x / _DOT), -1) + 1
            shift = (-1) ** n * math.ceil(n / 2) * _DOT
            y = middle + max(min(shift, _LANE / 2 - 2), 2 - _LANE / 2)
            is_grey = math.isnan(rank) or names[feature] in categories
            fill = "var(--c6)" if is_grey else f"color-mix(in srgb, var(--c5) {100 * rank:.0f}%, var(--c1))"
            hint = f"{names[feature]} {_value(value, categories.get(names[feature]))}: {float(of_row):+.3g}"
            lanes.marks.append({"kind": "circle", "x": x, "y": y, "r": _DOT - 0.4, "fill": fill, "hint": hint})
    return lanes.drawn("SHAP values of rows")


def waterfall(
    names: Sequence[str], contributions: Floats, values: Floats, bias: float, categories: Lists = _NO_LISTS
) -> str:
    """Draw how one row's margin comes about: from the mean over the training rows, feature by feature.

    Shapes: contributions, values: float[n_features].
    """
    order = [int(one) for one in np.argsort(-np.abs(contributions), kind="stable")]
    shown, rest = order[: _MOST_FEATURES - 1], order[_MOST_FEATURES - 1 :]
    steps = []
    for one in reversed(shown):
        value = shortened(_value(values[one], categories.get(names[one])), 12)
        steps.append((f"{shortened(names[one], 16)} = {value}", float(contributions[one])))
    if rest:
        steps.insert(0, (f"{len(rest)} other features", float(contributions[rest].sum())))
    sums = np.cumsum([bias, *(step for _, step in steps)])
    lanes = _Lanes(float(sums.min()), float(sums.max()), len(steps))
    for place, ((label, step), before, after) in enumerate(zip(steps, sums[:-1], sums[1:], strict=True)):
        top = _LANE * (len(steps) - 1 - place)
        left, right = sorted((lanes.x(float(before)), lanes.x(float(after))))
        lanes.marks.append(
            {
                "kind": "rect",
                "x": left,
                "y": top + 5,
                "width": max(right - left, 1.0),
                "height": 20,
                "fill": f"var(--c{5 if step > 0 else 1})",
                "hint": f"{label}: {step:+.4g}, from {number(float(before))} to {number(float(after))}",
            }
        )
        lanes.marks.append(text_mark(_LEFT - 12, top + 19, label, "end", "label"))
        is_last = right + 52 > WIDTH
        lanes.marks.append(
            text_mark(
                left - 5 if is_last else right + 5, top + 19, f"{step:+.3g}", "end" if is_last else "start", "value"
            )
        )
    return lanes.drawn("SHAP values of one row")


class _Lanes:
    """Lanes above one axis, with names to the left."""

    def __init__(self, low: float, high: float, n: int) -> None:
        values = ticks(low, high, 7)
        self._low, self._high, self._bottom = values[0], values[-1], _LANE * n + 4
        self.marks: list[Mark] = []
        for value in values:
            x = self.x(value)
            style = "axis" if value == 0 else "grid"
            self.marks.append({"kind": "line", "ends": (x, 0, x, self._bottom), "class": style})
            self.marks.append(text_mark(x, self._bottom + 16, number(value), "middle", "tick"))

    def x(self, value: float) -> float:
        return _LEFT + (value - self._low) / (self._high - self._low) * (WIDTH - _LEFT - _RIGHT)

    def drawn(self, name: str) -> str:
        return figure("drawing", width=WIDTH, height=self._bottom + 24, name=name, marks=self.marks)


def _ranks(values: Floats) -> Floats:
    """Return each value's place among the others, from 0 to 1; NaN where it is missing. Shapes: float[n_rows]."""
    there = np.sort(values[~np.isnan(values)])
    places = (np.searchsorted(there, values, "left") + np.searchsorted(there, values, "right") - 1) / 2
    return np.where(np.isnan(values), np.nan, places / max(there.size - 1, 1))


def _value(value: float, categories: Sequence[str] | None = None) -> str:
    if math.isnan(value):
        return "missing"
    return number(float(value)) if categories is None else categories[int(value)]


# -- a tree -----------------------------------------------------------------------------------------------------------


def tree_chart(tree: Mapping[str, Any], names: Sequence[str], categories: Lists) -> str:
    """Draw the top of a tree of XGBoost's JSON: splits to four levels, leaves with their weights; no row counts.

    Args:
        names: of the features.
        categories: name -> its public list.
    """
    marks, levels = list[Mark](), set[int]()
    left, right = tree["left_children"], tree["right_children"]

    def draw(node: int, low: float, high: float, depth: int) -> float:
        """Draw what lies below a node between two places; return the node's own."""
        middle, y = (low + high) / 2, 20 + _LEVEL * depth
        levels.add(depth)
        is_leaf = left[node] == -1
        if not is_leaf and depth < _TREE_DEPTH:
            ends = (draw(left[node], low, middle, depth + 1), draw(right[node], middle, high, depth + 1))
            for end, answer in zip(ends, ("yes", "no"), strict=True):
                marks.insert(0, {"kind": "line", "ends": (middle, y, end, y + _LEVEL), "class": "axis"})
                if depth < 2:
                    marks.append(text_mark((middle + end) / 2, y + _LEVEL / 2, answer, "middle", "tick halo"))
        text = number(tree["split_conditions"][node]) if is_leaf else _question(tree, node, names, categories)
        most = int((high - low) / 8.8)
        marks.append(
            {
                "kind": "rect",
                "x": middle - (high - low) / 2 + 4,
                "y": y - _BOX / 2,
                "width": high - low - 8,
                "height": _BOX,
                "fill": f"var(--{'good' if is_leaf else 'warn'}-bg)",
                "hint": f"leaf: {text}" if is_leaf else text,
            }
        )
        marks.append(text_mark(middle, y + 4, shortened(text, most), "middle", "label"))
        return middle

    draw(0, 0, WIDTH, 0)
    return figure("drawing", width=WIDTH, height=40 + _LEVEL * max(levels), name="the first tree", marks=marks)


def _question(tree: Mapping[str, Any], node: int, names: Sequence[str], categories: Lists) -> str:
    """Return what a split asks; XGBoost sends the categories of a set to the right."""
    name = names[tree["split_indices"][node]]
    if tree["split_type"][node] == 0:
        return f"{name} < {number(tree['split_conditions'][node])}"
    codes = category_sets(tree)[node]
    known = categories.get(name, ())
    return f"{name} not in {', '.join(known[code] if code < len(known) else str(code) for code in codes)}"
