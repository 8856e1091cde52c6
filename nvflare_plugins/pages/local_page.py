"""``local.html``: a model of one site's own rows beside the federated one, on that site's own evaluation rows.

Privacy: the page is about this site's rows alone. It is written into the run's folder for its owner and sent nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvflare_plugins.pages.charts import Line, labelled_lines, page
from nvflare_plugins.pages.model_charts import RowFigures

FILE_NAME = "local.html"


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
        job: its name.
        n_training, n_evaluation: rows of this site.
        rounds, tuned_rounds: boosting rounds of the models.
        curve_metric: of ``curves``, which give it by round: (name, points).
        notes: what limits the numbers.
        rows: what the federated model makes of the evaluation rows.
    """

    job: str
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
    rows: RowFigures | None = None


def local_html(compared: Comparison) -> str:
    """Return the page as HTML."""
    curves = ""
    if len(compared.curves) > 1 and len(compared.curves[0][1]) > 1:
        lines = [Line(name, i + 1, points) for i, (name, points) in enumerate(compared.curves)]
        curves = labelled_lines(lines, "round", compared.curve_metric)
    return page("local.html", compared=compared, curves=curves)
