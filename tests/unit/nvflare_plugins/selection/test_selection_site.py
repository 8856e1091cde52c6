"""Selections over sites in threads: a twin with stock XGBoost, planted columns, and what is refused."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import PlanRequest
from nvflare_plugins.base.errors import PolicyRefusal, TooFewRows
from nvflare_plugins.data.table import load_table
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.profile.site import Counted, count
from nvflare_plugins.kinds.selection import site as selection_site
from nvflare_plugins.kinds.selection.job import SelectionJob, plan
from nvflare_plugins.kinds.selection.result import OverFolds, SelectionResult, Step
from nvflare_plugins.kinds.selection.site import PURPOSE, run_selection_site, shadow_names
from nvflare_plugins.kinds.tuning.folds import fold_of_rows
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pooled.row_floors import RowNumbers
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb.cuts import Cuts
from tests.support.federation import Parties, central_model, succeed

POLICY = {"consents": {"tuning": 10_000, "feature_profile": True}, "min_rows_per_node": 0}
NAMES, WARDS = ["eins", "zwei", "noise", "ward", "drei"], ["a", "b", "c"]
PARAMS = {"objective": "binary:logistic", "base_score": 0.5, "max_bin": 16, "max_depth": 3, "eval_metric": "logloss"}
FOLDS, ROUNDS = 2, 3
RESULTS = ("selection.json", "selection.csv", "selection_steps.csv", "selection.html", "train_chosen.py")


def rows(seed: int, n_rows: int) -> pd.DataFrame:
    """Three columns tell of the label, two of them only together; a column of numbers and one of wards do not."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({name: random.normal(size=n_rows).astype(np.float32) for name in NAMES if name != "ward"})
    frame["ward"] = random.choice(WARDS, n_rows)
    signal = frame.eins + 1.5 * frame.zwei * frame.drei + 0.5 * random.normal(size=n_rows)
    frame = frame[NAMES].mask(random.random((n_rows, len(NAMES))) < 0.05)
    return frame.assign(y=(signal > 0.3).astype(np.int64))


