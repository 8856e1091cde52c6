"""``local.html``: a model of one site's own rows beside the federated one, on that site's own evaluation rows.

Privacy: the page is about this site's rows alone. It is written into the run's folder for its owner and sent nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nvflare_plugins.formatting import counted, markup
from nvflare_plugins.report.charts import Line, legend, line_chart
from nvflare_plugins.report.style import page

FILE_NAME = "local.html"
_NAMES = ("alone", "alone, tuned", "federated", "difference")


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric of the models on the evaluation rows.

    Attributes:
        alone, tuned: of the models of this site's own rows: with the job's rounds, and with rounds chosen by
            cross-validation; ``tuned`` is None where there are too few rows for that.
        federated: of the job's model.
        low, high: 95 % interval of federated minus the better one of the others, over resampled evaluation rows.
    """

    name: str
    is_higher_better: bool
    alone: float
    tuned: float | None
    federated: float
    low: float
    high: float

    @property
    def best_alone(self) -> float:
        """The better of the site's own models."""
        both = [self.alone] if self.tuned is None else [self.alone, self.tuned]
        return max(both) if self.is_higher_better else min(both)

    @property
    def verdict(self) -> str:
        """Whether the federated model is better, beyond what so few rows show by chance."""
        if self.low <= 0 <= self.high:
            return "no difference that these rows could show"
        return "federated is better" if (self.low > 0) == self.is_higher_better else "this site alone is better"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the page shows.

    Attributes:
        n_training, n_evaluation: rows of this site.
        rounds, tuned_rounds: boosting rounds of the models.
        curve_metric: of ``curves``, which give it by round: (name, points).
        notes: what limits the numbers.
    """

    job_id: str
    site: str
    data_set: str
    n_training: int
    n_evaluation: int
    rounds: int
    tuned_rounds: int | None
    metrics: tuple[Compared, ...]
    curve_metric: str = ""
    curves: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()
    notes: tuple[str, ...] = ()


def build_page(compared: Comparison) -> str:
    """Return the page as HTML."""
    first = compared.metrics[0]
    body = "\n".join(
        (
            "<header><p class=eyebrow>What joining is worth to this site</p>"
            f"<h1>{markup(compared.job_id)}, {markup(compared.site)}</h1>"
            f"<p><span class='chip warn'>for this site only</span><span class='chip {_level(first)}'>"
            f"{markup(first.verdict)}</span></p><p class=lead>{_sentence(first)}</p></header>",
            f"<section><h2>On {counted(compared.n_evaluation, 'evaluation row')} of this site</h2>",
            *_table(compared),
            "</section>",
            *_curves(compared),
            "<section><h2>How to read it</h2><ul>",
            *(f"<li>{markup(note)}" for note in _notes(compared)),
            "</ul></section>",
        )
    )
    footer = "Written by VeilBoost at this site, from its own rows. It was sent nowhere and is for its owner alone."
    return page(f"Local comparison: {compared.job_id}, {compared.site}", body, footer)


def _level(metric: Compared) -> str:
    return {"federated is better": "good", "this site alone is better": "bad"}.get(metric.verdict, "warn")


def _sentence(metric: Compared) -> str:
    change = metric.federated - metric.best_alone
    return markup(
        f"{metric.name} {metric.federated:.4g} with the federated model, {metric.best_alone:.4g} with the better model "
        f"of this site's rows alone: {change:+.4g} (95 % of resamplings {metric.low:+.4g} to {metric.high:+.4g})."
    )


def _table(compared: Comparison) -> Iterator[str]:
    yield "<div class=scroll><table class=messages><tr><th>metric"
    yield from (f"<th class=n>{markup(name)}" for name in _NAMES)
    yield "<th></tr>"
    for one in compared.metrics:
        tuned = "" if one.tuned is None else f"{one.tuned:.4g}"
        better = "higher" if one.is_higher_better else "lower"
        yield (
            f"<tr><td>{markup(one.name)}<br><span class=muted>{better} is better</span><td class=n>{one.alone:.4g}"
            f"<td class=n>{tuned}<td class=n>{one.federated:.4g}<td class=n>{one.federated - one.best_alone:+.4g}"
            f"<br><span class=muted>{one.low:+.3g} to {one.high:+.3g}</span><td>{markup(one.verdict)}</tr>"
        )
    yield "</table></div>"


def _curves(compared: Comparison) -> Iterator[str]:
    if len(compared.curves) < 2 or len(compared.curves[0][1]) < 2:
        return
    lines = [Line(name, i + 1, points) for i, (name, points) in enumerate(compared.curves)]
    yield f"<section><h2>{markup(compared.curve_metric)} by round</h2>"
    yield legend([(line.name, line.colour) for line in lines])
    yield line_chart(lines, "round", compared.curve_metric)
    yield "</section>"


def _notes(compared: Comparison) -> Iterator[str]:
    tuned = compared.tuned_rounds
    yield (
        f"'Alone' was trained on this site's {counted(compared.n_training, 'row')} of data set "
        f"{compared.data_set} with the job's parameters, for the same {counted(compared.rounds, 'round')}"
        + (f"; 'tuned' for {counted(tuned, 'round')}, chosen by cross-validation on these rows." if tuned else ".")
    )
    yield (
        "The difference is that of 'federated' to the better of the others, with the interval that 95 % of resamplings "
        "of the evaluation rows give: where it holds zero, these rows do not show which model is better. It does not "
        "say how other training rows would have changed it."
    )
    yield "Rows of a person who is in both sets would flatter the model that was trained on them."
    yield from compared.notes
