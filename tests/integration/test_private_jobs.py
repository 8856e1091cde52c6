"""Private jobs through the whole code of three sites, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import ROWS_TEXT, JobAborted, PolicyRefusal
from nvflare_plugins.base.files import write_private_table
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.private_trees import noisy_sums
from nvflare_plugins.kinds.private_trees import training as private_site
from nvflare_plugins.kinds.private_trees.job import JobPlan
from nvflare_plugins.kinds.private_trees.plan import OwnRows
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.recipes.recipe import PrivateTreesRecipe, write_folder
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.site.setup import SetupOptions
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb.model_json import with_positive_covers
from tests.support.examples import slow
from tests.support.federation import SiteDied, dies_at
from tests.support.private_federation import BUDGET, DATA, PUBLIC, PrivateFederation, Run, frame_of, job_of
from tests.support.refreshed import refreshed
from tests.support.simulator import SITES, run_simulator

RELEASED = {"CELL_COUNTS", "NODE_STATS", "HISTOGRAM", "ROOT_SUM"}
NAMES = ["x0", "x1", "x2", "x3", "colour"]
EVENT = GaussianEvent(1.0, NeighbouringRelation.ADD_OR_REMOVE_ROW)


def trees_of(model: bytes) -> list:
    return json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]


def central(job, frame, n_sites: int = 3) -> bytes:
    """Refresh the job's forest on the pooled, clipped rows, with XGBoost alone."""
    plan = JobPlan.of(job, n_sites, NAMES).training
    codes = frame.colour.map({"red": 0, "green": 1, "blue": 2})
    rows = frame.assign(colour=codes)[NAMES].to_numpy(np.float32)
    low, high = (np.array([getattr(b, end) for b in plan.bounds], np.float32) for end in ("low", "high"))
    label = frame.label.to_numpy(np.float32)
    rows = np.clip(rows, low, high)
    return refreshed(plan, OwnRows(rows.T, label))


def exact(sums, sensitivity, multiplier, *_) -> Release:
    return Release(np.asarray(sums), EVENT)


def nothing_released(run: Run, federation: PrivateFederation) -> None:
    """No private sum passed, and no ledger has a charge."""
    assert not run.kinds & RELEASED
    for site in federation.sites:
        assert not federation.ledger_exists(site) or not any(federation.ledger(site).spent().parts())
    assert not list(federation.folder.rglob("model.json"))


