"""One site's part in a profile, from its policy to its pages.

The sites search cut points as a horizontal training does, and remember them like one: a training over the same data,
with the same sites and settings, finds them in the registry and searches no more. Then they decide which bins are
counted together (``merge``), and add their counts of these, and of nothing finer.

Privacy: needs the consent ``feature_profile`` of every site. The server sees protected sums. Every site learns what the
    cut search tells (xgb/cuts.py), the bits of pooled/spans.py, and the pooled rows of each class in each cell.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.job_context import JobResult, SiteContext
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.base.files import write_private
from nvflare_plugins.base.formatting import bounds
from nvflare_plugins.data.table import Table, log_what_labels_lack
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.pages.profile_page import (
    LOCAL_PAGE,
    PROFILE_PAGE,
    ProfiledCell,
    ProfiledFeature,
    ProfileFacts,
    Shift,
    local_html,
    profile_html,
    too_few,
)
from nvflare_plugins.pages.run_record import DataFacts, ReportSection
from nvflare_plugins.pooled.attempt import Agreement, PooledAttempt
from nvflare_plugins.pooled.preparation import Prepared, allow
from nvflare_plugins.pooled.spans import Bools, Ints, ask_spans, edges_of, local_bits, spans_of
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb.cuts import Cuts

# What a profile ends with: ``profile.json``, and what its pages show.


FORMAT = "veilboost-profile-1"
FILE_NAME = "profile.json"
_MOST_BARS = 40
_MOST_NAMED = 8  # categories of a bin; profile.json lists all


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """What all sites have counted.

    Attributes:
        n_rows: pooled rows.
        missing: pooled rows without a value, of each feature.
        least: rows of every class in each cell, at least.
        cuts: cut points of each feature.
        cells: those of each feature; none where some class is too small.
        rows: pooled rows of each feature's cells by class. Shapes: int64[n_cells, n_classes] each.
        own: this site's. Shapes: as ``rows``.
        at_least: what each feature's information values are at least, where they say more than its cells. Shapes:
            float64[n_classes] each.
    """

    n_rows: int
    missing: tuple[int, ...]
    least: int
    cuts: Cuts
    cells: tuple[list[Cell], ...] = ()
    rows: tuple[Ints, ...] = ()
    own: tuple[Ints, ...] = ()
    at_least: tuple[NDArray[np.float64], ...] = ()

    def agreed(self) -> bytes:
        """Return what all sites must have alike: integers and cut points, of which everything else follows."""
        cells = [[(cell.first, cell.end, cell.has_missing) for cell in of_feature] for of_feature in self.cells]
        rows = [of_feature.tolist() for of_feature in self.rows]
        return json.dumps([self.n_rows, self.missing, self.least, self.cuts.to_lists(), cells, rows]).encode()

    def monotone(self, names: Sequence[str], listed: Collection[str]) -> Counted:
        """Return the counts with bins of numbers joined (``monotone_groups``). Args: listed: columns of categories."""
        cells, rows, own = list(self.cells), list(self.rows), list(self.own)
        for place, name in enumerate(names if self.cells else ()):
            of_values = [cell for cell in cells[place] if cell.first < cell.end]
            if name in listed:
                continue
            runs = monotone_groups(rows[place][: len(of_values)])
            joined = [Cell(of_values[i].first, of_values[j - 1].end, of_values[i].has_missing) for i, j in runs]
            starts = [*(i for i, _ in runs), *range(len(of_values), len(cells[place]))]
            cells[place] = joined + cells[place][len(of_values) :]
            rows[place], own[place] = (np.add.reduceat(of[place], starts, axis=0) for of in (rows, own))
        return replace(self, cells=tuple(cells), rows=tuple(rows), own=tuple(own))


class Profile:
    """Names and numbers of a profile."""

    def __init__(self, job: ProfileJob, job_id: str, table: Table, counted: Counted) -> None:
        self._job, self._job_id, self._table = job, job_id, table
        self._counted = counted.monotone(table.feature_names, table.categories) if job.monotonic else counted
        listed = job.label_classes if job.label_classes is not None else range(job.n_classes)
        self._classes = tuple(map(str, listed))

    def facts(self, n_sites: int) -> ProfileFacts:
        """Return what ``profile.html`` shows, the feature of the largest information value first."""
        counted = self._counted
        sizes = counted.rows[0].sum(axis=0).tolist() if counted.rows else []
        classes = tuple(zip(self._classes, sizes, strict=True)) if sizes else ()
        features = [self._feature(place) for place in self._ranking()]
        job = self._job
        return ProfileFacts(
            self._job_id, job.data_set, job.label, n_sites, counted.n_rows, classes, counted.least, tuple(features)
        )

    def document(self, n_sites: int) -> dict[str, Any]:
        """Return ``profile.json``; ``ranking`` is the list of columns for a recipe, the most telling first."""
        counted, facts = self._counted, self.facts(n_sites)
        cuts = {"mode": "quantile", "max_bin": self._job.max_bin, "min_rows_per_cut": self._job.min_rows_per_cut}
        return {
            "format": FORMAT,
            "job_id": self._job_id,
            "data_set": self._job.data_set,
            "label": self._job.label,
            "sites": n_sites,
            "rows": counted.n_rows,
            "classes": [{"class": name, "rows": rows} for name, rows in facts.classes],
            "min_rows_per_class": counted.least,
            "cuts": cuts,
            "ranking": [one.name for one in facts.features],
            "features": [self._entry(one, place) for one, place in zip(facts.features, self._ranking(), strict=True)],
        }

    def section(self, n_sites: int, too_few: str) -> ReportSection:
        """Return what the run's report says; ``too_few`` where nothing was counted."""
        facts = self.facts(n_sites)
        if not facts.features:
            return ReportSection("Information value", (too_few,))
        shown = facts.features[:_MOST_BARS]
        note = (
            f"Of {facts.n_rows:,} rows of all sites; bins hold at least {facts.least} of every class. All columns, "
            "bins and weights of evidence are in `profile.html` and `profile.json`."
        )
        bars = tuple((one.name, one.at_least, one.text) for one in shown)
        return ReportSection("Information value", (note,), bars=bars)

    def shifts(self) -> list[Shift]:
        """Return how far this site lies from the rest, the farthest column first; nothing where either has no rows."""
        counted, found = self._counted, []
        for place, (pooled, own) in enumerate(zip(counted.rows, counted.own, strict=True)):
            here, rest = own.sum(axis=1), (pooled - own).sum(axis=1)
            if not here.sum() or not rest.sum():
                return []
            labels = self._labels(place)
            shares = zip(labels, (here / here.sum()).tolist(), (rest / rest.sum()).tolist(), strict=True)
            found.append(Shift(self._table.feature_names[place], stability_index(here, rest), tuple(shares)))
        return sorted(found, key=lambda one: -one.index)

    def _ranking(self) -> list[int]:
        values = [self._feature(place).at_least for place in range(len(self._counted.rows))]
        return sorted(range(len(values)), key=lambda place: (-values[place], place))

    def _feature(self, place: int) -> ProfiledFeature:
        rows = self._counted.rows[place]
        weights = weights_of_evidence(rows)
        return ProfiledFeature(
            self._table.feature_names[place],
            self._counted.missing[place],
            tuple(information_values(rows).tolist()),
            tuple(self._counted.at_least[place].tolist()),
            tuple(values_by_chance(rows).tolist()),
            tuple(
                ProfiledCell(label, tuple(of_cell), tuple(of_weights))
                for label, of_cell, of_weights in zip(self._labels(place), rows.tolist(), weights.tolist(), strict=True)
            ),
        )

    def _entry(self, one: ProfiledFeature, place: int) -> dict[str, Any]:
        n_rows = self._counted.n_rows
        bins = [
            {**self._values(place, cell), "rows": sum(c.counts), "counts": c.counts, "weights_of_evidence": c.weights}
            for cell, c in zip(self._counted.cells[place], one.cells, strict=True)
        ]
        return {
            "name": one.name,
            "information_value": one.value,
            "information_values": one.values,
            "at_least": one.at_least,
            "by_chance": one.by_chance[one.best_class],
            "missing": one.missing,
            "missing_rate": one.missing / n_rows,
            "bins": bins,
        }

    def _values(self, place: int, cell: Cell) -> dict[str, Any]:
        """Return which values a cell holds: of numbers, low <= value < high, where null is no bound."""
        listed = self._categories(place)
        if listed is not None:
            return {"categories": listed[cell.first : cell.end], "missing": cell.has_missing}
        low, high = self._bounds(place, cell)
        return {"low": low, "high": high, "values": cell.first < cell.end, "missing": cell.has_missing}

    def _labels(self, place: int) -> list[str]:
        cells = self._counted.cells[place]
        listed = self._categories(place)
        ranges = self._ranges(place, cells) if listed is None else [_names(listed[c.first : c.end]) for c in cells]
        return [
            "missing" if cell.first == cell.end else text + (", or missing" if cell.has_missing else "")
            for cell, text in zip(cells, ranges, strict=True)
        ]

    def _ranges(self, place: int, cells: Sequence[Cell]) -> list[str]:
        ends = [self._bounds(place, cell) for cell in cells]
        known = sorted({end for pair in ends for end in pair if end is not None})
        text = dict(zip(known, bounds(known), strict=True))
        return [
            ("all values" if high is None else f"below {text[high]}")
            if low is None
            else (f"{text[low]} and more" if high is None else f"{text[low]} to {text[high]}")
            for low, high in ends
        ]

    def _bounds(self, place: int, cell: Cell) -> tuple[float | None, float | None]:
        points = self._counted.cuts.of_feature[place]
        low = float(points[cell.first - 1]) if 0 < cell.first <= points.size and cell.first < cell.end else None
        high = float(points[cell.end - 1]) if cell.first < cell.end <= points.size else None
        return low, high

    def _categories(self, place: int) -> Sequence[str] | None:
        return self._table.categories.get(self._table.feature_names[place])


