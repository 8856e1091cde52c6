"""The page of a tuning, ``tuning.html``: mean and spread over the folds for each trial, and by each parameter.

Privacy: everything on it is pooled metrics, which all sites have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nvflare_plugins.formatting import counted, markup
from nvflare_plugins.report.charts import Point, number, points_chart
from nvflare_plugins.report.style import page

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
    best = facts.trials[0]
    lead = (
        f"{counted(len(facts.trials), 'trial')} on {facts.n_folds} folds over {counted(facts.n_sites, 'site')}. Best "
        f"is trial {best.number}: {facts.metric} {number(best.mean)}, spread {number(best.spread)} ({best.text})."
    )
    header = (
        "<header><p class=eyebrow>Tuning and cross validation over the rows of all sites</p>"
        f"<h1>{markup(facts.data_set)}: {markup(facts.label)}</h1><p class=lead>{markup(lead)}</p></header>"
    )
    parts = (_by_trial(facts), _by_parameter(facts), _table(facts), _best(facts), _how_to_read(facts))
    body = "\n".join((header, *(line for part in parts for line in part)))
    return page(f"Tuning on {facts.data_set}", body, f"Written by VeilBoost, job {markup(facts.job_id)}.")


def _drawn(facts: TuningFacts) -> list[TunedTrial]:
    return [one for one in facts.trials if one.mean == one.mean and abs(one.mean) < float("inf")]


def _spread(one: TunedTrial) -> float:
    return one.spread if one.spread == one.spread else 0.0


def _point(facts: TuningFacts, one: TunedTrial, x: float) -> Point:
    name = f"trial {one.number}: {number(one.mean)}, spread {number(one.spread)} ({one.text})"
    return Point(name, x, one.mean, _spread(one), _BEST if one is facts.trials[0] else _OTHER)


def _by_trial(facts: TuningFacts) -> Iterator[str]:
    yield f"<section><h2>{markup(facts.metric)} by trial</h2>"
    shown = _drawn(facts)
    if shown:
        yield points_chart([_point(facts, one, one.number) for one in shown], "trial", facts.metric)
    yield "<p class=muted>Mean over the folds, and one standard deviation to both sides.</p></section>"


def _by_parameter(facts: TuningFacts) -> Iterator[str]:
    shown = _drawn(facts)
    for name in dict.fromkeys(name for one in shown for name, _ in one.parameters):
        pairs = [(one, dict(one.parameters).get(name)) for one in shown]
        numbers = [(one, float(value)) for one, value in pairs if value is not None and not isinstance(value, str)]
        values = {value for _, value in numbers}
        if len(numbers) < len([value for _, value in pairs if value is not None]) or len(values) < 2:
            continue
        is_log = min(values) > 0 and max(values) / min(values) >= _LOG_SPAN
        yield f"<section><h2>{markup(facts.metric)} by {markup(name)}</h2>"
        yield points_chart([_point(facts, one, value) for one, value in numbers], name, facts.metric, is_log)
        yield "</section>"


def _table(facts: TuningFacts) -> Iterator[str]:
    names = list(dict.fromkeys(name for one in facts.trials for name, _ in one.parameters))
    yield "<section><h2>All trials</h2><div class=scroll><table class=messages><tr><th class=n>trial"
    yield "".join(f"<th class=n>{markup(name)}" for name in names)
    yield f"<th class=n>mean {markup(facts.metric)}<th class=n>spread<th class=n>lowest<th class=n>highest"
    yield "<th class=n>rounds</tr>"
    for one in facts.trials[:_MOST_ROWS]:
        given = dict(one.parameters)
        cells = "".join(f"<td class=n>{_cell(given.get(name))}" for name in names)
        yield (
            f"<tr><td class=n>{one.number}{cells}<td class=n>{number(one.mean)}<td class=n>{number(one.spread)}"
            f"<td class=n>{number(min(one.scores))}<td class=n>{number(max(one.scores))}<td class=n>{one.rounds}</tr>"
        )
    yield "</table></div>"
    if len(facts.trials) > _MOST_ROWS:
        yield f"<p class=muted>{len(facts.trials) - _MOST_ROWS} further trials are in tuning.csv.</p>"
    yield "</section>"


def _cell(value: str | float | None) -> str:
    return "" if value is None else markup(value if isinstance(value, str) else number(value))


def _best(facts: TuningFacts) -> Iterator[str]:
    yield "<section><h2>Train the best</h2><p>The file train_best.py beside this page, run as <code>python "
    yield "train_best.py</code>, writes the job folder jobs/best, which trains on all rows.</p>"
    yield f"<div class=scroll><pre>{markup(facts.script)}</pre></div></section>"


def _how_to_read(facts: TuningFacts) -> Iterator[str]:
    better = "larger" if facts.is_larger_better else "smaller"
    yield "<section><h2>How to read it</h2><ul>"
    yield f"<li>A {better} {markup(facts.metric)} is better. Rounds are for a training over all rows: the mean of "
    yield "the folds' best rounds.</li>"
    yield (
        "<li>Folds share rows of training, so that their scores are not independent: the spread shows how much a score "
        "depends on the fold, and is no confidence interval. Trials whose means differ by less than a fraction of it "
        "are hardly told apart.</li>"
    )
    yield (
        "<li>The best of many trials looks better than it is, because it was chosen by these very scores. Rows that no "
        "trial has seen tell how good it is.</li></ul></section>"
    )