@pytest.mark.parametrize("missing", [*slow(False), True], ids=["complete", "with_gaps"])
def test_without_noise_it_is_centralized_refresh(
    tmp_path: Path, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = frame_of(missing=missing)
    job = job_of(method="dp_tr_newton", trust="trusted_aggregator", structure_seed=5)
    federation = PrivateFederation(tmp_path, frame)
    federation.run_private(job, server_noise=exact).succeed()
    assert trees_of(federation.model()) == trees_of(with_positive_covers(central(job, frame)))
    # The same with shares of no noise, under the ridge of distributed noise.
    real = noisy_sums.add_noise_share
    monkeypatch.setattr(
        noisy_sums, "add_noise_share", lambda sums, *rest: Release(np.asarray(sums), real(sums, *rest).event)
    )
    shared = job_of(method="dp_tr_newton", structure_seed=5)
    federation.run_private(shared, "shared").succeed()
    assert trees_of(federation.model("shared")) == trees_of(with_positive_covers(central(shared, frame)))


def test_a_distributed_run_and_what_remains_of_it(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    job = job_of()
    run = federation.run_private(job).succeed()
    assert len({outcome.hmac for outcome in run.outcomes.values()}) == 1
    model = federation.model()
    assert xgb.Booster(model_file=bytearray(model)).feature_names == NAMES
    for site in federation.sites:
        ledger = federation.ledger(site)
        assert 0.9999 < ledger.job_spent("job").epsilon(job.delta) <= job.epsilon
        folder = federation.workspace(site) / "runs" / "job"
        record = RunRecord.read(folder)
        assert record.profile == "dp_distributed" and len(record.rounds) == 8
        assert {section.title for section in record.sections} == {"Privacy", "Privacy spent over rounds"}
        assert (folder / "report.html").exists()
        evidence = (folder / "evidence" / f"{site}.evidence.jsonl").read_text().splitlines()
        spends = [r for r in map(json.loads, evidence) if r["type"] == "spend"]
        assert len(spends) == 9 and all("n_shares 2" in spend["event"] for spend in spends)
        assert float(spends[-1]["epsilon"]) == pytest.approx(1.0, rel=1e-4)
    folders = [federation.workspace(site) / "runs" / "job" / "evidence" for site in federation.sites]
    assert verify(folders).failures == ()


def test_a_trusted_server_adds_the_noise_and_notes_it(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    job = job_of(trust="trusted_aggregator", method="dp_tr_newton")
    run = federation.run_private(job).succeed()
    assert len(run.server_spends) == 8
    query, event, epsilon, delta = run.server_spends[-1]
    assert "NODE_STATS" in query and "discrete_gaussian" in event and "n_shares 1" in event
    assert epsilon == pytest.approx(1.0, rel=1e-4) and delta == job.delta
    # No site sees an exact sum: not one number of the model is that of the exact sums.
    noisy, plain = trees_of(federation.model())[0], trees_of(central(job, frame_of()))[0]
    assert noisy["left_children"] == plain["left_children"]
    for name in ("sum_hessian", "base_weights"):
        assert not set(noisy[name]) & set(plain[name]) - {0.0}


@pytest.mark.parametrize("trust", [*slow("distributed"), "trusted_aggregator"])
def test_histogram_trees_run_too(tmp_path: Path, trust: str) -> None:
    federation = PrivateFederation(tmp_path, frame_of(missing=True))
    components = {"n_trees": 2, "depth": 3, "n_candidates": 8}
    job = job_of(method="feverless", trust=trust, components=components)
    run = federation.run_private(job).succeed()
    assert run.kinds & RELEASED == {"HISTOGRAM"}
    assert xgb.Booster(model_file=bytearray(federation.model())).num_boosted_rounds() == 2
    assert federation.ledger("site-1").job_spent("job").epsilon(job.delta) <= job.epsilon


def test_local_noise_has_the_size_of_all_rows_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their counts have the noise of one report each.

    Statistic: mean square of 8 x 16 noisy row counts, all small beside the noise, over that of the noise; false alarm
    below 1e-4 outside (0.5, 1.7). The counts are those before the model raises what is not positive.
    """
    monkeypatch.setattr(private_site, "with_positive_covers", lambda model: model)
    federation = PrivateFederation(tmp_path)
    job = job_of(
        trust="local", n_rows=900, method="dp_tr_newton", components={"n_trees": 8, "weight_update": "gradient"}
    )
    run = federation.run_private(job).succeed()
    assert run.kinds & RELEASED == {"NODE_STATS"}
    counts = [
        np.array(tree["sum_hessian"])[np.array(tree["left_children"]) < 0] for tree in trees_of(federation.model())
    ]
    expected = JobPlan.of(job, 3, NAMES).training.leaf_noise[1]
    assert expected > 500 and 0.5 < np.mean(np.concatenate(counts) ** 2) / expected**2 < 1.7
    assert federation.ledger("site-1").job_spent("job").epsilon(job.delta) <= job.epsilon


@pytest.mark.parametrize("method", [*slow("dp_tr_newton_ih", "dp_ebm_newton"), "batch_ih_ebm_25", "dp_gbm", "dp_rf"])
def test_papers_methods_run_as_jobs(tmp_path: Path, method: str) -> None:
    federation = PrivateFederation(tmp_path)
    batch_size = {"batch_ih_ebm_25": 2, "dp_rf": 4}.get(method, 1)
    job = job_of(method=method, components={"n_trees": 4, "batch_size": batch_size})
    federation.run_private(job).succeed()
    assert xgb.Booster(model_file=bytearray(federation.model())).feature_names == NAMES
    assert 0 < federation.ledger("site-2").job_spent("job").epsilon(job.delta) <= job.epsilon


def test_weights_count_up_to_their_public_bound(tmp_path: Path) -> None:
    frame = frame_of()
    weight = np.random.default_rng(1).uniform(0, 4, len(frame))
    federation = PrivateFederation(tmp_path, frame.assign(w=weight))
    common = {"method": "dp_tr_newton", "trust": "trusted_aggregator", "features": NAMES}
    federation.run_private(job_of(weight="w", max_weight=2.0, **common), server_noise=exact).succeed()
    covers = np.array(trees_of(federation.model())[0]["sum_hessian"])
    factor = np.minimum(weight, 2.0) / 2.0
    assert covers[0] == pytest.approx(0.25 * factor.sum(), rel=1e-5)


@pytest.mark.parametrize("trust", ["distributed", *slow("trusted_aggregator")])
def test_xgboost_trains_where_a_job_asks_for_it(tmp_path: Path, trust: str) -> None:
    """The sites grow it: same releases, same price, same model given the same noise (tests/oracle), any XGBoost."""
    federation = PrivateFederation(tmp_path, frame_of(missing=True))
    components = {"n_trees": 4, "grower": "xgboost"}
    with pytest.raises(ConfigurationError, match="each tree from those before it: leave grower away, or set inter"):
        job_of(trust=trust, components=components)
    job = job_of(trust=trust, components={**components, "interactions": "alternating"})
    run = federation.run_private(job).succeed()
    assert run.kinds & RELEASED == {"CELL_COUNTS", "NODE_STATS"}
    assert xgb.Booster(model_file=bytearray(federation.model())).num_boosted_rounds() == 4
    assert 0.9999 < federation.ledger("site-1").job_spent("job").epsilon(job.delta) <= job.epsilon


# -- refusals: nothing is released, nothing charged -------------------------------------------------------------------


def refused(federation: PrivateFederation, job, site: str, kind: type[Exception], *texts: str) -> None:
    run = federation.run_private(job)
    error = run.error(site)
    assert isinstance(error, kind)
    assert all(text in str(error) for text in texts), str(error)
    assert all(isinstance(outcome, Exception) for outcome in run.outcomes.values())
    nothing_released(run, federation)


def test_an_overdrawn_budget_at_one_site_stops_all(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    federation.set_budget("site-2", {"epsilon": 0.5, "delta": 1e-5})
    refused(federation, job_of(), "site-2", PolicyRefusal, "would overdraw the privacy budget", "0.5")
    # What the other sites had reserved is free again.
    federation.set_budget("site-2", BUDGET)
    federation.run_private(job_of(), "again").succeed()


def test_a_second_job_that_does_not_fit_any_more(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    for site in federation.sites:
        federation.set_budget(site, {"epsilon": 1.2, "delta": 1e-5})
    federation.run_private(job_of()).succeed()
    run = federation.run_private(job_of(), "second")
    assert isinstance(run.error("site-1"), (PolicyRefusal, JobAborted)) and not run.kinds & RELEASED
    assert federation.ledger("site-1").spent().epsilon(1e-5) <= 1.0


def test_no_budget(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    federation.set_budget("site-1", None)
    refused(federation, job_of(), "site-1", PolicyRefusal, "no privacy budget", "data_sets.patients.privacy")


def test_missing_bounds_are_named(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    job = job_of(feature_bounds={"x0": [-3, 3], "x2": [-3, 3]})
    refused(federation, job, "site-3", ConfigurationError, "lacks public bounds of x1, x3")


def test_persons_with_more_rows_than_the_job_protects(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    for site in federation.sites:
        federation.set_budget(site, {**BUDGET, "rows_per_person": 2})
    refused(federation, job_of(), "site-1", PolicyRefusal, "rows_per_person=2 in the job")
    job = job_of(rows_per_person=2)
    federation.run_private(job, "two").succeed()
    assert 0.999 < federation.ledger("site-1").job_spent("two").epsilon(job.delta) <= job.epsilon


def test_too_few_sites_and_colluders(tmp_path: Path) -> None:
    two = PrivateFederation(tmp_path / "two", n_sites=2)
    refused(two, job_of(), "site-1", PolicyRefusal, "fewer_than_three_sites")
    wary = PrivateFederation(tmp_path / "wary", n_sites=4, max_colluders=2)
    refused(wary, job_of(), "site-1", PolicyRefusal, "max_colluders", "holds against 1")
    small = PrivateFederation(tmp_path / "small", n_sites=3)
    refused(small, job_of(n_sites=4), "site-1", ConfigurationError, "meant for 4 sites")
    refused(small, job_of(colluders=3), "site-1", ConfigurationError, "cannot tolerate")


def test_profiles_that_the_policy_does_not_allow(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path, allowed_profiles=["dp_distributed"])
    job = job_of(trust="trusted_aggregator")
    refused(federation, job, "site-1", PolicyRefusal, "dp_trusted", "allowed_profiles")


def test_labels_other_than_two_classes(tmp_path: Path) -> None:
    frame = frame_of()
    frame.loc[0, "label"] = 2  # which row it is, and that there is one, is nobody's business
    PrivateFederation(tmp_path, frame).run_private(job_of()).succeed()


# -- crashes ----------------------------------------------------------------------------------------------------------


def test_a_crash_between_charge_and_send_costs_nothing_more_when_resumed(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    job = job_of()
    run = federation.run_private(job, "first", tamper={"site-2": dies_at(Kind.NODE_STATS, 4)})
    assert isinstance(run.error("site-2"), SiteDied)
    charged = {site: federation.ledger(site).job_spent("first") for site in federation.sites}
    assert all(cost.mu_squared > 0 for cost in charged.values())
    federation.run_private(job_of(resume_from="first"), "second").succeed()
    for site in federation.sites:
        ledger = federation.ledger(site)
        assert 0.999 < ledger.job_spent("first").epsilon(job.delta) <= job.epsilon
        assert ledger.spent() == ledger.job_spent("first")
        text = (federation.workspace(site) / "runs" / "second" / "evidence" / f"{site}.evidence.jsonl").read_text()
        spends = [r for r in map(json.loads, text.splitlines()) if r["type"] == "spend"]
        # Cells and rounds 0 to 2 at all sites, and round 3 where it was charged already.
        assert sum("replayed" in spend["event"] for spend in spends) >= 4
    closed = federation.run_private(job_of(resume_from="first"), "third")
    assert isinstance(closed.error("site-1"), (PolicyRefusal, JobAborted)) and not closed.kinds & RELEASED


def test_jobs_that_are_broken_off_leave_the_budget_to_others(tmp_path: Path) -> None:
    """Each once held its whole plan at every site: two of them, and no job on the data set fitted any more."""
    federation = PrivateFederation(tmp_path)
    for number in range(2):
        run = federation.run_private(
            job_of(epsilon=1.9), f"attack-{number}", tamper={"site-2": dies_at(Kind.CELL_COUNTS)}
        )
        assert isinstance(run.error("site-2"), SiteDied)
    for site in federation.sites:
        ledger = federation.ledger(site)
        assert ledger.quote([]).held == ledger.spent()
    federation.run_private(job_of(epsilon=1.9), "honest").succeed()


def test_a_job_is_not_resumed_on_other_rows(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    federation.run_private(job_of(), "first", tamper={"site-2": dies_at(Kind.NODE_STATS, 7)})
    spent = {site: federation.ledger(site).spent() for site in federation.sites}
    frame = frame_of().iloc[:250]
    frame.to_parquet(federation.workspace("site-1") / "patients.parquet", index=False)
    run = federation.run_private(job_of(resume_from="first"), "second")
    assert str(run.error("site-1")) == ROWS_TEXT and "are not those on which" in run.error("site-1").reason
    assert not run.kinds & RELEASED
    assert spent == {site: federation.ledger(site).spent() for site in federation.sites}


def test_an_unknown_job_cannot_be_resumed(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    refused(federation, job_of(resume_from="never"), "site-1", ConfigurationError, "knows no job never")


def test_a_failed_job_with_a_trusted_server_ends_in_the_ledger(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path)
    job = job_of(trust="trusted_aggregator", method="dp_tr_newton")
    federation.run_private(job, "first", tamper={"site-2": dies_at(Kind.NODE_STATS, 4)})
    ledger = federation.ledger("site-1")
    assert 0 < ledger.job_spent("first").epsilon(job.delta) < job.epsilon
    assert " closed " in ledger.describe()
    federation.run_private(job, "second").succeed()
    assert federation.ledger("site-1").spent().epsilon(1e-4) > job.epsilon * 0.9


# -- numbers and several classes ---------------------------------------------------------------------------------------


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
