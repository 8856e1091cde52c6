"""The server's side of an attempt, with sites that finish, fail, vanish and lie."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.message import Message

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.flare import attempt as attempt_module
from nvflare_plugins.flare import controller as controller_module
from nvflare_plugins.flare.attempt import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    ServedJob,
    ServerAttempt,
    SiteReport,
)
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.loading import died_early, note_step
from nvflare_plugins.flare.timeouts import REPORT_S, SILENCE_LIMIT_S, START_SILENCE_S
from nvflare_plugins.flare.transport import CHANNEL, STOPPING, TOPIC_BEAT, SiteTransport
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Kind
from tests.support.flare_network import FakeCell, Network
from tests.support.threads import answers_in_threads, wait_until

SITES = ("site-1", "site-2", "site-3")
GOOD = SiteReport(COMPLETED, model_hmac="ab" * 32, summary={"n_rounds": 2}, evidence=b"log\n")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Federation:
    def __init__(self, folder: Path, deadline_s: float = 60.0, waits_s: float | None = None) -> None:
        network = Network()
        self.clock = Clock()
        cells = {site: f"{site}.job" for site in SITES}
        self.folder = folder
        job = ServedJob("job", "masks", folder, deadline_s, waits_s=waits_s)
        cell = FakeCell(network, "server.job")
        self.attempt = ServerAttempt(job, cell=cell, site_cells=cells, clock=self.clock)
        self.cells = {site: FakeCell(network, name, site) for site, name in cells.items()}
        self.channels = {
            site: Channel(
                site,
                SITES,
                "job",
                bytes.fromhex(self.attempt.attempt),
                SiteTransport(cell, "server.job", self.attempt.attempt),
                60.0,
            )
            for site, cell in self.cells.items()
        }

    def gather(self, *sites: str) -> dict[str, object]:
        def gather(site: str) -> list[bytes]:
            return self.channels[site].gather(Kind.CLOSING, site.encode())

        return answers_in_threads(gather, sites, (JobAborted, ProtocolError), 90)

    def all_beat(self, sites: tuple[str, ...] = SITES) -> None:
        for site in sites:
            self.attempt._frames.life_signs.heard(site)

    def pass_time(self, seconds: float, alive: tuple[str, ...], machines: tuple[str, ...] = ()) -> None:
        """Let time pass in steps of a second; sites that are alive beat every ten, and the machines of others."""
        for second in range(int(seconds)):
            self.clock.now += 1.0
            if second % 10 == 9:
                self.all_beat(alive)
                for site in machines:
                    self.attempt.lives(site)
            self.attempt.poll()

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


def test_a_report_that_comes_while_the_server_ends_changes_nothing(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE hands reports over in threads of its own, also those of sites for which nobody waits any more."""
    for site in SITES[:2]:
        federation.attempt.add_report(site, GOOD.to_dict())
    write = attempt_module._write

    def meanwhile(path: Path, content: bytes) -> None:
        federation.attempt.add_report(SITES[2], SiteReport(FAILED, "too late").to_dict())
        write(path, content)

    monkeypatch.setattr(attempt_module, "_write", meanwhile)
    assert federation.attempt.finish() == "no result from site-3"
    assert federation.summary()["reason"] == "no result from site-3" and set(federation.summary()["sites"]) == set(
        SITES[:2]
    )
    assert not (federation.folder / "evidence" / export_name("site-3")).exists()


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