def _names(categories: Sequence[str]) -> str:
    """Return the categories of one bin, the first of many."""
    rest = len(categories) - _MOST_NAMED
    return ", ".join([*categories[:_MOST_NAMED], *([f"{rest} more"] if rest > 0 else [])])


TITLE = "Profile of the data of all sites"
_NOT_RELEASED = ("deadline_s",)


def prepare(job: ProfileJob, context: SiteContext) -> Prepared:
    """Check the job against the policy and the data, at this site alone.

    Raises:
        PolicyRefusal: the site's policy forbids the job.
        ConfigurationError: job or data are not usable; the message says which.
    """
    policy = context.policy
    policy.check_consent(
        "feature_profile",
        "does not count its rows by features and label for other sites",
        "train without a profile",
    )
    remedy = "profile a data set of other rows without a budget"
    policy.check_no_budget(job.data_set, "the counts of a profile are", remedy)
    prepared = allow(job.training(), context, by_xgboost=False).load()
    if not np.isin(prepared.table.label, np.arange(job.n_classes)).all():
        raise DataRefusal(
            "a profile counts rows of classes, and some labels are no class (0 and 1, or a list of label_classes). A "
            "label for regression has no weight of evidence: profile a column that says which side of a bound it is on"
        )
    log_what_labels_lack(prepared.table, job.data_set, is_classification=True)
    return prepared


