"""Every training feature of the horizontal job, in whole federations, against what stock XGBoost does centrally."""

from __future__ import annotations

import json
import logging

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError, JobAborted, PolicyRefusal
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.xgb.cuts import reference_table
from tests.support.federation import Federation, SiteDied, central_model, leaf_difference, succeed

LABEL_MEAN_TOLERANCE = 2e-7
LOGISTIC = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 32}


def table(n_rows: int = 400, n_features: int = 4, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_rows, n_features)).astype(np.float32)
    signal = features[:, 0] + 0.5 * features[:, -1] ** 2 + rng.normal(size=n_rows)
    features[rng.random(features.shape) < 0.05] = np.nan
    return pd.DataFrame(features, columns=[f"f{i}" for i in range(n_features)]).assign(
        y=(signal > 0.4).astype(np.float32)
    )


def job(params: dict | None = None, num_rounds: int = 4, **fields) -> HorizontalJob:
    return HorizontalJob("train", "y", {**LOGISTIC, **(params or {})}, num_rounds, **fields)


def federate(folder, frame, training: HorizontalJob, held_out: pd.DataFrame | None = None, **options) -> Federation:
    parts = options.pop("parts", None)
    federation = Federation(folder, **options)
    federation.give_data("train", frame, parts)
    federation.set_registry_keys()
    if held_out is not None:
        federation.give_data("held_out", held_out)
    succeed(federation.run(training))
    return federation


# -- data
# ---------------------------------------------------------------------------------------------------------------

COLOURS = [f"colour {i}" for i in range(9)]


