"""Processes that are started again, and those that are not."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReservedKey, RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.server_engine import ServerEngine

from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import DIED, read_log
from nvflare_plugins.flare import kept_jobs, timeouts
from nvflare_plugins.flare.attempt import EVIDENCE_FOLDER, RESULT_FOLDER, SUMMARY_FILE
from nvflare_plugins.flare.kept_jobs import (
    NOTE,
    KeptJob,
    Lead,
    count_start,
    is_noted,
    keep_jobs,
    keep_sites,
    note_over,
    note_waiting,
    noted_attempt,
    noted_lead,
    rejoin_jobs,
    restore_jobs,
)
from nvflare_plugins.flare.loading import note_step
from nvflare_plugins.flare.site_guard import SiteGuard
from tests.support.hostile_apps import undo_guard

JOB = "3392feae-8935-4144-8c27-c7aa221c04c0"


class Process:
    """A job's process; ``work`` is what it does before it dies."""

    def __init__(self, work) -> None:
        self._work, self.is_terminated = work, False

    def wait(self) -> None:
        self._work()

    def poll(self) -> int:
        return 9

    def terminate(self) -> None:
        self.is_terminated = True


def kept(run: Path, *works) -> tuple[KeptJob, list[Process]]:
    """Return a kept job whose processes do these works, one after the other."""
    waiting, processes = list(works), []

    def launch() -> Process:
        processes.append(Process(waiting.pop(0)))
        return processes[-1]

    return KeptJob(launch, run, pause_s=0.0), processes


def takes_part(run: Path, waits_s: float = 60.0):
    return lambda: note_waiting(run, waits_s, "aa")


def test_a_process_that_died_is_started_again_until_its_part_is_over(tmp_path):
    job, processes = kept(tmp_path, takes_part(tmp_path), takes_part(tmp_path), lambda: note_over(tmp_path))
    job.wait()
    assert len(processes) == 3 and job.poll() == 9


def test_a_process_of_a_job_that_does_not_wait_is_not_started_again(tmp_path):
    job, processes = kept(tmp_path, lambda: None)
    job.wait()
    assert len(processes) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_flares_process_held_in_circles_for_a_job_goes_with_it(tmp_path, fails):
    class Connection:
        """Holds itself, as a closed TLS connection does."""

        def __init__(self):
            self.own = self

    connection = Connection()
    closed = weakref.ref(connection)
    job, _ = kept(tmp_path, lambda: 1 / 0 if fails else None)
    gc.disable()
    try:
        del connection
        assert closed() is not None
        job.wait()
        assert closed() is None
    finally:
        gc.enable()


def servers_torn_log(run: Path) -> Path:
    path = run / RESULT_FOLDER / EVIDENCE_FOLDER / export_name(SERVER)
    log = EvidenceLog(path, SERVER, run.name, "aa", "masks", role="server")
    log.flush()
    log._file.close()  # as if the process had died
    return path


def test_the_log_of_a_server_whose_process_was_killed_has_an_end_before_flare_keeps_it(tmp_path):
    path = servers_torn_log(tmp_path)
    kept(tmp_path, lambda: None)[0].wait()
    assert read_log(path).end["reason"] == DIED and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("begins", [True, False])
def test_a_process_that_dies_before_its_part_begins_is_told_of(tmp_path, begins):
    told = []

    def work():
        note_step("while it loaded what its part needs", tmp_path)
        if begins:
            note_step(None, tmp_path)

    KeptJob(lambda: Process(work), tmp_path, tell=told.append).wait()
    assert (
        [text[:67] for text in told] == []
        if begins
        else ["the job's process ended while it loaded what its part needs; the co"]
    )
    assert not list(tmp_path.iterdir())


def test_the_server_is_told_until_it_has_heard_it(monkeypatch):
    replies, asked = ["target_unreachable", "service_unavailable", "ok", "ok"], []

    def send_request(channel, topic, target, message, timeout):
        asked.append((topic, target, bytes(message.payload)))
        return Message({MessageHeaderKey.RETURN_CODE: replies[len(asked) - 1]})

    monkeypatch.setattr(timeouts, "FAULT_ANSWER_S", 0.0)
    kept_jobs._tell_server(SimpleNamespace(send_request=send_request), JOB, "why")
    assert asked == [("fault", f"server.{JOB}", b"why")] * 3


WORDS = ["NaN", "-Infinity", "-1", "true", '"1"', "null"]


