"""Tunings over sites in threads: scores of centralized XGBoost on the same folds, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal, TooFewRows
from nvflare_plugins.data.table import load_table
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.horizontal.site import run_site as run_horizontal_site
from nvflare_plugins.kinds.tuning import site as tuning_site
from nvflare_plugins.kinds.tuning.folds import TOO_FEW_IN_A_FOLD, fold_of_rows
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.kinds.tuning.result import FoldScore, TrialResult, TuningResult, show_so_far
from nvflare_plugins.kinds.tuning.site import run_tuning_site
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pages.search_pages import TuningFacts
from nvflare_plugins.pooled import attempt as pooled_attempt
from nvflare_plugins.pooled import preparation
from nvflare_plugins.pooled.growing import ARITHMETIC_ATTRIBUTE
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb.cuts import Cuts
from tests.support.federation import Parties, central_model, dies_at, leaf_difference, succeed
from tests.support.tunings import result_of

POLICY = {"consents": {"tuning": 1000}, "min_rows_per_node": 0}
RESULTS = ("tuning.json", "tuning.csv", "tuning.html", "train_best.py")
GIVEN = {"objective": "binary:logistic", "base_score": 0.5, "max_bin": 16}


def rows(seed: int, n_rows: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(random.normal(size=(n_rows, 4)).astype(np.float32), columns=["a", "b", "größe", "d"])
    signal = frame.a + frame.b * frame.d + random.normal(size=n_rows)
    frame = frame.mask(random.random(frame.shape) < 0.05)
    return frame.assign(y=(signal > 0.3).astype(np.int64), person=random.integers(0, n_rows // 3, n_rows))


FRAMES = tuple(rows(number, 800 + 100 * number) for number in range(3))


def sites(folder: Path, frames: tuple[pd.DataFrame, ...] = FRAMES, **policy: Any) -> Parties:
    return Parties.with_tables(folder, frames, {**POLICY, **policy})


def job(**changes: Any) -> TuningJob:
    document = {
        "data_set": "train",
        "label": "y",
        "params": GIVEN,
        "trials": [{"max_depth": 2}],
        "folds": 2,
        "num_rounds": 3,
        "group": "person",
        **changes,
    }
    return TuningJob.from_dict(document)


def folds_of(parties: Parties, group: str | None, n_folds: int) -> np.ndarray:
    """Return the folds of all rows, the sites' one after the other, from their own secrets."""
    found = []
    for site in parties.sites:
        policy = SitePolicy.load(parties.workspace(site), site)
        spec = policy.data_set("train")
        names = ["a", "b", "größe", "d"]
        table = load_table(spec, label="y", group=group, features=names, may_lack_rows=True)
        found.append(fold_of_rows(table, spec, Registry.open(policy).secret("folds", str(n_folds)), n_folds))
    return np.concatenate(found)


TRIALS = [{"max_depth": 2, "eta": 0.5}, {"max_depth": 4, "lambda": 0.3, "colsample_bytree": 0.7}]


