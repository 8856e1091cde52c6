"""Cut points and quantiles, as XGBoost takes them, with no value of a row shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError

# Cut points that all sites agree on before training, without showing each other a value.
#
# `quantile` and `exact` are FederBoost's distributed quantile search: all features and all quantiles bisect at once
# over the order-preserving 32-bit image of float32, and each step is one secure sum of counts. `uniform` and
# `logarithmic` touch no data.
#
# With the cuts agreed, each site builds ``QuantileDMatrix(X, ref=reference_table(cuts))`` and XGBoost exchanges no
# sketch, which would carry raw feature values.
#
# Privacy: every site learns the pooled counts at the queried points; with `quantile` no bracket of fewer than
# ``min_rows`` pooled rows is divided further, by a query or by a cut's choice: the cut is the shortest decimal in it,
# chosen without a look at the values inside. It is a data value where at least ``min_rows`` rows share it, or by
# chance. The floor is for brackets before their division; one half of it, or a bin between two cuts, may hold fewer
# rows. `exact` cuts are data values. `uniform` and `logarithmic` look at no value, but whoever writes the job chooses
# the bounds, and training then shows the pooled sums of bins as narrow as he likes.
#
# Reference: FederBoost (Tian et al.), section 5.1, Protocol 3.


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
    points = {shortest_between(a, b) for a, b in from_keys(brackets)}
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
    columns = [
        np.arange(n_categories[feature], dtype=np.float32)
        if feature in n_categories
        else np.concatenate([[-LARGEST_VALUE], inner, [LARGEST_VALUE]]).astype(np.float32)
        for feature, inner in enumerate(cuts.of_feature)
    ]
    table = np.full((max(c.size for c in columns), len(columns)), np.nan, dtype=np.float32)
    for feature, column in enumerate(columns):
        table[: column.size, feature] = column
    return table


# Counts for the quantile search without holding values: five passes in place of thirty-two.
#
# The search halves brackets of keys, so that what it asks for in its first 12 steps ends in twenty ones: a count of
# keys by their first 12 bits answers it. The next five steps ask within at most as many of these groups as there are
# cuts, and so on: one pass each counts there.


_PARTS = ((20, 12), (15, 5), (10, 5), (5, 5), (0, 5))
"""Of each pass: how many of a key's last bits it leaves out, and how many before those it tells apart."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """What one pass has counted.

    Shapes: groups: int64[n_features][n_groups], ascending: the upper bits of keys that were looked at. below:
        uint32 or int64[n_features][n_groups, 2^width + 1]: values of a group whose next bits are less than a number.
    """

    left_out: int
    width: int
    groups: list[NDArray[np.int64]]
    below: list[NDArray[np.int64 | np.uint32]]

    def places(self, feature: int, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each key's group. Raises: KeyError, if one was not looked at."""
        groups, upper = self.groups[feature], keys >> (self.left_out + self.width)
        places = np.minimum(np.searchsorted(groups, upper), groups.size - 1)
        if keys.size and not np.array_equal(groups[places], upper):
            raise KeyError
        return places


