"""Rows in bins: which bin of its feature each value falls into.

A row's code of a feature is the number of the value's bin in that feature, or the feature's code for a missing value.
Codes take the fewest bytes that hold them: one up to 256 bins, two up to 65,536, as long as the last bin of a feature
that uses all of them is empty where the feature misses values. Between XGBoost's outer bounds it always is.

Reference: XGBoost 3.2, src/common/hist_util.h (SearchBin, SearchCatBin).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth.arithmetic import Arithmetic
from nvflare_plugins.xgb.cuts import LARGEST_VALUE, Cuts

Codes = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]

_CODE_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))


@dataclass(frozen=True, slots=True, repr=False)
class BinLayout:
    """The bins of all features, one feature after the other.

    Shapes: upper: float32[n_bins]; starts: int64[n_features + 1]; is_categorical: bool[n_features];
        lowest: float32[n_features].

    Attributes:
        upper: the upper bound of each bin, which is not in it; of a category its number.
        starts: each feature's first bin, and the number of bins last.
        lowest: threshold of a split that sends only missing values to the left.
    """

    upper: NDArray[np.float32]
    starts: NDArray[np.int64]
    is_categorical: NDArray[np.bool_]
    lowest: NDArray[np.float32]

    @classmethod
    def from_cuts(cls, cuts: Cuts, n_categories: Mapping[int, int], arithmetic: Arithmetic) -> BinLayout:
        """Lay out agreed cuts as XGBoost does that is given ``xgb.cuts.reference_table``.

        Args:
            n_categories: of each categorical feature.
        """
        beyond = _further_out(LARGEST_VALUE)
        upper = [
            np.arange(n_categories[feature], dtype=np.float32)
            if feature in n_categories
            else np.concatenate([inner, [LARGEST_VALUE, beyond]]).astype(np.float32)
            for feature, inner in enumerate(cuts.of_feature)
        ]
        starts = np.concatenate([[0], np.cumsum([bounds.size for bounds in upper])]).astype(np.int64)
        is_categorical = np.array([feature in n_categories for feature in range(len(upper))])
        lowest = np.full(len(upper), -np.inf if arithmetic.lowest_is_infinite else -beyond, dtype=np.float32)
        return cls(np.concatenate(upper), starts, is_categorical, lowest)

    @property
    def n_features(self) -> int:
        """Return the number of features."""
        return int(self.starts.size - 1)

    @property
    def n_bins(self) -> int:
        """Return the number of bins of all features."""
        return int(self.starts[-1])

    @property
    def bins_of_feature(self) -> NDArray[np.int64]:
        """Return how many bins each feature has. Shapes: int64[n_features]."""
        return np.diff(self.starts)

    def threshold(self, feature: int, last_left_bin: int) -> np.float32:
        """Return the value below which rows go left."""
        if last_left_bin < 0:
            return np.float32(self.lowest[feature])
        return np.float32(self.upper[self.starts[feature] + last_left_bin])


@dataclass(frozen=True, slots=True, repr=False)
class BinnedTable:
    """Rows in bins.

    Shapes: codes: uint8, uint16 or uint32[n_rows, n_features]; missing: uint32[n_features].

    Attributes:
        missing: code of a missing value of each feature; one that no row has where it does not fit the codes.
        is_dense: no value is missing.
    """

    codes: Codes
    missing: NDArray[np.uint32]
    is_dense: bool


def bin_rows(layout: BinLayout, blocks: Iterable[NDArray[np.float32]], n_rows: int) -> BinnedTable:
    """Find the bin of every value.

    Shapes: blocks: float32[n_block_rows, n_features] each, NaN is missing; together ``n_rows`` rows.
    """
    n_bins = layout.bins_of_feature
    widest = int(n_bins.max(initial=1))
    kind = next(one for one in _CODE_TYPES if widest - 1 <= np.iinfo(one).max)
    codes = np.empty((n_rows, layout.n_features), dtype=kind)
    lacks, fills = np.zeros((2, layout.n_features), dtype=bool)  # a value; a bin whose code stands for missing values
    done = 0
    for block in blocks:
        missing = _missing_codes(n_bins, kind)
        found = _codes_of(layout, block, missing)
        is_missing = np.isnan(block)
        lacks_now = is_missing.any(axis=0)
        fills_now = ((found == missing) & ~is_missing).any(axis=0)
        if ((lacks | lacks_now) & (fills | fills_now)).any():
            kind = _CODE_TYPES[_CODE_TYPES.index(kind) + 1]
            wider = codes[:done].astype(kind)
            for feature in np.flatnonzero(lacks):
                column = wider[:, feature]
                column[column == missing[feature]] = n_bins[feature]
            codes = np.empty((n_rows, layout.n_features), dtype=kind)
            codes[:done] = wider
            found[is_missing] = np.broadcast_to(n_bins, found.shape)[is_missing]
            fills_now[:] = fills[:] = False
        lacks |= lacks_now
        fills |= fills_now
        codes[done : done + len(block)] = found
        done += len(block)
    return BinnedTable(codes, np.where(fills, n_bins, _missing_codes(n_bins, kind)).astype(np.uint32), not lacks.any())


def right_mask(layout: BinLayout, feature: int, right: Sequence[int]) -> NDArray[np.bool_]:
    """Return which bins of a categorical feature go right. Shapes: bool[n_feature_bins]."""
    mask = np.zeros(int(layout.bins_of_feature[feature]), dtype=bool)
    mask[list(right)] = True
    return mask


def _further_out(value: np.float32) -> np.float32:
    """Return XGBoost's bound beyond a feature's largest value."""
    return np.float32(value + (np.abs(value) + np.float32(1e-5)))


def _missing_codes(n_bins: NDArray[np.int64], kind: np.dtype[np.unsignedinteger]) -> NDArray[np.int64]:
    return np.minimum(n_bins, np.iinfo(kind).max)


def _codes_of(layout: BinLayout, block: NDArray[np.float32], missing: NDArray[np.int64]) -> NDArray[np.int64]:
    codes = np.empty(block.shape, dtype=np.int64)
    for feature in range(layout.n_features):
        bounds = layout.upper[layout.starts[feature] : layout.starts[feature + 1]]
        side = "left" if layout.is_categorical[feature] else "right"
        values = np.trunc(block[:, feature]) if layout.is_categorical[feature] else block[:, feature]
        found = np.minimum(np.searchsorted(bounds, values, side=side), max(bounds.size - 1, 0))  # type: ignore[call-overload]
        codes[:, feature] = np.where(np.isnan(block[:, feature]), missing[feature], found)
    return codes
