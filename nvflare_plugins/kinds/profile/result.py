"""What a profile ends with: ``profile.json``, and what its pages show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.base.formatting import bounds
from nvflare_plugins.data.table import Table
from nvflare_plugins.kinds.profile.cells import (
    Cell,
    information_values,
    stability_index,
    values_by_chance,
    weights_of_evidence,
)
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.pages.profile_page import ProfiledCell, ProfiledFeature, ProfileFacts, Shift
from nvflare_plugins.pages.run_record import ReportSection
from nvflare_plugins.xgb.cuts import Cuts

FORMAT = "veilboost-profile-1"
FILE_NAME = "profile.json"
_MOST_BARS = 40
_MOST_NAMED = 8  # categories of a bin; profile.json lists all
Ints = NDArray[np.int64]


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


class Profile:
    """Names and numbers of a profile."""

    def __init__(self, job: ProfileJob, job_id: str, table: Table, counted: Counted) -> None:
        self._job, self._job_id, self._table, self._counted = job, job_id, table, counted
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