class ProfileAttempt(PooledAttempt):
    """The steps of one attempt once its session is open."""

    def __init__(self, attempt: SiteAttempt, prepared: Prepared) -> None:
        self._job: ProfileJob = attempt.job
        super().__init__(attempt, prepared, self._job.training(), is_grown=False)

    def run(self) -> JobResult:
        """Agree, search cut points, merge bins, count, write pages."""
        agreement, table, job = self.begin(), self._rows.table, self._job
        labels = table.label.astype(np.int64)
        return self._finish(count(agreement, table, labels, job.n_classes, job.min_rows_per_cut, self._world))

    def _release(self) -> dict[str, object]:
        fields = {name: value for name, value in self._job.to_dict().items() if name not in _NOT_RELEASED}
        return {"kind": "profile", "job": fields}

    def _finish(self, counted: Counted) -> JobResult:
        attempt, job, table = self._attempt, self._job, self._rows.table
        hmac = attempt.conclude(counted.agreed(), "counts")
        profile = Profile(job, attempt.context.job_id, table, counted)
        path = self._write(profile)
        attempt.all_have_written()
        self._reservations.complete(0)
        attempt.write_record(
            TITLE,
            {},
            None,
            (profile.section(self._world, too_few(counted.least)),),
            **self._record_of(counted.cuts),
            notes=(_REUSE,),
            data=(DataFacts.of(table, job.data_set),),
        )
        return JobResult(hmac.hex(), f"the profile is {path}", {"features": len(table.feature_names)})

    def _write(self, profile: Profile) -> object:
        folder, facts = self._attempt.folder.path, profile.facts(self._world)
        shifts = profile.shifts()
        if shifts:
            own = local_html(self._attempt.context.site, facts, self._rows.table.n_rows, shifts)
            write_private(folder / LOCAL_PAGE, own.encode())
        write_private(folder / PROFILE_PAGE, profile_html(facts).encode())
        document = json.dumps(profile.document(self._world), ensure_ascii=False, indent=1)
        write_private(folder / FILE_NAME, document.encode())
        return folder / PROFILE_PAGE


