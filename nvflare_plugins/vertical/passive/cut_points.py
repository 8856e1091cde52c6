"""A party's own cut points and bins, found by its own XGBoost exactly as in centralized training.

XGBoost sketches every column for itself, so the cuts of a column do not depend on the columns of other parties.

Reference: XGBoost 3.2, src/common/quantile.cc (MakeCuts), src/common/hist_util.h (SearchBin).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.histogram.bins import BinCodes, BinLayout


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

    def codes(self, features: NDArray[np.float32]) -> BinCodes:
        """Return the bin of every value; a missing one has the code after the last bin.

        Shapes: features: float32[n_rows, n_features]; result: uint8 or uint16[n_features, n_rows].
        """
        n_bins = self.layout.n_bins
        codes = np.empty(features.shape[::-1], dtype=np.uint8 if max(n_bins) < 256 else np.uint16)
        for feature, cuts in enumerate(self.upper):
            values = features[:, feature]
            if feature in self.bin_of_category:
                places = np.where(np.isnan(values), 0, values).astype(np.int64)
                bins = self.bin_of_category[feature][places]
            else:
                bins = np.minimum(np.searchsorted(cuts, values, side="right"), cuts.size - 1)
            codes[feature] = np.where(np.isnan(values), n_bins[feature], bins)
        return codes


def find_cut_points(features: NDArray[np.float32], max_bin: int, categorical: Collection[int] = ()) -> CutPoints:
    """Find a party's cut points.

    Call it outside a communicator: inside, XGBoost would send the sketch.

    Shapes: features: float32[n_rows, n_features]; NaN is missing, categorical columns hold places in public lists.

    Args:
        categorical: which features are categorical. A category has a bin of its own, whatever ``max_bin`` says.

    Raises:
        ConfigurationError: XGBoost refuses the values (an infinity, for example).
    """
    types = ["c" if feature in categorical else "float" for feature in range(features.shape[1])]
    try:
        matrix = xgb.QuantileDMatrix(features, max_bin=max_bin, nthread=1, feature_types=types, enable_categorical=True)
        starts, values = matrix.get_quantile_cut()
    except (xgb.core.XGBoostError, ValueError):
        # The reason could quote values.
        raise ConfigurationError("XGBoost refuses the feature table: check it for infinite values") from None
    parts = [values[start:end].astype(np.float32) for start, end in itertools.pairwise(starts)]
    # XGBoost lists a value below all others before the bounds of each feature of numbers.
    upper = tuple(part if feature in categorical else part[1:] for feature, part in enumerate(parts))
    lowest = np.array([part[0] for part in parts], dtype=np.float32)
    return CutPoints(upper, lowest, {feature: np.arange(upper[feature].size) for feature in categorical})
