"""What a site takes from the server's task, what it tells, and what it writes to the log."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import JobResult
from nvflare_plugins.base.errors import HeldElsewhere, JobAborted, PolicyRefusal, WorkerFailure, WorkerLost, time_mends
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import DIED, MAX_ATTEMPTS, read_log
from nvflare_plugins.flare import executor, timeouts
from nvflare_plugins.flare.attempt import COMPLETED, FAILED, INTERRUPTED
from nvflare_plugins.flare.controller import TRAIN_TASK
from nvflare_plugins.flare.executor import (
    JobTask,
    ProgressLog,
    error_text,
    job_name,
)
from nvflare_plugins.flare.kept_jobs import is_noted, note_waiting
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.certificates import load_identity
from nvflare_plugins.site.memory.store import NAME
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.protocols import Span
from nvflare_plugins.site.setup import SetupOptions, set_up
from nvflare_plugins.wire.envelope import MAX_FRAME_BYTES
from nvflare_plugins.xgb.rounds import RoundRecord
from tests.unit.nvflare_plugins.flare.test_work import executor_that, flare_context
from tests.unit.nvflare_plugins.flare.test_work import task as work_task

JOB = HorizontalJob("train", "y")


def task(**changes: object) -> Shareable:
    data = Shareable()
    good = {"job": JOB.to_dict(), "sites": ["site-1", "site-2"], "attempt": "00" * 16, "server": "server.job"}
    data.update({**good, "protocols": [1, 1], **changes})
    return data


def test_good_task() -> None:
    read = JobTask.from_shareable(task(), "site-2", HorizontalJob)
    assert read == JobTask(JOB, ("site-1", "site-2"), "00" * 16, "server.job", Span(1, 1))


@pytest.mark.parametrize("protocols", [None, [], [1], [1, "2"], [True, 1], [0, 1], "11"])
def test_a_server_that_does_not_say_what_it_speaks_is_told_what_to_do(protocols: object) -> None:
    with pytest.raises(ConfigurationError, match=r"the server does not say which protocols .*update VeilBoost there"):
        JobTask.from_shareable(task(protocols=protocols), "site-2", HorizontalJob)


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "x"},
        {"sites": None},
        {"sites": ["site-2", "site-1"]},
        {"sites": ["site-1", "site-1"]},
        {"sites": ["site-1"]},
        {"sites": [1, 2]},
        {"attempt": "00"},
        {"attempt": 7},
        {"server": "site-1.job"},
        {"server": None},
    ],
)
def test_wrong_tasks_are_refused(changes: dict) -> None:
    with pytest.raises(ProtocolError):
        JobTask.from_shareable(task(**changes), "site-2", HorizontalJob)


def test_unknown_job_fields_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown fields"):
        JobTask.from_shareable(task(job={**JOB.to_dict(), "surprise": 1}), "site-1", HorizontalJob)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (json.dumps({"name": "credit-2.b"}), "credit-2.b"),
        (json.dumps({"name": "<b>credit</b>"}), ""),
        (json.dumps({"name": "x" * 129}), ""),
        (json.dumps({"name": "credit\n"}), ""),
        (json.dumps({"name": ["credit"]}), ""),
        (json.dumps(["name"]), ""),
        ("{", ""),
    ],
)
def test_a_job_has_the_name_of_its_metadata_where_it_is_one(tmp_path: Path, content: str, name: str) -> None:
    assert job_name(tmp_path) == ""
    (tmp_path / "meta.json").write_text(content)
    assert job_name(tmp_path) == name


def test_errors_of_libraries_are_not_quoted() -> None:
    """Their messages may hold values of the data."""
    assert "4711" not in error_text(ValueError("could not convert 4711")) and "ValueError" in error_text(ValueError())
    assert error_text(PolicyRefusal("no")) == "no" and error_text(JobAborted("gone")) == "gone"
    assert error_text(ProtocolError("bad")) == "ProtocolError: bad"


def test_simulated_site_has_no_certificate(tmp_path: Path) -> None:
    assert not load_identity(tmp_path, "site-1").is_signed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_progress_is_one_line_a_second_and_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines, metrics = Clock(), [], []
    monkeypatch.setattr(executor, "time", clock)
    log = ProgressLog(lines.append, lambda *metric: metrics.append(metric))
    for number in range(100):
        clock.now += 0.125
        log(RoundRecord(number, {"eval-auc": 0.75}, 0.1, 0, 0, 0), 100)
    assert len(lines) == 14 and lines[0] == "round 1 of 100: 0.10 s, eval-auc 0.75000" and "round 100" in lines[-1]
    assert metrics == [("eval-auc", 0.75, number) for number in range(100)]
    log.heartbeat(None)
    clock.now += timeouts.HEARTBEAT_S
    log.heartbeat(20.0)
    clock.now += timeouts.HEARTBEAT_S
    log.heartbeat(None)
    assert len(lines) == 15, "each further sign of life takes twice as long"
    clock.now += timeouts.HEARTBEAT_S
    log.heartbeat(None)
    assert lines[14:] == ["waiting for the other sites since 20 s", "still working; the last line is 60 s old"]


def test_a_job_that_stays_with_nothing_to_tell_writes_a_line_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(), []
    monkeypatch.setattr(executor, "time", clock)
    log = ProgressLog(lines.append)
    for _ in range(24 * 3600):
        clock.now += 1.0
        log.heartbeat(None)
    assert 24 <= len(lines) < 32
    log.say("rows are scored")
    clock.now += timeouts.HEARTBEAT_S
    log.heartbeat(None)
    assert lines[-1] == "still working; the last line is 30 s old"


def test_deadlines_follow_what_is_sent() -> None:
    job, own = HorizontalJob("d", "y"), HorizontalJob("d", "y", deadline_s=5.0)
    assert timeouts.exchange_deadline_s(job) == timeouts.LOCAL_WORK_S
    assert timeouts.exchange_deadline_s(job, 125_000_000) == timeouts.LOCAL_WORK_S + 100.0
    assert timeouts.exchange_deadline_s(own, 125_000_000) == 5.0
    assert timeouts.site_timeout_s(own) > 5.0
    assert timeouts.site_timeout_s(job) > timeouts.exchange_deadline_s(job, 2 * MAX_FRAME_BYTES)


def test_graces_fit_into_each_other() -> None:
    """Sites end by themselves before the server stops waiting for their reports, and before FLARE kills them."""
    assert timeouts.STOP_GRACE_S < timeouts.ABORT_GRACE_S and timeouts.STOP_ANSWER_S < timeouts.STOP_REASON_S
    assert timeouts.STOP_REASON_S + timeouts.FLARE_STOP_GRACE_S < 9.0
    assert 60.0 + 2 * timeouts.BEAT_INTERVAL_S < timeouts.SILENCE_LIMIT_S <= 90.0


def idle(job, context, transport, timeout_s, progress) -> JobResult:
    return JobResult("00", f"kept in {context.runs}")


def run_idle(context: FLContext) -> Shareable:
    with executor_that(idle) as executor:
        return executor.execute(TRAIN_TASK, work_task(), context, Signal())


def test_a_site_whose_set_up_is_incomplete_takes_no_part(tmp_path: Path) -> None:
    context = flare_context(tmp_path)
    assert run_idle(context)["status"] == "completed"
    resources = tmp_path / "local" / "resources.json"
    document = json.loads(resources.read_text())
    for change, what in (
        ({"class_allow_list": ["nvflare_plugins.flare."]}, "nvflare_plugins.flare."),
        ({"allow_log_streaming": True}, "stream"),
    ):
        resources.write_text(json.dumps({**document, **change}))
        reply = run_idle(context)
        assert reply["status"] == "failed" and what in reply["error"] and "veilboost site-setup" in reply["error"]
    resources.unlink()
    assert "resources.json is missing" in run_idle(context)["error"]


def test_a_missing_policy_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = flare_context(tmp_path)
    (tmp_path / "local" / "veilboost.json").unlink()
    reply = run_idle(context)
    assert reply["status"] == "failed" and "has no site policy" in reply["error"] and "\n" not in reply["error"]
    assert not [record for record in caplog.records if record.exc_info or "Traceback" in record.getMessage()]


def test_a_site_says_in_its_log_why_the_server_refuses_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = flare_context(tmp_path)
    with executor_that(idle) as executor:
        refused = Shareable({"refused": "it is not set up\x1b[31m"})
        reply = executor.execute(TRAIN_TASK, refused, context, Signal())
    assert reply["status"] == "failed" and "says the server: it is not set up?[31m" in caplog.text


def test_results_go_where_the_policy_says_and_its_changes_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = flare_context(tmp_path / "workspace")
    run_idle(context)
    assert "policy has changed" not in caplog.text
    set_up(tmp_path / "workspace", SetupOptions(keep_in=str(tmp_path / "kept"), min_sites=2))
    with caplog.at_level("INFO"):
        assert run_idle(context)["status"] == "completed"
    assert f"kept in {tmp_path}/kept/site-1/veilboost_runs" in caplog.text
    run_idle(context)
    changes = [r.getMessage() for r in caplog.records if "policy has changed" in r.getMessage()]
    # The registry has moved, and with it what the site remembers: it begins anew there.
    assert not changes and (tmp_path / "kept" / "site-1" / "veilboost_registry" / NAME).is_file()
    set_up(tmp_path / "workspace", SetupOptions(min_sites=3, consents=("exact_cuts",)))
    run_idle(context)
    (text,) = [r.getMessage() for r in caplog.records if "policy has changed" in r.getMessage()]
    assert text.endswith("since the last job here: consents.exact_cuts, min_sites")


# -- jobs that wait for lost sites -------------------------------------------------------------------------------------

WAITING = HorizontalJob("train", "y", on_lost_site="wait")


@pytest.mark.parametrize("number", [0, -1, MAX_ATTEMPTS + 1, "2", 2.0, True, None])
def test_an_attempt_that_a_job_cannot_have_is_refused(number) -> None:
    with pytest.raises(ProtocolError, match="an attempt that this job cannot have"):
        JobTask.from_shareable(task(job=WAITING.to_dict(), number=number), "site-1", HorizontalJob)


def test_only_a_job_that_waits_has_a_second_attempt() -> None:
    assert JobTask.from_shareable(task(job=WAITING.to_dict(), number=2), "site-1", HorizontalJob).number == 2
    with pytest.raises(ProtocolError, match="an attempt that this job cannot have"):
        JobTask.from_shareable(task(number=2), "site-1", HorizontalJob)


def waiting_task(attempt: str, number: int) -> Shareable:
    data = work_task()
    data.update({"job": WAITING.to_dict(), "attempt": attempt, "number": number})
    return data


def test_a_process_takes_no_part_where_the_one_before_it_died(tmp_path: Path) -> None:
    """FLARE gives it the dead process's task: it says so, stays noted, and is there for the next attempt."""
    context, run, taken = flare_context(tmp_path), tmp_path / "job", []
    run.mkdir()

    def ended_by_the_server(job, context, transport, timeout_s, progress):
        taken.append(context.number)
        raise JobAborted("site-2 is lost")

    with executor_that(ended_by_the_server) as first:
        assert first.execute(TRAIN_TASK, waiting_task("aa" * 16, 1), context, Signal())["status"] == FAILED
    assert is_noted(run)
    with executor_that(ended_by_the_server) as second:
        reply = second.execute(TRAIN_TASK, waiting_task("aa" * 16, 1), context, Signal())
        assert reply["status"] == INTERRUPTED and "another one is there" in reply["error"] and is_noted(run)
        second.execute(TRAIN_TASK, waiting_task("bb" * 16, 2), context, Signal())
    assert taken == [1, 2]


