"""Models that are continued and jobs that are resumed, against training in one go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.xgb.cuts import reference_table
from tests.support.federation import Federation, SiteDied, central_model, leaf_difference, succeed
from tests.support.horizontal_jobs import LOGISTIC, dies_after, federate, table
from tests.support.horizontal_jobs import spaced as job


def give_model(federation: Federation, model: bytes, sites=None) -> None:
    for site in sites or federation.sites:
        folder = federation.workspace(site) / "inputs"
        folder.mkdir(exist_ok=True)
        (folder / "start.json").write_bytes(model)


VARIANTS = {
    "logistic": {},
    "lossguide": {"grow_policy": "lossguide", "max_leaves": 5, "max_depth": 0},
    "forest": {"num_parallel_tree": 2},
    "softprob": {"objective": "multi:softprob", "num_class": 2},
    "poisson": {"objective": "count:poisson"},
    "dart": {"booster": "dart", "rate_drop": 0.0},
}


def named(cases: dict, *fast: str) -> list:
    """Return the cases' names; only the fast ones run outside the slow tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in cases]


@pytest.mark.parametrize("name", named(VARIANTS, "logistic", "dart"))
def test_continuation_equals_central_continuation(tmp_path, name):
    frame, params = table(300), {"base_score": 0.5, **VARIANTS[name]}
    federation = federate(tmp_path, frame, job(params, 3))
    first = federation.model()
    give_model(federation, first)
    succeed(federation.run(job(params, 2, initial_model="start.json"), "more"))
    central = central_model(frame, "y", {**LOGISTIC, **params}, federation.cuts("more"), 2, initial=first)
    assert xgb.Booster(model_file=bytearray(federation.model("more"))).num_boosted_rounds() == 5
    assert leaf_difference(federation.model("more"), central) == 0


@pytest.mark.parametrize("cuts", ["quantile", "uniform"])
def test_a_model_of_other_cuts_predicts_the_training_rows_as_it_should(tmp_path, cuts):
    """XGBoost predicts binned rows by their bins: the model's thresholds must be among the cuts."""
    frame = table(600)
    features = frame.drop(columns="y")
    first = xgb.train({**LOGISTIC, "base_score": 0.5, "tree_method": "exact"}, xgb.DMatrix(features, frame.y), 2)
    federation = Federation.of(tmp_path, train=frame)
    give_model(federation, bytes(first.save_raw("ubj")))
    bounds = {name: [-3.0, 3.0] for name in features}
    training = job({"base_score": 0.5, "max_bin": 12}, 1, initial_model="start.json", cuts=cuts, cut_bounds=bounds)
    succeed(federation.run(training))
    assert all(cuts.size <= 10 for cuts in federation.cuts().of_feature)
    # The same step with the model's own margins on the raw rows.
    reference = xgb.QuantileDMatrix(reference_table(federation.cuts(), {}), max_bin=12)
    rows = xgb.QuantileDMatrix(
        features.to_numpy(),
        label=frame.y,
        ref=reference,
        max_bin=12,
        base_margin=first.predict(xgb.DMatrix(features), output_margin=True),
    )
    step = xgb.train({**LOGISTIC, "base_score": 0.5, "max_bin": 12, "nthread": 1}, rows, 1)
    ours = xgb.Booster(model_file=bytearray(federation.model()))[2:].trees_to_dataframe()
    theirs = step.trees_to_dataframe()
    assert ours.Gain.to_numpy() == pytest.approx(theirs.Gain.to_numpy(), rel=1e-4, abs=1e-5)
    assert np.nan_to_num(ours.Split).tolist() == np.nan_to_num(theirs.Split).tolist()


def test_a_model_of_too_many_thresholds_is_refused_before_anything_is_sent(tmp_path):
    frame, frames, federation = table(300), [], Federation(tmp_path)
    federation.give_data("train", frame)
    first = xgb.train({**LOGISTIC, "tree_method": "exact"}, xgb.DMatrix(frame.drop(columns="y"), frame.y), 9)
    give_model(federation, bytes(first.save_raw("json")))
    outcomes = federation.run(job({"max_bin": 4}, initial_model="start.json"), frames=frames)
    assert any("max_bin must be at least" in str(error) for error in outcomes.values()) and not frames