@pytest.fixture(autouse=True)
def _same_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have folds and orders of rows the same in each run of the tests."""
    monkeypatch.setattr(Registry, "secret", lambda self, *facts: hashlib.sha256(repr(facts).encode()).digest())


FRAMES = tuple(rows(number, 900 + 100 * number) for number in range(3))


def sites(folder: Path, frames: tuple[pd.DataFrame, ...] = FRAMES, **policy: Any) -> Parties:
    return Parties.with_tables(folder, frames, {**POLICY, **policy})


def job(**changes: Any) -> SelectionJob:
    document = {
        "data_set": "train",
        "label": "y",
        "params": PARAMS,
        "folds": FOLDS,
        "num_rounds": ROUNDS,
        "features": NAMES,
        "categories": {"ward": WARDS},
        **changes,
    }
    return SelectionJob.from_dict(document)


def result_of(parties: Parties, job_id: str = "job") -> dict[str, Any]:
    """Return ``selection.json``, which must be the same at every site."""
    first, *rest = [json.loads((parties.run_folder(s, job_id) / "selection.json").read_text()) for s in parties.sites]
    assert all(one == first for one in rest)
    return first


# -- beside the pooled rows -------------------------------------------------------------------------------------------


class Twin:
    """The same steps with stock XGBoost on the pooled rows, with the sites' folds and private orders."""

    def __init__(self, parties: Parties, rounds: int = ROUNDS) -> None:
        tables, folds, self.orders, self.rounds = [], [], [], rounds
        for site in parties.sites:
            policy = SitePolicy.load(parties.workspace(site), site)
            spec, registry = policy.data_set("train"), Registry.open(policy)
            table = load_table(spec, label="y", features=NAMES, categories={"ward": WARDS})
            folds.append(fold_of_rows(table, spec, registry.secret("folds", str(FOLDS)), FOLDS))
            self.orders.append(RowNumbers(registry.secret(PURPOSE), table, PURPOSE))
            tables.append(pd.DataFrame(table.features, columns=NAMES).assign(y=table.label))
        self.sizes = [len(one) for one in tables]
        self.rows, self.folds = pd.concat(tables, ignore_index=True), np.concatenate(folds)
        self.cuts = Cuts.from_lists(json.loads((parties.run_folder("site-1") / "cuts.json").read_text()))

    def dealt(self, name: str, what: str, *about: Any, among: np.ndarray | None = None) -> np.ndarray:
        """Return a column with its values dealt out anew at each site, among some of its rows."""
        values, found, first = self.rows[name].to_numpy(), [], 0
        for size, numbers in zip(self.sizes, self.orders, strict=True):
            here = np.ones(size, bool) if among is None else among[first : first + size]
            order = np.argsort(numbers.of(what, *about, name)[here], kind="stable")
            found.append(values[first : first + size][here][order])
            first += size
        return np.concatenate(found)

    def model(self, frame: pd.DataFrame, fold: int, sources: list[str]) -> tuple[xgb.Booster, float]:
        cuts = Cuts(tuple(self.cuts.of_feature[NAMES.index(one)] for one in sources))
        curve: dict[str, Any] = {}
        options = {"eval_frame": frame[self.folds == fold], "evals_result": curve, "verbose_eval": False}
        listed = {place: len(WARDS) for place, one in enumerate(sources) if one == "ward"}
        found = central_model(frame[self.folds != fold], "y", PARAMS, cuts, self.rounds, n_categories=listed, **options)
        return found, curve["eval"]["logloss"][-1]

    def steps(self, importance: str) -> Iterator[dict[str, Any]]:
        left = list(NAMES)
        while left:
            scores, gains, losses = [], [], []
            for fold in range(FOLDS):
                model, score = self.model(self.rows[[*left, "y"]], fold, left)
                total = model.get_score(importance_type="total_gain")
                gains.append([total.get(name, 0.0) / sum(total.values()) for name in left])
                losses.append([self.loss(model, left, fold, name) - score for name in left])
                scores.append(score)
            by = np.mean(losses if importance == "permutation" else gains, axis=0)
            worst = min(range(len(left)), key=lambda place: (by[place], -place))
            yield {"features": list(left), "scores": scores, "gain": gains, "permutation": losses}
            del left[worst]

    def loss(self, model: xgb.Booster, names: list[str], fold: int, name: str) -> float:
        held = self.folds == fold
        frame = self.rows[held][names].assign(**{name: self.dealt(name, "permutation", among=held)})
        types = ["c" if one == "ward" else "float" for one in names]
        matrix = xgb.DMatrix(
            frame.to_numpy(np.float32),
            label=self.rows.y[held],
            feature_names=names,
            feature_types=types,
            enable_categorical=True,
        )
        return float(model.eval(matrix).rpartition(":")[2]) if frame.size else math.nan

    def hits(self, trial: int) -> np.ndarray:
        copies = shadow_names(NAMES)
        dealt = {copy: self.dealt(name, "shadow", trial) for copy, name in zip(copies, NAMES, strict=True)}
        found = np.zeros(len(NAMES), dtype=int)
        for fold in range(FOLDS):
            model, _ = self.model(self.rows[NAMES].assign(**dealt, y=self.rows.y), fold, NAMES * 2)
            total = model.get_score(importance_type="total_gain")
            found += [total.get(name, 0.0) > max(total.get(copy, 0.0) for copy in copies) for name in NAMES]
        return found


