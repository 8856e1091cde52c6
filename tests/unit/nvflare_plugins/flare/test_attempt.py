"""The server's side of an attempt, with sites that finish, fail, vanish and lie."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from he_processors.errors import JobAborted, ProtocolError
from nvflare_plugins.flare.attempt import (
    COMPLETED,
    FAILED,
    ServerAttempt,
    SiteReport,
    printable,
)
from nvflare_plugins.flare.transport import SiteTransport
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.evidence_format import export_name
from nvflare_plugins.wire.evidence_reader import read_log
from tests.support.flare_network import FakeCell, Network

SITES = ("site-1", "site-2", "site-3")
GOOD = SiteReport(COMPLETED, model_hmac="ab" * 32, summary={"n_rounds": 2}, evidence=b"log\n")


class Federation:
    def __init__(self, folder: Path, deadline_s: float = 60.0) -> None:
        network = Network()
        cells = {site: f"{site}.job" for site in SITES}
        self.folder = folder
        self.attempt = ServerAttempt(
            cell=FakeCell(network, "server.job"), site_cells=cells, job_id="job", profile="masks",
            deadline_s=deadline_s, folder=folder,
        )  # fmt: skip
        self.channels = {
            site: Channel(
                site, SITES, "job", bytes.fromhex(self.attempt.attempt),
                SiteTransport(FakeCell(network, name, site), "server.job", self.attempt.attempt), 20.0,
            )
            for site, name in cells.items()
        }  # fmt: skip

    def gather(self, *sites: str) -> dict[str, object]:
        results: dict[str, object] = {}

        def run(site: str) -> None:
            try:
                results[site] = self.channels[site].gather(Kind.CLOSING, site.encode())
            except (JobAborted, ProtocolError) as error:
                results[site] = error

        threads = [threading.Thread(target=run, args=[site]) for site in sites]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(tmp_path / "veilboost")


def test_good_attempt_leaves_evidence_and_summary(federation: Federation) -> None:
    assert all(result == [b"site-1", b"site-2", b"site-3"] for result in federation.gather(*SITES).values())
    for site in SITES:
        federation.attempt.add_report(site, GOOD.to_dict())
    assert federation.attempt.missing == [] and federation.attempt.finish() is None
    assert federation.summary()["status"] == COMPLETED
    assert federation.summary()["sites"]["site-2"]["summary"] == {"n_rounds": 2}
    evidence = federation.folder / "evidence"
    assert (evidence / export_name("site-1")).read_bytes() == b"log\n"
    log = read_log(evidence / export_name("server"))
    assert log.completed and [m.direction for m in log.messages] == ["received"] * 3 + ["sent"]


def test_first_failure_reaches_every_site_in_the_failing_sites_words(federation: Federation) -> None:
    report = SiteReport(FAILED, "site-2 has column 'age2' where this site has 'age'").to_dict()
    threading.Timer(0.1, federation.attempt.add_report, ["site-2", report]).start()
    results = federation.gather("site-1", "site-3")
    expected = "site-2: site-2 has column 'age2' where this site has 'age'"
    assert {str(error) for error in results.values()} == {expected}
    federation.attempt.add_report("site-1", SiteReport(FAILED, "another story").to_dict())
    federation.attempt.add_report("site-3", SiteReport(FAILED, "a third one").to_dict())
    assert federation.attempt.finish() == expected
    assert federation.summary()["status"] == FAILED and federation.summary()["reason"] == expected


def test_site_without_result_fails_the_attempt(federation: Federation) -> None:
    for site in SITES[:2]:
        federation.attempt.add_report(site, GOOD.to_dict())
    assert federation.attempt.missing == ["site-3"]
    assert federation.attempt.finish() == "no result from site-3"


@pytest.mark.parametrize("other", ["cd" * 32, ""])
def test_different_or_unknown_models_fail_the_attempt(federation: Federation, other: str) -> None:
    for site in SITES:
        hmac = other if site == "site-3" else GOOD.model_hmac
        federation.attempt.add_report(site, SiteReport(COMPLETED, model_hmac=hmac).to_dict())
    assert "different results" in str(federation.attempt.finish())


def test_no_model_at_all_is_not_agreement(federation: Federation) -> None:
    for site in SITES:
        federation.attempt.add_report(site, SiteReport(COMPLETED).to_dict())
    assert federation.attempt.finish() is not None


def test_missing_site_is_named_at_the_deadline(tmp_path: Path) -> None:
    federation = Federation(tmp_path, deadline_s=0.2)
    timer = threading.Timer(0.5, federation.attempt.poll)
    timer.start()
    results = federation.gather("site-1", "site-2")
    assert {str(error) for error in results.values()} == {"no message from site-3 within 0 s"}
    assert federation.attempt.reason == "no message from site-3 within 0 s"


def test_stop_names_whom_the_others_waited_for(federation: Federation) -> None:
    threading.Timer(0.2, federation.attempt.stop).start()
    results = federation.gather("site-1", "site-2")
    assert all("waited for site-3" in str(error) for error in results.values())


def test_frames_that_break_the_protocol_name_their_sender(federation: Federation) -> None:
    federation.channels["site-2"].rank = 0
    results = federation.gather(*SITES)
    assert all("site-2: claims rank 0" in str(error) for error in results.values())


@pytest.mark.parametrize(
    "document",
    [{}, {"status": "fine"}, {"status": COMPLETED, "error": 1}, {"status": COMPLETED, "summary": "{"},
     {"status": COMPLETED, "summary": "[]"}, {"status": COMPLETED, "evidence": "text"}],
)  # fmt: skip
def test_unusable_reports_fail_the_attempt(federation: Federation, document: dict) -> None:
    with pytest.raises(ProtocolError):
        SiteReport.from_dict(document)
    federation.attempt.add_report("site-1", document)
    assert str(federation.attempt.reason).startswith("site-1: sent a result")


def test_report_survives_the_way() -> None:
    assert SiteReport.from_dict(GOOD.to_dict()) == GOOD


def test_text_of_peers_is_tamed() -> None:
    assert printable("a\nb\x1b[31m\u202ec") == "a b [31m c"
    assert len(printable("x" * 10_000)) == 2000