_REUSE = (
    "A training over the same data, sites, `max_bin` and `min_rows_per_cut` uses these cut points again and searches "
    "no more. Rows counted as one each."
)


def count(
    agreement: Agreement, table: Table, labels: Ints, n_classes: int, least: int, world: int, n_parts: int = 1
) -> Counted:
    """Decide with all sites which bins are counted together, and count.

    Args:
        labels: the class of each row, from 0. Shapes: int64[n_rows].
        n_classes: number of classes, in each part of the rows if these are counted apart: class c of part p is then
            p * n_classes + c. Parts have the same cells, with rows enough of every class in each.
        least: rows of every class in a cell, at least.

    Raises:
        ProtocolError: the opened counts contradict what was said before: a site or the server lied.
    """
    sums, cuts, pooled, n_columns = agreement.sums, agreement.cuts, agreement.rows, n_parts * n_classes
    missing = pooled[0] - pooled[1:]
    counted = Counted(int(pooled[0]), tuple(missing.tolist()), least, cuts)
    rows = [_own_rows(table, cuts, place, column, labels, n_columns) for place, column in enumerate(table.columns())]
    spans = [spans_of(len(of_feature) - 1) for of_feature in rows]
    whole = np.bincount(labels, minlength=n_columns)[None, :]
    asked = [whole, *(rows_of_spans(r, s) for r, s in zip(rows, spans, strict=True))]
    enough = ask_spans(sums, [local_bits(one, least, world) for one in asked])
    if not enough[0].all():
        return counted
    cells = tuple(
        merge(s, e, len(r) - 1, some_missing=bool(m))
        for s, e, r, m in zip(spans, enough[1:], rows, missing, strict=True)
    )
    own = tuple(rows_of_cells(r, c) for r, c in zip(rows, cells, strict=True))
    flat = sums.sum_counts(Kind.CLASS_COUNTS, np.concatenate(own).ravel())
    ends = np.cumsum([len(of_feature) for of_feature in own])[:-1]
    opened = np.split(flat.reshape(-1, n_columns), ends)
    totals = opened[0].sum(axis=0)
    if flat.min() < least or any((one.sum(axis=0) != totals).any() for one in opened):
        raise ProtocolError("the counts of classes contradict each other or what a site has said of its rows")
    parts = [slice(first, first + n_classes) for first in range(0, n_columns, n_classes)]
    at_least = tuple(
        np.concatenate([least_values(s, e[:, part], c, o[:, part], int(m), least, world) for part in parts])
        for s, e, c, o, m in zip(spans, enough[1:], cells, opened, missing, strict=True)
    )
    return Counted(counted.n_rows, counted.missing, counted.least, cuts, cells, tuple(opened), own, at_least)


