"""The pages of a profile: ``profile.html``, over the rows of all sites, and ``local.html``, one site beside the others.

Privacy: ``profile.html`` shows pooled counts, which all sites have. ``local.html`` is about this site's own rows: it is
written into the run's folder for its owner and sent nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvflare_plugins.formatting import counted, markup
from nvflare_plugins.report.charts import Bar, horizontal_bars, number, two_sided_bars
from nvflare_plugins.report.style import page

PAGE = "profile.html"
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
        bounds: what it is at least over all values, where that is more (profile/cells.py).
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


def build_page(facts: ProfileFacts) -> str:
    """Return ``profile.html``."""
    classes = ", ".join(f"{rows:,} of class {name}" for name, rows in facts.classes)
    sites = counted(facts.n_sites, "site")
    lead = f"{facts.n_rows:,} rows of {sites}; {classes}." if classes else f"{facts.n_rows:,} rows of {sites}."
    header = (
        "<header><p class=eyebrow>What single columns tell of the label, over the rows of all sites</p>"
        f"<h1>{markup(facts.data_set)}: {markup(facts.label)}</h1><p class=lead>{markup(lead)}</p></header>"
    )
    body = "\n".join((header, *_ranking(facts), *_details(facts), *_how_to_read(facts)))
    return page(f"Profile of {facts.data_set}", body, f"Written by VeilBoost, job {markup(facts.job_id)}.")


def too_few(least: int) -> str:
    """Return what is said where nothing was counted."""
    return (
        f"Some class has too few rows: no site has {least} of it by itself, and not every site its part of {least}. "
        "Nothing was counted."
    )


def _ranking(facts: ProfileFacts) -> Iterator[str]:
    yield "<section><h2>Information value</h2>"
    if not facts.features:
        yield f"<p>{markup(too_few(facts.least))}</p></section>"
        return
    shown = facts.features[:_MOST_BARS]
    yield horizontal_bars([Bar(one.name, one.at_least, one.text) for one in shown])
    if len(facts.features) > len(shown):
        yield f"<p class=muted>{len(facts.features) - len(shown)} further columns are in profile.json.</p>"
    several = len(facts.classes) > 2
    yield "<div class=scroll><table class=messages><tr><th>column<th class=n>information value"
    yield f"<th class=n>by chance about<th class=n>bins<th class=n>missing{'<th>most of class' if several else ''}</tr>"
    for one in facts.features:
        best = one.best_class
        rate = f"{100 * one.missing / facts.n_rows:.3g} %" if facts.n_rows else ""
        of_class = f"<td>{markup(facts.classes[best][0])}" if several else ""
        yield (
            f"<tr><td>{markup(one.name)}<td class=n>{one.text}<td class=n>{number(one.by_chance[best])}"
            f"<td class=n>{len(one.cells)}<td class=n>{rate}{of_class}</tr>"
        )
    yield "</table></div></section>"


def _details(facts: ProfileFacts) -> Iterator[str]:
    for one in facts.features[:_MOST_FEATURES]:
        best = one.best_class
        name = facts.classes[best][0]
        yield f"<section><h2>{markup(one.name)}</h2>"
        yield f"<p class=muted>Weight of evidence of class {markup(name)} against all other rows.</p>"
        yield two_sided_bars([Bar(cell.label, cell.weights[best], f"{cell.weights[best]:+.3g}") for cell in one.cells])
        yield f"<div class=scroll><table class=messages><tr><th>values<th class=n>rows<th class=n>share {markup(name)}"
        yield "<th class=n>weight of evidence</tr>"
        for cell in one.cells:
            rows = sum(cell.counts)
            yield (
                f"<tr><td>{markup(cell.label)}<td class=n>{rows:,}<td class=n>{100 * cell.counts[best] / rows:.3g} %"
                f"<td class=n>{cell.weights[best]:+.4g}</tr>"
            )
        yield "</table></div></section>"


def _how_to_read(facts: ProfileFacts) -> Iterator[str]:
    yield "<section><h2>How to read it</h2><ul>"
    yield (
        "<li>The weight of evidence of a bin is the logarithm of its share of the class's rows over its share of all "
        "other rows: above 0 where the class is more frequent than over all rows. The information value adds up these "
        "weights times the differences of the shares.</li>"
    )
    yield (
        "<li>A column that tells nothing has about the information value under 'by chance', not 0: with many bins and "
        "few rows, do not read more into it. A value far above 0.5 is worth a look at where the column comes from.</li>"
    )
    yield (
        f"<li>Bins are between the cut points that the sites have searched together, merged until each holds at least "
        f"{facts.least} rows of every class over all sites. A column whose values separate the classes has few bins. "
        "'At least' is then what is known without counts: that few rows of the class, or of the others, lie beyond "
        "some cut point.</li>"
    )
    yield "<li>Rows count as one each; sample weights play no part.</li></ul></section>"


def build_local_page(site: str, facts: ProfileFacts, n_own: int, shifts: Sequence[Shift]) -> str:
    """Return ``local.html``: this site beside the rest.

    Args:
        n_own: rows of this site.
        shifts: the one that has moved farthest first.
    """
    body = "\n".join((_local_header(site, facts, n_own), *_shifts(shifts), *_how_to_read_shifts()))
    footer = "Written by VeilBoost at this site, from its own rows. It was sent nowhere and is for its owner alone."
    return page(f"This site beside the others: {facts.job_id}, {site}", body, footer)


def _local_header(site: str, facts: ProfileFacts, n_own: int) -> str:
    return (
        "<header><p class=eyebrow>This site's rows beside those of the other sites</p>"
        f"<h1>{markup(facts.data_set)}, {markup(site)}</h1>"
        f"<p><span class='chip warn'>for this site only</span></p><p class=lead>{counted(n_own, 'row')} here, "
        f"{facts.n_rows - n_own:,} at the other sites.</p></header>"
    )


def _shifts(shifts: Sequence[Shift]) -> Iterator[str]:
    yield "<section><h2>Stability index by column</h2>"
    bars = [Bar(one.name, one.index, number(one.index), _colour(one.index)) for one in shifts[:_MOST_BARS]]
    yield horizontal_bars(bars)
    moved = sum(one.index >= _MOVED for one in shifts)
    yield f"<p>{moved} of {counted(len(shifts), 'column')} at {_MOVED:g} or more.</p></section>"
    for one in shifts[:_MOST_FEATURES]:
        yield f"<section><h2>{markup(one.name)}: {number(one.index)}</h2><div class=scroll>"
        yield "<table class=messages><tr><th>values<th class=n>share here<th class=n>share elsewhere</tr>"
        for label, here, elsewhere in one.cells:
            yield f"<tr><td>{markup(label)}<td class=n>{100 * here:.3g} %<td class=n>{100 * elsewhere:.3g} %</tr>"
        yield "</table></div></section>"


def _colour(index: float) -> int:
    return 5 if index >= _MOVED_FAR else 2 if index >= _MOVED else 3


def _how_to_read_shifts() -> Iterator[str]:
    yield "<section><h2>How to read it</h2><ul>"
    yield (
        f"<li>By custom, below {_MOVED:g} a column is alike, up to {_MOVED_FAR:g} it is worth a look, and above that "
        "the site's values are others: another population, other units, another way of recording. Few rows alone "
        "make a difference, too.</li>"
    )
    yield "<li>The rest is what all sites have counted minus this site's own rows, in the same bins.</li>"
    yield "</ul></section>"