def coloured() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a table with a column of texts, and the same with codes of the public list."""
    frame = table(600)
    codes = np.random.default_rng(1).integers(0, len(COLOURS), len(frame))
    frame["y"] = ((codes % 3 == 1) ^ (frame.y == 1)).astype(np.float32)
    texts = frame.assign(colour=np.array(COLOURS)[codes])[["f0", "colour", "f1", "y"]]
    numbers = frame.assign(colour=codes.astype(np.float32))[["f0", "colour", "f1", "y"]]
    texts.loc[5:9, "colour"], numbers.loc[5:9, "colour"] = None, np.nan
    return texts, numbers


@pytest.mark.parametrize("params", [{"max_cat_to_onehot": 2}, {"max_cat_to_onehot": 100}, {"max_cat_threshold": 3}])
def test_categories_equal_central_training_on_their_codes(tmp_path, params):
    texts, numbers = coloured()
    # Sorted by category: no site holds them all.
    parts = np.array_split(np.argsort(numbers.colour.to_numpy(), kind="stable"), 3)
    federation = federate(tmp_path, texts, job(params, categories={"colour": COLOURS}), parts=parts)
    settings = {**LOGISTIC, **params}
    central = central_model(numbers, "y", settings, federation.cuts(), 4, n_categories={1: len(COLOURS)})
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE
    trees = json.loads(federation.model())["learner"]["gradient_booster"]["model"]["trees"]
    assert any(tree["categories"] for tree in trees), "no split used the categories"


def test_unknown_categories_are_refused_or_missing_by_choice(tmp_path):
    texts, numbers = coloured()
    known = COLOURS[:-1]
    federation = Federation(tmp_path)
    federation.give_data("train", texts)
    outcomes = federation.run(job(categories={"colour": known}), "refused")
    refused = [e for e in outcomes.values() if isinstance(e, ConfigurationError)]
    assert refused and all("'colour'" in str(e) and COLOURS[-1] not in str(e) for e in refused)
    succeed(federation.run(job(categories={"colour": known}, unknown_category_is_missing=True)))
    numbers.loc[numbers.colour == len(known), "colour"] = np.nan
    central = central_model(numbers, "y", LOGISTIC, federation.cuts(), 4, n_categories={1: len(known)})
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE


def test_label_classes_are_positions_in_the_public_list(tmp_path):
    frame = table()
    named = frame.assign(y=np.where(frame.y == 1, "ill", "well"))
    federation = federate(tmp_path, named, job(label_classes=["well", "ill"]))
    central = central_model(frame, "y", LOGISTIC, federation.cuts(), 4)
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE


ODD_TABLES = {
    "one_feature": lambda f: f[["f0", "y"]],
    "constant_column": lambda f: f.assign(f1=np.float32(7)),
    "all_missing_column": lambda f: f.assign(f1=np.float32(np.nan)),
    "only_constant": lambda f: f.assign(f0=np.float32(1))[["f0", "y"]],
    "only_missing": lambda f: f.assign(f0=np.float32(np.nan))[["f0", "y"]],
    "huge": lambda f: f.assign(f0=f.f0 * np.float32(1e20), f3=f.f3 * np.float32(-3e37 / 5)),
    "tiny": lambda f: f.assign(f0=f.f0 * np.float32(1e-30)),
    "integers": lambda f: f.assign(f0=np.arange(len(f)) * 7919 % 100_000, f1=np.arange(len(f)) % 3),
    "booleans": lambda f: f.assign(f0=f.f0 > 0),
    "one_class": lambda f: f.assign(y=np.float32(1)),
}


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        pytest.param(
            name,
            cuts,
            id=f"{name}-{cuts}",
            marks=[pytest.mark.slow] if cuts == "exact" and name not in ("only_missing", "huge", "integers") else [],
        )
        for name in ODD_TABLES
        for cuts in ("quantile", "exact")
    ],
)
def test_odd_tables_equal_central(tmp_path, name, cuts):
    frame = ODD_TABLES[name](table(200))
    params = {"base_score": 0.5} if name == "one_class" else {}
    federation = federate(tmp_path, frame, job(params, cuts=cuts))
    central = central_model(frame.astype(np.float32), "y", {**LOGISTIC, **params}, federation.cuts(), 4)
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE


def test_values_beyond_the_outermost_cut_are_refused_before_anything_is_sent(tmp_path):
    federation = Federation(tmp_path)
    federation.give_data("train", table(90).assign(f2=np.float32(2e38)))
    frames: list = []
    outcomes = federation.run(job(), frames=frames)
    assert all("'f2'" in str(e) for e in outcomes.values() if isinstance(e, ConfigurationError))
    assert any(isinstance(e, ConfigurationError) for e in outcomes.values()) and not frames


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"objective": "reg:absoluteerror"},
        {"objective": "reg:quantileerror", "quantile_alpha": 0.3},
        pytest.param({"objective": "count:poisson"}, marks=pytest.mark.slow),
        pytest.param({"objective": "multi:softprob", "num_class": 2}, marks=pytest.mark.slow),
        {"subsample": 0.5},
    ],
)
def test_a_site_of_one_row(tmp_path, params):
    frame = table(200)
    parts = [np.arange(1), np.arange(1, 60), np.arange(60, 200)]
    training = job(params, evaluate_training=True, finest_exponent=-30)
    masked = federate(tmp_path / "masks", frame, training, parts=parts)
    plain = federate(tmp_path / "plain", frame, job(params, profile="plain", finest_exponent=-30), parts=parts)
    assert masked.model() == plain.model()


@pytest.mark.parametrize(
    "profile", ["masks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfv", "ckks"))]
)
def test_ten_sites(tmp_path, profile):
    frame = table(600)
    federation = federate(tmp_path, frame, job(num_rounds=2, profile=profile), n_sites=10)
    central = central_model(frame, "y", LOGISTIC, federation.cuts(), 2)
    assert leaf_difference(federation.model(), central) <= (1e-6 if profile == "ckks" else LABEL_MEAN_TOLERANCE)


def test_two_sites_only_by_consent(tmp_path):
    federation = Federation(tmp_path, n_sites=2)
    frame = table(100)
    federation.give_data("train", frame)
    frames: list = []
    outcomes = federation.run(job(), frames=frames)
    assert any(isinstance(e, PolicyRefusal) and "fewer_than_three_sites" in str(e) for e in outcomes.values())
    assert not frames
    for site in federation.sites:
        federation.write_policy(site, min_sites=2, max_colluders=0, consents={"fewer_than_three_sites": True})
    succeed(federation.run(job(), "consented"))
    central = central_model(frame, "y", LOGISTIC, federation.cuts("consented"), 4)
    assert leaf_difference(federation.model("consented"), central) <= LABEL_MEAN_TOLERANCE


def test_growing_gradients_find_new_scales(tmp_path):
    """A learning rate far too high: gradients outgrow every scale agreed at the start, several times."""
    frame = table(200)
    params = {"objective": "reg:squarederror", "learning_rate": 30.0}
    models = [
        federate(tmp_path / p, frame, job(params, 8, profile=p, finest_exponent=-10, evaluate_training=True)).model()
        for p in ("plain", "masks", "bfv", "ckks")
    ]
    assert len(set(models)) == 1
    prediction = xgb.Booster(model_file=bytearray(models[0])).predict(xgb.DMatrix(frame.drop(columns="y")))
    assert np.abs(prediction).max() > 1e6


# -- metrics, early stopping
# --------------------------------------------------------------------------------------------


def metrics_of(federation: Federation, name: str) -> list[float]:
    record = json.loads((federation.workspace("site-2") / "runs" / "job" / "run.json").read_text())
    return [row["metrics"][name] for row in record["rounds"]]


@pytest.mark.parametrize(
    ("params", "relative"),
    [
        ({"eval_metric": ["error", "rmse", "mae", "logloss"], "base_score": 0.5}, 1e-12),
        ({"objective": "count:poisson", "base_score": 0.5, "eval_metric": ["poisson-nloglik", "rmse"]}, 1e-12),
        ({"objective": "reg:squarederror", "base_score": 0.5, "eval_metric": ["mae", "rmse"]}, 1e-12),
        (
            {"objective": "multi:softprob", "num_class": 2, "base_score": 0.5, "eval_metric": ["merror", "mlogloss"]},
            1e-12,
        ),
    ],
)
def test_metrics_are_those_of_the_pooled_rows(tmp_path, params, relative):
    frame, held_out = table(400), table(300, seed=9)
    training = job(params, eval_data_set="held_out", evaluate_training=True)
    federation = federate(tmp_path, frame, training, held_out)
    history: dict = {}
    central_model(
        frame,
        "y",
        {**LOGISTIC, **params},
        federation.cuts(),
        4,
        eval_frame=held_out,
        evals_result=history,
        verbose_eval=False,
    )
    for metric, values in history["eval"].items():
        assert metrics_of(federation, f"eval-{metric}") == pytest.approx(values, rel=relative, abs=0)
        assert len(metrics_of(federation, f"train-{metric}")) == 4


def test_auc_is_the_weighted_mean_of_the_sites_own(tmp_path):
    frame, held_out = table(400), table(300, seed=9)
    training = job({"eval_metric": "auc"}, eval_data_set="held_out")
    federation = federate(tmp_path, frame, training, held_out)
    booster = xgb.Booster(model_file=bytearray(federation.model()))
    area, pairs = 0.0, 0.0
    for rows in np.array_split(np.arange(len(held_out)), 3):
        part = held_out.iloc[rows]
        matrix = xgb.DMatrix(part.drop(columns="y"), label=part.y)
        booster.set_param({"eval_metric": "auc"})
        n = part.y.sum() * (1 - part.y).sum()
        area += float(booster.eval(matrix).rsplit(":", 1)[1]) * n
        pairs += n
    assert metrics_of(federation, "eval-auc")[-1] == pytest.approx(area / pairs, rel=1e-6)


class Replay(xgb.callback.TrainingCallback):
    """Puts a recorded history in place of the real one, for XGBoost's own EarlyStopping after it."""

    def __init__(self, metric: str, history: list[float]):
        self._metric, self._history = metric, history

    def after_iteration(self, model, epoch, evals_log):
        evals_log["eval"][self._metric][-1] = self._history[epoch]
        return False


