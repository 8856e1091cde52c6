"""The fewest rows of a node that the sites ask for, and what a smaller child weight would tell."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.base.errors import ROWS_TEXT, JobAborted, PolicyRefusal
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.data_refusals import RefusalCount
from nvflare_plugins.site.policy import SitePolicy
from tests.support.examples import quick
from tests.support.federation import Federation, SiteDied, central_model, leaf_difference, succeed
from tests.support.horizontal_jobs import LOGISTIC, dies_after, federate, table
from tests.support.horizontal_jobs import spaced as job
from tests.support.row_draws import STRICT, names, train_centrally, weighted


def smallest_leaf(federation: Federation, frame: pd.DataFrame, job_id: str = "job") -> int:
    booster = xgb.Booster(model_file=bytearray(federation.model(job_id)))
    features = frame.drop(columns=[c for c in ("y", "w") if c in frame])
    leaf_of = booster.predict(xgb.DMatrix(features), pred_leaf=True).reshape(len(frame), -1).astype(int)
    return min(np.unique(column, return_counts=True)[1].min() for column in leaf_of.T)


def agreed(federation: Federation, job_id: str = "job") -> dict:
    return json.loads((federation.workspace("site-1") / "runs" / job_id / "run.json").read_text())


FLOORED = {
    "logistic": ({}, None),
    "scale_pos_weight": ({"scale_pos_weight": 5.0}, 5.0),
    "squared_error": ({"objective": "reg:squarederror"}, 4.0),
    "hinge": ({"objective": "binary:hinge"}, 4.0),
    "softprob": ({"objective": "multi:softprob", "num_class": 2}, 2.0),
    "lossguide": ({"objective": "reg:squarederror", "grow_policy": "lossguide", "max_leaves": 60, "max_depth": 0}, 4.0),
    "absolute_error": ({"objective": "reg:absoluteerror"}, 4.0),
    "sampled": ({"objective": "reg:squarederror", "subsample": 0.5}, 4.0),
}


@pytest.mark.parametrize(
    "name",
    names(FLOORED, "lossguide", "softprob", "hinge", "absolute_error", "scale_pos_weight", "sampled", "squared_error"),
)
def test_no_node_holds_fewer_rows_than_the_sites_ask_for(tmp_path, name):
    params, raised = FLOORED[name]
    params, frame = {"max_depth": 8, "reg_lambda": 0.0, **params}, table(400)
    training = job(params, 2)
    free = federate(tmp_path / "free", frame, job({**params, "min_child_weight": 0.0}, 2))
    assert smallest_leaf(free, frame) < 4, "the test shows nothing"
    federation = federate(tmp_path / "floor", frame, training, policy=STRICT)
    if "subsample" not in params:
        assert smallest_leaf(federation, frame) >= 4
    record = agreed(federation)
    assert record["params"].get("min_child_weight") == raised
    assert any("min_child_weight" in note for note in record["notes"]) == (raised is not None)


def test_a_raised_parameter_is_what_centralized_training_equals(tmp_path):
    frame, params = table(400), {"objective": "reg:squarederror", "base_score": 0.5, "max_depth": 6}
    federation = federate(tmp_path, frame, job(params), policy=STRICT)
    settings = {**LOGISTIC, **params, "min_child_weight": agreed(federation)["params"]["min_child_weight"]}
    assert leaf_difference(federation.model(), central_model(frame, "y", settings, federation.cuts(), 4)) == 0.0
    federation.set_policy("site-3", min_rows_per_node=9)
    federation.set_policies(consents={"recompute_with_changes": True})
    succeed(federation.run(job(params), "nine"))
    assert agreed(federation, "nine")["params"]["min_child_weight"] == 9.0


def test_a_smaller_child_weight_of_the_job_is_refused_with_the_number(tmp_path):
    federation, frames = Federation.of(tmp_path, policy=STRICT, train=weighted().assign(w=lambda f: f.w * 3)), []
    squared = {"objective": "reg:squarederror", "min_child_weight": 3.0}
    outcomes = federation.run(job(squared, features=["f0", "f1"]), frames=frames)
    assert any("at least 4," in str(e) and "min_rows_per_node" in str(e) for e in outcomes.values()) and not frames
    # With weights up to 3 each row may count 4 times as much.
    outcomes = federation.run(job({**squared, "min_child_weight": 15.0}, features=["f0", "f1"], weight="w"), "weights")
    assert all("at least 16," in str(error) for error in outcomes.values())
    succeed(federation.run(job({"objective": "reg:squarederror"}, features=["f0", "f1"], weight="w"), "left-out"))
    assert agreed(federation, "left-out")["params"]["min_child_weight"] == 16.0


def test_the_largest_value_of_a_column_is_not_told_by_a_smaller_child_weight(tmp_path):
    """The refusal held the power of two above the largest weight of all sites, for any column, as often as asked."""
    federation = Federation(tmp_path, policy={**STRICT, "share_data_errors": False, "data_refusals_per_month": 2})
    federation.give_data("train", weighted().assign(one=1.0, many=lambda f: f.w * 1000))
    squared, texts = {"objective": "reg:squarederror", "min_child_weight": 0.0}, []
    for number, column in enumerate(("one", "many", "w")):
        outcomes = federation.run(job(squared, features=["f0", "f1"], weight=column), f"job-{number}")
        texts.append({str(error) for error in outcomes.values() if not isinstance(error, JobAborted)})
    assert texts[:2] == [{ROWS_TEXT}] * 2
    assert texts[2] and all("has refused 2 jobs within a month" in text for text in texts[2])
    # None of them is remembered: the same rows may still be trained on, once the site has read its log.
    for site in federation.sites:
        RefusalCount(SitePolicy.load(federation.workspace(site), site)).reset("train")
    succeed(federation.run(job({"objective": "reg:squarederror"}, features=["f0", "f1"]), "later"))


UNBOUNDED = {
    "poisson": {"objective": "count:poisson"},
    "vector_leaf": {"objective": "multi:softprob", "num_class": 2, "multi_strategy": "multi_output_tree"},
    "squared_log_error": {"objective": "reg:squaredlogerror", "num_parallel_tree": 2},
}


@pytest.mark.parametrize("name", names(UNBOUNDED, "squared_log_error"))
def test_where_hessians_have_no_bound_leaves_are_counted(tmp_path, name):
    frame, params = table(400), UNBOUNDED[name]
    shallow = {**params, "max_depth": 1 if name == "vector_leaf" else 2, "min_child_weight": 12.0}
    federation = federate(tmp_path / "large", frame, job(shallow), policy=STRICT)
    assert smallest_leaf(federation, frame) >= 4
    assert any("counted" in note for note in agreed(federation)["notes"])
    small = Federation.of(tmp_path / "small", policy=STRICT, train=frame)
    outcomes = small.run(job({**params, "max_depth": 12, "min_child_weight": 0.0, "reg_lambda": 0.0}))
    assert all(isinstance(e, PolicyRefusal) and "min_rows_per_node" in str(e) for e in outcomes.values())
    assert not any((small.workspace(site) / "runs" / "job" / "model.json").exists() for site in small.sites)


@pytest.mark.parametrize(
    ("params", "num_rounds", "key"),
    [
        ({"max_bin": 2000}, 2, "max_bins"),
        ({"max_depth": 17}, 2, "max_depth"),
        ({}, 5001, "max_rounds"),
        ({"num_parallel_tree": 51}, 100, "max_rounds"),
        ({"grow_policy": "lossguide", "max_depth": 0, "max_leaves": 70_000}, 2, "max_depth"),
    ],
)
def test_jobs_beyond_the_sites_limits_are_refused_before_anything_is_sent(tmp_path, params, num_rounds, key):
    federation, frames = Federation.of(tmp_path, train=table(90)), []
    outcomes = federation.run(job(params, num_rounds), frames=frames)
    assert any(isinstance(e, PolicyRefusal) and f"Policy key: {key}." in str(e) for e in outcomes.values())
    assert not frames


# -- rows that take part -----------------------------------------------------------------------------------------------


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
        federation = Federation.of(tmp_path / str(seed), train=table(300))
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
    federation = Federation.of(tmp_path / "lost", train=frame)
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
    federation, frames = Federation.of(tmp_path, train=table(90)), []
    outcomes = federation.run(job({"subsample": 0.5, "num_parallel_tree": 2}), frames=frames)
    assert any("num_parallel_tree" in str(error) for error in outcomes.values()) and not frames