class PassedValues:
    """The values of a table that is read in passes; what ``SortedValues`` is for one that is held.

    Memory: 150 KiB for each feature with 256 cuts, twice that for 2^32 rows or more.
    """

    def __init__(self, blocks: Callable[[], Iterator[NDArray[np.float32]]], columns: Sequence[int]) -> None:
        """Count values of some columns.

        Args:
            blocks: begins a pass. Shapes: float32[some rows, n_features] each.
            columns: places of the columns that the search is for.
        """
        self._blocks, self._columns = blocks, list(columns)
        self._counted: list[_Counted] = []

    def present(self) -> NDArray[np.int64]:
        """See ``Values``."""
        if not self._counted:
            self._counted = [self._pass(0, [np.zeros(1, np.int64)] * len(self._columns))]
        return np.array([below[0, -1] for below in self._counted[0].below], dtype=np.int64)

    def up_to(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """See ``Values``."""
        self.present()
        result, is_open = np.zeros(keys.shape, dtype=np.int64), np.ones(keys.shape, dtype=bool)
        for number, (left_out, width) in enumerate(_PARTS):
            counted = self._counts_for(number, keys, is_open)
            for feature, own in enumerate(keys):
                still = is_open[feature]
                asked = own[still]
                is_end = (asked + 1) % (1 << left_out) == 0  # nothing finer is needed
                parts = (asked >> left_out) & ((1 << width) - 1)
                result[feature, still] += counted.below[feature][counted.places(feature, asked), parts + is_end]
                is_open[feature, still] = ~is_end
            if not is_open.any():
                break
        return result

    def _counts_for(self, number: int, keys: NDArray[np.int64], is_open: NDArray[np.bool_]) -> _Counted:
        """Return the counts of a level in which all open keys lie, from an earlier pass if there was such a one."""
        try:
            counted = self._counted[number]
            for feature, own in enumerate(keys):
                counted.places(feature, own[is_open[feature]])
        except (IndexError, KeyError):
            shift = sum(_PARTS[number])
            groups = [np.unique(own[still] >> shift) for own, still in zip(keys, is_open, strict=True)]
            counted = self._pass(number, groups)
            self._counted[number:] = [counted]
        return counted

    def _pass(self, number: int, groups: list[NDArray[np.int64]]) -> _Counted:
        left_out, width = _PARTS[number]
        counts = [np.zeros(own.size << width, dtype=np.int64) for own in groups]
        for block in self._blocks():
            for own, found, column in zip(groups, counts, block.T[self._columns], strict=True):
                keys = to_keys(column[~np.isnan(column)]).astype(np.int64)
                upper = keys >> (left_out + width)
                places = np.minimum(np.searchsorted(own, upper), own.size - 1)
                inside = own[places] == upper if own.size else np.zeros(keys.size, dtype=bool)
                parts = (keys[inside] >> left_out) & ((1 << width) - 1)
                found += np.bincount((places[inside] << width) + parts, minlength=found.size)
        below = [_below(found.reshape(own.size, 1 << width)) for own, found in zip(groups, counts, strict=True)]
        return _Counted(left_out, width, groups, below)


def _below(counts: NDArray[np.int64]) -> NDArray[np.int64 | np.uint32]:
    summed = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    return summed.astype(np.uint32) if summed.max(initial=0) < 1 << 32 else summed


# The quantiles that XGBoost takes for absolute and quantile error, to the last bit.
#
# Reference: XGBoost 3.2, src/common/stats.h (Quantile, WeightedQuantile) and src/objective/adaptive.cc.


Column = NDArray[np.float32]


def quantile(values: Column, weight: Column | None, alpha: float) -> np.float32:
    """Return the quantile of a column.

    Args:
        weight: of each value; None for 1 each, which XGBoost interpolates between.
        alpha: from 0 to 1; XGBoost holds it as float32.

    Shapes: values, weight: float32[n_rows]. Returns: not a number for no values.
    """
    n, level = values.size, float(np.float32(alpha))
    if not n:
        return np.float32(np.nan)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    if weight is not None:
        total = np.cumsum(weight[order], dtype=np.float32)
        found = np.searchsorted(total, np.float32(float(total[-1]) * level), side="left")
        return np.float32(ordered[min(int(found), n - 1)])
    if level <= 1 / (n + 1):
        return np.float32(ordered[0])
    if level >= n / (n + 1):
        return np.float32(ordered[-1])
    place = level * (n + 1)
    below = math.floor(place) - 1
    return np.float32(float(ordered[below]) + (place - 1 - below) * float(ordered[below + 1] - ordered[below]))


def leaf_quantiles(
    residuals: Column, weight: Column | None, leaf: NDArray[np.int32], n_leaves: int, alpha: float
) -> Column:
    """Return the quantile of the residuals in each leaf.

    Shapes: residuals, weight: float32[n_rows]; leaf: int32[n_rows], from 0 to n_leaves - 1; result: float32[n_leaves],
        not a number for a leaf without rows.
    """
    order = np.argsort(leaf, kind="stable")
    ends = np.searchsorted(leaf[order], np.arange(n_leaves + 1))
    runs = [order[ends[number] : ends[number + 1]] for number in range(n_leaves)]
    of_each = [quantile(residuals[run], None if weight is None else weight[run], alpha) for run in runs]
    return np.array(of_each, dtype=np.float32)
