"""Quantiles as XGBoost takes them for absolute and quantile error: its own estimates, to the last bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.xgb.cuts import leaf_quantiles, quantile


@pytest.mark.parametrize("seed", range(12))
def test_quantile_is_xgboosts_first_estimate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_rows = int(rng.integers(1, 40))
    values = rng.normal(size=n_rows).astype(np.float32).round(seed % 3)
    weight = rng.random(n_rows).astype(np.float32) if seed % 2 else None
    for alpha in (0.01, 0.3, 0.5, 0.99):
        params = {"objective": "reg:quantileerror", "quantile_alpha": alpha, "max_depth": 1, "nthread": 1}
        booster = xgb.train(params, xgb.DMatrix(np.zeros((n_rows, 1)), label=values, weight=weight, nthread=1), 1)
        learner = json.loads(booster.save_config())["learner"]
        assert quantile(values, weight, alpha) == np.float32(learner["learner_model_param"]["base_score"].strip("[]"))


def test_quantiles_of_leaves_are_those_of_their_rows() -> None:
    rng = np.random.default_rng(1)
    residuals, weight = rng.normal(size=50).astype(np.float32), rng.random(50).astype(np.float32)
    leaf = rng.choice([0, 2, 3], 50).astype(np.int32)
    for weights in (None, weight):
        found = leaf_quantiles(residuals, weights, leaf, 4, 0.5)
        assert np.isnan(found[1])
        for number in (0, 2, 3):
            own = leaf == number
            assert found[number] == quantile(residuals[own], None if weights is None else weights[own], 0.5)


def test_quantiles_by_hand() -> None:
    values = np.array([4, 1, 3, 2], np.float32)
    assert quantile(values, None, 0.5) == np.float32(2.5)
    assert quantile(values, np.array([0, 1, 1, 1], np.float32), 0.5) == np.float32(2)
    assert quantile(values[:1], None, 0.9) == np.float32(4)
    assert np.isnan(quantile(values[:0], None, 0.5))
