"""A party's cuts and bins against XGBoost's, column by column and all at once."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.vertical.party_data import find_cut_points


def table(n_rows: int) -> np.ndarray:
    rng = np.random.default_rng(n_rows)
    features = rng.normal(size=(n_rows, 8)).astype(np.float32)
    features[:, 1] = rng.integers(0, 5, n_rows)
    features[:, 2], features[:, 3] = 3.0, np.nan
    features[:, 4] = np.exp(features[:, 4] * 8)
    features[:, 5] *= np.float32(1e20)
    features[:, 6] = -np.abs(features[:, 6])
    features[rng.random(features.shape) < 0.2] = np.nan
    return features


@pytest.mark.parametrize("max_bin", [2, 16, 256, 1024])
@pytest.mark.parametrize("n_rows", [3, 100, 5_000])
def test_cuts_are_those_of_centralized_training(n_rows, max_bin):
    features = table(n_rows)
    matrix = xgb.DMatrix(features, label=np.arange(n_rows) % 2)
    xgb.train({"tree_method": "hist", "max_bin": max_bin, "max_depth": 1}, matrix, 1)
    starts, values = matrix.get_quantile_cut()
    cuts = find_cut_points(features[:, 2:].T, max_bin)
    for feature in range(6):
        expected = values[starts[feature + 2] : starts[feature + 3]]
        np.testing.assert_array_equal([cuts.threshold(feature, b) for b in range(-1, expected.size - 1)], expected)


def test_bins_follow_the_thresholds():
    features = table(2_000)
    cuts = find_cut_points(features.T, 64)
    codes = cuts.codes(features.T)
    assert codes.dtype == np.uint8
    for feature in range(8):
        values, missing = features[:, feature], np.isnan(features[:, feature])
        n_bins = cuts.layout.n_bins[feature]
        np.testing.assert_array_equal(codes[feature] == n_bins, missing)
        for last in range(-1, n_bins):
            left = codes[feature].astype(int) <= last
            np.testing.assert_array_equal(left[~missing], values[~missing] < cuts.threshold(feature, last))


def test_many_bins_take_two_bytes():
    assert find_cut_points(table(5_000).T, 1024).codes(table(5_000).T).dtype == np.uint16


def test_infinite_values_are_refused_without_quoting_them():
    features = np.array([[1.0], [np.inf], [5.5]], dtype=np.float32)
    with pytest.raises(ConfigurationError) as caught:
        find_cut_points(features.T, 16)
    assert "5.5" not in str(caught.value)