def ended_evidence(root: Path, attempt: str, *, is_closed: bool = True) -> None:
    """Leave what a process leaves that has ended an attempt well."""
    path = SitePolicy.load(root, "site-1").runs / "job" / "evidence" / export_name("site-1")
    log = EvidenceLog(path, "site-1", "job", attempt, "masks")
    log.model("model.json", 3, bytes.fromhex("ab" * 32))
    if is_closed:
        log.end("completed")
        log.close()
    else:
        log.flush()


def must_not_run(*of: object) -> JobResult:
    raise AssertionError("it was done before")


@pytest.mark.parametrize(("attempt", "is_closed"), [("aa", True), ("bb", True), ("aa", False)])
def test_a_process_reports_what_the_one_before_it_had_ended(tmp_path: Path, attempt: str, is_closed: bool) -> None:
    """The one before died with all written and its report not sent: the job is not lost, and nothing is done again."""
    context, run = flare_context(tmp_path), tmp_path / "job"
    run.mkdir()
    note_waiting(run, 60.0, "aa" * 16)
    with executor_that(must_not_run) as second:
        ended_evidence(tmp_path, attempt * 16, is_closed=is_closed)
        reply = second.execute(TRAIN_TASK, waiting_task("aa" * 16, 1), context, Signal())
    if attempt == "aa" and is_closed:
        assert (reply["status"], reply["model_hmac"]) == (COMPLETED, "ab" * 32) and reply["evidence"]
    else:
        assert reply["status"] == INTERRUPTED and "another one is there" in reply["error"]


