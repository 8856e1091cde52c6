"""FederBoost's vertical job at all its sites: result, price, secrecy, refusals."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from dp_components.bucket_ldp import PublicValues
from dp_components.ledger import Ledger
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob, Description
from nvflare_plugins.kinds.federboost_vertical.payment import BucketPayment, plan_of
from nvflare_plugins.kinds.federboost_vertical.training import run_site
from nvflare_plugins.kinds.vertical.model import ActivePart, PassivePart, find_part, merge
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.memory.budgets import PersonsOfBudgets
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy
from tests.support.federation import TIMEOUT_S, Parties, succeed
from tests.support.refusals import refused_for

N_ROWS = 1200
BUDGET = {"epsilon": 9.0, "delta": 1e-6, "pure_epsilon": 8.0}
PARAMS = {"objective": "binary:logistic", "max_depth": 3}
PUBLIC = {
    "site-2": {"age": {"low": 0, "high": 1}, "sex": {"values": [0, 1]}},
    "site-3": {"income": {"edges": [-1, 0, 1]}},
}
PASSIVE = tuple(PUBLIC)


def table(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "id": [f"p{i}" for i in range(N_ROWS)],
            "own": rng.random(N_ROWS),
            "age": rng.random(N_ROWS),
            "sex": rng.integers(0, 2, N_ROWS),
            "income": rng.normal(size=N_ROWS),
        }
    )
    frame["label"] = ((frame.own + frame.age * frame.sex + 0.5 * frame.income) > 0.7).astype(int)
    return frame


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    """Three parties; every file has its rows in another order."""
    parties = Parties(tmp_path, policy={"unsigned_sessions": True, "data_sets": {}, "allowed_profiles": ["dp_local"]})
    columns = {"site-1": ["id", "own", "label"], **{site: ["id", *PUBLIC[site]] for site in PASSIVE}}
    for number, site in enumerate(parties.sites):
        mixed = table().sample(frac=1, random_state=number)
        # Nothing protects what the active party trains on: a budget there would forbid it.
        budget = {"privacy": BUDGET} if site in PUBLIC else {}
        parties.give(site, "credit", mixed[columns[site]], id="id", **budget)
        if site in PUBLIC:
            parties.give_input(site, "bucket_features.json", PUBLIC[site])
    return parties


def job(**changes: object) -> BucketJob:
    fields = {"data_set": "credit", "num_rounds": 8, "edges_epsilon": 0.0, **changes}
    return BucketJob(active="site-1", label="label", params=PARAMS, **fields)


def parts(parties: Parties, job_id: str = "job") -> list:
    kinds = {site: PassivePart if site in PUBLIC else ActivePart for site in parties.sites}
    return [find_part(parties.workspace(s) / "runs", parties.folder, job_id, s, kind).part for s, kind in kinds.items()]


def ledger(parties: Parties, site: str, data_set: str = "credit") -> Ledger:
    policy = SitePolicy.load(parties.workspace(site), site)
    return Ledger(policy.ledgers / f"{data_set}.ledger")


def merged_accuracy(parties: Parties, job_id: str = "job") -> float:
    active, second, third = parts(parties, job_id)
    model = merge(active.booster, 1, [(1, second.table), (3, third.table)])
    test = table(seed=5)
    matrix = xgb.DMatrix(test[["own", "age", "sex", "income"]].to_numpy(np.float32))
    matrix.feature_names = ["own", "site-2.f0", "site-2.f1", "site-3.f0"]
    return float(np.mean((xgb.Booster(model_file=bytearray(model)).predict(matrix) > 0.5) == test.label))


def test_the_parts_predict_and_the_price_is_paid_once(parties: Parties) -> None:
    outcomes = succeed(parties.run(run_site, job(epsilon=6.0)))
    assert len({outcome.hmac for outcome in outcomes.values()}) == 1
    assert merged_accuracy(parties) > 0.8
    for site in PASSIVE:
        spent = ledger(parties, site).spent().pure_epsilon
        assert 6.0 * (1 - 1e-9) < spent <= 6.0
    assert not (SitePolicy.load(parties.workspace("site-1"), "site-1").ledgers).exists()
    assert "no record-level privacy" in " ".join(parties.said["site-2"])
    assert "12 only" in " ".join(parties.said["site-2"])
    record = RunRecord.read(parties.run_folder("site-2"))
    assert record.sections[0].rows == (("f0", "16", "3.6 %"), ("f1", "2", "0.2 %"))
    assert (parties.run_folder("site-2") / "report.html").stat().st_size > 1000


def test_two_parties_are_enough_and_the_active_one_may_have_the_label_alone(parties: Parties) -> None:
    parties.n_sites = 2
    parties.give("site-1", "credit", table()[["id", "label"]], id="id")
    succeed(parties.run(run_site, job()))
    active = find_part(parties.workspace("site-1") / "runs", parties.folder, "job", "site-1", ActivePart).part
    assert active.columns == () and [party.site for party in active.parties] == ["site-2"]
    table_of = find_part(parties.workspace("site-2") / "runs", parties.folder, "job", "site-2", PassivePart).part.table
    assert len(table_of) > 8


def test_buckets_are_paid_for_once_and_replayed_for_the_same_rows_only(parties: Parties) -> None:
    """The process died between charge and sending; the same job runs again."""
    place = SimpleNamespace(policy=SitePolicy.load(parties.workspace("site-2"), "site-2"), job_id="job")
    attempt = SimpleNamespace(context=place, evidence=SimpleNamespace(spend=lambda *told: said.append(told)))
    said: list[tuple] = []
    columns, features = np.random.default_rng(0).random((1, 50)).astype(np.float32), [FeatureBounds(0.0, 1.0)]

    def release(values: np.ndarray, ids: bytes = b"ids") -> np.ndarray:
        return BucketPayment(job(epsilon=1.0), attempt, features, ids).release(values)[1]  # type: ignore[arg-type]

    first = release(columns)
    assert np.array_equal(release(columns), first)
    assert [query for query, *_ in said] == ["randomised buckets"] * 2 and "replayed" in said[1][1]
    for values, ids in ((1 - columns, b"ids"), (columns, b"others"), (columns[:, :9], b"ids")):
        with pytest.raises(PolicyRefusal, match="has spent its plan"):
            release(values, ids)


def test_paid_edges_are_part_of_epsilon(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=8.0, edges_epsilon=2.0)))
    spent = ledger(parties, "site-2").spent().pure_epsilon
    assert 8.0 * (1 - 1e-9) < spent <= 8.0
    assert ledger(parties, "site-3").spent().pure_epsilon == pytest.approx(6.0)  # its edges are public
    assert merged_accuracy(parties) > 0.8


def test_by_default_a_tenth_of_epsilon_pays_for_edges_where_a_feature_has_bounds(parties: Parties) -> None:
    """Site 2 bounds one of its two features; site 3 states its edges, and all of epsilon is for its buckets."""
    by_default = job(epsilon=8.0, edges_epsilon=None)
    succeed(parties.run(run_site, by_default))
    for site in PASSIVE:
        assert 8.0 * (1 - 1e-9) < ledger(parties, site).spent().pure_epsilon <= 8.0
    bounded, discrete = FeatureBounds(0.0, 1.0), PublicValues((0.0, 1.0))
    paid, response = plan_of(by_default, [bounded, discrete]).events
    assert (paid.epsilon, response.epsilon) == pytest.approx((0.8, 7.2))
    assert plan_of(by_default, [discrete]).epsilon == pytest.approx(8.0)
    assert merged_accuracy(parties) > 0.8


def test_a_rows_epsilon_is_shared_by_its_features(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=7.0, unit="row")))
    for site in PASSIVE:
        assert ledger(parties, site).spent().pure_epsilon == pytest.approx(7.0)
    assert "whole row is protected, with epsilon 7" in " ".join(parties.said["site-2"])


def test_the_server_sees_no_bucket_and_the_active_party_only_randomised_ones(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    true = (table().sort_values("id").sex.to_numpy()).astype(np.uint8).tobytes()
    sent = [transfer.frame.payload for transfer in parties.transfers]
    assert not any(true[:64] in payload or true[-64:] in payload for payload in sent)
    assert any(len(payload) > 2 * N_ROWS for payload in sent)  # sealed, the two columns did leave


def test_rows_whose_buckets_were_sent_are_not_predicted(parties: Parties) -> None:
    policy = SitePolicy.load(parties.workspace("site-2"), "site-2")
    SentRows(policy).refuse(["p3"])
    SentRows(policy).refuse(None)
    succeed(parties.run(run_site, job()))
    SentRows(policy).refuse(["new"])
    with pytest.raises(PolicyRefusal, match="id column"):
        SentRows(policy).refuse(None)
    with refused_for("more of them than was paid for") as refusal:
        SentRows(policy).refuse(["new", "p3"])
    assert "p3" not in str(refusal.value)
    content = Memory.open(policy).path.read_bytes()  # of hashes, which may hold some of these by chance
    assert not all(f"p{number}".encode() in content for number in range(100, 200))


def test_the_inference_job_predicts_new_rows_by_true_values_and_no_others(parties: Parties) -> None:
    succeed(parties.run(run_site, job()))
    new = table(seed=5).assign(id=[f"new{i}" for i in range(N_ROWS)])
    for site, columns in {"site-1": ["own"], **{site: [*PUBLIC[site]] for site in PASSIVE}}.items():
        parties.give(site, "new", new[["id", *columns]], id="id")
        parties.give(site, "nameless", new[columns])
        mixed = pd.concat([new.iloc[:5], table().iloc[:1]])
        parties.give(site, "mixed", mixed[["id", *columns]], id="id")

    def predict(name: str) -> dict:
        return parties.run(run_inference, InferenceJob(model="job", data_set=name), name)

    succeed(predict("new"))
    predicted = pd.read_parquet(parties.run_folder("site-1", "new") / "predictions.parquet")
    active, second, third = parts(parties)
    merged = merge(active.booster, 1, [(1, second.table), (3, third.table)])
    matrix = xgb.DMatrix(new[["own", "age", "sex", "income"]].to_numpy(np.float32))
    matrix.feature_names = ["own", "site-2.f0", "site-2.f1", "site-3.f0"]
    expected = xgb.Booster(model_file=bytearray(merged)).predict(matrix)
    np.testing.assert_array_equal(predicted.prediction.to_numpy(np.float32), expected)
    for name in ("mixed", "nameless"):
        refusals = [o for o in predict(name).values() if not isinstance(o, JobAborted)]
        assert refusals and all("more of them than was paid for" in str(o) for o in refusals), name


def refused(parties: Parties, wrong: BucketJob, site: str, kind: type[Exception], text: str) -> None:
    """The job fails at this site for this reason, and no bucket has left anyone."""
    outcome = parties.run(run_site, wrong)[site]
    assert isinstance(outcome, kind), outcome
    assert text in str(outcome)
    assert not [t for t in parties.transfers if t.frame.kind.name == "CONVERSATION"]
    for passive in PASSIVE:
        policy = SitePolicy.load(parties.workspace(passive), passive)
        if (policy.ledgers / "credit.ledger").exists():
            assert ledger(parties, passive).spent().pure_epsilon == 0


def test_an_overdrawn_budget_is_refused(parties: Parties) -> None:
    refused(parties, job(epsilon=8.1), "site-2", PolicyRefusal, "would overdraw")
    # What the other passive party had reserved is free again.
    succeed(parties.run(run_site, job(epsilon=7.9), "another"))


def test_a_second_job_pays_again(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=5.0), "one"))
    outcomes = parties.run(run_site, job(epsilon=5.0), "two")
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    assert ledger(parties, "site-2").spent().pure_epsilon <= 5.0


def test_of_two_jobs_at_once_on_the_same_rows_under_two_names_one_sends(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ledger adds up two names: the second job ends although the first had sent nothing when it looked."""
    parties.n_sites = 2
    for site, columns in (("site-1", ["id", "own", "label"]), ("site-2", ["id", *PUBLIC["site-2"]])):
        parties.give(site, "again", table()[columns], id="id", **({"privacy": BUDGET} if site in PUBLIC else {}))
    looked, refuse = threading.Barrier(2), SentRows.refuse

    def refuse_both(sent: SentRows, ids: list[str] | None, data_set: str = "") -> None:
        refuse(sent, ids, data_set)
        looked.wait(TIMEOUT_S)

    monkeypatch.setattr(SentRows, "refuse", refuse_both)
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(parties.run, run_site, job(data_set=name), name) for name in ("credit", "again")}
        outcomes = {name: run.result() for name, run in runs.items()}
    (loser,) = [name for name, of_sites in outcomes.items() if isinstance(of_sites["site-2"], Exception)]
    assert "more of them than was paid for" in outcomes[loser]["site-2"].reason
    assert isinstance(outcomes[loser]["site-1"], JobAborted)
    (winner,) = set(outcomes) - {loser}
    succeed(outcomes[winner])
    assert ledger(parties, "site-2", loser).spent().pure_epsilon == 0
    assert ledger(parties, "site-2", winner).spent().pure_epsilon > 0


