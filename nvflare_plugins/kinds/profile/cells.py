"""The cells of a profile: pooled counts, and the information in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.pooled.spans import Bools, Ints, edges_of

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