def test_a_site_ends_the_evidence_of_a_job_whose_process_was_killed(tmp_path: Path) -> None:
    """Not that of a job which waits: its own next process does."""
    context, logs = flare_context(tmp_path), {}
    for job_id in ("killed", "waits"):
        (tmp_path / job_id).mkdir()
        path = SitePolicy.load(tmp_path, "site-1").runs / job_id / "evidence" / export_name("site-1")
        log = EvidenceLog(path, "site-1", job_id, "aa" * 16, "masks")
        log.flush()
        log._file.close()  # as if the process had died
        logs[job_id] = path
    note_waiting(tmp_path / "waits", 60.0, "aa" * 16)
    with executor_that(lambda *of: JobResult("ab" * 32, "done", {})) as component:
        assert component.execute(TRAIN_TASK, work_task(), context, Signal())["status"] == COMPLETED
    assert read_log(logs["killed"]).end["reason"] == DIED and not logs["waits"].exists()


@pytest.mark.parametrize("is_sent", [True, False])
@pytest.mark.parametrize("is_orphan", [False, True])
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_part_is_over_when_the_server_has_its_report_and_not_when_flare_dies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sent: bool, is_orphan: bool, ends_well: bool
) -> None:
    """FLARE's process of the site ends those of its jobs with it: what they have done is reported by the next ones."""
    context, run, signal = flare_context(tmp_path), tmp_path / "job", Signal()
    run.mkdir()

    def ends(*of: object) -> JobResult:
        if ends_well:
            return JobResult("ab" * 32, "the model is there")
        raise JobAborted("site-2 is lost")

    with executor_that(ends) as ending:
        ending._ready = SimpleNamespace(takes_part=lambda attempt: None, waits=lambda over: None, end=lambda: None)
        ending.execute(TRAIN_TASK, waiting_task("aa" * 16, 1), context, signal)
        assert is_noted(run), "the server has no report yet"
        if is_orphan:
            monkeypatch.setattr(executor.os, "getppid", lambda: -1)
        if not is_sent:  # FLARE gives it up, and fires the event all the same
            signal.trigger(True)
        ending.handle_event(EventType.AFTER_SEND_TASK_RESULT, context)
        is_open = not (ends_well and is_sent)
        assert is_noted(run) == is_open
        ending.handle_event(EventType.END_RUN, context)
    assert is_noted(run) == (is_open and is_orphan)