@pytest.mark.parametrize(
    ("profile", "importance"),
    [("masks", "gain"), ("masks", "permutation"), pytest.param("bfv", "permutation", marks=pytest.mark.slow)],
)
def test_steps_importances_and_choice_are_those_of_the_pooled_rows(
    profile: str, importance: str, tmp_path: Path
) -> None:
    parties, rounds = sites(tmp_path), 6  # as many as the third column takes
    asked = job(profile=profile, importance=importance, shadows=2, num_rounds=rounds)
    succeed(parties.run(run_selection_site, asked))
    found, twin = result_of(parties), Twin(parties, rounds)
    steps = list(twin.steps(importance))
    for step, said in zip(steps, found["steps"], strict=True):
        assert said["features"] == step["features"]
        assert said["score"]["folds"] == pytest.approx(step["scores"], rel=1e-7)
        means = dict(zip(step["features"], np.mean(step[importance], axis=0), strict=True))
        assert said["importance"] == pytest.approx(means, rel=1e-5, abs=2e-6)  # `eval` prints six digits
    of_columns = {one["name"]: one for one in found["features"]}
    for place, name in enumerate(NAMES):
        gains = np.array(steps[0]["gain"])[:, place]
        assert of_columns[name]["gain"]["folds"] == pytest.approx(gains, rel=1e-6)
        assert of_columns[name]["gain"]["spread"] == pytest.approx(np.std(gains, ddof=1), abs=1e-7)
    hits = np.sum([twin.hits(trial) for trial in range(2)], axis=0)
    assert {name: of_columns[name]["shadows"]["hits"] for name in NAMES} == dict(zip(NAMES, hits, strict=True))
    # What was planted.
    assert found["chosen"] == ["eins", "zwei", "drei"] and {*found["ranking"][:3]} == {"eins", "zwei", "drei"}
    assert {hits[NAMES.index(name)] for name in ("eins", "zwei", "drei")} == {4} and hits[NAMES.index("noise")] < 4


def test_information_values_are_those_of_the_pooled_rows_in_each_fold(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(run_selection_site, job(min_features=5)))
    found, twin = {one["name"]: one["information_value"] for one in result_of(parties)["features"]}, Twin(parties)
    ward = twin.rows.ward.fillna(-1).astype(int)
    for fold in range(FOLDS):
        held = twin.folds == fold
        table = pd.crosstab(ward[held], twin.rows.y[held]).to_numpy() / np.bincount(twin.rows.y[held].astype(int))
        value = ((table[:, 1] - table[:, 0]) * np.log(table[:, 1] / table[:, 0])).sum()
        assert found["ward"]["folds"][fold] == pytest.approx(value, rel=1e-9), "each ward, and missing ones, is a bin"
    assert found["ward"]["bins"] == 4 and found["eins"]["mean"] > 10 * found["noise"]["mean"]


def test_no_smaller_count_is_opened_than_the_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def counting(*args: Any) -> Counted:
        found = count(*args)
        opened.extend(int(of_cell) for of_column in found.rows for of_cell in of_column.ravel())
        return found

    monkeypatch.setattr(selection_site, "count", counting)
    succeed(sites(tmp_path).run(run_selection_site, job(min_features=5, min_rows_per_cut=40)))
    assert len(opened) >= 3 * len(NAMES) * FOLDS * 2 and min(opened) >= 40


# -- what a site has afterwards ---------------------------------------------------------------------------------------