def test_a_log_that_a_hanging_thread_holds_keeps_no_failed_job_from_ending(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that brings the log to the disk holds it until the disk answers."""
    monkeypatch.setattr(attempt_module, "DISK_ANSWER_S", 0.05)
    held, over = threading.Event(), threading.Event()

    def hang() -> None:
        with federation.attempt._evidence._lock:
            held.set()
            over.wait(60)

    writer = threading.Thread(target=hang)
    writer.start()
    held.wait(60)
    federation.attempt.fail("site-1: no reply from the server")
    ended = threading.Thread(target=federation.attempt.finish, daemon=True)
    ended.start()
    ended.join(60)
    over.set()
    writer.join(60)
    assert not ended.is_alive() and federation.summary()["reason"] == "site-1: no reply from the server"


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
    federation = Federation(tmp_path, deadline_s=0.0)

    def look() -> None:
        wait_until(lambda: [len(e.heads) for e in federation.attempt._aggregator._exchanges.values()] == [2])
        while federation.attempt.reason is None:
            federation.attempt.poll()

    threading.Thread(target=look, daemon=True).start()
    results = federation.gather("site-1", "site-2")
    assert {str(error) for error in results.values()} == {"no message from site-3 within 0 s"}
    assert federation.attempt.reason == "no message from site-3 within 0 s"


def test_an_operators_abort_is_blamed_on_no_site(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sites are stopped and say so; that the others waited for site-3 at the moment is not why."""
    monkeypatch.setattr(attempt_module, "STOP_ANSWER_S", 60.0)
    for cell in federation.cells.values():
        cell.fire_and_forget(CHANNEL, TOPIC_BEAT, "server.job", Message({}, STOPPING))
    threading.Timer(0.2, federation.attempt.stop).start()
    started = time.monotonic()
    results = federation.gather("site-1", "site-2")
    assert time.monotonic() - started < 60, "the server waited for no more than what the sites said"
    assert all("aborted by an operator, or by FLARE" in str(error) for error in results.values())
    assert not any(site in str(error) for error in results.values() for site in SITES)
    assert not any(site in str(federation.attempt.reason) for site in SITES)


def test_a_site_whose_death_made_flare_stop_the_job_is_named_to_the_others(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "STOP_ANSWER_S", 0.3)
    for site in ("site-1", "site-2"):
        federation.cells[site].fire_and_forget(CHANNEL, TOPIC_BEAT, "server.job", Message({}, STOPPING))
    wait_until(lambda: federation.attempt._frames.stopping == {"site-1", "site-2"})
    threading.Timer(0.1, federation.attempt.stop).start()
    results = federation.gather("site-1", "site-2")
    assert all("; site-3 no longer answered" in str(error) for error in results.values())


def test_a_site_that_is_silent_for_90_seconds_ends_the_job_for_all_and_is_named(federation: Federation) -> None:
    federation.all_beat()
    federation.pass_time(88.0, alive=("site-1", "site-3"))
    assert federation.attempt.reason is None
    federation.pass_time(4.0, alive=("site-1", "site-3"))
    assert str(federation.attempt.reason).startswith("no sign of life from site-2 for 90 s")
    assert federation.attempt.awaited == ["site-1", "site-3"] and federation.attempt.missing == list(SITES)
    results = federation.gather("site-1", "site-3")
    assert all("no sign of life from site-2" in str(error) for error in results.values())


def test_60_seconds_of_silence_are_survived_again_and_again(federation: Federation) -> None:
    federation.all_beat()
    for _ in range(5):
        federation.pass_time(60.0, alive=("site-1", "site-3"))
        federation.all_beat()
    assert federation.attempt.reason is None


def test_a_server_that_was_stopped_itself_takes_nobody_for_dead(federation: Federation) -> None:
    """After SIGSTOP or a suspended machine the sites' signs lie in its buffers still."""
    federation.all_beat()
    federation.clock.now += 3600.0
    federation.attempt.poll()
    assert federation.attempt.reason is None
    federation.all_beat()
    federation.pass_time(80.0, alive=())
    assert federation.attempt.reason is None


def test_silence_of_all_sites_points_at_the_servers_own_connection(federation: Federation) -> None:
    federation.all_beat()
    federation.pass_time(95.0, alive=())
    assert "all sites at once: look at this server's own connection" in str(federation.attempt.reason)


def test_sites_that_have_reported_may_be_silent(federation: Federation) -> None:
    federation.all_beat()
    federation.attempt.add_report("site-2", GOOD.to_dict())
    federation.pass_time(120.0, alive=("site-1", "site-3"))
    assert federation.attempt.reason is None


def test_a_site_that_gives_signs_of_life_and_never_reports_is_not_waited_for_without_end(
    federation: Federation,
) -> None:
    """After the last exchange it is missing from none: what hung then was once waited for until an operator came."""
    federation.all_beat()
    federation.pass_time(2 * REPORT_S, alive=SITES)
    assert federation.attempt.reason is None, "as long as nobody is done, exchanges have their own deadlines"
    federation.attempt.add_report("site-1", GOOD.to_dict())
    federation.pass_time(100.0, alive=SITES)
    federation.attempt.add_report("site-3", GOOD.to_dict())
    federation.pass_time(REPORT_S - 110.0, alive=SITES)
    assert federation.attempt.reason is None
    federation.pass_time(20.0, alive=SITES)
    assert str(federation.attempt.reason).startswith("no result from site-2 within 600 s")


def test_a_job_with_a_longer_deadline_waits_as_long_for_the_last_report(tmp_path: Path) -> None:
    """One party may write predictions or SHAP values of many rows when the others have nothing left to do."""
    federation = Federation(tmp_path / "veilboost", deadline_s=1200.0)
    federation.all_beat()
    for site in ("site-1", "site-3"):
        federation.attempt.add_report(site, GOOD.to_dict())
    federation.pass_time(1190.0, alive=SITES)
    assert federation.attempt.reason is None
    federation.pass_time(20.0, alive=SITES)
    assert "within 1200 s" in str(federation.attempt.reason) and "deadline_s" in str(federation.attempt.reason)


@pytest.mark.parametrize(("n_closings", "waits_s", "goes_on"), [(2, 700.0, True), (1, 700.0, False), (2, None, False)])
def test_a_site_that_is_lost_when_all_have_their_result_is_waited_for(
    tmp_path: Path, n_closings: int, waits_s: float | None, goes_on: bool
) -> None:
    federation = Federation(tmp_path / "veilboost", waits_s=waits_s)
    for _ in range(n_closings):
        federation.gather(*SITES)
    federation.attempt.lose(["site-2"], "site-2 has gone: its job process no longer answers")
    assert (federation.attempt.reason is None) is goes_on and (federation.attempt.missing == list(SITES))
    if goes_on:
        federation.pass_time(690, ("site-1", "site-3"))
        assert federation.attempt.reason is None and "site-2" in federation.attempt.awaited
        for site in SITES:
            federation.attempt.add_report(site, GOOD.to_dict())
        assert federation.attempt.finish() is None


def test_a_site_that_does_not_come_back_when_all_have_their_result_is_named(tmp_path: Path) -> None:
    federation = Federation(tmp_path / "veilboost", waits_s=700.0)
    for _ in range(2):
        federation.gather(*SITES)
    for site in ("site-1", "site-3"):
        federation.attempt.add_report(site, GOOD.to_dict())
    federation.pass_time(710, ())
    assert str(federation.attempt.reason).startswith(
        "no result from site-2 within 700 s after the first site had ended. "
    )


@pytest.mark.parametrize("cannot", ["server", "site"])
def test_what_cannot_report_when_all_have_their_result_ends_the_attempt(tmp_path: Path, cannot: str) -> None:
    """A server whose disk is full has not answered; a process that took no part knows nothing of the result."""
    federation = Federation(tmp_path / "veilboost", waits_s=700.0)
    for _ in range(2):
        federation.gather(*SITES)
    if cannot == "server":
        federation.attempt.lose(["server"], "the server could not go on")
    else:
        federation.attempt.add_report("site-2", SiteReport(INTERRUPTED, "another one is there").to_dict())
    assert federation.attempt.reason is not None


def test_a_site_that_never_begins_has_longer(federation: Federation) -> None:
    """Its process may have to be brought up first: a container, a queue."""
    federation.pass_time(START_SILENCE_S - 10.0, alive=("site-1", "site-2"))
    assert federation.attempt.reason is None
    federation.pass_time(20.0, alive=("site-1", "site-2"))
    assert str(federation.attempt.reason).startswith("site-3 did not begin within")


def test_a_machine_that_dies_before_its_part_began_is_noticed_as_any_other(federation: Federation) -> None:
    federation.pass_time(30.0, alive=("site-1",), machines=SITES)
    federation.pass_time(SILENCE_LIMIT_S - 5.0, alive=("site-1",), machines=("site-1", "site-2"))
    assert federation.attempt.reason is None
    federation.pass_time(10.0, alive=("site-1",), machines=("site-1", "site-2"))
    assert str(federation.attempt.reason).startswith("no sign of life from site-3 for 90 s")
    assert federation.attempt.lost == ["site-3"] and federation.attempt.awaited == ["site-1", "site-2"]


def test_a_machine_that_was_gone_before_the_servers_process_began_is_noticed_too(federation: Federation) -> None:
    federation.pass_time(SILENCE_LIMIT_S + 5.0, alive=(), machines=("site-1", "site-2"))
    assert federation.attempt.lost == ["site-3"]


def test_a_site_that_is_slow_to_start_is_not_taken_for_dead(federation: Federation) -> None:
    """Its job's process loads libraries, or its container is pulled: FLARE's process there says that it lives."""
    federation.pass_time(START_SILENCE_S - 10.0, alive=("site-1", "site-2"), machines=SITES)
    assert federation.attempt.reason is None and federation.attempt.starting == ["site-3"]
    federation.pass_time(20.0, alive=("site-1", "site-2"), machines=SITES)
    assert str(federation.attempt.reason).startswith("site-3 did not begin within 600 s")
    federation.pass_time(5.0, alive=("site-1", "site-2"), machines=SITES)
    assert federation.attempt.awaited == ["site-1", "site-2"]


def test_a_machine_that_lives_is_no_sign_of_a_part_that_had_begun(federation: Federation) -> None:
    federation.all_beat()
    federation.pass_time(SILENCE_LIMIT_S + 5.0, alive=("site-1", "site-2"), machines=SITES)
    assert federation.attempt.lost == ["site-3"]


def test_a_site_that_is_not_there_is_lost_and_not_late(federation: Federation, monkeypatch) -> None:
    """An exchange may wait as long for it; a job that waits for lost sites goes on only where the site is lost."""
    began = federation.clock.now

    def expire() -> None:
        if federation.clock.now > began + START_SILENCE_S:
            federation.attempt.fail("no message from site-3")

    monkeypatch.setattr(federation.attempt._aggregator, "expire", expire)
    federation.pass_time(START_SILENCE_S + 10.0, alive=("site-1", "site-2"))
    assert federation.attempt.lost == ["site-3"]


def test_frames_that_break_the_protocol_name_their_sender(federation: Federation) -> None:
    federation.channels["site-2"].rank = 0
    results = federation.gather(*SITES)
    assert all("site-2: claims rank 0" in str(error) for error in results.values())


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"status": "fine"},
        {"status": COMPLETED, "error": 1},
        {"status": COMPLETED, "summary": "{"},
        {"status": COMPLETED, "summary": "[]"},
        {"status": COMPLETED, "evidence": "text"},
    ],
)
def test_unusable_reports_fail_the_attempt(federation: Federation, document: dict) -> None:
    with pytest.raises(ProtocolError):
        SiteReport.from_dict(document)
    federation.attempt.add_report("site-1", document)
    assert str(federation.attempt.reason).startswith("site-1: sent a result")