@pytest.mark.parametrize(
    ("engine", "patience"),
    [
        *(("xgboost", 2), ("own", None)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("xgboost", None), ("own", 2))),
    ],
)
@pytest.mark.parametrize("profile", ["masks", pytest.param("bfv", marks=pytest.mark.slow)])
def test_scores_and_models_are_those_of_the_pooled_rows(
    engine: str, profile: str, patience: int | None, models: dict[bytes, int], tmp_path: Path
) -> None:
    parties = sites(tmp_path)
    tuning = job(trials=TRIALS, num_rounds=6, early_stopping_rounds=patience, profile=profile, engine=engine)
    succeed(parties.run(run_tuning_site, tuning))
    found, pooled = result_of(parties), pd.concat(FRAMES, ignore_index=True).drop(columns="person")
    folds = folds_of(parties, "person", 2)
    cuts = Cuts.from_lists(json.loads((parties.run_folder("site-1") / "cuts.json").read_text()))
    made = list(models)
    assert len(made) == 4 and set(models.values()) == {3}, "each training ends with one model at all sites"
    for trial, given in enumerate(TRIALS):
        for fold in range(2):
            curve: dict[str, Any] = {}
            central = central_model(
                pooled[folds != fold].astype(np.float32),
                "y",
                {**GIVEN, **given, "eval_metric": "logloss"},
                cuts,
                6,
                eval_frame=pooled[folds == fold].astype(np.float32),
                evals_result=curve,
                early_stopping_rounds=patience,
                verbose_eval=False,
            )
            score = found["trials"][trial]["folds"][fold]
            best = 5 if patience is None else central.best_iteration
            assert score["rounds"] == best + 1 and score["trained"] == central.num_boosted_rounds()
            assert score["score"] == pytest.approx(curve["eval"]["logloss"][best], rel=1e-7)
            assert leaf_difference(made[2 * trial + fold], central) == 0.0
    assert found["best"]["trial"] == 1 + int(np.argmin([one["mean"] for one in found["trials"]]))


def test_scores_of_times_are_those_of_the_pooled_rows(models: dict[bytes, int], tmp_path: Path) -> None:
    """The fold's likelihood is XGBoost's, smaller is better, and what trains the best names the times again."""
    label, times = {"signed": "t"}, np.exp(np.random.default_rng(1).normal(size=3_000))
    frames = [frame.assign(t=times[: len(frame)] * np.where(frame.y == 1, 4, -1)) for frame in FRAMES]
    params = {"objective": "survival:aft", "base_score": 2.0, "max_bin": 16, "eval_metric": "aft-nloglik"}
    parties, trials = sites(tmp_path, tuple(frames)), [{"max_depth": 2, "eta": 0.4}, {"max_depth": 2, "eta": 0.01}]
    names = ["a", "b", "größe", "d"]
    succeed(parties.run(run_tuning_site, job(label=label, params=params, trials=trials, features=names, num_rounds=4)))
    found, pooled = result_of(parties), pd.concat(frames, ignore_index=True)[[*names, "t"]]
    folds, made = folds_of(parties, "person", 2), list(models)
    cuts = Cuts.from_lists(json.loads((parties.run_folder("site-1") / "cuts.json").read_text()))
    for fold in range(2):
        curve: dict[str, Any] = {}
        central = central_model(
            pooled[folds != fold].astype(np.float32),
            label,
            {**params, **trials[0]},
            cuts,
            4,
            eval_frame=pooled[folds == fold].astype(np.float32),
            evals_result=curve,
            verbose_eval=False,
        )
        score = found["trials"][0]["folds"][fold]["score"]
        assert score == pytest.approx(curve["eval"]["aft-nloglik"][-1], rel=1e-7)
        assert leaf_difference(made[fold], central) == 0.0
    assert found["best"]["trial"] == 1 and not found["larger_is_better"]
    assert "{'signed': 't'}" in (parties.run_folder("site-1") / "train_best.py").read_text()


DART = {**GIVEN, "booster": "dart"}


def test_auto_has_the_sites_grow_what_they_can(models: dict[bytes, int], tmp_path: Path) -> None:
    succeed(sites(tmp_path).run(run_tuning_site, job(num_rounds=1, engine="auto")))
    attributes = [json.loads(model)["learner"]["attributes"] for model in models]
    assert len(attributes) == 2 and all(ARITHMETIC_ATTRIBUTE in one for one in attributes)


def test_only_what_xgboost_grows_needs_its_communicator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_missing() -> None:
        raise ConfigurationError("this XGBoost has no communicator")

    monkeypatch.setattr(preparation, "installed_release", is_missing)
    for number, changes in enumerate(({"engine": "xgboost"}, {"params": DART, "engine": "auto"})):
        outcomes = sites(tmp_path / f"{number}").run(run_tuning_site, job(num_rounds=1, **changes))
        assert all("no communicator" in str(error) for error in outcomes.values())
    succeed(sites(tmp_path / "own").run(run_tuning_site, job(num_rounds=1, engine="own", arithmetic="3.4")))


