"""The DPBoost job at all its sites: result, price, what the server and the sites see, refusals."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from dp_components.dpboost.ensemble_of_ensembles import DpBoostModel, SiteData, train
from dp_components.events import Release
from dp_components.ledger import Ledger
from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import JobResult
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.kinds.dpboost.job import KEPT_FILE, DpBoostJob
from nvflare_plugins.kinds.dpboost.server import HASH_BYTES, KEY_BYTES, DpBoostServer, KeptAnswers, steps
from nvflare_plugins.kinds.dpboost.training import run_dpboost_site, xgboost_model
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.wire.envelope import Codec, Frame, Kind, Phase, TrainingStep
from tests.support import frames
from tests.support.federation import Parties, succeed
from tests.support.seeded_randomness import SeededRandomness

BUDGET = {"epsilon": 9.0, "delta": 1e-6, "pure_epsilon": 8.0}
FIELDS = {
    "data_set": "rows",
    "label": "y",
    "epsilon": 2.0,
    "feature_bounds": {"a": [0, 1], "b": [0, 1]},
    "categories": {"c": ["red", "green", "blue"]},
    "n_trees": 4,
    "trees_per_ensemble": 2,
    "depth": 2,
    "learning_rate": 0.3,
    "n_candidates": 8,
}


def job(**changes: object) -> DpBoostJob:
    return DpBoostJob.from_dict({**FIELDS, **changes})


def table(n: int = 900) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"id": np.arange(n), "a": rng.random(n), "b": rng.random(n)})
    frame["c"] = np.array(["red", "green", "blue"])[rng.integers(0, 3, n)]
    frame["y"] = ((frame.a > 0.5) ^ (frame.c == "blue")).astype(int)
    frame["length"] = 10 + 10 * frame.a - 5 * (frame.c == "blue")
    frame.loc[::50, "b"] = np.nan
    return frame


@pytest.fixture
def sites(tmp_path: Path) -> Parties:
    parties = Parties(tmp_path, policy={"unsigned_sessions": True, "data_sets": {}, "allowed_profiles": ["dp_trusted"]})
    for number, site in enumerate(parties.sites):
        parties.give(site, "rows", table().iloc[number::3], id="id", privacy=BUDGET)
    return parties


def run(
    parties: Parties, wanted: DpBoostJob, job_id: str = "job", **options: object
) -> dict[str, JobResult | Exception]:
    server, spends = DpBoostServer(wanted, options.pop("randomness", SeededRandomness(1))), options.pop("spends", [])
    return parties.run(
        run_dpboost_site,
        wanted,
        job_id,
        on_sum=lambda frame, total: server.answer(frame, total, lambda *spend: spends.append(spend)),
        **options,
    )


def ledger(parties: Parties, site: str) -> Ledger:
    return Ledger(parties.workspace(site) / "veilboost_ledgers" / site / "rows.ledger")


def model_of(parties: Parties, job_id: str = "job") -> xgb.Booster:
    models = {(parties.run_folder(site, job_id) / "model.json").read_bytes() for site in parties.sites}
    assert len(models) == 1
    return xgb.Booster(model_file=bytearray(models.pop()))


def features(frame: pd.DataFrame) -> xgb.DMatrix:
    coded = frame[["a", "b"]].assign(c=pd.Categorical(frame.c, ["red", "green", "blue"]).codes)
    return xgb.DMatrix(coded.to_numpy(np.float32), feature_names=["a", "b", "c"])


def without_ledger(_: str, make: Callable[[], Release]) -> np.ndarray:
    return make().value


@pytest.mark.parametrize(
    "fields", [{}, {"label": "length", "label_bounds": [0, 25], "start_share": 0.1}], ids=["two classes", "regression"]
)
def test_sites_and_server_grow_the_trees_that_the_components_grow_in_one_place(sites: Parties, fields: dict) -> None:
    """The naive twin: the same rows and noise in ``dp_components``' own loop.

    The key of the rows' assignment is the session's; with one tree per ensemble it does not matter, as every row is in
    every tree.
    """
    wanted = job(variant="seq", n_trees=3, **fields)
    succeed(run(sites, wanted, randomness=SeededRandomness(7)))
    data = []
    for number, site in enumerate(sites.sites):
        part = table().iloc[number::3]
        columns = part[["a", "b"]].assign(c=pd.Categorical(part.c, ["red", "green", "blue"]).codes)
        label, ids = part[wanted.label].to_numpy(float), part.id.astype(str).tolist()
        data.append(SiteData(site, columns.to_numpy(np.float32).T, label, ids))
    twin = train(
        data, wanted.candidates(), wanted.loss(), wanted.plan(), bytes(32), without_ledger, SeededRandomness(7)
    )
    expected = xgb.Booster(model_file=bytearray(xgboost_model(twin, wanted.names))).predict(features(table()))
    np.testing.assert_array_equal(model_of(sites).predict(features(table())), expected)
    assert ledger(sites, "site-1").spent().pure_epsilon == pytest.approx(2.0, rel=1e-6)


def test_every_ensemble_is_paid_for_once_and_the_evidence_says_so(sites: Parties) -> None:
    spends: list[tuple] = []
    outcomes = succeed(run(sites, job(), spends=spends))
    assert len({outcome.hmac for outcome in outcomes.values()}) == 1
    for site in sites.sites:
        spent = ledger(sites, site).spent().pure_epsilon
        assert 2.0 * (1 - 1e-6) < spent <= 2.0 and " closed " in ledger(sites, site).describe()
    assert [round(spend[2], 6) for spend in spends] == [1, 1, 2, 2]  # two ensembles of two trees
    record = RunRecord.read(sites.run_folder("site-1"))
    assert [round(y, 6) for _, y in record.sections[1].curves[0].points] == [1, 1, 2, 2]
    assert "server sees exact sums" in " ".join(record.sections[0].paragraphs)


def test_no_frame_holds_one_sites_sums_and_the_reply_holds_no_sum(sites: Parties) -> None:
    wanted = job()
    n_bins = sum(n + 1 for n in wanted.candidates().counts)
    succeed(run(sites, wanted))
    contributions = [
        np.frombuffer(t.frame.payload, "<i8")
        for t in sites.transfers
        if t.frame.kind in (Kind.HISTOGRAM, Kind.NODE_STATS) and t.direction == "received"
    ]
    assert len(contributions) == 3 * 4 * 3
    assert all(np.abs(values.astype(float)).max() > 2.0**55 for values in contributions)  # masked: uniform words
    sizes = {len(t.frame.payload) for t in sites.transfers if t.frame.kind is Kind.HISTOGRAM and t.direction == "sent"}
    assert sizes == {8, 16} and n_bins > 2


def test_a_person_with_more_rows_gets_the_epsilon_of_the_job(sites: Parties) -> None:
    site = "site-2"
    sites.give(site, "rows", table().iloc[1::3], id="id", privacy={**BUDGET, "rows_per_person": 2})
    outcome = run(sites, job())[site]
    assert isinstance(outcome, PolicyRefusal) and "rows_per_person" in str(outcome)
    succeed(run(sites, job(rows_per_person=2), "again"))
    assert ledger(sites, site).spent().pure_epsilon == pytest.approx(2.0, rel=1e-6)
    assert ledger(sites, "site-1").spent().pure_epsilon == pytest.approx(1.0, rel=1e-6)


def refused(parties: Parties, wanted: DpBoostJob, site: str, kind: type[Exception], text: str) -> None:
    outcome = run(parties, wanted)[site]
    assert isinstance(outcome, kind) and text in str(outcome), outcome
    assert not [t for t in parties.transfers if t.frame.kind in (Kind.HISTOGRAM, Kind.NODE_STATS)]
    for other in parties.sites:
        path = parties.workspace(other) / "veilboost_ledgers" / other / "rows.ledger"
        assert not path.exists() or ledger(parties, other).spent().pure_epsilon == 0


def test_an_overdrawn_budget_is_refused_and_the_others_reservation_is_free_again(sites: Parties) -> None:
    sites.give("site-3", "rows", table().iloc[2::3], id="id", privacy={**BUDGET, "pure_epsilon": 1.0})
    refused(sites, job(), "site-3", PolicyRefusal, "would overdraw")
    sites.give("site-3", "rows", table().iloc[2::3], id="id", privacy=BUDGET)
    succeed(run(sites, job(epsilon=7.9), "next"))


def test_refusals_before_anything_is_released(sites: Parties) -> None:
    part = table().iloc[::3]
    for changes, facts, kind, text in (
        ({}, {"id": "id"}, PolicyRefusal, "data_sets.rows.privacy"),
        ({}, {"id": "id", "privacy": {"epsilon": 9.0, "delta": 1e-6}}, PolicyRefusal, "would overdraw"),
        ({}, {"privacy": BUDGET}, ConfigurationError, "data_sets.rows.id"),
        ({"label": "id"}, {"id": "id", "privacy": BUDGET}, ConfigurationError, "id column"),
    ):
        sites.give("site-1", "rows", part, **facts)
        refused(sites, job(**changes), "site-1", kind, text)
        forget(sites)
    sites.set_policy("site-1", allowed_profiles=["dp_distributed"])
    refused(sites, job(), "site-1", PolicyRefusal, "dp_trusted")


def forget(parties: Parties) -> None:
    """Forget the failed attempt, so that the next one may have the same job id."""
    for site in parties.sites:
        shutil.rmtree(parties.workspace(site) / "runs", ignore_errors=True)


def test_a_server_that_answers_with_what_cannot_be_is_found_out(sites: Parties) -> None:
    for number, wrong in enumerate((b"\xff" * 8, (999).to_bytes(8, "little"), b"", bytes(16))):
        outcomes = sites.run(run_dpboost_site, job(), f"job-{number}", on_sum=lambda frame, total, w=wrong: w)
        assert isinstance(outcomes["site-1"], ProtocolError), outcomes["site-1"]


def frame(wanted: DpBoostJob, **changes: object) -> Frame:
    first = next(steps(wanted))
    n_bins = sum(n + 1 for n in wanted.candidates().counts)
    facts = {"kind": first.kind, "moment": first.moment, "counter": 9, "n_values": math.prod(first.shape(n_bins))}
    return frames.frame(**{**facts, **changes})


def test_the_server_answers_only_what_the_plan_pays_for() -> None:
    wanted = job()
    good = frame(wanted)
    zeros = bytes(8 * good.n_values)
    for changes in (
        {"kind": Kind.NODE_STATS},
        {"kind": Kind.ROOT_SUM},
        {"moment": TrainingStep(Phase.UPDATE, 1)},
        {"codec": Codec.PLAIN},
        {"n_values": good.n_values - 1},
        {"n_values": 2 * good.n_values},
    ):
        with pytest.raises(ProtocolError, match="pays for no such sum"):
            DpBoostServer(wanted).answer(frame(wanted, **changes), zeros, print)
    sums = np.zeros((2, good.n_values // 2), dtype="<i8")
    for grad, count in ((-1, -1), (1, 0), (-(1 << 20) - 1, 1), (0, 1 << 29), (-(2**63), 5)):
        sums[:, 0] = grad, count
        with pytest.raises(ProtocolError, match="no sums over rows"):
            DpBoostServer(wanted).answer(good, sums.tobytes(), print)
    server = DpBoostServer(wanted)
    assert len(server.answer(good, zeros, print)) == 8
    with pytest.raises(ProtocolError):
        server.answer(good, zeros, print)  # a second answer to the same sums would cost again


def test_the_model_for_xgboost_predicts_the_same() -> None:
    for loss_fields in ({}, {"label_bounds": [-3, 9]}, {"label_bounds": [-3, 9], "start_share": 0.2}):
        wanted = job(**loss_fields)
        rng = np.random.default_rng(5)
        x = np.stack([rng.random(500), rng.random(500), rng.integers(0, 3, 500)]).astype(np.float32)
        y = (x[0] > 0.4).astype(float)
        cuts: Candidates = wanted.candidates()
        rows = SiteData("s", x, y, [str(i) for i in range(500)])
        model: DpBoostModel = train(
            [rows], cuts, wanted.loss(), wanted.plan(), bytes(32), without_ledger, SeededRandomness(2)
        )
        x[1, ::7] = np.nan
        predicted = xgb.Booster(model_file=bytearray(xgboost_model(model, wanted.names))).predict(
            xgb.DMatrix(x.T, feature_names=wanted.names)
        )
        np.testing.assert_allclose(predicted, model.predict(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0},
        {"epsilon": float("inf")},
        {"feature_bounds": {}, "categories": {}},
        {"features": ["a", "z"]},
        {"features": ["a"]},
        {"feature_bounds": {"a": [1, 1]}},
        {"categories": {"a": ["x", "y"]}},
        {"categories": {"c": ["x"]}},
        {"label_bounds": [3, 3]},
        {"label_bounds": [0, 1], "label_classes": ["n", "y"]},
        {"variant": "other"},
        {"depth": 13},
        {"learning_rate": 1.0},
        {"n_trees": 0},
        {"n_candidates": 0},
        {"rows_per_person": 0},
        {"profile": "masks"},
        {"tracking": True},
        {"n_trees": 400, "trees_per_ensemble": 400},
        {"eval_metric": "auc"},
        {"start_share": 0.1},
        {"start_share": 1, "label_bounds": [0, 1]},
    ],
)
def test_impossible_jobs_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigurationError):
        job(**wrong)
    assert DpBoostJob.from_dict(job().to_dict()) == job()


def test_a_site_without_a_usable_row_takes_part(sites: Parties) -> None:
    """A refusal would tell whether there is one."""
    for number, part in enumerate((table().iloc[:0], table().iloc[:2].assign(y=7))):
        sites.give("site-1", "rows", part, id="id", privacy=BUDGET)
        succeed(run(sites, job(), f"job-{number}"))


# -- what is kept ------------------------------------------------------------------------------------------------------


KEYS = [bytes([n]) * KEY_BYTES for n in range(3)]
OFFER_BYTES = KEY_BYTES + 8 + HASH_BYTES
answer_lists = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), max_size=5)


class Sites:
    """Other sites: their answers to whatever is gathered."""

    def __init__(self, *answers: bytes, rank: int = 0) -> None:
        self.channel, self.answers, self.n_gathered = SimpleNamespace(rank=rank), answers, 0

    def gather_sealed(self, purpose: str, content: bytes) -> list[bytes]:
        self.n_gathered += 1
        return [content if rank == self.channel.rank else other for rank, other in enumerate(self.answers)]


def kept(folder: Path, *answers: list[int], key: bytes = KEYS[1]) -> KeptAnswers:
    one = KeptAnswers(folder, is_kept=True)
    one.agree(Sites(b""), [b""], key)
    for answer in answers:
        one.add(np.array(answer, dtype=np.int64))
    return KeptAnswers(folder, is_kept=True)


@given(answer_lists)
def test_what_is_kept_is_read_back(answers: list[list[int]]) -> None:
    with TemporaryDirectory() as folder:
        again = kept(Path(folder), *answers)
        assert again.key == KEYS[1] and (Path(folder) / KEPT_FILE).stat().st_mode & 0o777 == 0o600
        assert [again.take(len(answer)).tolist() for answer in answers] == answers
        assert again.take(1) is None
        again.drop()
        assert KeptAnswers(Path(folder), is_kept=True).offer() == b""


@given(st.binary(max_size=200))
def test_a_file_of_any_other_bytes_counts_as_lost(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / KEPT_FILE).write_bytes(content)
        one = KeptAnswers(Path(folder), is_kept=True)
        assert one.key == one.offer() == b"" and one.take(1) is None


def test_a_job_that_does_not_wait_keeps_and_reads_nothing(tmp_path: Path) -> None:
    kept(tmp_path, [1, 2])
    one = KeptAnswers(tmp_path, is_kept=False)
    assert one.offer() == b"" and one.take(1) is None
    content = (tmp_path / KEPT_FILE).read_bytes()
    one.agree(Sites(b""), [b""], KEYS[2])
    one.add(np.array([3]))
    assert one.key == KEYS[2] and (tmp_path / KEPT_FILE).read_bytes() == content


def test_a_site_takes_what_another_one_holds_and_keeps_it(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    one, two, three = (kept(tmp_path / name, *([[7], [8, 9]][:n])) for n, name in enumerate(("one", "two", "three")))
    offers = [site.offer() for site in (one, two, three)]
    for rank, site in enumerate((one, two, three)):
        site.agree(Sites(b"", b"", three._answers, rank=rank), offers, KEYS[2])
    for name in ("one", "two", "three"):
        again = KeptAnswers(tmp_path / name, is_kept=True)
        assert (again.key, again.take(1).tolist(), again.take(2).tolist()) == (KEYS[1], [7], [8, 9])


def test_sites_that_hold_the_same_give_each_other_nothing(tmp_path: Path) -> None:
    one, sites = kept(tmp_path, [7]), Sites(b"", b"")
    one.agree(sites, [one.offer()] * 2, KEYS[2])
    assert sites.n_gathered == 0


@given(st.lists(st.one_of(st.binary(max_size=OFFER_BYTES + 9), st.binary(min_size=OFFER_BYTES, max_size=OFFER_BYTES))))
def test_any_other_accounts_of_sites_are_refused(offers: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        one = kept(Path(folder), [7])
        own = one.offer()
        others = [offer for offer in offers if offer not in (b"", own)]
        try:
            one.agree(Sites(b"", *others), [own, *others], KEYS[2])
        except ProtocolError:
            return
        assert not others


def test_different_keys_or_answers_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    one, two = kept(tmp_path / "one", [7]), kept(tmp_path / "two", [7, 8], key=KEYS[2])
    with pytest.raises(ProtocolError, match="different keys"):
        one.agree(Sites(b"", b""), [one.offer(), two.offer()], KEYS[0])
    three = kept(tmp_path / "three", [6, 8])
    with pytest.raises(ProtocolError, match="different answers"):
        one.agree(Sites(b"", three._answers), [one.offer(), three.offer()], KEYS[0])
    with pytest.raises(ProtocolError, match="different answers"):  # not what was announced
        one.agree(Sites(b"", b""), [one.offer(), kept(tmp_path / "three", [7, 8]).offer()], KEYS[0])


def test_answers_that_end_in_the_midst_of_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="in the midst"):
        kept(tmp_path, [7]).take(2)
