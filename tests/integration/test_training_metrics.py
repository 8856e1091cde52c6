"""Metrics and early stopping of whole federations, against those of XGBoost on the pooled rows."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from tests.support.examples import slow
from tests.support.federation import Federation, central_model, leaf_difference, succeed
from tests.support.horizontal_jobs import LOGISTIC, federate, metrics_of, table
from tests.support.horizontal_jobs import spaced as job


@pytest.mark.parametrize(
    ("params", "relative"),
    [
        ({"eval_metric": ["error", "rmse", "mae", "logloss"], "base_score": 0.5}, 1e-12),
        *slow(({"objective": "count:poisson", "base_score": 0.5, "eval_metric": ["poisson-nloglik", "rmse"]}, 1e-12)),
        *slow(({"objective": "reg:squarederror", "base_score": 0.5, "eval_metric": ["mae", "rmse"]}, 1e-12)),
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
        *slow(("error", 1), ("logloss", 1), ("auc", 1), ("auc", 3), ("error", 3)),
    ],
)
def test_early_stopping_decides_as_xgboost_does(tmp_path, metric, patience):
    frame, held_out = table(200, seed=3), table(150, seed=4)
    params = {"eval_metric": metric, "learning_rate": 0.3, "base_score": 0.5}
    whole = federate(tmp_path / "all", frame, job(params, 12, eval_data_set="held_out"), held_out)
    history = metrics_of(whole, f"eval-{metric}")
    stopped = federate(
        tmp_path / "stopped",
        frame,
        job(params, 12, eval_data_set="held_out", early_stopping_rounds=patience),
        held_out,
    )
    central = central_model(
        frame,
        "y",
        {**LOGISTIC, **params},
        stopped.cuts(),
        12,
        eval_frame=held_out,
        verbose_eval=False,
        callbacks=[Replay(metric, history), xgb.callback.EarlyStopping(rounds=patience)],
    )
    booster = xgb.Booster(model_file=bytearray(stopped.model()))
    assert booster.num_boosted_rounds() == central.num_boosted_rounds() < 12
    assert booster.best_iteration == central.best_iteration
    assert booster.best_score == central.best_score
    assert leaf_difference(stopped.model(), central) == 0


def test_early_stopping_without_a_metric_is_refused(tmp_path):
    federation = Federation.of(tmp_path, train=table(90))
    training = job({"eval_metric": []}, eval_data_set="train", early_stopping_rounds=2)
    assert any("eval_metric" in str(e) for e in federation.run(training).values())


# -- metrics that are no number at one site ----------------------------------------------------------------------------


def one_class_at_site_1() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training rows, and evaluation rows whose first third, site-1's, holds no positive."""
    held_out = table(300, seed=5)
    held_out.loc[:99, "y"] = np.float32(0)
    return table(), held_out


@pytest.mark.parametrize("profile", ["masks", *slow("bfv")])
def test_aucpr_is_the_mean_over_the_sites_with_both_classes(tmp_path, profile):
    frame, held_out = one_class_at_site_1()
    federation = Federation.of(tmp_path, train=frame, held_out=held_out)
    training = job(
        {"eval_metric": ["auc", "aucpr"]},
        3,
        eval_data_set="held_out",
        profile=profile,
    )
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
    federation = Federation.of(tmp_path, train=frame, held_out=held_out)
    outcomes = succeed(federation.run(training))
    rounds = {(outcomes[s].summary["n_rounds"], federation.record(s).best_round) for s in federation.sites}
    [(n_rounds, best_round)] = rounds
    assert n_rounds == best_round + 4 < 40


def test_aucpr_of_a_class_that_one_site_lacks(tmp_path):
    frame = table(600)
    frame["y"] = np.digitize(np.nan_to_num(frame.f0), [-0.5, 0.5]).astype(np.float32)
    held_out = frame.iloc[:300].reset_index(drop=True)
    held_out.loc[:99, "y"] = held_out.y[:100].clip(0, 1)
    federation = Federation.of(tmp_path, train=frame, held_out=held_out)
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
        federation = Federation.of(tmp_path / name, train=frame, held_out=held_out)
        found: list[float] = []

        def listen(record, n_rounds, found=found, name=name):
            found.append(record.metrics[f"eval-{name}"])

        training = job(params, 2, eval_data_set="held_out")
        succeed(federation.run(training, on_progress=lambda site, listen=listen: listen))
        assert np.array_equal(found, [expected] * 6, equal_nan=True)
        record = json.loads((federation.workspace("site-1") / "runs" / "job" / "run.json").read_text())
        assert [row["metrics"][f"eval-{name}"] for row in record["rounds"]] == [None, None]