@pytest.mark.parametrize(
    "note", [b"", b"[]", b"{}", b"\xff", b"[" * 9999, *(b'{"waits_s": %s}' % w.encode() for w in WORDS)]
)
def test_a_note_that_is_none_starts_nothing(tmp_path, note):
    job, processes = kept(tmp_path, lambda: (tmp_path / NOTE).write_bytes(note))
    job.wait()
    assert len(processes) == 1


@pytest.mark.parametrize("seconds", ["Infinity", "1e300", "9" * 4000])
def test_no_note_starts_a_process_again_for_ever(tmp_path, seconds):
    (tmp_path / NOTE).write_text(f'{{"waits_s": {seconds}}}')
    now = iter([0.0, 7 * 86400.0 + 1])
    launched = []

    def launch() -> Process:
        launched.append(Process(lambda: None))
        return launched[-1]

    KeptJob(launch, tmp_path, pause_s=0.0, clock=lambda: next(now)).wait()
    assert len(launched) == 2 and not is_noted(tmp_path)


def test_what_flare_ends_stays_ended(tmp_path):
    begun = threading.Event()
    job, processes = kept(tmp_path, lambda: (note_waiting(tmp_path, 60.0, "aa"), begun.wait(10)), lambda: None)
    waiter = threading.Thread(target=job.wait)
    waiter.start()
    job.terminate()
    begun.set()
    waiter.join(10)
    assert not waiter.is_alive() and len(processes) == 1 and processes[0].is_terminated


def test_a_process_that_is_being_ended_leaves_no_note_whatever_it_writes(tmp_path):
    told, ended = threading.Event(), threading.Event()
    job, _ = kept(tmp_path, lambda: (told.wait(10), takes_part(tmp_path)(), ended.set()))
    waiter = threading.Thread(target=job.wait)
    waiter.start()
    job.terminate()
    told.set()
    waiter.join(10)
    assert ended.is_set() and not is_noted(tmp_path)


def test_a_process_that_dies_again_and_again_is_given_up_at_the_deadline(tmp_path):
    times = iter([0.0, 30.0, 59.0, 61.0])
    works = [takes_part(tmp_path), *[lambda: None] * 5]
    job, processes = kept(tmp_path, *works)
    job._clock = lambda: next(times)
    job.wait()
    assert len(processes) == 4 and not is_noted(tmp_path)


def test_the_return_code_of_a_dead_process_is_not_that_of_the_next(tmp_path):
    code = tmp_path / FLMetaKey.PROCESS_RC_FILE
    seen = []
    job, _ = kept(
        tmp_path,
        lambda: (note_waiting(tmp_path, 60.0, "aa"), code.write_text("101")),
        lambda: (seen.append(code.exists()), note_over(tmp_path)),
    )
    job.wait()
    assert seen == [False]


def test_flares_launcher_keeps_jobs(tmp_path, monkeypatch):
    undo_guard(monkeypatch)
    started = []
    monkeypatch.setattr(
        kept_jobs, "_flares_launch", lambda launcher, meta, fl_ctx: started.append(meta) or Process(None)
    )
    keep_jobs()
    context = FLContext()
    workspace = SimpleNamespace(get_run_dir=lambda job_id: str(tmp_path / job_id))
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    handle = ClientProcessJobLauncher().launch_job({"job_id": JOB}, context)
    assert isinstance(handle, KeptJob) and started == [{"job_id": JOB}]


@pytest.mark.parametrize("launcher", [ClientProcessJobLauncher, ServerProcessJobLauncher])
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_folder_that_was_changed_since_its_deployment_is_not_started_again(
    workspace, monkeypatch, launcher, is_changed
):
    undo_guard(monkeypatch)
    run, started = led(deployed(workspace)), []
    for name in ("_flares_launch", "_flares_launch_on_server"):
        monkeypatch.setattr(kept_jobs, name, lambda *_: started.append(1) or Process(note_later))
    monkeypatch.setattr(timeouts, "RESTART_PAUSE_S", 0.0)
    note_later = lambda: note_over(run) if len(started) > 1 else None  # noqa: E731
    if is_changed:
        for name in ("app_site-1", "app_server"):
            (run / name).mkdir(exist_ok=True)
            (run / name / ".__nvfl_sig.json").write_text("{}")
    keep_jobs()
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    job = launcher().launch_job({"job_id": JOB}, context)
    job._pause_s = 0.0
    job.wait()
    assert len(started) == (1 if is_changed else 2) and not is_noted(run)


