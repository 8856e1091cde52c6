"""Split candidates at differentially private quantiles (C3)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dp_components.events import DiscreteGaussianEvent, NeighbouringRelation
from dp_components.mechanisms import draw_noise, gaussian_event, share_scales
from dp_components.sensitivity import Norm, Sensitivity, grid_integers
from dp_components.split_candidates.candidates import (
    Candidates,
    Columns,
    FeatureBounds,
    as_candidates,
    logarithmic_candidates,
    uniform_candidates,
)
from he_processors.randomness import OS_RANDOMNESS, RandomSource

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
    return cuts[np.isfinite(cuts)]


def _keys(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the leading bits of each value in an order that is that of the values. Shapes: int64[n]."""
    bits = (values + np.float32(0)).view(np.uint32)  # -0 becomes 0
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (ordered >> np.uint32(32 - LEVELS)).astype(np.int64)


def _values(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the least value of each cell; NaN for a key beyond all numbers. Shapes: float32[n]."""
    ordered = (np.minimum(keys, _KEYS - 1) << (32 - LEVELS)).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered & np.uint32((1 << 31) - 1), ~ordered)
    return np.ascontiguousarray(bits).view(np.float32)
