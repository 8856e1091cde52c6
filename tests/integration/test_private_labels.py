"""Private jobs on numbers and on several classes: through the whole code of three sites, and in FLARE's simulator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.files import write_private_table
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.recipes.recipe import PrivateTreesRecipe, write_folder
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.site.setup import SetupOptions
from nvflare_plugins.wire.envelope import Kind
from tests.support.examples import slow
from tests.support.federation import SiteDied, dies_at
from tests.support.private_federation import BUDGET, DATA, PUBLIC, PrivateFederation, frame_of, job_of
from tests.support.simulator import SITES, run_simulator

COLOURS = ["red", "green", "blue"]
NUMBERS = {"label_bounds": [-4e6, 8e6]}
CLASSES = {"label_classes": ["low", "middle", "high", "never"]}
LABELS = pytest.mark.parametrize("label", [NUMBERS, CLASSES], ids=["numbers", "classes"])


def rows_of(label: dict, n_rows: int = 900) -> pd.DataFrame:
    """Return rows with a label of a kind; some cannot be used, or lie beyond the bounds; nobody has the last class."""
    frame = frame_of(n_rows)
    score = frame.x0 + frame.x1 * frame.x2
    if "label_bounds" in label:
        values = np.array(1e6 * (2 * score + 1))
        values[:3] = np.nan, 1e30, -1e30
        return frame.assign(label=values)
    words = np.array(["low", "middle", "high"], dtype=object)[np.digitize(score, [-0.5, 0.5])]
    words[:2] = None, "nonsense"
    return frame.assign(label=words)


def as_numbers(frame: pd.DataFrame) -> np.ndarray:
    codes = frame.colour.map({colour: i for i, colour in enumerate(COLOURS)})
    return frame.assign(colour=codes)[["x0", "x1", "x2", "x3", "colour"]].clip(-3, 3).to_numpy(np.float32)


@pytest.mark.parametrize(
    ("trust", "label"),
    [
        *(("distributed", CLASSES), ("trusted_aggregator", NUMBERS)),
        *slow(("distributed", NUMBERS), ("trusted_aggregator", CLASSES)),
    ],
)
def test_a_run_and_what_remains_of_it(tmp_path: Path, label: dict, trust: str) -> None:
    federation = PrivateFederation(tmp_path, rows_of(label))
    job = job_of(trust=trust, **label)
    run = federation.run_private(job).succeed()
    assert len({outcome.hmac for outcome in run.outcomes.values()}) == 1
    content, values = federation.model(), as_numbers(rows_of(label))
    model, booster = FinishedModel(content, "model"), xgb.Booster(model_file=bytearray(content))
    theirs = booster.predict(xgb.DMatrix(values, feature_names=booster.feature_names))
    if label is CLASSES:
        assert model.classes == ("low", "middle", "high", "never") and model.objective == "multi:softprob"
        assert np.array_equal(model.probabilities(values), theirs) and theirs.shape == (900, 4)
    else:
        assert model.classes is None and model.objective == "reg:squarederror" and model.clipped_at is None
        assert np.array_equal(model.predict(values), theirs) and np.ptp(theirs) > 1e4
    for site in federation.sites:
        assert 0.9999 < federation.ledger(site).job_spent("job").epsilon(job.delta) <= job.epsilon
        folder = federation.workspace(site) / "runs" / "job"
        [privacy, _] = RunRecord.read(folder).sections
        assert dict(privacy.rows)["label"].startswith("a number from" if label is NUMBERS else "one of 4 classes")
        evidence = (folder / "evidence" / f"{site}.evidence.jsonl").read_text()
        spends = [r for r in map(json.loads, evidence.splitlines()) if r["type"] == "spend"]
        assert len(spends) == 9 and float(spends[-1]["epsilon"]) == pytest.approx(1.0, rel=1e-4)
        assert "1e+30" not in evidence and "nonsense" not in evidence
    folders = [federation.workspace(site) / "runs" / "job" / "evidence" for site in federation.sites]
    assert verify(folders).failures == ()


@LABELS
def test_labels_that_cannot_be_used_are_nobodys_business(tmp_path: Path, label: dict, caplog) -> None:
    """They are left out, or count as the bound, each by itself; the site's own log has numbers of rows alone."""
    caplog.set_level("INFO")
    PrivateFederation(tmp_path, rows_of(label)).run_private(job_of(**label)).succeed()
    assert "missing, or none that the job takes: 1 of" in caplog.text or "takes: 2 of" in caplog.text
    if label is NUMBERS:
        assert "labels 'label' beyond label_bounds: " in caplog.text
    assert "nonsense" not in caplog.text and "1e+30" not in caplog.text