@pytest.mark.parametrize(
    ("metric", "patience"),
    [
        ("logloss", 3),
        ("error", 1),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("logloss", 1), ("auc", 1), ("auc", 3), ("error", 3))
        ),
    ],
)
def test_early_stopping_decides_as_xgboost_does(tmp_path, metric, patience):
    frame, held_out = table(200, seed=3), table(150, seed=4)
    params = {"eval_metric": metric, "learning_rate": 0.8, "base_score": 0.5}
    whole = federate(tmp_path / "all", frame, job(params, 25, eval_data_set="held_out"), held_out)
    history = metrics_of(whole, f"eval-{metric}")
    stopped = federate(
        tmp_path / "stopped", frame, job(params, 25, eval_data_set="held_out", early_stopping_rounds=patience), held_out
    )
    central = central_model(
        frame,
        "y",
        {**LOGISTIC, **params},
        stopped.cuts(),
        25,
        eval_frame=held_out,
        verbose_eval=False,
        callbacks=[Replay(metric, history), xgb.callback.EarlyStopping(rounds=patience)],
    )
    booster = xgb.Booster(model_file=bytearray(stopped.model()))
    assert booster.num_boosted_rounds() == central.num_boosted_rounds() < 25
    assert booster.best_iteration == central.best_iteration
    assert booster.best_score == central.best_score
    assert leaf_difference(stopped.model(), central) == 0


