"""Choosing the splits of one level of a tree by the exponential mechanism, over all public candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.dpboost.gradient_based_data_filtering import gain_bound
from dp_components.events import ExponentialEvent, Release
from dp_components.mechanisms.exponential import choose_exponentially, grid_utilities, utility_sensitivity
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.sensitivity import GRID_BITS, Sensitivity
from dp_components.split_candidates.candidates import Candidates

GAIN_GRID = 2.0**-20
MAX_ROWS = 1 << 28
"""Up to here the rounding of a gain in doubles stays below half a unit of the gain grid."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """All candidates of all features under one number, and where each feature's bins lie in a row of bin sums.

    Shapes: feature, candidate: int64[n_candidates]; bins_of_feature: one slice per feature.
    """

    feature: NDArray[np.int64]
    candidate: NDArray[np.int64]
    bins_of_feature: tuple[slice, ...]

    @classmethod
    def of(cls, candidates: Candidates) -> SplitTable:
        """Number the candidates.

        Raises:
            ValueError: there are none.
        """
        counts = candidates.counts
        if sum(counts) == 0:
            raise ValueError("no feature has a split candidate")
        ends = np.cumsum([count + 1 for count in counts])
        return cls(
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([np.arange(count) for count in counts]),
            tuple(slice(int(end) - count - 1, int(end)) for end, count in zip(ends, counts, strict=True)),
        )

    @property
    def n_bins(self) -> int:
        """Bins of all features together."""
        return int(self.bins_of_feature[-1].stop)

    def left_sums(self, bin_sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what goes left at each candidate. Shapes: bin_sums: int64[..., n_bins]; result [..., n_candidates]."""
        parts = [np.cumsum(bin_sums[..., bins], axis=-1)[..., :-1] for bins in self.bins_of_feature]
        return np.concatenate(parts, axis=-1)

    def totals(self, bin_sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums per node: every feature's bins hold every row once."""
        result: NDArray[np.int64] = bin_sums[..., self.bins_of_feature[0]].sum(axis=-1)
        return result


def gains(
    table: SplitTable, grad_sums: NDArray[np.int64], counts: NDArray[np.int64], ridge: float
) -> NDArray[np.float64]:
    """Return G_L^2 / (n_L + lambda) + G_R^2 / (n_R + lambda) of each candidate.

    Shapes: grad_sums, counts: int64[n_nodes, n_bins], from ``bin_sums``; result: float64[n_nodes, n_candidates].
    Units:  grad_sums: 2^-GRID_BITS; ridge: rows.
    Privacy: exact; must not leave the aggregator.
    """
    left, n_left = table.left_sums(grad_sums), table.left_sums(counts)
    right = table.totals(grad_sums)[:, np.newaxis] - left
    n_right = table.totals(counts)[:, np.newaxis] - n_left

    def half(sums: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.float64]:
        result: NDArray[np.float64] = np.ldexp(sums.astype(np.float64), -GRID_BITS) ** 2 / (n + ridge)
        return result

    return half(left, n_left) + half(right, n_right)


def choose_splits(
    table: SplitTable,
    grad_sums: NDArray[np.int64],
    counts: NDArray[np.int64],
    gradients: Sensitivity,
    ridge: float,
    epsilon: float,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Choose one candidate for every node of a level, nodes without rows included.

    Shapes:  as ``gains``; value: int64[n_nodes], numbers in the table.
    Privacy: exactly ``epsilon`` for the level, because a row lies in one of its nodes. Utility sensitivity 3 g*^2.

    Raises:
        ValueError: more rows than ``MAX_ROWS``.
    Reference: DPBoost, Algorithm 1, lines 4 to 10.
    """
    if int(table.totals(counts).sum()) > MAX_ROWS:
        raise ValueError("too many rows for the grid of the gains")
    sensitivity = utility_sensitivity(gain_bound(gradients), GAIN_GRID, gradients)
    chosen = [
        int(choose_exponentially(grid_utilities(of_node, GAIN_GRID), sensitivity, epsilon, randomness).value[0])
        for of_node in gains(table, grad_sums, counts, ridge)
    ]
    return Release(np.array(chosen, dtype=np.int64), ExponentialEvent(epsilon, gradients.relation))