def test_bounds_that_no_value_meets_are_in_the_sites_own_log_alone(tmp_path: Path, caplog) -> None:
    job = job_of(feature_bounds={f"x{i}": [100.0, 101.0] if i == 2 else [-3.0, 3.0] for i in range(4)})
    run = PrivateFederation(tmp_path).run_private(job).succeed()
    [text] = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert text == "no value of column 'x2' lies within the job's bounds: each counts as one of them"
    assert not any(b"no value of" in data for _, data in run.frames)


PURE = {"method": "pure"}
PURE_BUDGETS = {
    "pure alone": {"epsilon": 2.0, "delta": 0.0, "pure_epsilon": 2.0},
    "of both": {**BUDGET, "pure_epsilon": 2.5},
}


@pytest.mark.parametrize("budget", [*slow(PURE_BUDGETS["pure alone"]), PURE_BUDGETS["of both"]], ids=PURE_BUDGETS)
def test_a_pure_job_from_policy_to_verified_evidence(tmp_path: Path, budget: dict) -> None:
    federation, job = PrivateFederation(tmp_path), job_of(method="pure", epsilon=2.0)
    refusal = federation.run_private(job, "refused").error("site-1")
    assert isinstance(refusal, PolicyRefusal) and "the pure part (pure_epsilon) would be 2 of 0" in str(refusal)
    for site in federation.sites:
        federation.set_budget(site, budget)
    federation.run_private(job).succeed()
    folders = {site: federation.workspace(site) / "runs" / "job" for site in federation.sites}
    for site, folder in folders.items():
        spent = federation.ledger(site).job_spent("job")
        assert spent.parts() == pytest.approx((0.0, 2.0, 0.0, 0.0), rel=1e-7) and spent.epsilon(0.0) <= 2.0
        privacy = dict(RunRecord.read(folder).sections[0].rows)
        assert privacy["spent by this job"] == "pure epsilon 2, without a delta"
        assert "computational" in privacy["trust model"]
        evidence = (folder / "evidence" / f"{site}.evidence.jsonl").read_text()
        spends = [r for r in map(json.loads, evidence.splitlines()) if r["type"] == "spend"]
        assert [float(spends[-1][name]) for name in ("epsilon", "delta")] == pytest.approx([2.0, 0.0])
        assert len(spends) == 8 and all("discrete_laplace" in r["event"] and "n_shares 2" in r["event"] for r in spends)
    assert verify([folder / "evidence" for folder in folders.values()]).failures == ()
    assert FinishedModel(federation.model(), "model").clipped_at == pytest.approx(0.6)