def test_results_record_and_what_follows(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(run_selection_site, job(step=2, min_features=2), "first"))
    found, folder = result_of(parties, "first"), parties.run_folder("site-1", "first")
    assert [len(one["features"]) for one in found["steps"]] == [5, 3, 2]
    table = list(csv.DictReader((folder / "selection.csv").open()))
    assert [row["feature"] for row in table] == found["ranking"]
    assert [row["feature"] for row in table if row["chosen"] == "True"] == sorted(
        found["chosen"], key=found["ranking"].index
    )
    steps = list(csv.DictReader((folder / "selection_steps.csv").open()))
    assert [row["columns"] for row in steps] == ["5", "3", "2"] and "mean_logloss" in steps[0]
    page = (folder / "selection.html").read_text()
    assert page.count("<svg") == 3 and "://" not in page and "train_chosen.py" in page
    said: dict[str, Any] = {}
    exec((folder / "train_chosen.py").read_text().replace('recipe.export("jobs")', ""), said)  # noqa: S102
    assert said["recipe"].job.features == found["chosen"]
    assert verify([parties.run_folder(site, "first") / "evidence" for site in parties.sites]).attempts[0].failures == (
        "the log of server is missing",
    )
    private = {one.frame.kind for one in parties.transfers if one.frame.kind.private}
    counts = {Kind.EFFECTIVE_ROWS, Kind.CUT_COUNTS, Kind.CELL_FLAGS, Kind.CLASS_COUNTS}
    sums = counts | {Kind.SCALE, Kind.HISTOGRAM, Kind.METRIC}
    assert private - {Kind.GROUP_KEY, Kind.AGREEMENT} == sums, "pooled sums, and nothing else of rows"
    record = RunRecord.read(folder)
    assert record.consents == ("feature_profile", "tuning") and record.model is None
    assert "Sets of columns" in (folder / "report.html").read_text()
    succeed(parties.run(run_selection_site, job(step=2, min_features=2, rule="best"), "second"))
    assert "the same release" in RunRecord.read(parties.run_folder("site-1", "second")).registry
    assert result_of(parties, "second")["steps"] == found["steps"], "folds and orders are drawn from what a site keeps"


def step(n_columns: int, *scores: float) -> Step:
    of_each = tuple(OverFolds((1.0, 1.0)) for _ in range(n_columns))
    return Step(tuple("abcd"[:n_columns]), OverFolds(scores), of_each)


def test_one_standard_error_takes_the_fewest_columns() -> None:
    steps = (step(4, 0.80, 0.84), step(3, 0.82, 0.86), step(2, 0.81, 0.84), step(1, 0.70, 0.90))
    result = SelectionResult("auc", steps)  # the best is the second: 0.84, standard error 0.02
    assert (result.best, result.chosen("best"), result.chosen("one_standard_error")) == (1, 1, 2)
    losses = SelectionResult("logloss", (step(2, 0.4, 0.5), step(1, 0.4, 0.5)))
    assert losses.chosen("best") == 1, "of equal ones the one with fewer columns"