def test_best_iteration_of_a_continued_model_counts_as_xgboost_does(tmp_path):
    frame, held_out = table(200, seed=3), table(150, seed=4)
    params = {"base_score": 0.5, "eval_metric": "logloss"}
    federation = federate(tmp_path, frame, job(params, 3), held_out)
    first = federation.model()
    give_model(federation, first)
    training = job(params, 25, initial_model="start.json", eval_data_set="held_out", early_stopping_rounds=2)
    succeed(federation.run(training, "more"))
    central = central_model(
        frame,
        "y",
        {**LOGISTIC, **params},
        federation.cuts("more"),
        25,
        initial=first,
        eval_frame=held_out,
        verbose_eval=False,
        early_stopping_rounds=2,
    )
    ours = xgb.Booster(model_file=bytearray(federation.model("more")))
    assert ours.best_iteration == central.best_iteration
    assert ours.num_boosted_rounds() == central.num_boosted_rounds()


def broken_start(what: str, frame: pd.DataFrame) -> bytes:
    features = frame.drop(columns="y")
    if what == "not a model":
        return b'{"learner": {}}'
    if what == "other columns":
        features = features.rename(columns={"f0": "g0"})
    params = {
        "booster": {**LOGISTIC, "booster": "gblinear"},
        "objective": {"objective": "reg:squarederror"},
        "number of outputs": {"objective": "multi:softprob", "num_class": 3},
    }.get(what, LOGISTIC)
    model = xgb.train({**params, "nthread": 1}, xgb.DMatrix(features, label=frame.y), 0 if what == "no trees" else 1)
    return bytes(model.save_raw("json"))


@pytest.mark.parametrize(
    "what", ["not a model", "other columns", "booster", "objective", "number of outputs", "no trees"]
)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_sent(tmp_path, what):
    federation, frame, frames = Federation(tmp_path), table(90), []
    federation.give_data("train", frame)
    give_model(federation, broken_start(what, frame))
    outcomes = federation.run(job(initial_model="start.json"), frames=frames)
    assert all(isinstance(e, (ConfigurationError, JobAborted)) for e in outcomes.values())
    assert any("start.json" in str(e) for e in outcomes.values()) and not frames


def test_another_initial_model_at_one_site_is_named(tmp_path):
    federation, frame = Federation(tmp_path), table(90)
    federation.give_data("train", frame)
    models = [
        xgb.train({**LOGISTIC, "seed": 1, "eta": eta}, xgb.DMatrix(frame.drop(columns="y"), frame.y), 1)
        for eta in (0.1, 0.2)
    ]
    give_model(federation, bytes(models[0].save_raw("json")))
    give_model(federation, bytes(models[1].save_raw("json")), ["site-3"])
    outcomes = federation.run(job(initial_model="start.json"))
    assert any("initial_model" in str(e) and isinstance(e, ConfigurationError) for e in outcomes.values())


# -- resumption --------------------------------------------------------------------------------------------------------


RESUMED = {
    **VARIANTS,
    "absolute_error": {"objective": "reg:absoluteerror"},
    "vector_leaf": {"objective": "multi:softprob", "num_class": 2, "multi_strategy": "multi_output_tree"},
}


@pytest.mark.parametrize("name", named(RESUMED, "dart", "absolute_error"))
def test_a_resumed_model_equals_the_uninterrupted_one(tmp_path, name):
    frame, params = table(300), RESUMED[name]
    training = job(params, 7, checkpoint_every=2)
    whole = federate(tmp_path / "whole", frame, training)
    federation = Federation.of(tmp_path / "lost", train=frame)
    outcomes = federation.run(training, "lost", on_progress=dies_after("site-2", 5))
    assert isinstance(outcomes["site-2"], SiteDied)
    assert all("no message from site-2" in str(outcomes[site]) for site in ("site-1", "site-3"))
    assert not any((federation.workspace(s) / "runs" / "lost" / "model.json").exists() for s in federation.sites)
    resumed = HorizontalJob.from_dict({**training.to_dict(), "resume_from": "lost"})
    results = succeed(federation.run(resumed))
    assert federation.model() == whole.model()
    assert {r.summary["n_rounds"] for r in results.values()} == {7}


def test_early_stopping_goes_on_where_a_lost_job_stood(tmp_path):
    frame, held_out = table(200, seed=3), table(150, seed=4)
    params = {"eval_metric": "logloss", "learning_rate": 0.8}
    training = job(params, 25, eval_data_set="held_out", early_stopping_rounds=4, checkpoint_every=1)
    whole = federate(tmp_path / "whole", frame, training, held_out)
    booster = xgb.Booster(model_file=bytearray(whole.model()))
    best, n_rounds = booster.best_iteration, booster.num_boosted_rounds()
    for lost_after in (best + 3, n_rounds):
        federation = Federation.of(tmp_path / str(lost_after), train=frame, held_out=held_out)
        federation.run(training, "lost", on_progress=dies_after("site-1", lost_after))
        succeed(federation.run(HorizontalJob.from_dict({**training.to_dict(), "resume_from": "lost"})))
        assert federation.model() == whole.model()


