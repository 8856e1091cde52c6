"""Whether new rows are still like those that a model was trained on: stability index, missing values, scores.

The population stability index of a column is the sum over its bins of (q - p) ln(q / p), p and q the shares of the
training rows and of the new ones in a bin. The bins are those that the model itself makes: its thresholds on the column
(at most 19 of them, those nearest to the training rows' quantiles), a category each, and one bin for what is missing.
Half a row is added to every bin, so that an empty one gives a number. Rows of one population give about (k - 1)
(1 / n + 1 / m) with k bins, n and m rows: an index of few rows says little.

Privacy: purely local; the result is about this site's rows.
Reference: Siddiqi, Credit Risk Scorecards (2006), chapter 10.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.base.formatting import bounds
from nvflare_plugins.scoring.model import Feature, FinishedModel
from nvflare_plugins.scoring.rows import RowReader, Rows
from nvflare_plugins.xgb.cuts import LARGEST_VALUE

_MOST_CUTS = 19
_SCORE_BINS = 10
_LEAST_ROWS_SHOWN = 10

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Drift:
    """One column, or one score, in both batches.

    Attributes:
        index: population stability index.
        by_chance: its mean for two batches of these sizes from one population.
        missing_before, missing_now: shares.
        unknown: new rows whose category is in no list.
        new_categories: those of ten rows or more, with their rows.
        labels, before, now: the bins and the shares of rows in them; the last bin is what is missing.
    """

    name: str
    index: float
    by_chance: float
    missing_before: float = 0.0
    missing_now: float = 0.0
    unknown: int = 0
    new_categories: Mapping[str, int] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    before: tuple[float, ...] = ()
    now: tuple[float, ...] = ()


Batch = Rows | RowReader


def features_of(model: FinishedModel, before: Batch, now: Batch, dates: Collection[str] = ()) -> list[Drift]:
    """Compare all columns of a model, the largest index first.

    Args:
        dates: columns of days since 1970-01-01, whose bins are named by dates.
        before, now: training rows and new ones, with categories in no list counted (``Rows.unknown``).
    """
    cuts = _thresholds(model)
    found = []
    for feature, of_feature, then, here in zip(model.features, cuts, before.columns(), now.columns(), strict=True):
        old, new = then.values[:, 0], here.values[:, 0]
        labels, bins = _bins(feature, of_feature, old, is_date=feature.name in dates)
        unknown = here.unknown.get(feature.name, {})
        found.append(_drift(feature.name, labels, bins(old), bins(new), unknown))
    return sorted(found, key=lambda one: -one.index)


def scores_of(model: FinishedModel, before: Batch, now: Batch) -> list[Drift]:
    """Compare what the model makes of both: each class's probability (the second's of two), or the prediction."""
    found = []
    names, olds = _scores(model, before)
    for name, old, new in zip(names, olds, _scores(model, now)[1], strict=True):
        cuts = np.unique(np.quantile(old, np.arange(1, _SCORE_BINS) / _SCORE_BINS)) if old.size else np.empty(0)
        labels = _intervals(cuts)
        found.append(_drift(name, labels, _counts(old, cuts), _counts(new, cuts)))
    return found


def _scores(model: FinishedModel, batch: Batch) -> tuple[list[str], list[NDArray[np.float64]]]:
    has_probabilities = model.classes is not None and model.has_probabilities
    of_rows = model.probabilities if has_probabilities else model.predict
    values = np.concatenate([of_rows(rows.values) for rows in batch.blocks()]).astype(np.float64)
    if model.classes is None or not has_probabilities:
        return ["prediction"], [values]
    places = [1] if len(model.classes) == 2 else list(range(len(model.classes)))
    return [f"probability.{model.classes[place]}" for place in places], [values[:, place] for place in places]


def _thresholds(model: FinishedModel) -> list[NDArray[np.float64]]:
    """Return the ascending thresholds on each column of numbers. Shapes: float64[n] each."""
    found: list[set[float]] = [set() for _ in model.features]
    for tree in model.trees:
        columns = ("left_children", "split_indices", "split_conditions", "split_type")
        for child, feature, threshold, kind in zip(*(tree[column] for column in columns), strict=True):
            # Beyond the outermost cuts lie the thresholds of splits that send only missing values aside.
            if child != -1 and kind == 0 and abs(threshold) < LARGEST_VALUE:
                found[feature].add(float(np.float32(threshold)))
    return [np.array(sorted(thresholds), dtype=np.float64) for thresholds in found]


def _bins(
    feature: Feature, cuts: NDArray[np.float64], old: Values, *, is_date: bool
) -> tuple[tuple[str, ...], Callable[[Values], NDArray[np.int64]]]:
    """Return the names of a column's bins, and what counts values in them."""
    if feature.categories is not None:
        n_categories = len(feature.categories)

        def categories(values: Values) -> NDArray[np.int64]:
            codes = np.where(np.isnan(values), n_categories, values).astype(np.int64)
            return np.bincount(codes, minlength=n_categories + 1)

        return tuple(feature.categories), categories
    kept = _fewer(cuts, old)
    shown = np.ceil(kept) if is_date and (np.isnan(old) | (old == np.floor(old))).all() else kept  # of whole days
    return _intervals(shown, is_date=is_date), lambda values: _counts(values, kept)


