"""Processes that are started again, and those that are not."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher

from nvflare_plugins.flare import kept_jobs
from nvflare_plugins.flare.kept_jobs import NOTE, KeptJob, is_noted, keep_jobs, note_over, note_waiting, rejoin_jobs
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
    monkeypatch.setattr(ClientProcessJobLauncher, "launch_job", ClientProcessJobLauncher.launch_job)
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


@pytest.mark.parametrize(("kit", "joins"), [("fed_client.json", [JOB]), ("fed_server.json", [])])
def test_the_guard_of_a_site_joins_them_once_flare_has_registered(workspace, kit, joins, monkeypatch):
    undo_guard(monkeypatch)
    deployed(workspace)
    (Path(workspace.get_startup_kit_dir()) / kit).write_text("{}")
    started: list[str] = []
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    engine = SimpleNamespace(start_app=lambda job_id, meta: started.append(job_id))
    context.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    SiteGuard().handle_event(EventType.SYSTEM_START, context)
    assert started == joins


def test_a_job_that_did_not_wait_is_not_joined(workspace):
    note_over(deployed(workspace))
    assert joined(workspace) == ([], [])


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
