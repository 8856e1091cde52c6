"""Bagging over sites in threads: who gets what, who refuses what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.evidence.reader import ended_early, read_log
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.bagging import model as bagging_model
from nvflare_plugins.kinds.bagging import training as bagging_site
from nvflare_plugins.kinds.bagging.model import _NODE, SharedTree
from nvflare_plugins.kinds.bagging.training import run_bagging_site
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.wire.envelope import Kind
from tests.support import bagging
from tests.support.federation import Parties, succeed


def refused(parties: Parties, **changes: object) -> list[str]:
    outcomes = parties.run(run_bagging_site, bagging.job(**changes))
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values()), outcomes
    assert not list(parties.folder.rglob("model.json"))
    return [f"{type(outcome).__name__}: {outcome}" for outcome in outcomes.values()]


@pytest.mark.usefixtures("every_report")
def test_all_sites_end_with_one_model_and_evidence_of_sealed_trees(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path)
    results = succeed(parties.run(run_bagging_site, bagging.job()))
    assert len({result.hmac for result in results.values()}) == 1
    assert bagging.model(parties)
    for site in parties.sites:
        log = read_log(next((parties.run_folder(site) / "evidence").glob("*.jsonl")))
        kinds = {(message.kind, message.codec) for message in log.messages if message.private}
        assert ("OWN_TREES", "SEALED") in kinds and {codec for _, codec in kinds} == {"SEALED"}
        assert len({m.size for m in log.messages if m.kind == "OWN_TREES" and m.direction == "sent"}) == 1
        assert len([round_ for _, round_ in log.rounds]) == 4
        record = RunRecord.read(parties.run_folder(site))
        assert record.profile == "own_trees" and len(record.rounds) == 4 and record.registry
        report = (parties.run_folder(site) / "report.html").read_text()
        assert "EVERY OTHER SITE&#39;S OWN TREES" in report
        assert "the model carries no gains" in report and "0.0 %" not in report and "mean gain" not in report
    (found,) = verify([parties.run_folder(site) / "evidence" for site in parties.sites]).attempts
    assert found.failures == ("the log of server is missing",)
    assert not ended_early({("job", "first"): found.logs, ("job", "second"): found.logs}, "job", "first")


def test_the_server_reads_no_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    grow = bagging_model.grow

    def noted(*arguments: object) -> SharedTree:
        tree = grow(*arguments)
        sent.append(tree.nodes.tobytes())
        return tree

    monkeypatch.setattr(bagging_site, "grow", noted)
    parties = bagging.sites(tmp_path)
    succeed(parties.run(run_bagging_site, bagging.job()))
    seen = [bytes(t.frame.payload) for t in parties.transfers if t.frame.kind is Kind.OWN_TREES]
    assert len(sent) == 12 and seen
    # Sixteen bytes of a tree stand in no message by chance: 2^-128 for each place.
    assert not any(tree[start : start + 16] in payload for tree in sent for start in (0, 16, 32) for payload in seen)


def test_a_site_that_does_not_consent_ends_the_job_at_all(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path)
    parties.set_policy("site-2", consents={})
    reasons = refused(parties)
    assert any("PolicyRefusal" in r and "consents.share_own_trees" in r for r in reasons)
    assert not any(t.frame.kind is Kind.OWN_TREES for t in parties.transfers)


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ({"min_effective_rows": 200}, "min_effective_rows"),
        ({"min_sites": 4}, "min_sites"),
        ({"max_depth": 2}, "max_depth"),
        ({"max_rounds": 11}, "max_rounds"),
        ({"max_bins": 16}, "max_bins"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_a_policy_limits_is_refused(tmp_path: Path, policy: dict, key: str) -> None:
    parties = bagging.sites(tmp_path, **policy)
    reasons = refused(parties)
    assert any(key in reason for reason in reasons), reasons
    assert not any(t.frame.kind is Kind.OWN_TREES for t in parties.transfers)


def test_a_budgeted_data_set_takes_no_bagging(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path)
    parties.give("site-1", "train", bagging.rows(0, 120), privacy={"epsilon": 1.0, "delta": 1e-6})
    assert any("exact_use_of_budgeted_data" in reason for reason in refused(parties))


def test_sites_with_other_parameters_or_columns_do_not_train(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path)
    parties.give("site-3", "train", bagging.rows(2, 180).rename(columns={"a": "d"}))
    assert any("ConfigurationError" in reason for reason in refused(parties))
    assert not any(t.frame.kind is Kind.OWN_TREES for t in parties.transfers)


def test_leaves_hold_as_many_rows_as_their_own_site_asks_for(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path, min_rows_per_node=30)
    succeed(parties.run(run_bagging_site, bagging.job(num_rounds=2)))
    booster = xgb.Booster(model_file=bytearray(bagging.model(parties)))
    for number, site in enumerate(parties.sites):
        frame = bagging.rows(number, 120 + 30 * number)
        leaves = booster.predict(xgb.DMatrix(frame[["a", "b", "c"]]), pred_leaf=True).reshape(len(frame), -1)
        for tree in (number, 3 + number):
            assert np.unique(leaves[:, tree], return_counts=True)[1].min() >= 30, site


def test_changed_rows_are_refused_by_the_registry(tmp_path: Path) -> None:
    parties = bagging.sites(tmp_path)
    succeed(parties.run(run_bagging_site, bagging.job()))
    parties.give("site-1", "train", bagging.rows(0, 119))
    outcomes = parties.run(run_bagging_site, bagging.job(), "second")
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    assert any("recompute_with_changes" in str(outcome) for outcome in outcomes.values()), outcomes


LIES = {
    "short": lambda data: data[:-1],
    "not a tree": lambda data: data[:4] + bytes(4) + data[8:],
    "other column": lambda data: data[:12] + (99).to_bytes(4, "little") + data[16:],
    "no number": lambda data: data[:16] + np.float32(np.nan).tobytes() + data[20:],
    "too large": lambda data: SharedTree(np.array([(-1, -1, 0, 1e31, 0)], _NODE)).to_bytes(3),
}


@pytest.mark.parametrize("how", LIES)
def test_a_hostile_tree_ends_the_job_and_names_its_site_and_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    parties = bagging.sites(tmp_path)
    gather = SiteAttempt.gather_sealed

    def lie(attempt: SiteAttempt, purpose: str, content: bytes, *kind: Kind) -> list[bytes]:
        if attempt.channel.site == "site-2" and kind == (Kind.OWN_TREES,):
            content = LIES[how](content)
        return gather(attempt, purpose, content, *kind)

    monkeypatch.setattr(SiteAttempt, "gather_sealed", lie)
    reasons = refused(parties)
    told = [reason for reason in reasons if reason.startswith(ProtocolError.__name__)]
    assert told and all(reason.startswith("ProtocolError: site-2: a shared tree") for reason in told), reasons
    assert not any(word in reason for reason in reasons for word in ("nan", "99", "e+31"))
    logs = [read_log(path) for path in parties.folder.rglob("*.evidence.jsonl")]
    assert logs and all(log.end["status"] == "aborted" and not log.models for log in logs)