def _own_rows(table: Table, cuts: Cuts, place: int, column: NDArray[np.float32], labels: Ints, n_classes: int) -> Ints:
    """Return this site's rows of each bin of a feature and class, missing values last."""
    name = table.feature_names[place]
    is_missing = np.isnan(column)
    if name in table.categories:
        n_bins = len(table.categories[name])
        bins = np.where(is_missing, n_bins, np.nan_to_num(column)).astype(np.int64)
    else:
        n_bins = cuts.of_feature[place].size + 1
        bins = np.where(is_missing, n_bins, np.searchsorted(cuts.of_feature[place], column, side="right"))
    return rows_of_bins(bins.astype(np.int64), labels, n_bins, n_classes)


run_profile_site = SitePart(
    prepare,
    lambda attempt, prepared: ProfileAttempt(attempt, prepared).run(),
    protection=lambda job, prepared: prepared.chosen.facts,
)
"""Takes part in one attempt of a job.

Privacy: the server has seen messages whose number and size follow from the job, the number of cut points and how many
    bins were merged.
"""


# Cells: neighbouring bins that are counted together, decided by spans of them before any count of a class is opened
# (pooled/spans.py).
#
# Where a column separates the classes there are few cells, and they show little of it. But where neither bit shows k,
# the pooled rows are fewer than W k: that bounds from below what the column tells (``least_values``).


@dataclass(frozen=True, slots=True)
class Cell:
    """Bins that are counted together: from ``first`` to before ``end``, and missing values if these are among them."""

    first: int
    end: int
    has_missing: bool = False


def rows_of_bins(bins: Ints, labels: Ints, n_bins: int, n_classes: int) -> Ints:
    """Count this site's rows.

    Shapes: bins: int64[n_rows], ``n_bins`` where the value is missing; labels: int64[n_rows]; result:
        int64[n_bins + 1, n_classes], missing values last.
    """
    places = bins * n_classes + labels
    return np.bincount(places, minlength=(n_bins + 1) * n_classes).reshape(n_bins + 1, n_classes).astype(np.int64)


def rows_of_spans(rows: Ints, spans: Ints) -> Ints:
    """Return this site's rows of each span, and of missing values. Shapes: result: int64[n_spans + 1, n_classes]."""
    until = np.concatenate([np.zeros((1, rows.shape[1]), dtype=np.int64), np.cumsum(rows[:-1], axis=0)])
    return np.concatenate([until[spans[:, 1]] - until[spans[:, 0]], rows[-1:]])