def test_a_continued_job_resumes_too(tmp_path):
    frame = table(200)
    federation = federate(tmp_path, frame, job(num_rounds=2))
    give_model(federation, federation.model())
    training = job(num_rounds=4, initial_model="start.json", checkpoint_every=1)
    succeed(federation.run(training, "whole"))
    federation.run(training, "lost", on_progress=dies_after("site-3", 3))
    succeed(federation.run(HorizontalJob.from_dict({**training.to_dict(), "resume_from": "lost"}), "resumed"))
    assert federation.model("resumed") == federation.model("whole")


LOST = job(num_rounds=5, checkpoint_every=1)


@pytest.fixture(scope="module")
def lost_once(tmp_path_factory) -> Path:
    """The folder of a federation of four whose job was lost after three rounds, with checkpoints after each."""
    federation = Federation.of(tmp_path_factory.mktemp("lost"), n_sites=4, train=table(200))
    federation.run(LOST, "lost", on_progress=dies_after("site-4", 3))
    return federation.folder


@pytest.fixture
def lost(tmp_path, lost_once) -> tuple[Federation, HorizontalJob]:
    """That federation, for one test alone, and the job that resumes."""
    shutil.copytree(lost_once, tmp_path, dirs_exist_ok=True)
    return Federation(tmp_path, n_sites=4), HorizontalJob.from_dict({**LOST.to_dict(), "resume_from": "lost"})


def test_only_the_same_sites_may_resume(lost):
    federation, resumed = lost
    outcomes = Federation(federation.folder, n_sites=3).run(resumed)
    assert any(isinstance(e, PolicyRefusal) and "site set" in str(e) for e in outcomes.values())


def test_other_parameters_may_not_resume(lost):
    federation, resumed = lost
    other = HorizontalJob.from_dict({**resumed.to_dict(), "params": {**LOGISTIC, "eta": 0.7}})
    assert any(isinstance(e, PolicyRefusal) and "parameters" in str(e) for e in federation.run(other).values())


def test_other_rows_may_not_resume(lost):
    federation, resumed = lost
    federation.give_data("train", table(200, seed=8))
    assert any(isinstance(e, ConfigurationError) and "rows" in str(e) for e in federation.run(resumed).values())


def test_without_a_common_checkpoint_nothing_resumes(lost):
    federation, resumed = lost
    for checkpoint in (federation.workspace("site-2") / "runs" / "lost").glob("checkpoint-*"):
        checkpoint.unlink()
    outcomes = federation.run(resumed)
    assert all(isinstance(e, (ConfigurationError, JobAborted)) for e in outcomes.values())
    assert any("no checkpoint of lost is held by all sites" in str(e) for e in outcomes.values())


@pytest.mark.parametrize("damage", ["lost", "others"])
def test_a_site_that_died_before_it_had_the_cuts_lacks_the_checkpoints(lost, damage):
    """The refusal says what is missing; a checkpoint counts with the cuts beside it alone."""
    federation, resumed = lost
    run = federation.workspace("site-2") / "runs" / "lost"
    if damage == "lost":
        for path in (*run.glob("checkpoint-*"), run / "cuts.json"):
            path.unlink()
    else:
        (run / "cuts.json").write_text(json.dumps([[0.5], [0.5], [0.5]]))
    outcomes = federation.run(resumed)
    own = [str(error) for error in outcomes.values() if isinstance(error, ConfigurationError)]
    assert own and all("no checkpoint of lost is held by all sites: start a new job" in text for text in own)


def test_the_latest_common_checkpoint_counts(lost):
    federation, resumed = lost
    (federation.workspace("site-2") / "runs" / "lost" / "checkpoint-3.json").write_text("{}")
    succeed(federation.run(resumed))
    record = json.loads((federation.workspace("site-1") / "runs" / "job" / "run.json").read_text())
    assert [row["round"] for row in record["rounds"]] == [2, 3, 4]


def test_a_job_that_ended_well_is_not_resumed(tmp_path):
    federation = federate(tmp_path, table(90), job(num_rounds=2, checkpoint_every=1))
    resumed = HorizontalJob.from_dict({**job(num_rounds=2, checkpoint_every=1).to_dict(), "resume_from": "job"})
    assert all(isinstance(e, (ConfigurationError, JobAborted)) for e in federation.run(resumed, "again").values())