@pytest.mark.parametrize("error", [ConfigurationError("no such column"), MemoryError(), ValueError("secret")])
def test_a_site_that_fails_by_itself_is_not_started_again(tmp_path: Path, error: Exception) -> None:
    context, run = flare_context(tmp_path), tmp_path / "job"
    run.mkdir()

    def fails(*of):
        assert is_noted(run)
        raise error

    with executor_that(fails) as failing:
        assert failing.execute(TRAIN_TASK, waiting_task("aa" * 16, 1), context, Signal())["status"] == FAILED
    assert not is_noted(run)


@pytest.mark.parametrize(("waits", "error"), [(True, WorkerLost), (False, WorkerLost), (True, WorkerFailure)])
def test_a_site_that_lost_a_worker_is_there_for_the_next_attempt(tmp_path: Path, waits: bool, error: type) -> None:
    context, run = flare_context(tmp_path), tmp_path / "job"
    run.mkdir()

    def fails(*of):
        raise error("worker 1 of this site's cluster was lost")

    with executor_that(fails) as failing:
        given = waiting_task("aa" * 16, 1) if waits else work_task()
        reply = failing.execute(TRAIN_TASK, given, context, Signal())
    goes_on = waits and error is WorkerLost
    assert reply["status"] == (INTERRUPTED if goes_on else FAILED) and "worker 1" in reply["error"]
    assert is_noted(run) == goes_on


