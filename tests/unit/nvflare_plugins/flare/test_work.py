"""Work that never returns: the site reports without it, ends its evidence, and leaves a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import xgboost as xgb
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobResult
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.flare import timeouts
from nvflare_plugins.flare import work as work_module
from nvflare_plugins.flare.executor import TRAIN_TASK, JobExecutor
from nvflare_plugins.flare.kinds import KINDS, JobKind, RunSite
from nvflare_plugins.flare.timeouts import FLARE_STOP_GRACE_S, SILENCE_LIMIT_S, STOP_GRACE_S, STOP_REASON_S
from nvflare_plugins.flare.transport import CHANNEL, STOPPING, TOPIC_BEAT, SiteTransport
from nvflare_plugins.flare.work import NO_REASON, Beats, Guard, Stuck, Watch, Work, leave_process, serves_one_site
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.mediated.communicator import Federated, blocked
from nvflare_plugins.site.setup import set_up
from tests.support.flare_network import FakeCell, Network
from tests.support.threads import wait_until

SERVER, ATTEMPT = "server.job", "00" * 16
DONE = JobResult("ab", "done")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Site:
    """A site whose work waits until it is released."""

    def __init__(self) -> None:
        network = Network()
        self.heard = []
        FakeCell(network, SERVER).register_request_cb(CHANNEL, TOPIC_BEAT, lambda m: self.heard.append(m.payload))
        self.clock, self.signal, self.lines = Clock(), Signal(), []
        self.transport = SiteTransport(FakeCell(network, "a.job", "a"), SERVER, ATTEMPT, clock=self.clock)
        self.beats = Beats(self.transport.beat, 60.0)
        self.watch = Watch(self.transport, self.beats, self.signal, self.lines.append, self.clock)
        self.release = threading.Event()
        self.work = Work(lambda: self.release.wait(30) and DONE)

    def look_for(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            self.watch.look(self.work)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.release.set()
    site.beats.stop()


def test_work_that_returns_is_handed_on(site: Site) -> None:
    site.release.set()
    assert site.watch.wait(site.work) == DONE


def test_the_works_own_error_is_handed_on(site: Site) -> None:
    def fail() -> JobResult:
        raise ConfigurationError("no such column")

    with pytest.raises(ConfigurationError, match="no such column"):
        site.watch.wait(Work(fail))


def test_a_silent_server_ends_the_sites_part_after_90_seconds(site: Site) -> None:
    site.look_for(SILENCE_LIMIT_S - 1)
    assert site.transport.abort_reason is None and not site.watch.server_is_gone
    site.look_for(3)
    assert site.watch.server_is_gone
    with pytest.raises(JobAborted, match="no sign of life from the server for 90 s"):
        site.transport.exchange(b"", 1.0)


def test_60_seconds_of_a_silent_server_are_survived(site: Site) -> None:
    for _ in range(4):
        site.look_for(60)
        site.transport._life_signs.heard(SERVER)
    assert site.transport.abort_reason is None


def test_a_site_that_flare_stops_says_so_and_waits_for_the_servers_reason(site: Site) -> None:
    site.signal.trigger(True)
    site.look_for(STOP_REASON_S - 1)
    assert site.transport.abort_reason is None
    wait_until(lambda: STOPPING in site.heard)
    site.transport.abort("site-2 no longer answered")
    site.look_for(FLARE_STOP_GRACE_S)
    with pytest.raises(Stuck, match=r"^site-2 no longer answered"):
        site.look_for(3)


def test_flares_abort_is_no_sites_fault_and_has_a_grace(site: Site) -> None:
    site.signal.trigger(True)
    site.look_for(STOP_REASON_S + 1)
    assert site.transport.abort_reason == NO_REASON
    site.look_for(FLARE_STOP_GRACE_S)
    with pytest.raises(Stuck, match="did not say why"):
        site.look_for(2)


def test_a_lost_flare_parent_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: -1)  # 1 may be the parent itself, in a container
    site.signal.trigger(True)
    site.look_for(1)
    assert "FLARE process has ended" in str(site.transport.abort_reason)


def test_the_servers_reason_is_kept_when_work_is_stuck(site: Site) -> None:
    site.transport.abort("no sign of life from site-2 for 90 s")
    site.look_for(STOP_GRACE_S)
    with pytest.raises(Stuck, match=r"^no sign of life from site-2 for 90 s .and this site's work did not stop"):
        site.look_for(3)


def test_a_refused_thread_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for make in (lambda: Work(lambda: DONE), lambda: Beats(lambda: None), lambda: Guard(Path())):
        with pytest.raises(JobAborted, match="refuses a thread"):
            make()


def test_beats_end_with_the_connection_and_when_told() -> None:
    sent = []

    def send() -> None:
        sent.append(1)
        if len(sent) == 3:
            raise JobAborted("closed")

    beats = Beats(send, 0.001)
    beats._thread.join(60)
    assert len(sent) == 3 and not beats._thread.is_alive()
    quiet = Beats(lambda: None, 60.0)
    quiet.stop()
    quiet._thread.join(60)
    assert not quiet._thread.is_alive()


# -- XGBoost that does not close its communicator ---------------------------------------------------------------------


@pytest.fixture
def hanging_finalize(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """XGBoost's communicator opens, and never closes, as under a limit on threads."""
    release = threading.Event()
    monkeypatch.setattr(xgb.collective, "init", lambda **args: None)
    monkeypatch.setattr(xgb.collective, "get_world_size", lambda: 2)
    monkeypatch.setattr(xgb.collective, "finalize", lambda: release.wait(60))
    monkeypatch.setattr(timeouts, "COMMUNICATOR_S", 0.3)
    monkeypatch.setattr(timeouts, "STOP_GRACE_S", 0.3)
    yield release
    release.set()


