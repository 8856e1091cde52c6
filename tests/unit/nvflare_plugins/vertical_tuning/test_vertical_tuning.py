"""Vertical tunings over parties in threads: scores of centralized XGBoost on the same folds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.tuning.folds import fold_of_names
from nvflare_plugins.kinds.vertical_tuning import site as tuning_site
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob
from nvflare_plugins.kinds.vertical_tuning.site import run_vertical_tuning_site
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind
from tests.support import survival
from tests.support.federation import Parties, dies_at, succeed
from tests.support.vertical_jobs import give_columns, table
from tests.support.workers_here import workers_here

WIDTHS = (2, 3, 1)
CONSENTS = {"plain_profile": True, "exact_bins": True, "tuning": 1000}
POLICY = {"allowed_profiles": ["plain", "elgamal"], "consents": CONSENTS}
PARAMS = {"objective": "binary:logistic", "max_bin": 16, "eval_metric": ["auc", "logloss"]}
RESULTS = ("tuning.json", "tuning.csv", "tuning.html", "train_best.py")
N_ROWS = 2700  # far more than 1,000 in each of two folds, of groups of three too; too few for three folds


def rows() -> pd.DataFrame:
    frame = table(N_ROWS, sum(WIDTHS))
    return frame.assign(id=[f"L{number}" for number in range(N_ROWS)])


def parties(folder: Path, frame: pd.DataFrame | None = None, person: bool = False, **policy: Any) -> Parties:
    found = Parties(folder, 3, {**POLICY, **policy})
    give_columns(found, "data", rows() if frame is None else frame, WIDTHS)
    if person:
        path = found.workspace("site-1") / "data.parquet"
        own = pd.read_parquet(path)
        own.assign(person=np.arange(len(own)) // 3).to_parquet(path, index=False)
    return found


def job(**changes: Any) -> VerticalTuningJob:
    document = {
        "active": "site-1",
        "data_set": "data",
        "label": "y",
        "params": PARAMS,
        "trials": [{"max_depth": 2}],
        "folds": 2,
        "num_rounds": 2,
        "profile": "plain",
        **changes,
    }
    return VerticalTuningJob.from_dict(document)


def folds_of(found: Parties, names: list[str], what: str = "id", **changes: Any) -> np.ndarray:
    """Return the folds of rows that have names: what they hold does not matter then."""
    policy = SitePolicy.load(found.workspace("site-1"), "site-1")
    spec = policy.data_set("data")
    own = tuning_site.vertical_site.load_party(
        job(**changes).training_of({}, is_scored=False), _Context(policy)
    ).train.table
    assert spec.name == "data"
    return fold_of_names(names, what, own, Registry.open(policy).secret("folds", "2"), 2)


class _Context:
    """What ``load_party`` asks of a place."""

    site, sites = "site-1", ("site-1", "site-2", "site-3")

    def __init__(self, policy: SitePolicy) -> None:
        self.policy = policy


def central(
    frame: pd.DataFrame, kept: np.ndarray, params: dict, num_rounds: int, metric: str = "logloss"
) -> list[float]:
    """Train on the rows that are kept; return the metric of the others after each round.

    Cut points as in vertical jobs: the active party's from the rows that weigh, the others' from all rows.
    """
    features = frame[[name for name in frame.columns if name not in ("y", "id")]].to_numpy(np.float32)
    weight, columns = kept.astype(np.float32), []
    for place in range(features.shape[1]):
        column = features[:, [place]]
        own = weight if place < WIDTHS[0] else None
        cuts = xgb.QuantileDMatrix(column, weight=own, max_bin=16, nthread=1).get_quantile_cut()[1]
        columns.append(np.concatenate([[np.nanmin(column)], cuts[1:-1], [np.nanmax(column)]]))
    whole = np.full((max(map(len, columns)), len(columns)), np.nan, dtype=np.float32)
    for place, column in enumerate(columns):
        whole[: len(column), place] = column
    reference = xgb.QuantileDMatrix(whole, max_bin=16)
    matrix = xgb.QuantileDMatrix(features[kept], label=frame.y[kept], ref=reference, max_bin=16)
    curve: dict[str, Any] = {}
    held_out = xgb.DMatrix(features[~kept], label=frame.y[~kept])
    settings = {"tree_method": "hist", "nthread": 1, "max_bin": 16, **params, "eval_metric": metric}
    xgb.train(settings, matrix, num_rounds, evals=[(held_out, "eval")], evals_result=curve, verbose_eval=False)
    return curve["eval"][metric]


TRIALS = [{"max_depth": 2, "eta": 0.5}, {"max_depth": 3, "lambda": 0.3}]


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "patience"), [("plain", None), ("plain", 1), ("elgamal", None)])
def test_scores_are_those_of_the_pooled_columns(profile: str, patience: int | None, tmp_path: Path) -> None:
    found, frame = parties(tmp_path), rows()
    tuning = job(trials=TRIALS, num_rounds=4, profile=profile, early_stopping_rounds=patience)
    succeed(found.run(run_vertical_tuning_site, tuning))
    result = json.loads((found.run_folder("site-1") / "tuning.json").read_text())
    folds = folds_of(found, list(frame.id))
    for trial, given in enumerate(TRIALS):
        for fold in range(2):
            curve = central(frame, folds != fold, {"objective": "binary:logistic", **given}, 4)
            score = result["trials"][trial]["folds"][fold]
            best = 3 if patience is None else int(np.argmin(curve))
            assert score["rounds"] == best + 1
            assert score["score"] == pytest.approx(curve[best], rel=1e-6)


def test_rows_of_a_fold_are_not_at_risk_for_cox_regression(tmp_path: Path) -> None:
    times = survival.times("events", N_ROWS)
    frame = rows().assign(y=np.where(times.death == 1, times.days, -times.days))
    found, params = parties(tmp_path, frame), {"objective": "survival:cox", "max_bin": 16, "base_score": 1.0}
    succeed(found.run(run_vertical_tuning_site, job(label={"signed": "y"}, params=params, num_rounds=4)))
    result = json.loads((found.run_folder("site-1") / "tuning.json").read_text())
    folds = folds_of(found, list(frame.id), label={"signed": "y"}, params=params)
    for fold in range(2):
        curve = central(frame, folds != fold, {**params, "max_depth": 2}, 4, "cox-nloglik")
        assert result["trials"][0]["folds"][fold]["score"] == pytest.approx(curve[-1], abs=1e-5)


def test_one_fold_equals_the_pooled_columns_and_only_the_active_party_has_scores(tmp_path: Path) -> None:
    """Groups, too: rows of a person are in one fold, and the column of persons is no feature."""
    found, frame = parties(tmp_path, person=True), rows()
    succeed(found.run(run_vertical_tuning_site, job(group="person")))
    result = json.loads((found.run_folder("site-1") / "tuning.json").read_text())
    folds = folds_of(found, [str(number // 3) for number in range(N_ROWS)], "group")
    assert pd.Series(folds).groupby(np.arange(N_ROWS) // 3).nunique().max() == 1
    for fold in range(2):
        curve = central(frame, folds != fold, {"objective": "binary:logistic", "max_depth": 2}, 2)
        assert result["trials"][0]["folds"][fold]["score"] == pytest.approx(curve[-1], rel=1e-6)
    for site in ("site-2", "site-3"):
        assert not any((found.run_folder(site) / name).exists() for name in RESULTS)
        assert "logloss" not in "".join(found.said[site]) and "answered for 2 folds" in found.said[site][-1]
        assert f"{result['best']['trial']} is best" not in (found.run_folder(site) / "report.html").read_text()
    said: dict[str, Any] = {}
    script = (found.run_folder("site-1") / "train_best.py").read_text()
    exec(script.replace('recipe.export("jobs")', ""), said)  # noqa: S102  # what a person runs
    assert said["recipe"].job.features == {"site-1": ["c0", "c1"]} and said["recipe"].job.preset == "exact"
    logs = [found.run_folder(site) / "evidence" for site in found.sites]
    assert verify(logs).attempts[0].failures == ("the log of server is missing",)
    record = RunRecord.read(found.run_folder("site-2"))
    assert set(record.consents) == {"exact_bins", "plain_profile", "tuning"}


def test_scores_of_a_party_on_workers_are_those_of_the_pooled_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_site.vertical_site, "open_workers", lambda cluster: workers_here(cluster.workers))
    found, frame = parties(tmp_path), rows()
    found.set_policy("site-2", cluster={"scheduler": "tcp://127.0.0.1:8786", "workers": 2})
    succeed(found.run(run_vertical_tuning_site, job(num_rounds=1)))
    result = json.loads((found.run_folder("site-1") / "tuning.json").read_text())
    folds = folds_of(found, list(frame.id))
    for fold in range(2):
        curve = central(frame, folds != fold, {"objective": "binary:logistic", "max_depth": 2}, 1)
        assert result["trials"][0]["folds"][fold]["score"] == pytest.approx(curve[-1], rel=1e-6)
    for site, has_workers in (("site-2", True), ("site-3", False)):
        titles = [one.title for one in RunRecord.read(found.run_folder(site)).sections]
        assert ("Workers" in titles) == has_workers


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "guarded"}, "preset=guarded is refused in a vertical tuning: its guards let"),
        ({"profile": "masks"}, "profile='masks' is unknown"),
        ({"own_rounds": 1}, "own_rounds is refused in a vertical tuning"),
        ({"epsilon": 1.0}, "pay for every trial"),
        ({"on_lost_site": "wait"}, "on_lost_site is refused"),
        ({"trials": [{"max_bin": 8}]}, "'max_bin' cannot be tuned"),
        ({"trials": [{"eta": 0.1}] * 2}, "are the same parameters"),
        ({"folds": 11}, "folds must be a whole number from 2 to 10"),
    ],
)
def test_jobs_that_are_none_are_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        job(**changes)


@pytest.mark.parametrize(
    ("site", "consents", "words"),
    [
        ("site-2", {**CONSENTS, "tuning": 3}, "1 x 2 x 2 = 4"),
        ("site-1", {**CONSENTS, "tuning": 0}, "consents.tuning"),
        ("site-3", {**CONSENTS, "exact_bins": False}, "consents.exact_bins"),
    ],
)
def test_a_party_that_does_not_consent_ends_it(site: str, consents: dict, words: str, tmp_path: Path) -> None:
    found = parties(tmp_path)
    found.set_policy(site, consents=consents)
    outcomes = found.run(run_vertical_tuning_site, job())
    assert isinstance(outcomes[site], PolicyRefusal) and words in str(outcomes[site])
    assert Kind.CONVERSATION not in {t.frame.kind for t in found.transfers}


def test_too_few_common_rows_are_refused_alike(tmp_path: Path) -> None:
    outcomes = parties(tmp_path).run(run_vertical_tuning_site, job(folds=3))
    assert all("fewer than 1000 of the common rows" in str(error) for error in outcomes.values())


def test_a_fold_that_is_too_small_is_refused_by_the_one_that_knows(tmp_path: Path) -> None:
    found = parties(tmp_path, person=True)
    path = found.workspace("site-1") / "data.parquet"
    pd.read_parquet(path).assign(person=1).to_parquet(path, index=False)
    outcomes = found.run(run_vertical_tuning_site, job(group="person"))
    assert "fewer than 1000 of the common rows" in str(outcomes["site-1"])
    assert Kind.CONVERSATION not in {t.frame.kind for t in found.transfers}


def test_a_lost_party_ends_the_job_which_says_where(tmp_path: Path) -> None:
    found = parties(tmp_path)
    outcomes = found.run(run_vertical_tuning_site, job(), tamper={"site-3": dies_at(Kind.CONVERSATION, 6)})
    assert "(trial 1 of 1, fold" in str(outcomes["site-1"])
    assert not any((found.run_folder("site-1") / name).exists() for name in RESULTS)