@pytest.mark.parametrize("reason", ["site-2: no\x1b", None, 7])
def test_administrators_see_why_a_job_has_failed(workspace, monkeypatch, reason):
    undo_guard(monkeypatch)
    run, kept_of_job = deployed(workspace), {}
    monkeypatch.setattr(kept_jobs, "_flares_launch_on_server", lambda *_: Process(lambda: note_over(run)))
    (run / "veilboost").mkdir()
    (run / "veilboost" / "summary.json").write_text(json.dumps({"status": "failed", "reason": reason}))
    keep_jobs()
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    manager = SimpleNamespace(update_meta=lambda job_id, meta, _: kept_of_job.update({job_id: meta}))
    engine = SimpleNamespace(new_context=contextlib.nullcontext, get_component=lambda name: manager)
    context.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    ServerProcessJobLauncher().launch_job({"job_id": JOB}, context).wait()
    assert kept_of_job == ({JOB: {"veilboost_reason": "site-2: no?"}} if isinstance(reason, str) else {})


# -- after a restart of FLARE's own process ---------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    return Workspace(str(tmp_path), "site-1")


def deployed(workspace: Workspace, job_id: str = JOB) -> Path:
    run = Path(workspace.get_root_dir()) / job_id
    (run / "app_site-1" / "config").mkdir(parents=True)
    (run / "meta.json").write_text(json.dumps({"job_id": job_id}))
    note_waiting(run, 60.0, "aa")
    return run


def joined(workspace: Workspace) -> tuple[list[str], list[tuple]]:
    started: list[tuple] = []
    return rejoin_jobs(SimpleNamespace(start_app=lambda *job: started.append(job)), workspace), started


def test_a_job_that_waited_is_joined_again_with_what_flare_has_deployed(workspace):
    deployed(workspace)
    assert joined(workspace) == ([JOB], [(JOB, {"job_id": JOB})])


def test_the_guard_of_a_site_joins_them_once_flare_has_registered(workspace, monkeypatch):
    undo_guard(monkeypatch)
    deployed(workspace)
    (Path(workspace.get_startup_kit_dir()) / "fed_client.json").write_text("{}")
    started: list[str] = []
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    engine = SimpleNamespace(start_app=lambda job_id, meta: started.append(job_id))
    context.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    SiteGuard().handle_event(EventType.SYSTEM_START, context)
    assert started == [JOB]


def test_a_job_that_did_not_wait_is_not_joined(workspace):
    note_over(deployed(workspace))
    assert joined(workspace) == ([], [])


def test_a_job_whose_process_had_no_task_yet_is_joined_and_says_that_it_is_ready(workspace):
    """It may be one that waits: only the task says so. Its process is not started a second time before that."""
    run = deployed(workspace)
    note_over(run)
    note_step("before it had its task", run)
    assert joined(workspace) == ([JOB], [(JOB, {"job_id": JOB})]) and is_noted(run)
    job, processes = kept(run, lambda: None, lambda: None)
    job.wait()
    assert len(processes) == 1 and not is_noted(run)


def test_an_unsigned_folder_is_not_joined_where_jobs_must_be_signed(workspace):
    deployed(workspace)
    (Path(workspace.get_startup_kit_dir()) / "rootCA.pem").write_text("a certificate")
    assert joined(workspace) == ([], [])


def test_a_changed_folder_is_not_joined(workspace):
    run = deployed(workspace)
    (run / "app_site-1" / ".__nvfl_sig.json").write_text("{}")
    (Path(workspace.get_startup_kit_dir()) / "rootCA.pem").write_text("a certificate")
    assert joined(workspace) == ([], [])


def test_one_job_that_cannot_be_joined_does_not_keep_the_others_out(workspace):
    other = "4392feae-8935-4144-8c27-c7aa221c04c0"
    (deployed(workspace) / "meta.json").unlink()
    deployed(workspace, other)
    assert joined(workspace)[0] == [other]


# -- at the server ----------------------------------------------------------------------------------------------------


SITE_NAMES = ["site-1", "site-2"]


def led(run: Path, starts: int = 0, number: int = 3) -> Path:
    note_waiting(run, 60.0, "aa", Lead(number, SITE_NAMES, {name: name for name in SITE_NAMES}, starts))
    return run


