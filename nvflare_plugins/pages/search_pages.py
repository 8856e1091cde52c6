"""The pages of jobs that search.

``tuning.html`` shows all trials side by side, what their parameters matter, and each of them. It is written after each
trial and reloads itself until the last one. ``selection.html`` shows the score of each set of columns, and what each
column is worth.

Privacy: everything on them follows from pooled metrics, counts and models, which all sites have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nvflare_plugins.base.formatting import number
from nvflare_plugins.pages.charts import (
    HALF,
    WIDTH,
    Bar,
    Mark,
    Point,
    figure,
    horizontal_bars,
    page,
    points_chart,
    shortened,
    text_mark,
)

TUNING_PAGE = "tuning.html"
_MOST_ROWS, _MOST_AXES = 200, 7
_BEST, _OTHER = 3, 1
_LOG_SPAN = 20.0  # from the smallest to the largest value: beyond it the axis is logarithmic


@dataclass(frozen=True, slots=True)
class TunedTrial:
    """One parameter set.

    Attributes:
        parameters: (name, value) of what trials differ in; text and numbers.
        scores: of each fold.
        rounds: for a training over all rows.
    """

    number: int
    parameters: tuple[tuple[str, str | float], ...]
    mean: float
    spread: float
    scores: tuple[float, ...]
    rounds: int

    @property
    def text(self) -> str:
        """The parameters, for people."""
        return ", ".join(f"{name} {_text(value)}" for name, value in self.parameters)

    @property
    def hint(self) -> str:
        """What a pointer at the trial shows."""
        return f"trial {self.number}: {number(self.mean)}, spread {number(self.spread)} ({self.text})"


@dataclass(frozen=True, slots=True)
class SearchFacts:
    """What both pages show of the job."""

    job_id: str
    data_set: str
    label: str
    metric: str
    is_larger_better: bool
    n_sites: int
    n_folds: int


@dataclass(frozen=True, slots=True)
class TuningFacts(SearchFacts):
    """What ``tuning.html`` shows.

    Attributes:
        trials: the best first; those whose score is no number last.
        script: the text of train_best.py.
        n_trials: how many there will be.
        now: when the page was written, in UTC, for people.
    """

    trials: tuple[TunedTrial, ...]
    script: str
    n_trials: int
    now: str


def tuning_html(facts: TuningFacts) -> str:
    """Return ``tuning.html``."""
    drawn = [one for one in facts.trials if math.isfinite(one.mean)]
    axes = [axis for axis in (_axis_of(name, drawn) for name in _names(drawn)) if axis is not None]
    importance = sorted(((_importance(axis, drawn), axis) for axis in axes), key=lambda one: -one[0])
    points = [_point(one, one.number, is_best=one is facts.trials[0]) for one in drawn]
    return page(
        "tuning.html",
        facts=facts,
        is_running=len(facts.trials) < facts.n_trials,
        by_trial=points_chart(points, "trial", facts.metric) if points else "",
        parallel=_parallel(facts, drawn, [axis for _, axis in importance[:_MOST_AXES]]) if axes else "",
        importance=horizontal_bars([Bar(axis.name, value, f"{100 * value:.0f} %") for value, axis in importance]),
        by_parameter=[(axis.name, _by_parameter(facts, drawn, axis)) for _, axis in importance],
        names=_names(facts.trials),
        most_rows=_MOST_ROWS,
    )


def _names(trials: Iterable[TunedTrial]) -> list[str]:
    return list(dict.fromkeys(name for one in trials for name, _ in one.parameters))


@dataclass(frozen=True, slots=True)
class _ParameterAxis:
    """Where values of a parameter lie: numbers from low to high, texts one after the other.

    Attributes:
        texts: the values, where some are texts; empty for numbers.
    """

    name: str
    low: float
    high: float
    is_log: bool = False
    texts: tuple[str, ...] = ()

    def of(self, one: TunedTrial) -> float | None:
        """Return the trial's value as a number, a text's as its place; None where it gives none."""
        value = dict(one.parameters).get(self.name)
        if value is None:
            return None
        return float(self.texts.index(_text(value))) if self.texts else float(value)

    def share(self, value: float) -> float:
        """Return where a number lies between the lowest, 0, and the highest, 1."""
        scaled = [math.log(x) if self.is_log else x for x in (self.low, value, self.high)]
        return (scaled[1] - scaled[0]) / (scaled[2] - scaled[0])


def _axis_of(name: str, trials: Sequence[TunedTrial]) -> _ParameterAxis | None:
    """Return the axis of a parameter; None for one that does not change."""
    values = {value for one in trials for key, value in one.parameters if key == name}
    if len(values) < 2:
        return None
    if any(isinstance(value, str) for value in values):
        return _ParameterAxis(name, 0.0, len(values) - 1.0, texts=tuple(sorted(map(_text, values))))
    low, high = min(map(float, values)), max(map(float, values))
    return _ParameterAxis(name, low, high, low > 0 and high / low >= _LOG_SPAN)


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else number(value)


def _importance(axis: _ParameterAxis, trials: Sequence[TunedTrial]) -> float:
    """Return the share of the scores' variance that goes with a parameter alone, less what chance would give.

    This is epsilon squared (Kelley, 1935) over its values, numbers in at most four groups of as many trials.
    """
    pairs = [(axis.of(one), one.mean) for one in trials]
    places, scores = (np.array(one, dtype=float) for one in zip(*pairs, strict=True))  # None becomes NaN
    edges = np.unique(np.nanquantile(places, (0.25, 0.5, 0.75))) if not axis.texts else np.arange(len(axis.texts))
    groups = np.where(np.isnan(places), -1, np.searchsorted(edges, places))
    found, sizes = np.unique(groups, return_counts=True)
    total, n = float(((scores - scores.mean()) ** 2).sum()), len(scores)
    if len(found) < 2 or n <= len(found) or total == 0:
        return 0.0
    between = sum(
        size * (scores[groups == group].mean() - scores.mean()) ** 2 for group, size in zip(found, sizes, strict=True)
    )
    return max(0.0, float((between - (len(found) - 1) * (total - between) / (n - len(found))) / total))


def _point(one: TunedTrial, x: float, *, is_best: bool) -> Point:
    return Point(one.hint, x, one.mean, 0.0 if math.isnan(one.spread) else one.spread, _BEST if is_best else _OTHER)


def _by_parameter(facts: TuningFacts, trials: Sequence[TunedTrial], axis: _ParameterAxis) -> str:
    given = [(one, axis.of(one)) for one in trials]
    points = [_point(one, x, is_best=one is facts.trials[0]) for one, x in given if x is not None]
    return points_chart(points, axis.name, facts.metric, is_log=axis.is_log, names=axis.texts, width=HALF)


def _parallel(facts: TuningFacts, trials: Sequence[TunedTrial], axes: Sequence[_ParameterAxis]) -> str:
    """Draw a line for each trial through its parameters to its score, the best one last and green."""
    marks: list[Mark] = []
    top, bottom, step = 44, 290, (WIDTH - 130) / len(axes)
    scores, most = [one.mean for one in trials], max(int(step / 7.5), 6)
    score = _ParameterAxis(facts.metric, min(scores), max(scores) if max(scores) > min(scores) else min(scores) + 1)

    def height(axis: _ParameterAxis, value: float) -> float:
        return bottom - axis.share(value) * (bottom - top)

    for place, axis in enumerate((*axes, score)):
        x = 50 + step * place
        marks.append({"kind": "line", "ends": (x, top, x, bottom), "class": "axis"})
        marks.append(text_mark(x, top - 22, shortened(axis.name, most), "middle", "label"))
        ends = [(float(n), text) for n, text in enumerate(axis.texts)] or [
            (v, number(v)) for v in (axis.low, axis.high)
        ]
        for value, text in ends:
            marks.append(text_mark(x + 5, height(axis, value) + 4, shortened(text, most), "start", "tick halo"))
    lines = []
    for rank, one in enumerate(trials):  # the best first
        values = [(50 + step * place, axis, axis.of(one)) for place, axis in enumerate(axes)]
        path = [(x, height(axis, value)) for x, axis, value in values if value is not None]
        path.append((50 + step * len(axes), height(score, one.mean)))
        share = 100 * (1 - rank / max(len(trials) - 1, 1))
        is_best = one is facts.trials[0]
        stroke = "var(--c3)" if is_best else f"color-mix(in srgb, var(--c1) {share:.0f}%, var(--c6))"
        style = "line" if is_best else "faint"
        lines.append({"kind": "path", "class": style, "stroke": stroke, "path": path, "hint": one.hint})
    name = "trials in parallel coordinates"
    return figure("drawing", width=WIDTH, height=310, name=name, marks=[*reversed(lines), *marks])


SELECTION_PAGE = "selection.html"
_MOST_BARS = 60
_CHOSEN, _BEST_STEP, _GONE = 3, 2, 6


@dataclass(frozen=True, slots=True)
class SelectionStep:
    """One set of columns: how many, their score over the folds with its standard error, and which go after it."""

    n_columns: int
    mean: float
    standard_error: float
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SelectedColumn:
    """One column.

    Attributes:
        gone_after: the step after which it was taken away; None if it was not.
        mean, spread: its importance with all columns, over the folds.
        information: information value over the folds (mean, spread), about what it would be by chance, and whether it
            is a bound from below.
        shadows: in how many trainings it was above all shadow columns, and what that says.
    """

    name: str
    is_chosen: bool
    gone_after: int | None
    mean: float
    spread: float
    information: tuple[float, float, float, bool] | None = None
    shadows: tuple[int, str] | None = None

    @property
    def colour(self) -> int:
        """Of its bars."""
        return _CHOSEN if self.is_chosen else _GONE


@dataclass(frozen=True, slots=True)
class SelectionFacts(SearchFacts):
    """What ``selection.html`` shows.

    Attributes:
        best, chosen: places of these steps.
        columns: the one kept longest first.
        script: the text of train_chosen.py.
    """

    importance: str
    rule: str
    steps: tuple[SelectionStep, ...]
    best: int
    chosen: int
    columns: tuple[SelectedColumn, ...]
    n_shadow_trainings: int
    script: str


def selection_html(facts: SelectionFacts) -> str:
    """Return ``selection.html``."""
    points = [
        Point(
            f"{one.n_columns} columns: {facts.metric} {number(one.mean)}",
            one.n_columns,
            one.mean,
            one.standard_error,
            _CHOSEN if place == facts.chosen else _BEST_STEP if place == facts.best else _OTHER,
        )
        for place, one in enumerate(facts.steps)
    ]
    by_importance = sorted(facts.columns, key=lambda one: -one.mean)[:_MOST_BARS]
    informed = [(one, one.information) for one in facts.columns]
    values = sorted(((given[0], one, given) for one, given in informed if given is not None), key=lambda one: -one[0])
    return page(
        "selection.html",
        facts=facts,
        names=[one.name for one in facts.columns if one.is_chosen],
        by_size=points_chart(points, "columns", facts.metric),
        importance=horizontal_bars(
            [Bar(one.name, one.mean, f"{number(one.mean)} ± {number(one.spread)}", one.colour) for one in by_importance]
        ),
        values=horizontal_bars(
            [Bar(one.name, value, _value_text(given), one.colour) for value, one, given in values[:_MOST_BARS]]
        )
        if values
        else "",
        most_bars=_MOST_BARS,
        value_text=_value_text,
    )


def _value_text(information: tuple[float, float, float, bool]) -> str:
    mean, spread, _, at_least = information
    return f"{'at least ' if at_least else ''}{number(mean)} ± {number(spread)}"