@pytest.mark.parametrize("label", [*slow(NUMBERS), CLASSES, {**NUMBERS, **PURE}], ids=["numbers", "classes", "pure"])
def test_what_was_released_is_replayed_by_a_job_that_resumes_or_waits(tmp_path: Path, label: dict) -> None:
    for number, goes_on in enumerate(({"on_lost_site": "wait"}, {"resume_from": "first"})):
        federation = PrivateFederation(tmp_path / str(number), rows_of(label))
        for site in federation.sites:
            federation.set_budget(site, PURE_BUDGETS["of both"] if "method" in label else BUDGET)
        first = {k: v for k, v in goes_on.items() if k == "on_lost_site"}
        run = federation.run_private(job_of(**label, **first), "first", tamper={"site-2": dies_at(Kind.NODE_STATS, 4)})
        assert isinstance(run.error("site-2"), SiteDied)
        job = job_of(**label, **goes_on)
        if first:
            federation.run_private(job, "first", number=2).succeed()
        else:
            federation.run_private(job, "second").succeed()
        for site in federation.sites:
            spent = federation.ledger(site).job_spent("first")
            assert 0.999 < spent.epsilon(job.at_delta) <= job.epsilon and federation.ledger(site).spent() == spent


@pytest.mark.parametrize("other", [{"label_bounds": [-4e6, 9e6]}, CLASSES], ids=["bounds", "kind"])
def test_sites_agree_on_what_the_label_is(tmp_path: Path, other: dict) -> None:
    """The job stands in the terms that all sites compare: another interval is another job, and so is a resumed one."""
    assert job_of(**NUMBERS).to_dict() != job_of(**other).to_dict()
    federation = PrivateFederation(tmp_path, rows_of(NUMBERS))
    federation.run_private(job_of(**NUMBERS), "first", tamper={"site-2": dies_at(Kind.NODE_STATS)})
    run = federation.run_private(job_of(**other, resume_from="first"), "second")
    assert all(isinstance(run.error(site), Exception) for site in federation.sites)
    assert "NODE_STATS" not in run.kinds


@pytest.mark.parametrize(
    "method", ["dp_rf", "dp_ebm_newton", "feverless", *slow("dp_tr_newton", "dp_tr_newton_ih", "few_rounds")]
)
def test_papers_methods_train_numbers(tmp_path: Path, method: str) -> None:
    components = {"n_trees": 10 if method == "few_rounds" else 4, "depth": 2}
    federation = PrivateFederation(tmp_path, rows_of(NUMBERS))
    federation.run_private(job_of(method=method, components=components, **NUMBERS)).succeed()
    assert FinishedModel(federation.model(), "model").classes is None


# -- FLARE ------------------------------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("label", [NUMBERS, CLASSES], ids=["numbers", "classes"])
def test_under_flare(tmp_path: Path, label: dict) -> None:
    frame = rows_of(label, 3000)
    settings = {**PUBLIC, "epsilon": 2.0, "components": {"n_trees": 40}, **label}
    job = write_folder(PrivateTreesRecipe("labels", **settings), tmp_path)
    workspace = tmp_path / "ws"

    def prepare() -> None:
        (workspace / "local" / "data").mkdir(parents=True, exist_ok=True)
        for i, site in enumerate(SITES):
            write_private_table(workspace / "local" / "data" / f"{site}.parquet", frame.iloc[i::3])

    options = SetupOptions(
        {DATA: str(workspace / "local" / "data" / "{site}.parquet")},
        profiles=("dp_distributed",),
        budgets={DATA: {"epsilon": 2.5, "delta": 1e-5}},
    )
    done = run_simulator(job, workspace, options, prepare)
    assert done.code == 0, done.output[-4000:]
    assert done.summary["status"] == "completed" and verify([done.result / "evidence"]).sound
    models = {(done.site(site) / "model.json").read_bytes() for site in SITES}
    assert len(models) == 1
    model, values = FinishedModel(models.pop(), "model"), as_numbers(frame)
    if label is NUMBERS:
        truth = frame.label.clip(*label["label_bounds"]).to_numpy()[3:]
        error = np.sqrt(np.mean((model.predict(values)[3:] - truth) ** 2))
        assert error < 0.95 * truth.std()
    else:
        named = np.array(model.classes)[model.positions(values)]
        most = frame.label[2:].value_counts(normalize=True).iloc[0]
        assert np.mean(named[2:] == frame.label.to_numpy()[2:]) > most + 0.1