def test_early_stopping_without_a_metric_is_refused(tmp_path):
    federation = Federation(tmp_path)
    federation.give_data("train", table(90))
    training = job({"eval_metric": []}, eval_data_set="train", early_stopping_rounds=2)
    assert any("eval_metric" in str(e) for e in federation.run(training).values())


# -- continuation and resumption
# ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", named(VARIANTS, "logistic", "forest", "dart"))
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
    federation = Federation(tmp_path)
    federation.give_data("train", frame)
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


def dies_after(site: str, n_rounds: int):
    def on_progress(name: str):
        def progress(record, total):
            if name == site and record.round + 1 == n_rounds:
                raise SiteDied

        return progress

    return on_progress


RESUMED = {
    **VARIANTS,
    "absolute_error": {"objective": "reg:absoluteerror"},
    "vector_leaf": {"objective": "multi:softprob", "num_class": 2, "multi_strategy": "multi_output_tree"},
}


@pytest.mark.parametrize("name", named(RESUMED, "logistic", "dart", "absolute_error", "vector_leaf"))
def test_a_resumed_model_equals_the_uninterrupted_one(tmp_path, name):
    frame, params = table(300), RESUMED[name]
    training = job(params, 7, checkpoint_every=2)
    whole = federate(tmp_path / "whole", frame, training)
    federation = Federation(tmp_path / "lost")
    federation.give_data("train", frame)
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
        federation = Federation(tmp_path / str(lost_after))
        federation.give_data("train", frame)
        federation.give_data("held_out", held_out)
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


@pytest.fixture
def lost(tmp_path) -> tuple[Federation, HorizontalJob]:
    """A federation of four whose job was lost after three rounds, with checkpoints after each."""
    federation = Federation(tmp_path, n_sites=4)
    federation.give_data("train", table(200))
    training = job(num_rounds=5, checkpoint_every=1)
    federation.run(training, "lost", on_progress=dies_after("site-4", 3))
    return federation, HorizontalJob.from_dict({**training.to_dict(), "resume_from": "lost"})


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


# -- results
# ------------------------------------------------------------------------------------------------------------


def test_the_model_is_equal_everywhere_and_stock_xgboost_reads_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    frame = table(200)
    federation = federate(tmp_path, frame, job(evaluate_training=True))
    booster = xgb.Booster(model_file=bytearray(federation.model()))
    assert booster.feature_names == ["f0", "f1", "f2", "f3"]
    assert booster.predict(xgb.DMatrix(frame.drop(columns="y"))).shape == (200,)
    assert "agreed on" in caplog.text


def test_tuples_and_lists_in_a_job_mean_the_same(tmp_path):
    params = {"monotone_constraints": (1, 0, 0, 0), "interaction_constraints": (("f0", "f1"), ("f2", "f3"))}
    frame = table(150)
    federation = federate(tmp_path, frame, job(params))
    plain = {**LOGISTIC, "monotone_constraints": "(1,0,0,0)", "interaction_constraints": "[[0, 1], [2, 3]]"}
    central = central_model(frame, "y", plain, federation.cuts(), 4)
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE


# -- metrics that are no number at one site
# ------------------------------------------------------------------------------


def one_class_at_site_1() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training rows, and evaluation rows whose first third, site-1's, holds no positive."""
    held_out = table(300, seed=5)
    held_out.loc[:99, "y"] = np.float32(0)
    return table(), held_out


@pytest.mark.parametrize("profile", ["masks", "bfv"])
def test_aucpr_is_the_mean_over_the_sites_with_both_classes(tmp_path, profile):
    frame, held_out = one_class_at_site_1()
    federation = Federation(tmp_path)
    federation.give_data("train", frame)
    federation.give_data("held_out", held_out)
    training = job({"eval_metric": ["auc", "aucpr"]}, 3, eval_data_set="held_out", profile=profile)
    succeed(federation.run(training))
    booster = xgb.Booster(params={"eval_metric": "aucpr"}, model_file=bytearray(federation.model()))
    parts = [
        xgb.DMatrix(part.drop(columns="y"), label=part.y) for part in (held_out.iloc[100:200], held_out.iloc[200:])
    ]
    local = [float(booster.eval(part).rpartition(":")[2]) for part in parts]
    assert federation.metrics("site-1")["eval-aucpr"] == pytest.approx(np.mean(local), abs=2e-6)
    assert 0.5 < federation.metrics("site-1")["eval-auc"] < 1


def test_early_stopping_on_aucpr_where_one_site_has_one_class(tmp_path):
    frame, held_out = one_class_at_site_1()
    training = job({"eval_metric": "aucpr", "eta": 1.0}, 40, eval_data_set="held_out", early_stopping_rounds=3)
    federation = Federation(tmp_path)
    federation.give_data("train", frame)
    federation.give_data("held_out", held_out)
    outcomes = succeed(federation.run(training))
    rounds = {(outcomes[s].summary["n_rounds"], federation.record(s).best_round) for s in federation.sites}
    [(n_rounds, best_round)] = rounds
    assert n_rounds == best_round + 4 < 40


def test_aucpr_of_a_class_that_one_site_lacks(tmp_path):
    frame = table(600)
    frame["y"] = np.digitize(np.nan_to_num(frame.f0), [-0.5, 0.5]).astype(np.float32)
    held_out = frame.iloc[:300].reset_index(drop=True)
    held_out.loc[:99, "y"] = held_out.y[:100].clip(0, 1)
    federation = Federation(tmp_path)
    federation.give_data("train", frame)
    federation.give_data("held_out", held_out)
    params = {"objective": "multi:softprob", "num_class": 3, "eval_metric": "aucpr"}
    succeed(federation.run(job(params, 2, eval_data_set="held_out")))
    assert 0.8 < federation.metrics("site-2")["eval-aucpr"] <= 1


def test_metrics_that_are_no_number_on_the_pooled_rows_are_none_here(tmp_path):
    """No positive anywhere; and labels of 0 under mape, for which XGBoost says infinity."""
    frame, held_out = table(), table(300, seed=5).assign(y=np.float32(0))
    cases = {
        "aucpr": ({"eval_metric": "aucpr"}, np.nan),
        "mape": ({"objective": "reg:squarederror", "eval_metric": ["mape"]}, np.inf),
    }
    for name, (params, expected) in cases.items():
        federation = Federation(tmp_path / name)
        federation.give_data("train", frame)
        federation.give_data("held_out", held_out)
        found: list[float] = []

        def listen(record, n_rounds, found=found, name=name):
            found.append(record.metrics[f"eval-{name}"])

        training = job(params, 2, eval_data_set="held_out")
        succeed(federation.run(training, on_progress=lambda site, listen=listen: listen))
        assert np.array_equal(found, [expected] * 6, equal_nan=True)
        record = json.loads((federation.workspace("site-1") / "runs" / "job" / "run.json").read_text())
        assert [row["metrics"][f"eval-{name}"] for row in record["rounds"]] == [None, None]
