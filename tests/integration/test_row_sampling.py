"""Rows that take part: drawn in secret, equal to weights in centralized training."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.pooled.job import HorizontalJob
from tests.support.examples import quick
from tests.support.federation import Federation, SiteDied, leaf_difference, succeed
from tests.support.horizontal_jobs import dies_after, federate, table
from tests.support.horizontal_jobs import spaced as job
from tests.support.row_draws import train_centrally, weighted

VARIANTS: dict[str, tuple[dict, dict]] = {
    "logistic": ({"subsample": 0.5}, {}),
    "weighted": ({"subsample": 0.7}, {"weight": "w"}),
    "scale_pos_weight": ({"subsample": 0.6, "scale_pos_weight": 3.0}, {}),
    "base_score": ({"subsample": 0.5, "base_score": 0.4}, {"weight": "w"}),
    "softprob": ({"subsample": 0.5, "objective": "multi:softprob", "num_class": 2}, {}),
    "squared_error": ({"subsample": 0.5, "objective": "reg:squarederror"}, {"weight": "w"}),
    "poisson": ({"subsample": 0.5, "objective": "count:poisson"}, {}),
    "dart_and_columns": (
        {"subsample": 0.5, "booster": "dart", "rate_drop": 0.5, "colsample_bytree": 0.6, "seed": 5},
        {},
    ),
}


@pytest.mark.parametrize("name", quick(VARIANTS, "base_score", "softprob", "dart_and_columns"))
def test_trees_equal_central_training_on_the_drawn_rows(tmp_path, name):
    params, fields = VARIANTS[name]
    frame = (weighted if fields else table)(400)
    if name == "softprob":  # two classes mirror each other: missing values that make no difference go either way
        frame = frame.dropna()
    training = job(params, **fields)
    federation = federate(tmp_path, frame, training)
    central = train_centrally(frame, training, federation)
    assert leaf_difference(federation.model(), central) <= 5e-7


def test_the_public_seed_decides_no_row(tmp_path):
    models = []
    for seed in (0, 7):
        federation = Federation(tmp_path / str(seed))
        federation.give_data("train", table(300))
        federation.set_registry_keys()
        succeed(federation.run(job({"subsample": 0.5, "seed": seed}, 2)))
        models.append(federation.model())
    assert models[0] == models[1]


def test_metrics_are_of_all_rows_at_their_true_weights(tmp_path):
    frame = weighted()
    training = job({"subsample": 0.3, "eval_metric": ["logloss", "error"]}, weight="w", evaluate_training=True)
    federation = federate(tmp_path, frame, training)
    booster = xgb.Booster({"nthread": 1, "eval_metric": ["logloss", "error"]}, model_file=bytearray(federation.model()))
    rows = xgb.DMatrix(frame.drop(columns=["y", "w"]), label=frame.y, weight=frame.w)
    stock = booster.eval(rows).split("\t")[1:]
    record = json.loads((federation.workspace("site-1") / "runs" / "job" / "run.json").read_text())
    ours = record["rounds"][-1]["metrics"]
    expected = {text.rpartition(":")[0].replace("eval", "train"): float(text.rpartition(":")[2]) for text in stock}
    assert ours == pytest.approx(expected, rel=1e-6)


def test_a_resumed_job_draws_the_same_rows(tmp_path):
    frame = table(300)
    training = job({"subsample": 0.4}, 6, checkpoint_every=2)
    whole = federate(tmp_path / "whole", frame, training)
    federation = Federation(tmp_path / "lost")
    federation.give_data("train", frame)
    federation.set_registry_keys()
    outcomes = federation.run(training, "lost", on_progress=dies_after("site-2", 5))
    assert isinstance(outcomes["site-2"], SiteDied)
    # A file written anew in another order holds the same rows.
    path = federation.workspace("site-3") / "train.parquet"
    pd.read_parquet(path).sample(frac=1, random_state=1).to_parquet(path, index=False)
    succeed(federation.run(HorizontalJob.from_dict({**training.to_dict(), "resume_from": "lost"})))
    difference = leaf_difference(federation.model(), xgb.Booster(model_file=bytearray(whole.model())))
    assert difference <= 5e-7  # float sums over rows in another order


def test_adaptive_leaves_survive_a_site_that_draws_no_row(tmp_path):
    """XGBoost mixes up the leaves at a site without rows: one always takes part."""
    parts = [np.arange(2), np.arange(2, 100), np.arange(100, 200)]
    for objective in ({"objective": "reg:absoluteerror"}, {"objective": "reg:quantileerror", "quantile_alpha": 0.3}):
        federate(tmp_path / objective["objective"][4:], table(200), job({**objective, "subsample": 0.1}), parts=parts)


def test_parallel_trees_with_sampled_rows_are_refused_before_anything_is_sent(tmp_path):
    federation, frames = Federation(tmp_path), []
    federation.give_data("train", table(90))
    outcomes = federation.run(job({"subsample": 0.5, "num_parallel_tree": 2}), frames=frames)
    assert any("num_parallel_tree" in str(error) for error in outcomes.values()) and not frames
