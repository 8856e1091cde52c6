"""Cut points that all sites agree on before training, without showing each other a value.

`quantile` and `exact` are FederBoost's distributed quantile search: all features and all quantiles bisect at once over
the order-preserving 32-bit image of float32, and each step is one secure sum of counts. `uniform` and `logarithmic`
touch no data.

With the cuts agreed, each site builds ``QuantileDMatrix(X, ref=reference_table(cuts))`` and XGBoost exchanges no
sketch, which would carry raw feature values.

Privacy: every site learns the pooled counts at the queried points; with `quantile` no bracket of fewer than
``min_rows`` pooled rows is divided further, by a query or by a cut's choice: the cut is the shortest decimal in it,
chosen without a look at the values inside. It is a data value where at least ``min_rows`` rows share it, or by chance.
The floor is for brackets before their division; one half of it, or a bin between two cuts, may hold fewer rows.
`exact` cuts are data values. `uniform` and `logarithmic` look at no value, but whoever writes the job chooses the
bounds, and training then shows the pooled sums of bins as narrow as he likes.

Reference: FederBoost (Tian et al.), section 5.1, Protocol 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError

KEY_BITS = 32
LARGEST_VALUE = np.float32(1e38)  # the outermost cut: no data value may reach it
_SHORTEST_DIGITS = 9  # every float32 is determined by nine significant digits

CountSum = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Adds this site's counts to those of all other sites."""


class CutMode(Enum):
    """How cut points are agreed."""

    QUANTILE = "quantile"
    EXACT = "exact"
    UNIFORM = "uniform"
    LOGARITHMIC = "logarithmic"


@dataclass(frozen=True, slots=True)
class Cuts:
    """Ascending inner cut points of each feature: float32[n_cuts] each; bin i holds cuts[i-1] <= x < cuts[i]."""

    of_feature: tuple[NDArray[np.float32], ...]

    def to_lists(self) -> list[list[float]]:
        """Return plain numbers, for JSON."""
        return [[float(c) for c in cuts] for cuts in self.of_feature]

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[float]]) -> Cuts:
        """Read what ``to_lists`` wrote.

        Raises:
            ProtocolError: cuts that are not finite, ascending float32 below the largest value.
        """
        features = []
        for cuts in lists:
            array = np.asarray(cuts, dtype=np.float32)
            if array.ndim != 1 or not (np.abs(array) < LARGEST_VALUE).all() or (np.diff(array) <= 0).any():
                raise ProtocolError("stored cut points are not ascending finite numbers")
            features.append(array)
        return cls(tuple(features))