@pytest.mark.parametrize(
    ("hits", "verdict"), [(12, "above all shadows"), (11, "above all shadows"), (9, "open"), (1, "not above them")]
)
def test_verdicts_of_shadows_are_binomial(hits: int, verdict: str) -> None:
    """Of 12: P(12) = 1/4096, P(11 or more) = 13/4096, P(9 or more) = 299/4096; the limit is 0.05 over 4 columns."""
    result = SelectionResult(
        "auc", (step(4, 0.5, 0.5),), hits={**dict.fromkeys("bcd", 6), "a": hits}, n_shadow_trainings=12
    )
    assert result.verdict("a") == verdict


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"min_features": 6}, "min_features=6 and there are 5 columns"),
        ({"profile": "ckks"}, "profile=ckks lets the server"),
        ({"profile": "plain"}, "profile=plain would show the server"),
        ({"engine": "xgboost"}, "engine is refused in a selection"),
        ({"active": "site-1"}, "active is refused in a selection: parties that hold other columns"),
        ({"weight": "w"}, "weight is refused in a selection"),
        ({"folds": 1}, "folds"),
        ({"importance": "shap"}, "choose one of gain, permutation"),
        ({"params": {**PARAMS, "monotone_constraints": "(1,0,0,0,0)"}}, "monotone_constraints must name columns"),
        ({"params": {**PARAMS, "interaction_constraints": [["eins", "zwei"]]}}, "interaction_constraints name columns"),
        ({"params": {"objective": "rank:ndcg"}}, "a selection: folds divide rows"),
        ({"params": {"objective": "survival:cox"}}, "survival:cox is refused in a selection"),
        ({"group": "y"}, "group must not be the label"),
    ],
)
def test_a_job_is_refused_where_it_is_made(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        job(**changes)
    assert text in str(refused.value)


def constant(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(noise=1.0, ward="b")


def one_class(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(y=(np.arange(len(frame)) < 3).astype(int))


@pytest.mark.parametrize(
    ("frames", "changes", "kind", "text"),
    [
        (FRAMES, {"features": [*NAMES, "zwie"]}, ConfigurationError, "zwie"),
        (FRAMES, {"features": None, "min_features": 9}, ConfigurationError, "there are 5 columns"),
        (FRAMES, {"folds": 4}, TooFewRows, "some fold has fewer than 1000 rows"),
        (tuple(map(constant, FRAMES)), {}, ConfigurationError, "columns without spread, all of whose rows lie in one"),
        (tuple(map(one_class, FRAMES)), {}, ConfigurationError, "some fold has too few rows of a class"),
        (
            tuple(frame.assign(y=0) for frame in FRAMES),
            {"information_value": False, "params": {**PARAMS, "eval_metric": "auc"}},
            ConfigurationError,
            "auc is no number on fold 1",
        ),
        (FRAMES, {"params": {"objective": "binary:logistic", "booster": "dart"}}, ConfigurationError, "does not grow"),
    ],
)
def test_data_that_cannot_be_selected_on(
    frames: tuple[pd.DataFrame, ...], changes: dict[str, Any], kind: type[Exception], text: str, tmp_path: Path
) -> None:
    parties = sites(tmp_path, frames)
    outcomes = parties.run(run_selection_site, job(**changes))
    assert all(isinstance(one, kind) for one in outcomes.values()), outcomes
    assert any(text in str(one) for one in outcomes.values()), outcomes
    assert not any((parties.run_folder(site) / name).exists() for site in parties.sites for name in RESULTS)


@pytest.mark.parametrize(
    ("consents", "text"),
    [
        ({"tuning": 29, "feature_profile": True}, "5 x 2 x 3 = 30"),
        ({"tuning": 30}, "consents.feature_profile"),
        ({"feature_profile": True}, "consents.tuning"),
    ],
)
def test_a_site_has_to_consent(consents: dict[str, Any], text: str, tmp_path: Path) -> None:
    parties = sites(tmp_path)
    parties.set_policy("site-2", consents=consents)
    outcomes = parties.run(run_selection_site, job())
    assert any(isinstance(one, PolicyRefusal) and text in str(one) for one in outcomes.values()), outcomes
    assert Kind.HISTOGRAM not in {one.frame.kind for one in parties.transfers}


NUMBERS = {"max_depth": 2, "max_bin": 16}
TIMES = {"label": {"time": "y", "event": "seen"}, "params": {"objective": "survival:aft", **NUMBERS}}


@pytest.mark.parametrize("changes", [{"params": {"objective": "reg:squarederror", **NUMBERS}}, TIMES])
def test_numbers_for_labels_have_no_information_value(changes: dict[str, Any], tmp_path: Path) -> None:
    frames = tuple(frame.assign(y=np.exp(frame.eins.fillna(0)), seen=1) for frame in FRAMES)
    parties = sites(tmp_path, frames)
    with pytest.raises(ConfigurationError, match="information"):
        succeed(parties.run(run_selection_site, job(**changes)))
    parties = sites(tmp_path / "without", frames)
    succeed(parties.run(run_selection_site, job(**changes, information_value=False, importance="permutation")))
    found = result_of(parties)
    assert found["chosen"] == ["eins"] and "information_value" not in found["features"][0]


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_counts_what_is_sent_and_asked_for(tmp_path: Path) -> None:
    frames = tuple(frame.drop(columns="ward") for frame in FRAMES)
    parties, asked = sites(tmp_path, frames), job(importance="permutation", shadows=1, categories={}, features=None)
    succeed(parties.run(run_selection_site, asked))
    sent = sum(row.bytes_out for row in RunRecord.read(parties.run_folder("site-1")).traffic)
    found = plan(PlanRequest(rows=sum(map(len, frames)), features=4, sites=3, missing=True), asked)
    assert found.figures["tuning"] == (4 + 1) * FOLDS * ROUNDS and "feature_profile" in found.text
    assert sent - 4000 < found.figures["bytes_sent"] < 1.01 * sent, "all but what opens the session"
