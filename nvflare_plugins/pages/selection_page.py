"""The page of a selection, ``selection.html``: the score of each set of columns, and what each column is worth.

Privacy: everything on it follows from pooled metrics, counts and models, which all sites have.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvflare_plugins.base.formatting import number
from nvflare_plugins.pages.charts import Bar, Point, horizontal_bars, points_chart
from nvflare_plugins.pages.render import page

PAGE = "selection.html"
_MOST_BARS = 60
_CHOSEN, _BEST, _OTHER, _GONE = 3, 2, 1, 6


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
class SelectionFacts:
    """What ``selection.html`` shows.

    Attributes:
        best, chosen: places of these steps.
        columns: the one kept longest first.
        script: the text of train_chosen.py.
    """

    job_id: str
    data_set: str
    label: str
    metric: str
    is_larger_better: bool
    n_sites: int
    n_folds: int
    importance: str
    rule: str
    steps: tuple[SelectionStep, ...]
    best: int
    chosen: int
    columns: tuple[SelectedColumn, ...]
    n_shadow_trainings: int
    script: str


def build_page(facts: SelectionFacts) -> str:
    """Return ``selection.html``."""
    points = [
        Point(
            f"{one.n_columns} columns: {facts.metric} {number(one.mean)}",
            one.n_columns,
            one.mean,
            one.standard_error,
            _CHOSEN if place == facts.chosen else _BEST if place == facts.best else _OTHER,
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
