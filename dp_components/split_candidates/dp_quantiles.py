"""Split candidates at differentially private quantiles (C3), from one noisy histogram per feature.

Skewed features leave most uniform candidates without rows. One count histogram per feature over a public grid, dense
near the lower bound, tells where the rows are. All features go in one message.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_components.sensitivity import grid_integers
from dp_components.split_candidates.candidates import Candidates, Columns, FeatureBounds, as_candidates
from dp_components.split_candidates.logarithmic import logarithmic_candidates
from dp_components.split_candidates.uniform import uniform_candidates

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