FULL, DENIED = OSError(errno.ENOSPC, "full", "/secret/path"), OSError(errno.EACCES, "denied", "/secret/path")


@pytest.mark.parametrize("error", [FULL, HeldElsewhere("the memory is held"), DENIED, ConfigurationError("no column")])
def test_what_time_mends_pauses_a_job_that_waits(tmp_path: Path, monkeypatch, error: Exception) -> None:
    context, run, paused, room = flare_context(tmp_path), tmp_path / "job", [], [False]
    run.mkdir()
    monkeypatch.setattr(timeouts, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(executor, "takes_files", lambda folder: room[0])

    def fails(*of):
        raise error

    with executor_that(fails) as failing:
        failing._ready = SimpleNamespace(takes_part=lambda attempt: None, waits=paused.append, end=lambda: None)
        reply = failing.execute(TRAIN_TASK, waiting_task("aa" * 16, 1), context, Signal())
        failing.handle_event(EventType.AFTER_SEND_TASK_RESULT, context)
    goes_on = time_mends(error)
    assert goes_on == (error not in (DENIED,) and "column" not in str(error))
    assert reply["status"] == (INTERRUPTED if goes_on else FAILED) and "secret" not in reply["error"]
    assert len(paused) == goes_on and is_noted(run) == goes_on
    if goes_on:
        assert not paused[0]()
        room[0] = True
        assert paused[0]()


def test_pauses_grow_longer(tmp_path: Path) -> None:
    context = flare_context(tmp_path)
    (tmp_path / "job").mkdir()

    def fails(*of):
        raise FULL

    found = []
    with executor_that(fails) as failing:
        for number in range(1, 9):
            failing.execute(TRAIN_TASK, waiting_task(f"{number:032x}", number), context, Signal())
            found.append(failing._pause_s)
    assert found == [5, 10, 20, 40, 80, 160, 300, 300]


def test_what_flare_aborts_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvflare_plugins.flare.timeouts.STOP_REASON_S", 0.0)
    context, run, signal = flare_context(tmp_path), tmp_path / "job", Signal()
    run.mkdir()

    def waits(job, context, transport, timeout_s, progress):
        signal.trigger(True)
        while transport.abort_reason is None:
            time.sleep(0.01)
        raise JobAborted(transport.abort_reason)

    with executor_that(waits) as aborted:
        aborted.execute(TRAIN_TASK, waiting_task("aa" * 16, 1), context, signal)
    assert not is_noted(run)