def test_persons_whom_another_budget_has_paid_for_are_not_sent(parties: Parties) -> None:
    """A private job on another data set of this site had them: no ledger adds both up."""
    parties.give("site-2", "august", table()[["id", "age"]], id="id", privacy=BUDGET)
    policy = SitePolicy.load(parties.workspace("site-2"), "site-2")
    PersonsOfBudgets(policy, policy.data_set("august")).note([str(table().id.iloc[3])])
    outcome = parties.run(run_site, job())
    assert "another budget pays" in outcome["site-2"].reason
    assert not SentRows(policy).sent([str(table().id.iloc[3])]).any()


def test_persons_whose_buckets_were_paid_for_belong_to_that_budget(parties: Parties) -> None:
    parties.give("site-2", "august", table()[["id", "age"]], id="id", privacy=BUDGET)
    succeed(parties.run(run_site, job()))
    policy = SitePolicy.load(parties.workspace("site-2"), "site-2")
    assert not PersonsOfBudgets(policy, policy.data_set("august")).are_new([str(table().id.iloc[3])]).any()


def test_a_data_set_without_budget_is_refused(parties: Parties) -> None:
    parties.give("site-3", "credit", table()[["id", "income"]], id="id")
    refused(parties, job(), "site-3", PolicyRefusal, "data_sets.credit.privacy")