def test_the_servers_note_says_what_the_next_process_must_know(tmp_path):
    led(tmp_path)
    assert noted_lead(tmp_path) == Lead(3, SITE_NAMES, {"site-1": "site-1", "site-2": "site-2"}, 0)
    assert noted_attempt(tmp_path) == "aa"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 0),
        ("number", "3"),
        ("starts", -1),
        ("starts", True),
        ("members", ["site-9"]),
        ("members", [[1]]),
        ("members", 1),
        ("cells", []),
    ],
)
def test_a_note_of_a_server_that_is_none_restores_nothing(tmp_path, name, value):
    note = json.loads((led(tmp_path) / NOTE).read_text())
    (tmp_path / NOTE).write_text(json.dumps({**note, name: value}))
    assert noted_lead(tmp_path) is None and not count_start(tmp_path, 10)


def test_the_servers_process_is_started_again_as_often_as_its_policy_allows(tmp_path):
    dies = [lambda: led(tmp_path, number=1), *[lambda: None] * 5]
    job, processes = kept(tmp_path, *dies)
    job._may_start = lambda: count_start(tmp_path, 2)
    job.wait()
    assert len(processes) == 3 and not is_noted(tmp_path)


@pytest.mark.parametrize("fails", ["count", "launch"])
def test_flare_hears_of_the_end_of_a_process_that_cannot_be_started_again(tmp_path, fails):
    """A wait that raises would leave the job in FLARE's table of those that run, for ever."""

    def full() -> bool:
        raise OSError(28, "No space left on device")

    job, processes = kept(tmp_path, lambda: led(tmp_path))
    if fails == "count":
        job._may_start = full
    else:
        job._launch = full
    job.wait()
    assert len(processes) == 1 and not is_noted(tmp_path)


class Runner:
    """The part of FLARE's job runner that starts a job again."""

    def __init__(self) -> None:
        self.running_jobs, self.clients, self.scheduler = {}, {}, None

    def restore_running_job(self, job_id, clients, snapshot, fl_ctx) -> None:
        assert snapshot is None and self.scheduler is not None
        self.running_jobs[job_id], self.clients = 1, clients


class Server:
    """FLARE's engine of a server that was started again while jobs ran."""

    def __init__(self, *jobs: str) -> None:
        self.job_runner, self.status = Runner(), {}
        self._jobs = [SimpleNamespace(job_id=job_id) for job_id in jobs]

    def get_component(self, name):
        of = lambda status, fl_ctx: self._jobs  # noqa: E731
        return SimpleNamespace(
            get_jobs_by_status=of, set_status=lambda job, status, _: self.status.update({job: status})
        )

    def new_context(self):
        return contextlib.nullcontext()


def test_a_server_that_is_back_goes_on_with_jobs_that_wait_and_abandons_the_others(workspace):
    other = "4392feae-8935-4144-8c27-c7aa221c04c0"
    led(deployed(workspace))
    note_over(deployed(workspace, other))
    server = Server(JOB, other)
    assert restore_jobs(server, workspace) == [JOB]
    assert server.status == {other: "FINISHED:ABANDONED"}
    assert sorted(client.name for client in server.job_runner.clients.values()) == SITE_NAMES
    assert noted_lead(Path(workspace.get_root_dir()) / JOB).starts == 1


def test_a_job_that_cannot_even_be_called_abandoned_keeps_no_other_from_going_on(workspace):
    other = "4392feae-8935-4144-8c27-c7aa221c04c0"
    note_over(deployed(workspace, other))
    led(deployed(workspace))
    server = Server(other, JOB)
    server.status = SimpleNamespace()  # takes no status, as a full store
    assert restore_jobs(server, workspace) == [JOB]


@pytest.mark.parametrize("change", ["signature", "policy", "FLARE"])
def test_a_job_that_may_not_go_on_is_abandoned_and_its_note_goes(workspace, change):
    run, server = led(deployed(workspace)), Server(JOB)
    if change == "signature":
        (run / "app_server").mkdir()
        (Path(workspace.get_startup_kit_dir()) / "rootCA.pem").write_text("a certificate")
    elif change == "policy":
        (Path(workspace.get_root_dir()) / "local" / "veilboost_server.json").write_text('{"restarts": 0}')
    else:
        server.job_runner.restore_running_job = lambda *_: None
    assert restore_jobs(server, workspace) == []
    assert server.status == {JOB: "FINISHED:ABANDONED"} and not is_noted(run)