def test_a_server_without_room_says_so_to_everyone(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/srv/secret")

    monkeypatch.setattr(federation.attempt._evidence, "record", full)
    results = federation.gather(*SITES)
    assert all(isinstance(error, JobAborted) and "the disk is full" in str(error) for error in results.values())
    assert "the server could not go on" in federation.attempt.reason and "secret" not in federation.attempt.reason
    federation.attempt.abandon("later")
    log = read_log(federation.folder / "evidence" / export_name("server"))
    assert log.end["status"] == "aborted" and "the disk is full" in log.end["reason"]


def test_a_controller_that_cannot_go_on_ends_the_attempt_and_says_why(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Controller(JobController):
        def _run(self, *_: object) -> None:
            self._attempt = federation.attempt
            raise OSError(errno.EROFS, "Read-only file system", "/srv/secret")

    controller, said = Controller({"data_set": "train", "label": "y"}, kind="horizontal"), []
    monkeypatch.setattr(controller_module, "check_set_up", lambda *_: None)
    engine = MagicMock()
    engine.get_workspace().get_run_dir.return_value = str(federation.folder)
    monkeypatch.setattr(controller, "_engine", engine, raising=False)
    monkeypatch.setattr(controller, "_wait_for_sites", lambda *_: [object()])
    monkeypatch.setattr(controller, "system_panic", lambda reason, context: said.append(reason))
    note_step("before its connection stood", federation.folder)
    assert died_early(federation.folder) is not None
    controller.control_flow(None, MagicMock())
    assert died_early(federation.folder) is None, "FLARE's process of the server would call each job's end too early"
    assert said == [f"VeilBoost job failed: {federation.attempt.reason}"]
    assert "the server could not go on: the file system is read-only" in said[0] and "secret" not in said[0]
    assert read_log(federation.folder / "evidence" / export_name("server")).end["status"] == "aborted"


@pytest.mark.parametrize(
    ("begins_s", "waits", "ends_s"),
    [(0, False, 20), (60, False, 80), (10_000, False, 140), (300, True, 320), (10_000, True, 602)],
)
def test_a_site_whose_process_still_starts_when_another_fails_hears_why(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, begins_s: int, waits: bool, ends_s: int
) -> None:
    """It has until all sites must be there, and then as long as any other; a job that waits cannot do without it."""
    federation.all_beat(SITES[:2])
    federation.attempt.add_report("site-1", GOOD.to_dict())
    federation.attempt.add_report("site-2", SiteReport(FAILED, "its wheel does not load").to_dict())
    began, clock = federation.clock(), federation.clock

    def sleep(seconds: float) -> None:
        clock.now += 1.0
        if clock() - began > begins_s:
            federation.all_beat(("site-3",))

    monkeypatch.setattr(controller_module, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    controller = JobController({"data_set": "train", "label": "y"}, kind="horizontal")
    presence = SimpleNamespace(heard=list, replaced=list)
    standing = MagicMock(patience=SimpleNamespace(presence=presence) if waits else None)
    controller._supervise(federation.attempt, None, standing, SimpleNamespace(triggered=False), MagicMock())
    assert ends_s <= clock() - began <= ends_s + 3 and federation.attempt.missing == ["site-3"]
    assert "its wheel does not load" in str(federation.gather("site-3")["site-3"])


def test_a_job_whose_metrics_would_be_written_elsewhere_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, said, waited = JobController({"data_set": "train", "label": "y"}, kind="horizontal"), [], []
    engine = MagicMock()
    engine.get_workspace().get_run_dir.return_value = str(tmp_path)
    engine.run_manager.components = {"tb": SimpleNamespace(tb_folder="/srv/elsewhere")}
    monkeypatch.setattr(controller_module, "check_set_up", lambda *_: None)
    monkeypatch.setattr(controller, "_engine", engine, raising=False)
    monkeypatch.setattr(controller, "_wait_for_sites", lambda *_: waited.append(1))
    monkeypatch.setattr(controller, "system_panic", lambda reason, context: said.append(reason))
    controller.control_flow(None, FLContext())
    assert "may only write below the job's own folder" in said[0] and not waited


def test_all_sites_hear_why_there_is_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose process comes later; and the result that an administrator downloads says it."""
    controller, said, waited = JobController({"data_set": "train"}, kind="horizontal"), [], []
    engine, context, told = MagicMock(), MagicMock(), {}
    engine.get_workspace().get_run_dir.return_value = str(tmp_path)
    engine.get_clients.return_value = [SimpleNamespace(name=site) for site in SITES]
    context.get_job_id.return_value = "job"

    def refuse(*_: object) -> None:
        raise ConfigurationError("the server is not set up")

    def broadcast(task: object, fl_ctx: object, targets: list[str], min_responses: int) -> None:
        told.update(dict.fromkeys(targets, task))

    def sleep(seconds: float) -> None:
        site = SITES[len(waited)]
        waited.append(site)
        told[site].result_received_cb(SimpleNamespace(client=SimpleNamespace(name=site)), context)

    monkeypatch.setattr(controller_module, "check_set_up", refuse)
    monkeypatch.setattr(controller_module, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    for name, does in (("_engine", engine), ("broadcast", broadcast), ("cancel_task", lambda task: None)):
        monkeypatch.setattr(controller, name, does, raising=False)
    monkeypatch.setattr(controller, "system_panic", lambda reason, fl_ctx: said.append(reason))
    controller.control_flow(SimpleNamespace(triggered=False), context)
    assert said == ["VeilBoost job failed: the server is not set up"] and waited == list(SITES)
    assert all(told[site].data["refused"] == "the server is not set up" for site in SITES)
    summary = json.loads((tmp_path / "veilboost" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == (FAILED, "the server is not set up")


def test_report_survives_the_way() -> None:
    assert SiteReport.from_dict(GOOD.to_dict()) == GOOD


def test_text_of_peers_is_tamed() -> None:
    def read(text: str) -> str:
        return SiteReport.from_dict({**GOOD.to_dict(), "error": text}).error

    assert read("no column 'Größe'\nb\x1b[31m\u202ec ") == "no column 'Größe'?b?[31m?c"
    assert len(read("x" * 10_000)) == 2000


def test_a_server_that_dies_between_the_log_of_an_attempt_and_its_note_leads_a_later_one(tmp_path, monkeypatch):
    """The next process would find the log of an attempt of the same number in its way, and end the job."""
    site_cells = {site: site for site in SITES}
    clients = [SimpleNamespace(name=site, get_fqcn=lambda site=site: site) for site in SITES]
    cell = FakeCell(Network(), "server.job")
    core = SimpleNamespace(core_cell=cell, get_fqcn=lambda: "server.job")
    lead = controller_module.Lead(1, list(SITES), site_cells)
    controller_module.note_waiting(tmp_path, 60.0, "aa", lead)
    (tmp_path / "veilboost").mkdir()
    served = ServedJob("job", "masks", tmp_path / "veilboost", 60.0)
    server = MagicMock()
    server._engine.get_cell.return_value = core

    def begin() -> ServerAttempt:
        standing = controller_module._Standing(tmp_path, clients, controller_module._Patience(MagicMock(), 60.0))
        return JobController._begin(server, SimpleNamespace(profile="masks"), served, standing, site_cells, None)[0]

    with monkeypatch.context() as dies:
        dies.setattr(controller_module._Standing, "begin", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            begin()
    assert begin().number == 3
