"""Labels and weights of any size: the federated model and metrics against centralized XGBoost on the same cuts.

Tolerances: structure, features and thresholds equal; predictions within 5e-7 of the largest one (float32, and XGBoost's
base score in float32); RMSE within 1e-6 of what the predictions give.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.processors import BUILT_IN
from tests.support.examples import quick
from tests.support.federation import Federation, central_model, leaf_difference, succeed

NAMES = [f"x{i}" for i in range(6)]
BOUNDS = {name: [-3.0, 3.0] for name in NAMES}
TREE = {"max_depth": 4, "max_bin": 32}
ROUNDS = 4
SCALES = [1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9]


def features(n_rows: int) -> pd.DataFrame:
    return pd.DataFrame(np.random.default_rng(1).normal(size=(n_rows, 6)).astype(np.float32), columns=NAMES)


def skewed(frame: pd.DataFrame, scale: float) -> pd.DataFrame:
    noise = np.random.default_rng(2).normal(size=len(frame))
    label = np.exp(0.7 * frame.x0 + 0.5 * frame.x1 * frame.x2 + 0.8 * noise) * scale
    return frame.assign(label=label.astype(np.float32))


def incomes(n_rows: int) -> pd.DataFrame:
    """Most around 13,000, one of 3 million."""
    frame = skewed(features(n_rows), 13_000.0)
    frame.loc[7, "label"] = np.float32(3.0e6)
    return frame


def classes(n_rows: int) -> pd.DataFrame:
    frame = features(n_rows)
    noise = np.random.default_rng(3).normal(size=n_rows)
    return frame.assign(label=(frame.x0 + frame.x1 * frame.x2 + noise > 0).astype(np.float32))


def check(folder: Path, frame: pd.DataFrame, params: dict, profile: str, weight: str | None = None) -> None:
    federation = Federation.of(folder, train=frame)
    params = {**TREE, **params}
    job = HorizontalJob(
        "train",
        "label",
        params,
        ROUNDS,
        profile,
        cuts="uniform",
        cut_bounds=BOUNDS,
        evaluate_training=True,
        weight=weight,
    )
    succeed(federation.run(job))
    metrics = federation.metrics("site-1")
    central = central_model(frame, "label", params, federation.cuts(), ROUNDS, weight=weight)
    assert leaf_difference(federation.model(), central) < np.inf, "another structure"
    rows = xgb.DMatrix(frame[NAMES])
    ours = xgb.Booster(model_file=bytearray(federation.model())).predict(rows).astype(np.float64)
    theirs = central.predict(rows).astype(np.float64)
    assert np.abs(ours - theirs).max() <= 5e-7 * np.abs(theirs).max()
    weights = np.ones(len(frame)) if weight is None else frame[weight].to_numpy(np.float64)
    if "train-rmse" in metrics:
        expected = np.sqrt(np.average(np.square(theirs - frame.label), weights=weights))
        assert metrics["train-rmse"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("profile", quick(BUILT_IN, "masks", "bfv"))
def test_an_income_column_as_label(tmp_path, profile):
    check(tmp_path, incomes(600), {"objective": "reg:squarederror", "eval_metric": ["mae", "rmse"]}, profile)


@pytest.mark.parametrize("scale", [1e-6, 1e9])
def test_labels_of_extreme_size(tmp_path, scale):
    check(tmp_path, skewed(features(600), scale), {"objective": "reg:squarederror", "eval_metric": "rmse"}, "masks")


@pytest.mark.parametrize("offset", [4_321.0, 87_654.3])
def test_labels_far_from_zero(tmp_path, offset):
    """Where the pooled mean is off by a unit of float32's last place, every leaf is: by 5e-4 at an offset of 4,321."""
    frame = skewed(features(542), 1.0)  # a table for which XGBoost's own parts miss the mean
    frame["label"] += np.float32(offset)
    params = {**TREE, "objective": "reg:squarederror", "eta": 1.0}
    federation = Federation.of(tmp_path, train=frame)
    succeed(federation.run(HorizontalJob("train", "label", params, 2, "masks", cuts="uniform", cut_bounds=BOUNDS)))
    central = central_model(frame, "label", params, federation.cuts(), 2)
    assert leaf_difference(federation.model(), central) <= 2e-7


def weights_over(low: float, high: float, n_rows: int) -> np.ndarray:
    exponents = np.random.default_rng(4).uniform(np.log10(low), np.log10(high), n_rows)
    return (10.0**exponents).astype(np.float32)


def test_weights_over_twelve_orders_of_magnitude(tmp_path):
    check(tmp_path, classes(600).assign(w=weights_over(1e-6, 1e6, 600)), {"objective": "binary:logistic"}, "masks", "w")


def test_weights_too_unlike_for_exact_leaves_are_refused_at_all_sites_alike(tmp_path):
    federation = Federation.of(tmp_path, train=classes(300).assign(w=weights_over(1e-6, 1e6, 300)))
    params = {**TREE, "objective": "binary:logistic", "min_child_weight": 0, "lambda": 0}
    outcomes = federation.run(
        HorizontalJob("train", "label", params, 1, "masks", cuts="uniform", cut_bounds=BOUNDS, weight="w")
    )
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values())
    refused = [outcome for outcome in outcomes.values() if isinstance(outcome, ConfigurationError)]
    assert refused and all(str(o).startswith("weight: ") and "min_child_weight" in str(o) for o in refused)


@pytest.mark.slow
@pytest.mark.parametrize("profile", BUILT_IN)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("objective", ["reg:squarederror", "count:poisson", "reg:gamma", "reg:tweedie"])
def test_labels_over_fifteen_orders_of_magnitude(tmp_path, objective, scale, profile):
    params = {"objective": objective, "eval_metric": ["mae", "mape", "rmse"]}
    check(tmp_path, skewed(features(3000), scale), params, profile)


@pytest.mark.slow
@pytest.mark.parametrize("profile", BUILT_IN)
@pytest.mark.parametrize(("low", "high"), [(1e-6, 2e-6), (1e-3, 1e3), (1e-6, 1e6), (1e6, 2e6)])
@pytest.mark.parametrize("objective", ["binary:logistic", "reg:squarederror"])
def test_weights_of_any_size(tmp_path, objective, low, high, profile):
    frame = classes(3000) if objective == "binary:logistic" else incomes(3000)
    params = {"objective": objective, "eval_metric": "rmse"}
    check(tmp_path, frame.assign(w=weights_over(low, high, 3000)), params, profile, "w")