def hang(job, context, transport, timeout_s, progress) -> JobResult:
    """Open evidence and fail inside a communicator that then does not close."""
    folder = RunFolder(context.runs, context.job_id).create()
    path = folder.evidence / export_name(context.site)
    log = EvidenceLog(path, context.site, context.job_id, context.attempt.hex(), job.profile)
    mediator = SimpleNamespace(address="", error=None)
    try:
        with Federated(mediator, 2, 0):
            raise ConfigurationError("the label has one class only")
    except ConfigurationError as error:
        log.end("aborted", str(error))
        raise
    finally:
        log.close()


@contextmanager
def executor_that(run: RunSite) -> Iterator[JobExecutor]:
    """Yield an executor of a kind of job whose part at a site is the function; afterwards the kind is gone."""
    with patch.dict(KINDS, tried=JobKind("tried", HorizontalJob, run)):
        yield JobExecutor("tried")


def flare_context(workspace: Path) -> FLContext:
    (workspace / "local").mkdir(parents=True)
    set_up(workspace)
    network = Network()
    FakeCell(network, SERVER).register_request_cb(CHANNEL, TOPIC_BEAT, lambda message: None)
    cell = SimpleNamespace(core_cell=FakeCell(network, "site-1.job", "site-1"))
    engine = SimpleNamespace(
        get_workspace=lambda: SimpleNamespace(get_root_dir=lambda: str(workspace)),
        get_cell=lambda: cell,
        fire_event=lambda *event: None,
    )
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False)
    context.set_prop(FLContextKey.CURRENT_RUN, "job", private=False)
    context.set_prop(ReservedKey.ENGINE, engine, private=True)
    return context


def task() -> Shareable:
    data = Shareable()
    sites = ["site-1", "site-2"]
    data.update(
        {
            "job": HorizontalJob("d", "y").to_dict(),
            "sites": sites,
            "attempt": ATTEMPT,
            "server": SERVER,
            "protocols": [1, 1],
        }
    )
    return data


def test_a_finalize_that_hangs_costs_neither_report_nor_evidence(
    tmp_path: Path, hanging_finalize: threading.Event
) -> None:
    context = flare_context(tmp_path)
    before = set(threading.enumerate())
    started = time.monotonic()
    with executor_that(hang) as executor:
        reply = executor.execute(TRAIN_TASK, task(), context, Signal())
    assert time.monotonic() - started < 50
    assert reply["status"] == "failed" and "the label has one class only" in reply["error"]
    log = read_log(tmp_path / "veilboost_runs" / "job" / "evidence" / export_name("site-1"))
    assert not log.completed and reply["evidence"]
    left = [thread for thread in set(threading.enumerate()) - before if thread.name == "veilboost_job"]
    assert left and not left[0].daemon, "FLARE must see it, to leave the process without waiting for it"
    hanging_finalize.set()
    left[0].join(60)
    assert not left[0].is_alive() and blocked(left[0]) is None


def test_processes_that_may_serve_several_sites_are_never_left(tmp_path: Path) -> None:
    left = []
    guard = Guard(tmp_path, 0.0, lambda folder, code: left.append(code))
    guard.arm(101)
    guard._thread.join(60)
    assert not serves_one_site() and not left


@pytest.mark.parametrize("name", ["client.worker_process", "simulator.simulator_worker"])
def test_a_process_of_one_site_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name=f"nvflare.private.fed.app.{name}"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    left = []
    for arm in (True, False):
        guard = Guard(tmp_path, 0.0, lambda folder, code: left.append((folder, code)))
        if arm:
            guard.arm(9)
        guard.dismiss()
        guard._thread.join(60)
    assert left == [(tmp_path, 9)]


def test_the_processes_of_one_site_are_flares() -> None:
    from importlib.util import find_spec

    assert all(find_spec(name) is not None for name in work_module._PROCESSES_OF_ONE_SITE)


@pytest.mark.parametrize("recorded", [None, "103"])
def test_leaving_writes_flares_return_code_unless_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str | None
) -> None:
    path, codes = tmp_path / FLMetaKey.PROCESS_RC_FILE, []
    if recorded is not None:
        path.write_text(recorded)
    monkeypatch.setattr(os, "_exit", codes.append)
    leave_process(tmp_path, 101)
    assert codes == [101] and path.read_text() == (recorded or "101")