def test_a_profile_that_the_site_does_not_allow_is_refused(parties: Parties) -> None:
    parties.set_policy("site-2", allowed_profiles=["masks"])
    refused(parties, job(), "site-2", PolicyRefusal, "dp_local")


def test_a_ledger_in_another_unit_is_refused(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=1.0), "one"))
    outcome = parties.run(run_site, job(epsilon=1.0, unit="row"), "two")["site-2"]
    assert isinstance(outcome, PolicyRefusal) and "neighbouring relation" in str(outcome)


def test_too_many_features_for_a_rows_epsilon_are_refused(parties: Parties) -> None:
    refused(parties, job(epsilon=0.19, unit="row"), "site-2", ConfigurationError, "almost at random")


def test_features_without_public_description_are_refused(parties: Parties) -> None:
    path = parties.workspace("site-2") / "inputs" / "bucket_features.json"
    for content, text in (
        ({"age": {"low": 0}}, "'age' has no usable public description"),
        ({"age": {"low": 2, "high": 1}}, "'age'"),
        ({"age": {"values": []}}, "'age'"),
        ({"age": {"low": 0, "high": 1, "values": [1]}}, "'age'"),
        ({"age": {"edges": [1, 1]}}, "'age'"),
        ({"age": {"edges": ["a"]}}, "'age'"),
        ({}, "describes no feature"),
        ({"height": {"low": 0, "high": 1}}, "no column 'height'"),
        ({"id": {"low": 0, "high": 1}}, "id column"),
    ):
        parties.give_input("site-2", path.name, content)
        refused(parties, job(), "site-2", ConfigurationError, text)
    path.unlink()
    refused(parties, job(), "site-2", PolicyRefusal, "inputs")


