"""Training again on buckets that were paid for: same answers, no charge, no contact; what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.evidence import audit
from nvflare_plugins.evidence.format import PAID_IN
from nvflare_plugins.kinds.federboost_vertical import tables as bucket_tables
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.payment import FILE_NAME, KeptBuckets, KeptEdges
from nvflare_plugins.kinds.federboost_vertical.tables import BucketBlock, OwnedSplits, blocks_of, divide_model, joined
from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters, run_site, train_on_buckets
from nvflare_plugins.kinds.vertical.model import ActivePart, find_part, mask_columns, merge
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy import SitePolicy
from tests.support.federation import Parties, succeed
from tests.support.refusals import refused_for
from tests.unit.nvflare_plugins.federboost_vertical import test_bucket_site as first
from tests.unit.nvflare_plugins.federboost_vertical.test_bucket_site import PASSIVE, job, ledger, parties, table

__all__ = ["parties"]  # the fixture
IDS = b"ids"


def again(**changes: object) -> BucketJob:
    return job(epsilon=6.0, buckets_from="job", **changes)


def alone(parties: Parties, wanted: BucketJob, job_id: str = "again") -> dict:
    parties.n_sites = 1
    try:
        return parties.run(run_site, wanted, job_id)
    finally:
        parties.n_sites = 3


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_active_party_trains_again_alone_without_a_charge(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    before = {site: everything(parties.workspace(site)) for site in PASSIVE}
    parties.transfers.clear()
    outcome = succeed(alone(parties, again()))["site-1"]
    assert {site: everything(parties.workspace(site)) for site in PASSIVE} == before, "nobody else was there"
    assert not [t for t in parties.transfers if t.frame.kind.name == "CONVERSATION"]
    folder = parties.run_folder("site-1", "again")
    assert str(folder / "model.json") in outcome.message and outcome.summary == {"n_rounds": 8}
    model = xgb.Booster(model_file=folder / "model.json")
    assert model.feature_names == ["own", "site-2.f0.bucket", "site-2.f1.bucket", "site-3.f0.bucket"]
    # The model of the first job is this one, with true values in the place of buckets, in three hands.
    part = find_part(parties.workspace("site-1") / "runs", parties.folder, "job", "site-1", ActivePart).part
    earlier = xgb.Booster(model_file=bytearray(part.booster)).trees_to_dataframe()
    leaves = earlier.Feature == "Leaf"
    assert earlier.Gain[leaves].tolist() == model.trees_to_dataframe().Gain[leaves].tolist()
    record = RunRecord.read(folder)
    assert record.settings["buckets_from"] == "job" and "charged nothing" in record.sections[0].paragraphs[0]
    assert "answers of later predictions" in record.sections[0].paragraphs[1]


def test_other_parameters_are_tried_alone_and_shown_by_cross_validation(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    before = np.random.get_state()[1].tolist()
    succeed(alone(parties, replace(again(num_rounds=20), params={"objective": "binary:logistic", "eta": 0.1})))
    assert np.random.get_state()[1].tolist() == before
    [loss, auc] = RunRecord.read(parties.run_folder("site-1", "again")).sections[1].rows
    assert auc[0] == "auc" and 0.85 < float(auc[1]) < 1 and loss[0] == "logloss" and 0 < float(loss[1]) < 0.6


def test_all_parties_get_their_splits_of_another_model_and_pay_nothing(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0, edges_epsilon=1.0)))
    spent = {site: ledger(parties, site).spent() for site in PASSIVE}
    for site in PASSIVE:  # none of their values is looked at: only whether the rows are the same
        frame = table()[["id", *first.PUBLIC[site]]]
        frame[list(first.PUBLIC[site])] = 0.0
        parties.give(site, "credit", frame, id="id", privacy=first.BUDGET)
    outcomes = succeed(parties.run(run_site, again(edges_epsilon=1.0, num_rounds=20), "again"))
    assert len({outcome.hmac for outcome in outcomes.values()}) == 1
    assert {site: ledger(parties, site).spent() for site in PASSIVE} == spent
    assert first.merged_accuracy(parties, "again") > 0.8
    assert all(first.parts(parties, "again")[rank].table for rank in (1, 2))
    policy = SitePolicy.load(parties.workspace("site-2"), "site-2")
    with refused_for("more of them than was paid for"):
        SentRows(policy).refuse(["p3"])


def refusal(parties: Parties, wanted: BucketJob, site: str = "site-1") -> str:
    outcome = parties.run(run_site, wanted, "again")[site]
    assert isinstance(outcome, VeilBoostError), outcome
    return getattr(outcome, "reason", str(outcome))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epsilon": 5.0}, "epsilon"),
        ({"unit": "row"}, "unit"),
        ({"n_buckets": 8}, "n_buckets"),
        ({"edges_epsilon": 1.0, "epsilon": 7.0}, "epsilon, edges_epsilon"),
    ],
)
def test_other_terms_than_were_paid_for_are_refused(parties: Parties, changes: dict, named: str) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    for site in parties.sites:
        assert f"{named} differ from job job" in refusal(parties, replace(again(), **changes), site)


def test_other_rows_than_the_buckets_are_of_are_refused(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    parties.give("site-1", "credit", table()[["id", "own", "label"]].iloc[1:], id="id")
    outcome = alone(parties, again())["site-1"]
    assert "other rows" in outcome.reason and "p0" not in outcome.reason
    parties.give("site-1", "credit", table().assign(id=lambda f: "q" + f.id)[["id", "own", "label"]], id="id")
    assert "other rows" in alone(parties, again(), "third")["site-1"].reason


def test_a_passive_party_whose_rows_changed_ends_the_job(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    parties.give("site-3", "credit", table()[["id", "income"]].iloc[1:], id="id", privacy=first.BUDGET)
    assert "hold other rows" in refusal(parties, again())


def test_some_of_the_parties_are_refused(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    parties.n_sites = 2
    assert "let all of them take part" in refusal(parties, again())


def test_without_kept_buckets_the_job_is_refused(parties: Parties) -> None:
    for site in parties.sites:
        assert "has kept no buckets of job" in refusal(parties, replace(again(), buckets_from="another"), site)
    assert "at least one other party" in str(alone(parties, job(), "third")["site-1"])


def test_the_policy_of_the_active_party_holds(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    parties.set_policy("site-1", allowed_profiles=["masks"])
    outcome = alone(parties, again())["site-1"]
    assert isinstance(outcome, PolicyRefusal) and "dp_local" in str(outcome)
    parties.set_policy("site-1", allowed_profiles=["dp_local"])
    parties.give("site-1", "credit", table()[["id", "own", "label"]], id="id", privacy=first.BUDGET)
    assert "exact_use_of_budgeted_data" in str(alone(parties, again(), "third")["site-1"])


def test_a_copy_in_the_input_folder_stands_in_for_a_run_that_is_gone(parties: Parties) -> None:
    succeed(parties.run(run_site, job(epsilon=6.0)))
    kept = parties.run_folder("site-1") / FILE_NAME
    assert kept.stat().st_mode & 0o777 == 0o600
    (parties.workspace("site-1") / "inputs").mkdir()
    kept.rename(parties.workspace("site-1") / "inputs" / "job.site-1.buckets")
    succeed(alone(parties, again()))


def test_evidence_of_one_site_is_sound_only_where_it_says_which_job_has_paid_and_nothing_was_sent() -> None:
    def complaints(protection: dict[str, str], parts: tuple = ()) -> list[str]:
        session = {"sites": ["site-1"], "protection": protection}
        logs = [SimpleNamespace(site="server", session=None, parts=())]
        logs.append(SimpleNamespace(site="site-1", session=session, parts=parts))
        return list(audit._parties(logs, (), ended_early=False))  # type: ignore[arg-type]

    assert complaints({PAID_IN: "job"}) == []
    for of_one in (complaints({"epsilon": "4"}), complaints({PAID_IN: "job"}, ("buckets",))):
        assert of_one == ["a job has at least two sites; these logs know of one"]


# -- the files ---------------------------------------------------------------------------------------------------------


def context_of(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(runs=folder, site="site-1", policy=SimpleNamespace(inputs=folder / "none"))


def buckets() -> KeptBuckets:
    ids = np.arange(12, dtype=np.uint8).reshape(2, 6) % 4
    return KeptBuckets(("b", "a"), (("f0", "f1"), ()), (BucketBlock((4, 4), ids), BucketBlock((), ids[:0])))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "job").mkdir()
    buckets().write(folder / "job", again(), IDS)
    return folder


def test_what_was_written_is_read(kept: Path) -> None:
    found = KeptBuckets.read(again(), context_of(kept), IDS)  # type: ignore[arg-type]
    assert (found.sites, found.aliases) == (buckets().sites, buckets().aliases)
    for ours, theirs in zip(found.blocks, buckets().blocks, strict=True):
        assert ours.n_buckets == theirs.n_buckets and np.array_equal(ours.ids, theirs.ids)


def test_edges_are_read_to_the_last_bit(tmp_path: Path) -> None:
    cuts = np.sort(np.random.default_rng(1).normal(size=15).astype(np.float32))
    edges = KeptEdges(("age", "sex"), ("f0", "s"), Candidates((cuts, np.empty(0, dtype=np.float32))))
    (tmp_path / "job").mkdir()
    edges.write(tmp_path / "job", again())
    found = KeptEdges.read(again(), context_of(tmp_path))  # type: ignore[arg-type]
    assert (found.names, found.aliases) == (edges.names, edges.aliases)
    assert all(np.array_equal(a, b) for a, b in zip(found.edges.of_feature, edges.edges.of_feature, strict=True))


@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 400))
def test_damaged_files_are_refused_or_read_as_what_they_are(kept: Path, at: int, byte: int, cut: int) -> None:
    path = kept / "job" / FILE_NAME
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[at % len(whole)] = byte
    try:
        for content in (bytes(changed), whole[: cut % len(whole)], whole + b"x"):
            path.write_bytes(content)
            for read in readers():
                try:
                    read(again(), context_of(kept))
                except VeilBoostError as error:
                    assert isinstance(error, ConfigurationError)
                else:
                    assert content is not None and len(content) == len(whole)
    finally:
        path.write_bytes(whole)


def readers() -> list[Callable]:
    return [lambda j, c: KeptBuckets.read(j, c, IDS), KeptEdges.read]


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"terms": 3},
        {"terms": {}, "parties": []},
        {"parties": [["a", ["f0"], -4]], "rows": "", "n_rows": 1},
        {"parties": "x", "n_rows": "y"},
        {"names": ["a"], "aliases": ["a"], "edges": [[2.0, 1.0]]},
        {"names": ["a"], "aliases": [], "edges": [[1.0]]},
        {"names": ["a"], "aliases": ["a"], "edges": [["x"]]},
        {"names": 3, "aliases": ["a"], "edges": [[1e300]]},
    ],
)
def test_headers_that_say_something_else_are_refused(tmp_path: Path, header: object) -> None:
    from nvflare_plugins.kinds.federboost_vertical.payment import terms_of

    if isinstance(header, dict):
        header = {"terms": terms_of(again()), **header}
    text = json.dumps(header).encode()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / FILE_NAME).write_bytes(b"VLBK1" + len(text).to_bytes(4, "little") + text)
    for read in readers():
        with pytest.raises(ConfigurationError):
            read(again(), context_of(tmp_path))


# -- buckets and splits on the wire, and the division of a model trained on buckets ------------------------------------


EDGES = (
    Candidates((np.array([0.2, 0.5, 0.8], np.float32), np.array([0.0], np.float32))),
    Candidates((np.linspace(-1, 1, 15).astype(np.float32),)),
)


def block(n_rows: int = 5) -> BucketBlock:
    rng = np.random.default_rng(1)
    return BucketBlock((4, 2), np.stack([rng.integers(0, 4, n_rows), rng.integers(0, 2, n_rows)]).astype(np.uint8))


def test_a_block_survives_the_wire() -> None:
    read = BucketBlock.from_bytes(block().to_bytes(), 5, 2)
    assert read.n_buckets == (4, 2)
    np.testing.assert_array_equal(read.ids, block().ids)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_block_or_refused(data: bytes) -> None:
    for read in (lambda: BucketBlock.from_bytes(data, 5, 2), lambda: OwnedSplits.from_bytes(data)):
        with contextlib.suppress(ProtocolError):
            read()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[:-1],
        lambda d: d + b"\0",
        lambda d: b"X" + d[1:],
        lambda d: d[:4] + b"\2" + d[5:],
        lambda d: d[:-1] + b"\2",
        lambda d: d[:15] + b"\0" + d[16:],
    ],
)
def test_changed_blocks_are_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ProtocolError):
        BucketBlock.from_bytes(change(block().to_bytes()), 5, 2)


@pytest.mark.parametrize(("n_rows", "n_features"), [(4, 2), (6, 2), (5, 1), (5, 3)])
def test_blocks_of_other_shapes_are_refused(n_rows: int, n_features: int) -> None:
    with pytest.raises(ProtocolError):
        BucketBlock.from_bytes(block().to_bytes(), n_rows, n_features)


def test_many_features_travel_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_tables, "BLOCK_BYTES", 20)
    assert blocks_of(7, 5) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert blocks_of(100, 2) == [slice(0, 1), slice(1, 2)] and blocks_of(7, 0) == [slice(0, 0)]
    whole = joined([block(), block()])
    assert whole.n_buckets == (4, 2, 4, 2) and whole.ids.shape == (4, 5)


def trained(n_rows: int = 3000) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, bytes]:
    """A model on one own column (with missing values) and three of two other parties, as buckets."""
    rng = np.random.default_rng(3)
    own = rng.random((1, n_rows)).astype(np.float32)
    own[0, rng.random(n_rows) < 0.1] = np.nan
    others = [rng.uniform(-0.5, 1.5, (2, n_rows)).astype(np.float32), rng.normal(size=(1, n_rows)).astype(np.float32)]
    others[0][1, rng.random(n_rows) < 0.2] = np.nan
    label = (np.nan_to_num(own[0]) + others[0][0] * others[1][0] > 0.5).astype(np.float32)
    blocks = [BucketBlock(tuple(n + 1 for n in e.counts), e.bin_rows(x)) for e, x in zip(EDGES, others, strict=True)]
    parameters = check_bucket_parameters({"objective": "binary:logistic", "max_depth": 4}, 16)
    return own, others, label, train_on_buckets(own, label, blocks, parameters, 12, cores=2)


def test_a_divided_model_predicts_true_values_as_the_trained_one_predicts_buckets() -> None:
    """The naive twin: put every row into its buckets, and let the model that was trained on buckets predict them."""
    own, others, label, model = trained()
    on_buckets = np.concatenate([own, *(e.bin_rows(x) for e, x in zip(EDGES, others, strict=True))]).T
    expected = xgb.Booster(model_file=bytearray(model)).predict(xgb.DMatrix(on_buckets.astype(np.float32)))
    assert np.mean((expected > 0.5) == label) > 0.85
    masked, splits = divide_model(model, 1, [2, 1])
    assert sum(len(s.entries) for s in splits) > 20 and all(len(s.entries) for s in splits)
    mask_columns(masked, 1, ["own", "b.f0", "b.f1", "c.f0"])  # refuses thresholds of others
    tables = [OwnedSplits.from_bytes(s.to_bytes()).private_table(e) for s, e in zip(splits, EDGES, strict=True)]
    merged = merge(masked, 1, [(1, tables[0]), (3, tables[1])])
    true_values = np.concatenate([own, *others]).T
    predicted = xgb.Booster(model_file=bytearray(merged)).predict(xgb.DMatrix(true_values))
    np.testing.assert_array_equal(predicted, expected)


def test_values_on_an_edge_stay_in_their_bucket() -> None:
    splits = OwnedSplits(np.array([[0, 0, 0, 1]], np.uint32))
    split = splits.private_table(EDGES[0])[0, 0]
    edge = EDGES[0].of_feature[0][1]
    values = np.array([edge, np.nextafter(edge, np.float32(9)), np.nan, -5], np.float32)
    assert split.goes_left(values).tolist() == [True, False, False, True]


@pytest.mark.parametrize("entries", [[[0, 0, 2, 0]], [[0, 0, 0, 3]], [[0, 1, 0, 0], [0, 1, 1, 0]]])
def test_impossible_splits_are_refused(entries: list[list[int]]) -> None:
    with pytest.raises(ProtocolError, match="cannot have"):
        OwnedSplits(np.array(entries, np.uint32)).private_table(EDGES[0])


def test_parameters_that_do_not_fit_buckets_are_refused() -> None:
    for wrong in ({"max_bin": 8}, {"monotone_constraints": [1]}, {"booster": "dart"}, {"objective": "survival:cox"}):
        with pytest.raises(ConfigurationError):
            check_bucket_parameters(wrong, 16)
    with pytest.raises(ConfigurationError, match="rank:ndcg is refused"):
        BucketJob("toy", "site-1", "label", params={"objective": "rank:ndcg"}, num_rounds=3, epsilon=4.0)
