"""What a site takes from the server's task, what it tells, and what it writes to the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvflare.apis.shareable import Shareable

from he_processors.errors import (
    ConfigurationError,
    JobAborted,
    PolicyRefusal,
    ProtocolError,
)
from nvflare_plugins.flare import executor, timeouts
from nvflare_plugins.flare.executor import (
    ProgressLog,
    JobTask,
    error_text,
    load_identity,
)
from nvflare_plugins.flare.pieces import MAX_FRAME_BYTES
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.horizontal.training import RoundRecord

JOB = HorizontalJob("train", "y")


def task(**changes: object) -> Shareable:
    data = Shareable()
    good = {"job": JOB.to_dict(), "sites": ["site-1", "site-2"], "attempt": "00" * 16, "server": "server.job"}
    data.update({**good, **changes})
    return data


def test_good_task() -> None:
    read = JobTask.from_shareable(task(), "site-2", HorizontalJob)
    assert read == JobTask(JOB, ("site-1", "site-2"), "00" * 16, "server.job")


@pytest.mark.parametrize(
    "changes",
    [{"job": "x"}, {"sites": None}, {"sites": ["site-2", "site-1"]}, {"sites": ["site-1", "site-1"]},
     {"sites": ["site-1"]}, {"sites": [1, 2]}, {"attempt": "00"}, {"attempt": 7}, {"server": "site-1.job"},
     {"server": None}],
)  # fmt: skip
def test_wrong_tasks_are_refused(changes: dict) -> None:
    with pytest.raises(ProtocolError):
        JobTask.from_shareable(task(**changes), "site-2", HorizontalJob)


def test_unknown_job_fields_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown fields"):
        JobTask.from_shareable(task(job={**JOB.to_dict(), "surprise": 1}), "site-1", HorizontalJob)


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
    assert lines[14:] == ["waiting for the other sites since 20 s", "still working; the last line is 30 s old"]


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