def test_other_rows_are_refused(parties: Parties) -> None:
    parties.give("site-3", "credit", table()[["id", "income"]].iloc[1:], id="id", privacy=BUDGET)
    refused(parties, job(), "site-3", ConfigurationError, "hold other rows")


def test_a_missing_id_column_is_refused(parties: Parties) -> None:
    parties.give("site-3", "credit", table()[["id", "income"]], privacy=BUDGET)
    refused(parties, job(), "site-3", ConfigurationError, "data_sets.credit.id")


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0},
        {"epsilon": float("nan")},
        {"edges_epsilon": 4.0},
        {"edges_epsilon": -1},
        {"unit": "person"},
        {"n_buckets": 1},
        {"n_buckets": 256},
        {"profile": "plain"},
        {"tracking": True},
        {"num_rounds": 0},
        {"features": []},
        {"alignment": ""},
        {"description": ""},
    ],
)
def test_impossible_jobs_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigurationError):
        job(**wrong)
    assert BucketJob.from_dict(job().to_dict()) == job()
    with pytest.raises(ConfigurationError, match="unknown"):
        BucketJob.from_dict({**job().to_dict(), "surprise": 1})
    with pytest.raises(ConfigurationError, match="lacks"):
        BucketJob.from_dict({"data_set": "x"})


# -- descriptions ------------------------------------------------------------------------------------------------------


GOOD = '{"a": {"low": 0, "high": 1}}'


def test_a_description_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(GOOD)
    assert Description.read(path).names == ("a",)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, GOOD.replace("1", "1" + "0" * 400), GOOD.replace("1", '"1"')]
)
def test_anything_else_is_refused_in_words(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError):
        Description.read(path)
