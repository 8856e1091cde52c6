"""XGBoost's own callback is the oracle: the same scores end training in the same round, with the same best one."""

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from nvflare_plugins.xgb.rounds import EarlyStopping

SCORES = st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.75, 1e-6, 1e6]), min_size=1, max_size=12)


def stub() -> xgb.Booster:
    return xgb.Booster({"objective": "binary:logistic"})


def ours(name: str, scores: list[float], patience: int) -> tuple[int, int | None, float | None]:
    stopping, booster = EarlyStopping(patience), stub()
    rounds = 0
    for number, score in enumerate(scores):
        if stopping.is_over(number - 1):
            break
        stopping.note(booster, number, {"train-logloss": 0.0, name: score})
        rounds += 1
    return rounds, stopping.best_round, stopping.best_score


def theirs(metric: str, scores: list[float], patience: int) -> tuple[int, int, float]:
    matrix = xgb.DMatrix(np.zeros((4, 1)), np.array([0.0, 1.0, 0.0, 1.0]))
    answers = iter(scores)
    done = 0

    def scripted(predictions: np.ndarray, matrix: xgb.DMatrix) -> tuple[str, float]:
        nonlocal done
        done += 1
        return metric, next(answers)

    booster = xgb.train(
        {"objective": "binary:logistic", "max_depth": 1, "disable_default_eval_metric": True},
        matrix,
        len(scores),
        evals=[(matrix, "rows")],
        custom_metric=scripted,
        callbacks=[xgb.callback.EarlyStopping(rounds=patience, maximize=metric in ("auc", "aucpr"))],
        verbose_eval=False,
    )
    return done, booster.best_iteration, booster.best_score


@given(scores=SCORES, patience=st.integers(1, 4), metric=st.sampled_from(["auc", "aucpr", "logloss", "error@0.3"]))
def test_it_stops_where_xgboosts_callback_stops(scores: list[float], patience: int, metric: str) -> None:
    assert ours(f"set-of-rows-{metric}", scores, patience) == theirs(metric, scores, patience)


def test_without_patience_or_metrics_nothing_is_noted() -> None:
    booster = stub()
    EarlyStopping(None).note(booster, 0, {"eval-auc": 0.5})
    EarlyStopping(2).note(booster, 0, {})
    assert booster.attr("best_iteration") is None and not EarlyStopping(None).is_over(100)


@pytest.mark.parametrize("before", [0, 7])
def test_a_checkpoint_remembers_the_best_round_of_this_job(before: int) -> None:
    booster, stopping = stub(), EarlyStopping(2, before)
    stopping.note(booster, 3, {"eval-auc": 0.1 + 0.2})
    assert booster.attr("best_iteration") == str(before + 3)
    resumed = EarlyStopping(2, before)
    resumed.take_up(booster)
    assert (resumed.best_round, resumed.best_score) == (3, 0.1 + 0.2)
    assert resumed.is_over(5) and not resumed.is_over(4)
