"""The pages of a profile: ``profile.html``, over the rows of all sites, and ``local.html``, one site beside the others.

Privacy: ``profile.html`` shows pooled counts, which all sites have. ``local.html`` is about this site's own rows: it is
written into the run's folder for its owner and sent nowhere.

``local.html``: a model of one site's own rows beside the federated one, on that site's own evaluation rows.

Privacy: the page is about this site's rows alone. It is written into the run's folder for its owner and sent nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvflare_plugins.base.formatting import number
from nvflare_plugins.pages.charts import Bar, Line, horizontal_bars, labelled_lines, page, two_sided_bars
from nvflare_plugins.pages.model_charts import RowFigures

PROFILE_PAGE = "profile.html"
LOCAL_PAGE = "local.html"
_MOST_BARS = 40
_MOST_FEATURES = 60
_MOVED, _MOVED_FAR = 0.1, 0.25  # the usual marks of stability indices


@dataclass(frozen=True, slots=True)
class ProfiledCell:
    """Rows that were counted together.

    Attributes:
        label: which values, for people.
        counts: pooled rows of each class.
        weights: weight of evidence of each class against all others.
    """

    label: str
    counts: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProfiledFeature:
    """One column.

    Attributes:
        missing: pooled rows without a value.
        values: information value of each class against all others, in these cells.
        bounds: what it is at least over all values, where that is more (kinds/profile/site.py).
        by_chance: about what these would be if the column told nothing of the label.
    """

    name: str
    missing: int
    values: tuple[float, ...]
    bounds: tuple[float, ...]
    by_chance: tuple[float, ...]
    cells: tuple[ProfiledCell, ...]

    @property
    def best_class(self) -> int:
        """The class of which it tells most; of two classes, of which it tells as much, the second."""
        if len(self.values) == 2:
            return 1
        return max(range(len(self.values)), key=lambda one: max(self.values[one], self.bounds[one]))

    @property
    def value(self) -> float:
        """The largest information value in these cells."""
        return self.values[self.best_class]

    @property
    def at_least(self) -> float:
        """What the largest information value is known to be at least."""
        return max(self.value, self.bounds[self.best_class])

    @property
    def text(self) -> str:
        """The information value, for people."""
        return number(self.value) if self.at_least == self.value else f"at least {number(self.at_least)}"


@dataclass(frozen=True, slots=True)
class ProfileFacts:
    """What ``profile.html`` shows.

    Attributes:
        classes: (name, pooled rows) of each class.
        least: rows of every class in each cell, at least.
        features: the one that tells most first; none where classes are too small.
    """

    job_id: str
    data_set: str
    label: str
    n_sites: int
    n_rows: int
    classes: tuple[tuple[str, int], ...]
    least: int
    features: tuple[ProfiledFeature, ...]


@dataclass(frozen=True, slots=True)
class Shift:
    """How far a column's values at one site lie from those of the other sites.

    Attributes:
        cells: (which values, share of this site's rows, share of the others' rows).
    """

    name: str
    index: float
    cells: tuple[tuple[str, float, float], ...]


def profile_html(facts: ProfileFacts) -> str:
    """Return ``profile.html``."""
    bars = [Bar(one.name, one.at_least, one.text) for one in facts.features[:_MOST_BARS]]
    return page(
        "profile.html",
        facts=facts,
        ranking=horizontal_bars(bars) if bars else "",
        most_bars=_MOST_BARS,
        too_few=too_few(facts.least),
        details=[(one, _weights(one)) for one in facts.features[:_MOST_FEATURES]],
    )


def _weights(one: ProfiledFeature) -> str:
    weights = ((cell.label, cell.weights[one.best_class]) for cell in one.cells)
    return two_sided_bars([Bar(label, weight, f"{weight:+.3g}") for label, weight in weights])


def too_few(least: int) -> str:
    """Return what is said where nothing was counted."""
    return (
        f"Some class has too few rows: no site has {least} of it by itself, and not every site its part of {least}. "
        "Nothing was counted."
    )


def local_html(site: str, facts: ProfileFacts, n_own: int, shifts: Sequence[Shift]) -> str:
    """Return ``local.html``: this site beside the rest.

    Args:
        n_own: rows of this site.
        shifts: the one that has moved farthest first.
    """
    bars = [Bar(one.name, one.index, number(one.index), _colour(one.index)) for one in shifts[:_MOST_BARS]]
    return page(
        "profile_local.html",
        site=site,
        facts=facts,
        n_own=n_own,
        shifts=shifts,
        ranking=horizontal_bars(bars),
        n_moved=sum(one.index >= _MOVED for one in shifts),
        moved=_MOVED,
        moved_far=_MOVED_FAR,
        most_features=_MOST_FEATURES,
    )


def _colour(index: float) -> int:
    return 5 if index >= _MOVED_FAR else 2 if index >= _MOVED else 3


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


def comparison_html(compared: Comparison) -> str:
    """Return the page as HTML."""
    curves = ""
    if len(compared.curves) > 1 and len(compared.curves[0][1]) > 1:
        lines = [Line(name, i + 1, points) for i, (name, points) in enumerate(compared.curves)]
        curves = labelled_lines(lines, "round", compared.curve_metric)
    return page("local.html", compared=compared, curves=curves)
