"""Split candidates of all features, the bins that lie between them, and the methods that ask no private question."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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


def logarithmic_candidates(
    bounds: FeatureBounds, n_candidates: int, *, skewed_left: bool = False
) -> NDArray[np.float64]:
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