def merge(spans: Ints, enough: Bools, n_bins: int, *, some_missing: bool) -> list[Cell]:
    """Return the cells of a feature. The whole must have rows enough of every class.

    Missing values are a cell of their own, counted with the lowest one where they are too few for that.

    Args:
        enough: of each span, then of the missing values. Shapes: bool[n_spans + 1, n_classes].
        some_missing: whether any site lacks values, which all know.
    """
    ends = edges_of(spans, enough[:-1], n_bins)
    if not ends:
        return [Cell(0, n_bins, some_missing)]
    cells = [Cell(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    if not some_missing:
        return cells
    if enough[-1].all():
        return [*cells, Cell(n_bins, n_bins, has_missing=True)]
    return [Cell(0, ends[0], has_missing=True), *cells[1:]]


def rows_of_cells(rows: Ints, cells: list[Cell]) -> Ints:
    """Return this site's rows of each cell. Shapes: rows: as ``rows_of_bins``; result: int64[n_cells, n_classes]."""
    return np.stack([rows[cell.first : cell.end].sum(axis=0) + rows[-1] * cell.has_missing for cell in cells])


def least_values(
    spans: Ints, enough: Bools, cells: list[Cell], pooled: Ints, n_missing: int, least: int, n_sites: int
) -> NDArray[np.float64]:
    """Return what the information value of each class is at least, from the bits; 0 where they tell nothing.

    Where nearly all rows of a class lie to one side of a cut point, and nearly none of the others', the information
    value of this side and the rest is at least what it is with as many rows on the wrong sides as there may be.

    Args:
        enough: as for ``merge``.
        cells: what ``merge`` has returned.
        pooled: rows of these. Shapes: int64[n_cells, n_classes].
        n_missing: pooled rows without a value.
    """
    below, above = _sides(spans, enough)
    most = (n_sites - 1) * (least - 1) + -(-least // n_sites) - 1  # pooled rows where neither bit shows k
    missing = np.minimum(np.where(enough[-1], n_missing, most), n_missing)
    if cells[-1].first == cells[-1].end:
        missing = pooled[-1]
    of_class, found = pooled.sum(axis=0), np.zeros(pooled.shape[1])
    for one in range(of_class.size):
        others = np.arange(of_class.size) != one
        splits = [~beyond[:, one] & ~here[:, others].any(axis=1) for here, beyond in ((below, above), (above, below))]
        if np.any(splits):
            share = 1 - (most + int(missing[one])) / int(of_class[one])
            found[one] = _of_two_sides(share, most * (of_class.size - 1) / int(of_class[others].sum()))
    return found


def _sides(spans: Ints, enough: Bools) -> tuple[Bools, Bools]:
    """Return whether rows below, and from, each cut point are enough. Shapes: bool[n_bins - 1, n_classes] each."""
    n_bins = int(spans[:, 1].max())
    place = {(int(first), int(end)): number for number, (first, end) in enumerate(spans)}
    below = [place[0, cut] for cut in range(1, n_bins)]
    above = [place[cut, n_bins] for cut in range(1, n_bins)]
    return enough[np.array(below, dtype=np.int64)], enough[np.array(above, dtype=np.int64)]


def _of_two_sides(share: float, of_others: float) -> float:
    """Return the information value of a side with these shares, and of the rest; 0 where others may be as many."""
    if not 0 < of_others < share < 1:
        return 0.0
    return (share - of_others) * math.log(share * (1 - of_others) / (of_others * (1 - share)))


# Weight of evidence, information value and stability index, from counts.
#
# Of a class c against all other rows, with n_b rows of c and m_b others in cell b, of N and M in all:
#
# weight of evidence  w_b = ln((n_b / N) / (m_b / M)), above 0 where c is more frequent than over all rows information
# value   sum over b of (n_b / N - m_b / M) w_b
#
# Cells hold rows of every class, so that all logarithms are finite and no count is smoothed. Where a feature tells
# nothing of the label, its information value is not 0 but about (cells - 1) (1/N + 1/M), which is stated beside it.
#
# The stability index of a site against the rest is the same sum over shares of the site's rows and of the others', with
# half a row added to every cell, because a site may have none in a cell.
#
# Source: Siddiqi, Credit Risk Scorecards, chapters 6 and 12; Kullback, Information Theory and Statistics (divergence).


Floats = NDArray[np.float64]


def weights_of_evidence(counts: Ints) -> Floats:
    """Return the weights of each class in each cell. Shapes: counts, result: [n_cells, n_classes]; counts above 0."""
    share, share_of_others = _shares(counts)
    weights: Floats = np.log(share / share_of_others)
    return weights


def information_values(counts: Ints) -> Floats:
    """Return the information value of each class. Shapes: counts: int64[n_cells, n_classes]; result: [n_classes]."""
    share, share_of_others = _shares(counts)
    values: Floats = ((share - share_of_others) * np.log(share / share_of_others)).sum(axis=0)
    return values


def values_by_chance(counts: Ints) -> Floats:
    """Return about what each class's information value would be if the feature told nothing. Shapes: [n_classes]."""
    of_class = counts.sum(axis=0).astype(np.float64)
    values: Floats = (counts.shape[0] - 1) * (1 / of_class + 1 / (of_class.sum() - of_class))
    return values


def stability_index(own: Ints, rest: Ints) -> float:
    """Return how far one site's rows lie from the others'. Shapes: own, rest: int64[n_cells], rows of each cell."""
    share, share_of_rest = ((rows + 0.5) / (rows + 0.5).sum() for rows in (own, rest))
    return float(((share - share_of_rest) * np.log(share / share_of_rest)).sum())


def _shares(counts: Ints) -> tuple[Floats, Floats]:
    others = counts.sum(axis=1, keepdims=True) - counts
    return counts / counts.sum(axis=0), others / others.sum(axis=0)


# Bins whose weights of evidence rise throughout, or fall, as scorecards want them.
#
# Of all ways to join neighbouring cells under which the share of a class rises with the values, or falls, the one with
# the largest information value: what optbinning solves as an integer program, here by dynamic programming, in the order
# of the last two bins. Joined counts are sums of counts that all sites know already: nothing more is opened.
#
# Source: Navas-Palencia, Optimal binning: mathematical programming formulation, arXiv:2001.08025, section 2.


def monotone_groups(counts: Ints) -> list[tuple[int, int]]:
    """Return runs of cells to join, each from its first cell to before its end.

    Shapes: counts: int64[n_cells, 2], all above 0, in the order of the values.
    """
    until = np.concatenate([np.zeros((1, 2)), np.cumsum(counts, axis=0)])
    within = until[None, :, :] - until[:, None, :]  # of the cells from one place to before another
    with np.errstate(divide="ignore", invalid="ignore"):
        share = within / until[-1]
        value = (share[..., 0] - share[..., 1]) * np.log(share[..., 0] / share[..., 1])
        rate = within[..., 0] / within.sum(axis=-1)
    found = [_best_groups(value, sign * rate) for sign in (1, -1)]
    return max(found, key=lambda one: round(one[0], 12))[1]


def _best_groups(value: Floats, rate: Floats) -> tuple[float, list[tuple[int, int]]]:
    """Return the largest sum of values of runs whose rates do not fall, and these runs.

    Shapes: both: float64[n_cells + 1, n_cells + 1], of the cells from one place to before another.
    """
    n = len(value) - 1
    best = np.where(np.arange(n + 1)[:, None] == 0, value, -np.inf)  # with this run as the last one
    before = np.zeros((n + 1, n + 1), dtype=np.int64)
    for first in range(1, n):
        order = np.argsort(rate[:first, first], kind="stable")
        reached = np.maximum.accumulate(best[order, first])
        which = np.maximum.accumulate(np.where(best[order, first] == reached, np.arange(first), 0))
        ends = np.arange(first + 1, n + 1)
        places = np.searchsorted(rate[order, first], rate[first, ends], side="right") - 1
        best[first, ends] = np.where(places < 0, -np.inf, value[first, ends] + reached[places])
        before[first, ends] = order[which[places]]
    first, end = int(np.argmax(best[:n, n])), n
    runs = [(first, end)]
    while first:
        first, end = int(before[first, end]), first
        runs.append((first, end))
    return float(best[runs[0]]), runs[::-1]
