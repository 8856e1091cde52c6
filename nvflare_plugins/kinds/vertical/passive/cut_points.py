"""A party's own cut points and bins, found by its own XGBoost exactly as in centralized training.

XGBoost sketches every column for itself, so the cuts of a column do not depend on the columns of other parties.

Reference: XGBoost 3.2, src/common/quantile.cc (MakeCuts), src/common/hist_util.h (SearchBin).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.split_candidates import Columns
from he_processors.errors import ConfigurationError
from he_processors.histogram.planner import BinCodes, BinLayout
from nvflare_plugins.growth.arithmetic import Arithmetic

_MARGIN = 1e-5


@dataclass(frozen=True)
class CutPoints:
    """Cut points of one party's columns. They stay with the party.

    Attributes:
        upper: upper bounds of each feature's bins, ascending; of a categorical feature its places in the public list up
            to the last one that a training row has. Shapes: float32[n_bins] each.
        lowest: a value below all of a feature's. Shapes: float32[n_features].
        bin_of_category: of each categorical feature, the bin of every place. Shapes: int64[n_places] each.
    """

    upper: tuple[NDArray[np.float32], ...]
    lowest: NDArray[np.float32]
    bin_of_category: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    @cached_property
    def layout(self) -> BinLayout:
        """Return how many bins each feature has."""
        return BinLayout(tuple(self._n_bins(feature) for feature in range(len(self.upper))))

    def _n_bins(self, feature: int) -> int:
        if feature in self.bin_of_category:
            return int(self.bin_of_category[feature].max()) + 1
        return self.upper[feature].size

    def categories_in(self, feature: int, bins: Sequence[int]) -> tuple[int, ...]:
        """Return the places in the public list that lie in some bins, ascending."""
        return tuple(np.flatnonzero(np.isin(self.bin_of_category[feature], bins)).tolist())

    def threshold(self, feature: int, last_left_bin: int) -> np.float32:
        """Return the split value of "bins up to this one go left"; bin -1 sends no value left."""
        result: np.float32 = self.lowest[feature] if last_left_bin < 0 else self.upper[feature][last_left_bin]
        return result

    def codes(self, columns: Columns) -> BinCodes:
        """Return the bin of every value; a missing one has the code after the last bin.

        Shapes: columns: float32[n_features, n_rows]; result: uint8 or uint16[n_features, n_rows].
        """
        n_bins = self.layout.n_bins
        codes = np.empty(columns.shape, dtype=np.uint8 if max(n_bins) < 256 else np.uint16)
        for feature, (cuts, values) in enumerate(zip(self.upper, columns, strict=True)):
            if feature in self.bin_of_category:
                places = np.where(np.isnan(values), 0, values).astype(np.int64)
                bins = self.bin_of_category[feature][places]
            else:
                bins = np.minimum(np.searchsorted(cuts, values, side="right"), cuts.size - 1)
            codes[feature] = np.where(np.isnan(values), n_bins[feature], bins)
        return codes

    def thresholds(self, feature: int) -> NDArray[np.float32]:
        """Return all that a split of a feature of numbers may compare with, ascending. Shapes: float32[any]."""
        return np.unique(np.append(self.upper[feature], self.lowest[feature]))


def find_cut_points(
    columns: Columns,
    max_bin: int,
    categorical: Collection[int] = (),
    weight: NDArray[np.float32] | None = None,
    arithmetic: Arithmetic | None = None,
) -> CutPoints:
    """Find a party's cut points, one column after the other: what XGBoost would find in all together.

    Shapes: columns: float32[n_features, n_rows]; NaN is missing, categorical columns hold places in public lists;
        weight: float32[n_rows], which the sketch counts; None for 1 each.

    Args:
        categorical: which features are categorical. A category has a bin of its own, whatever ``max_bin`` says.
        arithmetic: of the job's trees; None is this site's XGBoost's.

    Raises:
        ConfigurationError: XGBoost refuses the values (an infinity, for example).
    """
    parts = [_cuts_of(column, max_bin, feature in categorical, weight) for feature, column in enumerate(columns)]
    # XGBoost lists a value below all others before the bounds of each feature of numbers.
    upper = tuple(part if feature in categorical else part[1:] for feature, part in enumerate(parts))
    lowest = [
        part[0] if arithmetic is None else _lowest(column, arithmetic)
        for part, column in zip(parts, columns, strict=True)
    ]
    return CutPoints(
        upper, np.array(lowest, dtype=np.float32), {feature: np.arange(upper[feature].size) for feature in categorical}
    )


def _lowest(column: NDArray[np.float32], arithmetic: Arithmetic) -> np.float32:
    """Return the threshold of a split that sends no value left, whichever XGBoost this site has."""
    if arithmetic.lowest_is_infinite:
        return np.float32(-np.inf)
    smallest = float(np.nanmin(column, initial=np.inf))
    return np.float32(smallest - (abs(smallest) + _MARGIN) if smallest < np.inf else _MARGIN)


def _cuts_of(
    column: NDArray[np.float32], max_bin: int, is_categorical: bool, weight: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    types = ["c" if is_categorical else "float"]
    rows = np.ascontiguousarray(column)[:, None]
    try:
        matrix = xgb.QuantileDMatrix(
            rows, weight=weight, max_bin=max_bin, nthread=1, feature_types=types, enable_categorical=True
        )
        return matrix.get_quantile_cut()[1].astype(np.float32)
    except (xgb.core.XGBoostError, ValueError):
        # The reason could quote values.
        raise ConfigurationError("XGBoost refuses the feature table: check it for infinite values") from None
