"""C3: where trees may split: public, at private quantiles, or refined by noisy Hessians."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dp_components.events import DiscreteGaussianEvent, NeighbouringRelation
from dp_components.mechanisms import draw_noise, gaussian_event, share_scales
from dp_components.sensitivity import Norm, Sensitivity, grid_integers
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# Split candidates of all features, the bins that lie between them, and the methods that ask no private question.


# Split candidates of all features, and the bins that lie between them.


MAX_CANDIDATES = 254  # bins are numbered in one byte


@dataclass(frozen=True, slots=True)
class FeatureBounds:
    """A public interval that holds every value of a feature; values outside are clamped into the outer bins."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not -np.inf < self.low <= self.high < np.inf:
            raise ValueError("bounds of a feature must be two finite numbers, the lower one first")


class Columns(Protocol):
    """A site's values feature by feature: an array float32[n_features, n_rows], or what reads each when it is asked."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the numbers of features and rows."""

    def __getitem__(self, feature: int, /) -> NDArray[np.float32]:
        """Return one feature's values. Shapes: float32[n_rows]."""

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield each feature's values."""


CandidateRule = Callable[[FeatureBounds, int], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ascending split candidates of each feature.

    A row with x <= c goes left at candidate c, so bin i holds the rows with c[i-1] < x <= c[i]. A missing value lies
    in the last bin: it goes right at every candidate.

    Shapes: of_feature: float32[n_candidates] for each feature.
    """

    of_feature: tuple[NDArray[np.float32], ...]

    def __post_init__(self) -> None:
        for cuts in self.of_feature:
            if cuts.size > MAX_CANDIDATES or not np.isfinite(cuts).all() or (np.diff(cuts) <= 0).any():
                raise ValueError(f"candidates must be at most {MAX_CANDIDATES} finite, ascending numbers")

    @property
    def counts(self) -> list[int]:
        """Number of candidates of each feature."""
        return [cuts.size for cuts in self.of_feature]

    def bin_rows(self, columns: Columns) -> NDArray[np.uint8]:
        """Number each value's bin. Shapes: columns: float32[n_features, n_rows]; result: uint8[n_features, n_rows]."""
        bins = np.empty(columns.shape, dtype=np.uint8)
        for of_feature, values, cuts in zip(bins, columns, self.of_feature, strict=True):
            of_feature[:] = bin_column(values, cuts)
        return bins

    def replaced(self, feature: int, cuts: NDArray[np.float64]) -> Candidates:
        """Return the candidates with those of one feature exchanged."""
        lists = list(self.of_feature)
        lists[feature] = as_candidates(cuts)
        return Candidates(tuple(lists))


def bin_column(values: NDArray[np.float32], cuts: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Number the bins of one feature. Shapes: values: float32[n_rows]; cuts: float32[n_cuts]; result: uint8[n_rows]."""
    return np.searchsorted(cuts, values, side="left").astype(np.uint8)


def as_candidates(points: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32, sort, and drop what coincides."""
    return np.unique(np.asarray(points).astype(np.float32))


def by_rule(rule: CandidateRule, bounds: Sequence[FeatureBounds], n_candidates: int) -> Candidates:
    """Apply a rule that needs public bounds only to every feature."""
    return Candidates(tuple(as_candidates(rule(b, n_candidates)) for b in bounds))


# Quantile split candidates (C3): NOT PRIVATE, a reference to compare with.


def non_private_quantile_candidates(values: NDArray[np.float32], n_candidates: int) -> NDArray[np.float64]:
    """Return the exact quantiles 0, 1/Q, ..., (Q-1)/Q of the data.

    Shapes: values: float32[n_rows]; result: float64[n_candidates].
    Privacy: none. The candidates are values of single rows; no mechanism of this project releases them.
    Reference: Maddock et al., section 4.5.1, where they serve as the non-private reference too.
    """
    result: NDArray[np.float64] = np.quantile(values, np.arange(n_candidates) / n_candidates)
    return result


# Uniform split candidates (C3).


def uniform_candidates(bounds: FeatureBounds, n_candidates: int) -> NDArray[np.float64]:
    """Space candidates evenly over the public bounds; the left end is one of them, the right end is not.

    Shapes: result: float64[n_candidates].
    Privacy: touches no data.
    Reference: Maddock et al., section 4.5.1.
    """
    return bounds.low + np.arange(n_candidates, dtype=np.float64) * ((bounds.high - bounds.low) / n_candidates)


# Logarithmic split candidates (C3).


def logarithmic_candidates(bounds: FeatureBounds, n_candidates: int, skewed_left: bool = False) -> NDArray[np.float64]:
    """Space candidates evenly in log(1 + x - low), so that they are dense near the lower bound.

    Shapes: result: float64[n_candidates], ascending.
    Privacy: touches no data; ``skewed_left`` must be public. The paper's code reads it from the private data.

    Args:
        skewed_left: the feature has its long tail at the lower end; the list is mirrored then.

    Reference: Maddock et al., section 4.5.1.
    """
    width = bounds.high - bounds.low
    distances = np.expm1(uniform_candidates(FeatureBounds(0.0, float(np.log1p(width))), n_candidates))
    return bounds.high - distances[::-1] if skewed_left else bounds.low + distances


# Split candidates at differentially private quantiles (C3).


# Split candidates at differentially private quantiles (C3), from one noisy histogram per feature.
#
# Skewed features leave most uniform candidates without rows. One count histogram per feature over a public grid, dense
# near the lower bound, tells where the rows are. All features go in one message.


LINEAR_EDGES, LOGARITHMIC_EDGES = 128, 256
_SUPPRESSED_BELOW = 2.0  # cells below so many standard deviations of the noise count as empty


def public_grid(bounds: FeatureBounds) -> NDArray[np.float32]:
    """Return the edges of the cells that are counted.

    Shapes: result: float32[at most 384], ascending; cell i holds edges[i-1] < x <= edges[i], the last one the rest.
    Privacy: touches no data.
    """
    return as_candidates(
        np.concatenate([uniform_candidates(bounds, LINEAR_EDGES), logarithmic_candidates(bounds, LOGARITHMIC_EDGES)])
    )


def count_cells(columns: Columns, grids: list[NDArray[np.float32]]) -> NDArray[np.int64]:
    """Count this site's rows per feature and cell, all features one after the other.

    Shapes: columns: float32[n_features, n_rows]; result: int64[sum of (edges + 1)].
    Units: 2^-20 rows, the grid of all queries.
    Privacy: must be noised before it leaves the site's protection; one row enters one cell of every feature
        (``count_sensitivity(n_features)``). A missing value counts once like any other, in the last cell.
    """
    return grid_integers(
        np.concatenate(
            [
                np.bincount(np.searchsorted(grid, column, side="left"), minlength=grid.size + 1)
                for column, grid in zip(columns, grids, strict=True)
            ]
        )
    )


def cut_at_quantiles(
    noisy: NDArray[np.float64], grids: list[NDArray[np.float32]], noise_std: float, n_candidates: int
) -> Candidates:
    """Choose the edges nearest to the quantiles of the noisy counts.

    Shapes: noisy: float64[sum of (edges + 1)].
    Units: noisy, noise_std: rows.
    Privacy: post-processing.
    """
    ends = np.cumsum([grid.size + 1 for grid in grids])
    parts = np.split(noisy, ends[:-1])
    return Candidates(
        tuple(
            _cuts_of_feature(counts, grid, noise_std, n_candidates) for counts, grid in zip(parts, grids, strict=True)
        )
    )


def _cuts_of_feature(
    counts: NDArray[np.float64], grid: NDArray[np.float32], noise_std: float, n_candidates: int
) -> NDArray[np.float32]:
    counts = np.where(counts < _SUPPRESSED_BELOW * noise_std, 0.0, counts)
    reached = np.cumsum(counts)
    if reached[-1] <= 0:
        return grid[:: max(1, grid.size // n_candidates)][:n_candidates]
    wanted = reached[-1] * (np.arange(n_candidates) + 0.5) / n_candidates
    chosen = np.unique(np.searchsorted(reached, wanted))
    result: NDArray[np.float32] = grid[chosen[chosen < grid.size]]
    return result


def union(first: Candidates, second: Candidates) -> Candidates:
    """Offer the candidates of both, feature by feature."""
    return Candidates(
        tuple(np.union1d(a, b).astype(np.float32) for a, b in zip(first.of_feature, second.of_feature, strict=True))
    )


# Split candidates at differentially private quantiles, found without bounds: a noisy descent through the float32.
#
# The float32 are ordered as their bit patterns are, so that sixteen halvings by leading bits lead to a cell in which
# all values agree to one part in 128, wherever they lie. At each halving the rows of both halves are counted with
# noise, and the wanted quantiles go to the half where they belong; a half that holds about as many rows as the noise is
# not halved further.


LEVELS = 16
_UNIT = 1 << 10  # counts are noised in thousandths of a row, where discrete noise is as good as continuous
_LEAST_ROWS = 4.0  # standard deviations of a count's noise below which a half is not halved
_KEYS = 1 << LEVELS


def descent_sensitivity(n_features: int) -> Sensitivity:
    """Return the joint sensitivity of all counts of a descent in so many features.

    A change of one row takes it out of one cell and puts it into another, at each of the sixteen levels of each
    feature; a cell is counted once. So 32 counts of a feature change by 1: L2 sqrt(32 n_features) for REPLACE_ROW,
    however the cells to count were chosen by the noisy counts above them.
    """
    bound = _UNIT * math.sqrt(2 * LEVELS * n_features) * (1 + 2.0**-50)
    return Sensitivity(bound, Norm.L2, NeighbouringRelation.REPLACE_ROW)


def descent_event(n_features: int, n_bins: int, noise_multiplier: float) -> DiscreteGaussianEvent:
    """Return what the cuts of all features cost. Args: as ``quantile_cuts``."""
    most_counts = 2 * LEVELS * max(n_bins - 1, 1) * n_features
    return gaussian_event(most_counts, descent_sensitivity(n_features), noise_multiplier)


def quantile_cuts(
    columns: Columns, n_bins: int, noise_multiplier: float, randomness: RandomSource = OS_RANDOMNESS
) -> tuple[NDArray[np.float32], ...]:
    """Find about equally full bins of every column.

    Shapes:  columns: float32[n_features, n_rows], NaN is missing and counts nowhere; result: for each feature
        float32[at most n_bins - 1], ascending: a bin holds cuts[i-1] <= x < cuts[i].
    Privacy: ``descent_event`` pays for it, and must be charged before it is called; the result may be used freely.
    """
    scale = share_scales(descent_sensitivity(columns.shape[0]), noise_multiplier)[0]
    return tuple(_cuts_of_column(column, n_bins, scale, randomness) for column in columns)


def _cuts_of_column(
    column: NDArray[np.float32], n_bins: int, scale: float, randomness: RandomSource
) -> NDArray[np.float32]:
    keys = np.sort(_keys(column[~np.isnan(column)]))
    wanted = np.arange(1, n_bins) / n_bins
    open_cells = [(0, wanted)]  # a cell is a prefix of the key; with the quantiles sought in it, as parts of its rows
    found: list[int] = []
    for level in range(1, LEVELS + 1):
        width = _KEYS >> level
        further: list[tuple[int, NDArray[np.float64]]] = []
        for cell, parts in open_cells:
            left, right = 2 * cell, 2 * cell + 1
            edges = np.searchsorted(keys, np.array([left, right, right + 1]) * width)
            noise = draw_noise((2,), (scale,), randomness)
            n_left, n_right = np.maximum((np.diff(edges) * _UNIT + noise) / _UNIT, 0.0)
            if n_left + n_right < _LEAST_ROWS * scale / _UNIT:
                found.append(right * width)
                continue
            share = n_left / (n_left + n_right)
            is_left = parts < share
            if is_left.any():
                further.append((left, parts[is_left] / share))
            if not is_left.all():
                further.append((right, np.clip((parts[~is_left] - share) / max(1 - share, 1e-12), 0.0, 1.0)))
        open_cells = further
    found += [cell + 1 for cell, _ in open_cells]  # where the cell ends
    cuts = np.unique(_values(np.array(sorted(set(found)), dtype=np.int64)))
    result: NDArray[np.float32] = cuts[np.isfinite(cuts)]
    return result


def _keys(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the leading bits of each value in an order that is that of the values. Shapes: int64[n]."""
    bits = (values + np.float32(0)).view(np.uint32)  # -0 becomes 0
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    result: NDArray[np.int64] = (ordered >> np.uint32(32 - LEVELS)).astype(np.int64)
    return result


def _values(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the least value of each cell; NaN for a key beyond all numbers. Shapes: float32[n]."""
    ordered = (np.minimum(keys, _KEYS - 1) << (32 - LEVELS)).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered & np.uint32((1 << 31) - 1), ~ordered)
    return np.ascontiguousarray(bits).view(np.float32)


# Iterative Hessian split candidates (C3): merge light bins, divide heavy ones, over the first rounds of training.
#
# The first ``rounds`` trees begin from uniform candidates and release one noisy histogram of Hessian sums per feature.
# Where a bin holds more than its share, a candidate is added inside it; bins that are light are merged.


def refine(
    cuts: NDArray[np.float32],
    hessians: NDArray[np.float64],
    target: float,
    n_candidates: int,
    as_published: bool = False,
) -> NDArray[np.float64]:
    """Return better candidates of one feature, given a noisy histogram over the present ones.

    Shapes: cuts: float32[n_cuts]; hessians: float64[n_cuts + 1], bin i lies below cuts[i]; result: at most about
        ``2 * n_candidates`` ascending candidates.
    Privacy: post-processing of the noisy histogram.

    Args:
        target: Hessian sum of a bin of ordinary weight.
        as_published: add the midpoint to the right of a heavy bin, as the paper's code does, and not inside it.

    Reference: Maddock et al., section 4.5.2, with a slip mended.
    """
    kept = _merge_and_divide(cuts, np.maximum(hessians, 0.0), target, n_candidates, as_published)
    return _fill(kept, n_candidates)


def _merge_and_divide(
    cuts: NDArray[np.float32], hessians: NDArray[np.float64], target: float, n_candidates: int, as_published: bool
) -> list[float]:
    kept: list[float] = []
    last, gathered = cuts.size - 1, 0.0
    for i, weight in enumerate(hessians[: cuts.size]):
        gathered += weight
        if gathered > target and i < last:
            gathered = 0.0
            kept.append(float(cuts[i]))
            if cuts.size < n_candidates and len(kept) < n_candidates:
                left, right = (i, i + 1) if as_published else (max(i - 1, 0), i)
                kept.append((float(cuts[left]) + float(cuts[right])) / 2)
        elif i == last:
            kept.append(float(cuts[i]))
    return sorted(set(kept))


def _fill(kept: list[float], n_candidates: int) -> NDArray[np.float64]:
    """Divide the gaps evenly where fewer candidates are left than wanted."""
    if len(kept) < 2 or len(kept) >= n_candidates:
        return np.array(kept)
    parts = -(-n_candidates // len(kept))
    gaps = [np.linspace(a, b, parts, endpoint=False) for a, b in itertools.pairwise(kept)]
    return np.concatenate([*gaps, [kept[-1]]])