def test_a_heartbeat_ends_no_job_that_is_about_to_run_again_and_makes_a_site_known(workspace, monkeypatch):
    undo_guard(monkeypatch)
    monkeypatch.setattr(kept_jobs, "_flares_sync", lambda *_: [JOB, "5392feae-8935-4144-8c27-c7aa221c04c0", "../x"])
    led(deployed(workspace))
    client, before = SimpleNamespace(name="site-1"), SimpleNamespace(name="site-1")
    job = {RunProcessKey.PARTICIPANTS: {"old": before}}
    engine = SimpleNamespace(args=SimpleNamespace(workspace=workspace.get_root_dir()), run_processes={JOB: job})
    engine.job_runner = SimpleNamespace(get_client_outcome_jobs=lambda name: set())
    clients, said = {"old": before}, []
    cell = SimpleNamespace(fire_and_forget=lambda *sent, optional: said.append((*sent[1:3], sent[3].payload)))
    manager = SimpleNamespace(clients=clients)
    server = SimpleNamespace(engine=engine, client_manager=manager, cell=SimpleNamespace(core_cell=cell))
    keep_sites()
    FederatedServer._sync_client_jobs(server, None, "old")
    assert said == [("lives", f"server.{JOB}", b"site-1")], "the job hears of the process that was there at its start"
    manager.clients = {"new": client}
    for _ in range(2):
        ended = FederatedServer._sync_client_jobs(server, None, "new")
    assert ended == ["5392feae-8935-4144-8c27-c7aa221c04c0", "../x"] and len(said) == 1
    assert job[RunProcessKey.PARTICIPANTS] == {"new": client}


def test_an_operators_abort_is_noted_before_flare_does_anything(workspace, monkeypatch):
    undo_guard(monkeypatch)
    run, seen = led(deployed(workspace)), []
    monkeypatch.setattr(kept_jobs, "_flares_abort_on_server", lambda *_: seen.append(is_noted(run)) or "")
    keep_jobs()
    engine = SimpleNamespace(args=SimpleNamespace(workspace=workspace.get_root_dir()))
    ServerEngine.abort_app_on_server(engine, JOB)
    assert seen == [False]


@pytest.mark.parametrize(("status", "age_s"), [("completed", 60), ("completed", 5), ("failed", 60)])
def test_a_process_that_runs_long_after_all_have_completed_is_not_waited_for(workspace, monkeypatch, status, age_s):
    undo_guard(monkeypatch)
    monkeypatch.setattr(kept_jobs, "_flares_sync", lambda *_: [])
    path, resolved = Path(workspace.get_root_dir()) / JOB / RESULT_FOLDER / SUMMARY_FILE, []
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"status": status}))
    os.utime(path, (time.time() - age_s,) * 2)
    runner = SimpleNamespace(get_client_outcome_jobs=lambda name: {JOB})
    runner.resolve_client_outcome = lambda *of: resolved.append(of)
    engine = SimpleNamespace(args=SimpleNamespace(workspace=workspace.get_root_dir()), run_processes={})
    engine.job_runner = runner
    clients = {"new": SimpleNamespace(name="site-1")}
    server = SimpleNamespace(engine=engine, client_manager=SimpleNamespace(clients=clients))
    keep_sites()
    assert FederatedServer._sync_client_jobs(server, None, "new") == []
    assert resolved == ([(JOB, "site-1")] if (status, age_s) == ("completed", 60) else [])


@pytest.mark.parametrize("summary", ['{"status": "completed"}', '{"status": "failed"}', "[]", "{", None])
def test_what_befalls_a_site_afterwards_fails_no_job_that_all_have_completed(workspace, monkeypatch, summary):
    undo_guard(monkeypatch)
    failed = []
    monkeypatch.setattr(kept_jobs, "_flares_fail", lambda runner, job_id, *_: failed.append(job_id) or "")
    path = Path(workspace.get_root_dir()) / JOB / RESULT_FOLDER / SUMMARY_FILE
    path.parent.mkdir(parents=True)
    if summary is not None:
        path.write_text(summary)
    keep_jobs()
    engine = SimpleNamespace(args=SimpleNamespace(workspace=workspace.get_root_dir()))
    JobRunner.fail_run(None, JOB, 1, SimpleNamespace(get_engine=lambda: engine))
    assert failed == ([] if summary == '{"status": "completed"}' else [JOB])