def _fewer(cuts: NDArray[np.float64], old: Values) -> NDArray[np.float64]:
    """Return at most 19 cuts: the model's own, or the training rows' quantiles for a column that it does not use."""
    there = old[~np.isnan(old)].astype(np.float64)
    if cuts.size <= _MOST_CUTS and cuts.size:
        return cuts
    if not there.size:
        return cuts[:: max(1, cuts.size // _MOST_CUTS)][:_MOST_CUTS]
    if not cuts.size:
        return np.unique(np.quantile(there, np.arange(1, _SCORE_BINS) / _SCORE_BINS))
    wanted = np.arange(1, _MOST_CUTS + 1) / (_MOST_CUTS + 1)
    below = np.searchsorted(np.sort(there), cuts) / there.size
    nearest = np.unique(np.abs(below[:, None] - wanted).argmin(axis=0))
    result: NDArray[np.float64] = cuts[nearest]
    return result


def _counts(values: NDArray[np.floating], cuts: NDArray[np.float64]) -> NDArray[np.int64]:
    """Count values by bin [cut, next cut), as trees send them; missing ones last. Shapes: int64[n_cuts + 2]."""
    is_missing = np.isnan(values)
    places = np.searchsorted(cuts, values[~is_missing].astype(np.float64), side="right")
    return np.append(np.bincount(places, minlength=cuts.size + 1), np.count_nonzero(is_missing))


def _intervals(cuts: NDArray[np.float64], *, is_date: bool = False) -> tuple[str, ...]:
    if not cuts.size:
        return ("any",)
    texts = (_dates(cuts) if is_date else []) or bounds(cuts.tolist())
    inner = (f"{low} to {high}" for low, high in itertools.pairwise(texts))
    return (f"below {texts[0]}", *inner, f"{texts[-1]} or more")


def _dates(days: NDArray[np.float64]) -> list[str]:
    """Return days since 1970-01-01 as dates, with the time where some have one; none where a calendar has no such."""
    try:
        found = [datetime(1970, 1, 1) + timedelta(days=day) for day in days.tolist()]
    except OverflowError:
        return []
    return [f"{one:%Y-%m-%d}" if (days == np.floor(days)).all() else f"{one:%Y-%m-%d %H:%M}" for one in found]


def _drift(
    name: str,
    labels: Sequence[str],
    before: NDArray[np.int64],
    now: NDArray[np.int64],
    unknown: Mapping[str, int] | None = None,
) -> Drift:
    unknown = unknown or {}
    n, m, used = int(before.sum()), int(now.sum()), (before + now) > 0
    k = max(int(np.count_nonzero(used)), 1)
    p, q = (before[used] + 0.5) / (n + 0.5 * k), (now[used] + 0.5) / (m + 0.5 * k)
    shown = {text: rows for text, rows in unknown.items() if rows >= _LEAST_ROWS_SHOWN}
    return Drift(
        name,
        float(((q - p) * np.log(q / p)).sum()),
        (k - 1) * (1 / max(n, 1) + 1 / max(m, 1)),
        float(before[-1] / max(n, 1)),
        float(now[-1] / max(m, 1)),
        sum(unknown.values()),
        dict(sorted(shown.items(), key=lambda item: -item[1])),
        (*labels, "missing"),
        tuple((before / max(n, 1)).tolist()),
        tuple((now / max(m, 1)).tolist()),
    )