def test_the_best_is_trained_by_whom_the_trials_were_which_the_report_says(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(run_tuning_site, job(num_rounds=1, engine="own", arithmetic="3.3")))
    report = (parties.run_folder("site-1") / "report.html").read_text()
    assert "grown by the sites themselves, in the arithmetic of XGBoost 3.3" in report
    assert "engine='own'" in (parties.run_folder("site-1") / "train_best.py").read_text()
    assert "engine" not in job().best_settings({}, 1, [])


def test_what_xgboost_released_before_is_the_same_release_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registries of before know tunings without ``engine`` and ``arithmetic``."""
    seen: list[bytes] = []
    reserve = pooled_attempt.reserve_together
    monkeypatch.setattr(pooled_attempt, "reserve_together", lambda *args: seen.append(args[3]) or reserve(*args))
    for engine in ("xgboost", "own"):
        succeed(sites(tmp_path / engine).run(run_tuning_site, job(num_rounds=1, engine=engine)))
    fields = [json.loads(release)["job"] for release in seen]
    assert ["engine" in one for one in fields] == [False] * 3 + [True] * 3


def test_results_record_and_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []

    def show(folder: Path, facts: TuningFacts) -> None:
        show_so_far(folder, facts)
        seen.append((len(facts.trials), 'http-equiv="refresh"' in (folder / "tuning.html").read_text()))

    monkeypatch.setattr(tuning_site, "show_so_far", show)
    parties = sites(tmp_path)
    succeed(parties.run(run_tuning_site, job(trials=TRIALS)))
    assert sorted(seen) == [(1, True)] * 3 + [(2, False)] * 3, "the page is there after each trial"
    found = result_of(parties)
    lines = parties.said["site-2"]
    assert len(lines) == 2 and lines[1].startswith("trial 2 of 2: logloss ") and "best so far" in lines[1]
    folder = parties.run_folder("site-1")
    table = list(csv.DictReader((folder / "tuning.csv").open()))
    assert [row["rank"] for row in table] == ["1", "2"] and int(table[0]["trial"]) == found["best"]["trial"]
    page = (folder / "tuning.html").read_text()
    assert page.count("<svg") >= 2 and "://" not in page and "train_best.py" in page
    script = (folder / "train_best.py").read_text()
    said: dict[str, Any] = {}
    exec(script.replace('recipe.export("jobs")', ""), said)  # noqa: S102  # what a person runs
    training = said["recipe"].job
    assert training.features == ["a", "b", "größe", "d"] and training.params == found["best"]["params"]
    logs = [parties.run_folder(site) / "evidence" for site in parties.sites]
    assert verify(logs).attempts[0].failures == ("the log of server is missing",)
    record = RunRecord.read(folder)
    assert record.consents == ("tuning",) and record.data[0].rows == len(FRAMES[0]) and record.model is None
    report = (folder / "report.html").read_text()
    assert "Trials, the best first" in report and "max_depth 2, eta 0.5" in report
    # Its cut points are used again by the training that follows, which the registry allows.
    kinds = [t.frame.kind for t in parties.transfers]
    assert Kind.METRIC in kinds and Kind.HISTOGRAM_METRIC not in kinds, "scores wait for no other round"
    searched = kinds.count(Kind.CUT_COUNTS)
    succeed(parties.run(run_horizontal_site, training, "later"))
    counted = [t.frame.kind for t in parties.transfers].count(Kind.CUT_COUNTS) - searched
    assert RunRecord.read(parties.run_folder("site-1", "later")).registry.startswith("same rows and sites as job job")
    assert searched > 10 * counted, "rows and values are counted, and nothing is searched"


def test_a_second_tuning_finds_the_same_folds_and_scores(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(run_tuning_site, job(), "first"))
    succeed(parties.run(run_tuning_site, job(), "second"))
    first, second = (result_of(parties, name) for name in ("first", "second"))
    assert first["trials"] == second["trials"]
    assert "the same release" in RunRecord.read(parties.run_folder("site-1", "second")).registry


def test_added_rows_need_a_consent(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(run_tuning_site, job(), "first"))
    before = folds_of(parties, "person", 2)
    for number, site in enumerate(parties.sites):
        parties.give(site, "train", pd.concat([FRAMES[number], rows(9 + number, 400)], ignore_index=True))
    outcomes = parties.run(run_tuning_site, job(), "second")
    assert all("consents.recompute_with_changes" in str(error) for error in outcomes.values())
    parties.set_policies(consents={"tuning": 1000, "recompute_with_changes": True})
    succeed(parties.run(run_tuning_site, job(), "third"))
    after = np.split(folds_of(parties, "person", 2), np.cumsum([len(one) + 400 for one in FRAMES])[:-1])
    kept = np.concatenate([one[: len(frame)] for one, frame in zip(after, FRAMES, strict=True)])
    assert (kept == before).all(), "rows are in the folds in which they were"


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(parties: Parties, tuning: TuningJob) -> list[Exception]:
    """Return the errors of all sites, which have sent no histogram and written no result."""
    outcomes = parties.run(run_tuning_site, tuning)
    assert all(isinstance(one, Exception) for one in outcomes.values()), outcomes
    assert Kind.HISTOGRAM not in {t.frame.kind for t in parties.transfers}
    for site in parties.sites:
        assert not any((parties.run_folder(site) / name).exists() for name in RESULTS)
    return [one for one in outcomes.values() if isinstance(one, Exception)]


@pytest.mark.parametrize("allowed", [None, 0, 5])
def test_a_site_allows_no_more_than_its_policy_says(allowed: int | None, tmp_path: Path) -> None:
    parties = sites(tmp_path)
    parties.set_policy("site-2", consents={} if allowed is None else {"tuning": allowed})
    errors = refused(parties, job())  # 1 x 2 x 3 = 6
    assert any(
        isinstance(error, PolicyRefusal) and "1 x 2 x 3 = 6" in str(error) and "consents.tuning" in str(error)
        for error in errors
    )


def test_a_trial_that_no_site_would_train_is_named_before_anything_leaves(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    errors = refused(parties, job(trials=[{"max_depth": 2}, {"max_depth": 99}]))
    assert all("max_depth=99 is outside [0, 30]. (trial 2 of 2)" in str(error) for error in errors)
    assert not parties.transfers
    errors = refused(sites(tmp_path / "deep", max_depth=3), job(trials=[{"max_depth": 2}, {"max_depth": 4}]))
    assert all("Policy key: max_depth" in str(error) and "(trial 2 of 2)" in str(error) for error in errors)


def test_own_names_the_trial_that_the_sites_do_not_grow(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    errors = refused(parties, job(params=DART, engine="own"))
    assert all("engine='own' does not grow" in str(error) and "(trial 1 of 1)" in str(error) for error in errors)
    assert not parties.transfers


def test_a_fold_below_the_floor_is_refused_alike_and_forgotten(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    errors = refused(parties, job(folds=3))  # 2,700 rows
    assert {str(error) for error in errors} == {TOO_FEW_IN_A_FOLD} and all(isinstance(e, TooFewRows) for e in errors)
    policy = SitePolicy.load(parties.workspace("site-1"), "site-1")
    assert "0 runs" in Registry.open(policy).describe()


def test_a_fold_with_rows_of_too_few_sites_is_refused(tmp_path: Path) -> None:
    """Each site's rows are one group, so that some fold lacks some site's."""
    frames = tuple(rows(number, 2500).assign(person=number) for number in range(3))
    errors = refused(sites(tmp_path, frames), job())
    assert {str(error) for error in errors} == {TOO_FEW_IN_A_FOLD}


def test_a_data_set_with_a_budget_is_refused(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    parties.give("site-3", "train", FRAMES[2], privacy={"epsilon": 1.0, "delta": 1e-6})
    assert any("has a privacy budget" in str(error) for error in refused(parties, job()))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"objective": "reg:absoluteerror"}, "cannot be tuned: its leaves are means"),
        ({**GIVEN, "eval_metric": []}, "needs a metric"),
    ],
)
def test_what_cannot_be_scored_on_folds_is_refused(params: dict, words: str, tmp_path: Path) -> None:
    consents = {"tuning": 1000, "exact_leaves": True}
    errors = refused(sites(tmp_path, consents=consents), job(params=params))
    assert any(words in str(error) for error in errors)


def test_samples_that_differ_need_a_consent(tmp_path: Path) -> None:
    frames = tuple(rows(number, 1600) for number in range(3))
    both = job(trials=[{"subsample": 0.5}, {"subsample": 0.6}], num_rounds=1)
    errors = refused(sites(tmp_path / "without", frames), both)
    assert any("consents.recompute_with_changes" in str(error) for error in errors)
    succeed(sites(tmp_path / "one", frames).run(run_tuning_site, job(trials=[{"subsample": 0.5}], num_rounds=1)))


# -- sites that lack something, and sites that are lost ----------------------------------------------------------------


def test_a_site_without_rows_and_one_of_one_class_take_part(tmp_path: Path) -> None:
    frames = (*FRAMES, FRAMES[0][:0], FRAMES[1].assign(y=1, person=lambda f: f.person + 10_000))
    parties = sites(tmp_path, frames)
    succeed(parties.run(run_tuning_site, job(params={**GIVEN, "eval_metric": ["auc", "logloss"]})))
    found = result_of(parties)
    folds, pooled = folds_of(parties, "person", 2), pd.concat(frames, ignore_index=True).drop(columns="person")
    cuts = Cuts.from_lists(json.loads((parties.run_folder("site-1") / "cuts.json").read_text()))
    curve: dict[str, Any] = {}
    central_model(
        pooled[folds != 0].astype(np.float32),
        "y",
        {**GIVEN, "max_depth": 2, "eval_metric": "logloss"},
        cuts,
        3,
        eval_frame=pooled[folds == 0].astype(np.float32),
        evals_result=curve,
        verbose_eval=False,
    )
    assert found["trials"][0]["folds"][0]["score"] == pytest.approx(curve["eval"]["logloss"][-1], rel=1e-7)


def test_a_lost_site_ends_the_job_which_says_where(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    # Three rounds of two levels, so six histograms a fold; the tenth is in the second fold.
    outcomes = parties.run(run_tuning_site, job(trials=TRIALS), tamper={"site-2": dies_at(Kind.HISTOGRAM, 10)})
    assert all("(trial 1 of 2, fold 2 of 2)" in str(outcomes[site]) for site in ("site-1", "site-3"))
    for site in parties.sites:
        assert not any((parties.run_folder(site) / name).exists() for name in RESULTS)


# -- ranking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "order"), [("logloss", [2, 1, 3]), ("auc", [1, 2, 3]), ("aucpr", [1, 2, 3])])
def test_the_best_is_by_the_metrics_own_direction_and_nan_is_last(metric: str, order: list[int]) -> None:
    scores = [(0.7, 0.9), (0.5, 0.6), (float("nan"), 0.1)]
    trials = tuple(
        TrialResult(n, {"eta": n / 10}, tuple(FoldScore(s, 4 + n, 9) for s in pair), 1.0)
        for n, pair in enumerate(scores, start=1)
    )
    result = TuningResult(metric, trials)
    assert [one.number for one in result.ranked()] == order
    assert trials[0].mean == pytest.approx(0.8) and trials[0].spread == pytest.approx(0.1 * 2**0.5)
    assert trials[0].rounds == 5
    assert result.document(job(), "j")["trials"][2]["mean"] is None
