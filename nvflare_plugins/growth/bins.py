"""Rows in bins: which bin of its feature each value falls into.

A row's code of a feature is the number of the value's bin in that feature, or the feature's code for a missing value.
Codes take the fewest bytes that hold them: one up to 256 bins, two up to 65,536, as long as the last bin of a feature
that uses all of them is empty where the feature misses values. Between XGBoost's outer bounds it always is.

Reference: XGBoost 3.2, src/common/hist_util.h (SearchBin, SearchCatBin).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import default_threads, row_blocks, run_blocks
from nvflare_plugins.growth._native import BEST, NUMPY, growth
from nvflare_plugins.growth.arithmetic import Arithmetic
from nvflare_plugins.xgb.cuts import LARGEST_VALUE, Cuts

Codes = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]

_ROWS_PER_THREAD = 4096
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


def bin_rows(
    layout: BinLayout,
    blocks: Iterable[NDArray[np.float32]],
    n_rows: int,
    variant: str = BEST,
    file: Path | None = None,
) -> BinnedTable:
    """Find the bin of every value.

    Shapes: blocks: float32[n_block_rows, n_features] each, NaN is missing; together ``n_rows`` rows.

    Args:
        variant: of ``_native.variants``.
        file: where the codes are kept if they are not to be held; the caller removes it.
    """
    n_bins = layout.bins_of_feature
    widest = int(n_bins.max(initial=1))
    kind = next(one for one in _CODE_TYPES if widest - 1 <= np.iinfo(one).max)
    codes = new_codes((n_rows, layout.n_features), kind, file)
    lacks, fills = np.zeros((2, layout.n_features), dtype=bool)  # a value; a bin whose code stands for missing values
    done = 0
    for block in blocks:
        lacks_now, fills_now = _bin_block(layout, block, codes[done : done + len(block)], variant)
        if ((lacks | lacks_now) & (fills | fills_now)).any():
            codes = _widened(codes, done, lacks, n_bins, file)
            _bin_block(layout, block, codes[done : done + len(block)], variant)
            fills[:] = fills_now[:] = False
        lacks |= lacks_now
        fills |= fills_now
        done += len(block)
    missing = np.where(fills, n_bins, _missing_codes(n_bins, codes.dtype))
    return BinnedTable(codes, missing.astype(np.uint32), not lacks.any())


def new_codes(shape: tuple[int, int], kind: np.dtype[Any], file: Path | None) -> Codes:
    """Return room for codes: in memory, or in a file of this name."""
    if file is None or not all(shape):
        return np.empty(shape, dtype=kind)
    file.unlink(missing_ok=True)
    return np.memmap(file, dtype=kind, mode="w+", shape=shape)


def _missing_codes(n_bins: NDArray[np.int64], kind: np.dtype[Any]) -> NDArray[np.int64]:
    """Return the codes of missing values: the one after the last bin, or the last bin's where that does not fit."""
    return np.minimum(n_bins, np.iinfo(kind).max)


def _widened(
    codes: Codes, n_rows: int, lacks: NDArray[np.bool_], n_bins: NDArray[np.int64], file: Path | None
) -> Codes:
    """Return codes of the next type with the first rows taken over. Shapes: lacks: bool[n_features], in these rows."""
    wider = new_codes((codes.shape[0], codes.shape[1]), _CODE_TYPES[_CODE_TYPES.index(codes.dtype) + 1], file)
    missing = _missing_codes(n_bins, codes.dtype)
    for feature in range(codes.shape[1]):
        column = wider[:n_rows, feature]
        column[:] = codes[:n_rows, feature]
        if lacks[feature]:
            column[column == missing[feature]] = n_bins[feature]
    return wider


def _bin_block(
    layout: BinLayout, block: NDArray[np.float32], codes: Codes, variant: str
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Write a block's codes; tell which features miss values, and which have a value whose code is that of missing.

    Shapes: block: float32[n_block_rows, n_features]; codes: of the same shape; results: bool[n_features].
    """
    missing = _missing_codes(layout.bins_of_feature, codes.dtype)
    if variant == NUMPY or not layout.n_features:
        return _bin_in_numpy(layout, block, codes, missing)
    values = np.ascontiguousarray(block, dtype=np.float32)
    parts = row_blocks(len(values), default_threads(), _ROWS_PER_THREAD)
    found = np.zeros((len(parts), 2, layout.n_features), dtype=np.uint8)

    def run(i: int) -> None:
        rows, kinds, code = parts[i], layout.is_categorical.view(np.uint8), missing.astype(np.uint32)
        out = codes[rows]
        growth.bin(codes.itemsize, values[rows], layout.upper, layout.starts, kinds, code, out, *found[i])

    run_blocks(run, list(range(len(parts))), default_threads())
    either = found.max(axis=0, initial=0).astype(bool)
    return either[0], either[1]


def _bin_in_numpy(
    layout: BinLayout, block: NDArray[np.float32], codes: Codes, missing: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    lacks, fills = np.zeros((2, layout.n_features), dtype=bool)
    for feature in range(layout.n_features):
        upper, values = layout.upper[layout.starts[feature] : layout.starts[feature + 1]], block[:, feature]
        is_missing = np.isnan(values)
        if layout.is_categorical[feature]:
            found = np.searchsorted(upper, np.trunc(values), side="left")
        else:
            found = np.searchsorted(upper, values, side="right")
        found = np.minimum(found, max(upper.size - 1, 0))
        lacks[feature] = is_missing.any()
        fills[feature] = (~is_missing & (found == missing[feature])).any()
        codes[:, feature] = np.where(is_missing, missing[feature], found)
    return lacks, fills


def right_mask(layout: BinLayout, feature: int, right: Sequence[int]) -> NDArray[np.bool_]:
    """Return which bins of a categorical feature go right. Shapes: bool[n_feature_bins]."""
    mask = np.zeros(int(layout.bins_of_feature[feature]), dtype=bool)
    mask[list(right)] = True
    return mask


def _further_out(value: np.float32) -> np.float32:
    """Return XGBoost's bound beyond a feature's largest value."""
    return np.float32(value + (np.abs(value) + np.float32(1e-5)))
