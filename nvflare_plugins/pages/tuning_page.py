"""The page of a tuning, ``tuning.html``: mean and spread over the folds for each trial, and by each parameter.

Privacy: everything on it is pooled metrics, which all sites have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nvflare_plugins.base.formatting import number
from nvflare_plugins.pages.charts import Point, points_chart
from nvflare_plugins.pages.render import page

PAGE = "tuning.html"
_MOST_ROWS = 200
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
        return ", ".join(
            f"{name} {value if isinstance(value, str) else number(value)}" for name, value in self.parameters
        )


@dataclass(frozen=True, slots=True)
class TuningFacts:
    """What ``tuning.html`` shows.

    Attributes:
        trials: the best first; those whose score is no number last.
        script: the text of train_best.py.
    """

    job_id: str
    data_set: str
    label: str
    metric: str
    is_larger_better: bool
    n_sites: int
    n_folds: int
    trials: tuple[TunedTrial, ...]
    script: str


def build_page(facts: TuningFacts) -> str:
    """Return ``tuning.html``."""
    points = [_point(facts, one, one.number) for one in _drawn(facts)]
    return page(
        "tuning.html",
        facts=facts,
        by_trial=points_chart(points, "trial", facts.metric) if points else "",
        by_parameter=list(_by_parameter(facts)),
        names=list(dict.fromkeys(name for one in facts.trials for name, _ in one.parameters)),
        most_rows=_MOST_ROWS,
    )


def _drawn(facts: TuningFacts) -> list[TunedTrial]:
    return [one for one in facts.trials if math.isfinite(one.mean)]


def _point(facts: TuningFacts, one: TunedTrial, x: float) -> Point:
    name = f"trial {one.number}: {number(one.mean)}, spread {number(one.spread)} ({one.text})"
    spread = 0.0 if math.isnan(one.spread) else one.spread
    return Point(name, x, one.mean, spread, _BEST if one is facts.trials[0] else _OTHER)


def _by_parameter(facts: TuningFacts) -> Iterator[tuple[str, str]]:
    shown = _drawn(facts)
    for name in dict.fromkeys(name for one in shown for name, _ in one.parameters):
        pairs = [(one, dict(one.parameters).get(name)) for one in shown]
        numbers = [(one, float(value)) for one, value in pairs if value is not None and not isinstance(value, str)]
        values = {value for _, value in numbers}
        if len(numbers) < len([value for _, value in pairs if value is not None]) or len(values) < 2:
            continue
        is_log = min(values) > 0 and max(values) / min(values) >= _LOG_SPAN
        yield (
            name,
            points_chart([_point(facts, one, value) for one, value in numbers], name, facts.metric, is_log=is_log),
        )