def to_keys(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Map float32 to uint32 so that the order stays. Shapes: any; -0.0 and 0.0 share a key."""
    bits = (values + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))


def from_keys(keys: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Invert ``to_keys``."""
    bits = np.where(keys >> 31 == 1, keys ^ np.uint32(1 << 31), ~keys)
    return bits.astype(np.uint32).view(np.float32)


class Values(Protocol):
    """This site's values of every feature, of which the search asks how many there are up to some point."""

    def present(self) -> NDArray[np.int64]:
        """Return how many values each feature has that are not missing. Shapes: int64[n_features]."""

    def up_to(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many values have keys up to given ones. Shapes: keys and result: int64[n_features, n]."""


class SortedValues:
    """Values that are all held, sorted. Shapes: features: float32[n_rows, n_features], NaN is missing."""

    def __init__(self, features: NDArray[np.float32]) -> None:
        self._ordered = [np.sort(to_keys(column[~np.isnan(column)])) for column in features.T]

    def present(self) -> NDArray[np.int64]:
        """See ``Values``."""
        return np.array([keys.size for keys in self._ordered], dtype=np.int64)

    def up_to(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """See ``Values``."""
        found = [np.searchsorted(own, asked, side="right") for own, asked in zip(self._ordered, keys, strict=True)]
        return np.stack(found).astype(np.int64)


def search_quantiles(values: Values, max_bin: int, min_rows: int | None, sum_counts: CountSum) -> Cuts:
    """Find the pooled quantiles of every feature.

    The number and size of the queries depend on ``n_features`` and ``max_bin`` alone: one count of values per feature
    and 32 steps of bisection.

    Args:
        max_bin: bins per feature; ``max_bin - 2`` quantiles are searched, two bins belong to the outer bounds.
        min_rows: smallest bracket that is divided; None searches exact order statistics.
        sum_counts: the secure sum.

    Raises:
        ProtocolError: the summed counts contradict each other.
    """
    n_present = sum_counts(values.present())
    if (n_present < 0).any():
        raise ProtocolError("a pooled count of values is negative")
    n_targets = max(max_bin - 2, 1)
    steps = np.arange(1, n_targets + 1, dtype=np.int64)
    ranks = -(-steps[None, :] * n_present[:, None] // (n_targets + 1))  # rank of the wanted order statistic, from 1
    shape = (n_present.size, n_targets)
    low = np.zeros(shape, dtype=np.int64)  # the wanted key lies in [low, high]
    high = np.full(shape, (1 << KEY_BITS) - 1, dtype=np.int64)
    below = np.zeros(shape, dtype=np.int64)  # pooled rows with keys < low
    through = np.broadcast_to(n_present[:, None], shape).copy()  # pooled rows with keys <= high
    for _ in range(KEY_BITS):
        divide = low < high
        if min_rows is not None:
            divide &= through - below >= min_rows
        # A bracket that is not divided asks for its upper end once more: the count there is known.
        middle = np.where(divide, (low + high) // 2, high)
        counts = sum_counts(values.up_to(middle).ravel()).reshape(shape)
        if (divide & ((counts < below) | (counts > through))).any():
            raise ProtocolError("pooled counts of the quantile search are not monotone: a site or the server lied")
        left = counts >= ranks
        high = np.where(divide & left, middle, high)
        through = np.where(divide & left, counts, through)
        low = np.where(divide & ~left, middle + 1, low)
        below = np.where(divide & ~left, counts, below)
    return Cuts(tuple(_cuts_of_feature(*f) for f in zip(low, high, n_present, strict=True)))


def _cuts_of_feature(low: NDArray[np.int64], high: NDArray[np.int64], n_present: int) -> NDArray[np.float32]:
    if n_present == 0:
        return np.empty(0, dtype=np.float32)
    brackets = np.unique(np.stack([low, high], axis=1), axis=0).astype(np.uint32)
    bounds = from_keys(brackets)
    points = {shortest_between(a, b) for a, b in bounds}
    return np.array(sorted(p for p in points if abs(p) < LARGEST_VALUE), dtype=np.float32)


def shortest_between(low: np.float32, high: np.float32) -> np.float32:
    """Return the float32 in [low, high] with the fewest decimal digits; the same at every site."""
    if low == high:
        return low
    if low <= 0 <= high:
        return np.float32(0)
    a, b = _finite(float(low)), _finite(float(high))
    for digits in range(1, _SHORTEST_DIGITS + 1):
        for text in (f"{(a + b) / 2:.{digits - 1}e}", f"{b:.{digits - 1}e}", f"{a:.{digits - 1}e}"):
            candidate = np.float32(text)
            if low <= candidate <= high:
                return candidate
    return low


def _finite(x: float) -> float:
    if math.isnan(x):
        return 0.0
    return math.copysign(3e38, x) if math.isinf(x) else x


def spaced_cuts(names: Sequence[str], bounds: Mapping[str, Sequence[float]], max_bin: int, mode: CutMode) -> Cuts:
    """Space cut points evenly (`uniform`) or by powers (`logarithmic`) between public bounds. Touches no data.

    Raises:
        ConfigurationError: a feature without bounds, or bounds that do not fit the mode.
    """
    n_points = max(max_bin - 2, 1)  # two bins belong to the outer bounds, as in the search
    cuts = []
    for name in names:
        if name not in bounds:
            raise ConfigurationError(f"cut_bounds lacks column {name!r}")
        low, high = (float(x) for x in bounds[name])
        if not -LARGEST_VALUE < low < high < LARGEST_VALUE:
            raise ConfigurationError(f"cut_bounds of {name!r} must be two finite numbers, the lower one first")
        if mode is CutMode.UNIFORM:
            points = np.linspace(low, high, n_points)
        else:
            # Powers need a positive origin: the grid starts at `low` and grows by a constant factor of distance.
            points = low + np.expm1(np.linspace(0.0, np.log1p(high - low), n_points))
        cuts.append(np.unique(points.astype(np.float32)))
    return Cuts(tuple(cuts))


def reference_table(cuts: Cuts, n_categories: Mapping[int, int]) -> NDArray[np.float32]:
    """Return a public table whose quantile sketch is exactly the agreed cuts.

    The outermost values are +-1e38: a split that sends only missing values aside then has a threshold that no data
    value reaches, and says nothing about the data.

    Shapes: result: float32[n, n_features]; a categorical column (in ``n_categories``) lists its codes.
    """
    columns = []
    for feature, inner in enumerate(cuts.of_feature):
        if feature in n_categories:
            columns.append(np.arange(n_categories[feature], dtype=np.float32))
        else:
            columns.append(np.concatenate([[-LARGEST_VALUE], inner, [LARGEST_VALUE]]).astype(np.float32))
    table = np.full((max(c.size for c in columns), len(columns)), np.nan, dtype=np.float32)
    for feature, column in enumerate(columns):
        table[: column.size, feature] = column
    return table
