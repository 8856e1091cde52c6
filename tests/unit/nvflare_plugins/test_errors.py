"""What a machine lacks becomes a text with a remedy, at every edge, and evidence ends with a record all the same."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from nvflare.apis.shareable import Shareable

from he_processors.errors import CapacityExceeded, VeilBoostError
from nvflare_plugins.attempt import site_attempt
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.base.errors import (
    DataRefusal,
    HeldElsewhere,
    JobAborted,
    PolicyRefusal,
    WorkerFailure,
    WorkerLost,
    machine_failure,
    reason_of,
    time_mends,
)
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.flare import executor as executor_module
from nvflare_plugins.flare.executor import JobExecutor, error_text
from nvflare_plugins.kinds.horizontal.site import run_site
from nvflare_plugins.pages.report import keep_report
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from tests.support.federation import Federation

LACKS = [
    (OSError(errno.ENOSPC, "No space left on device", "/data/secret/patient_4711.csv"), "disk is full", "make room"),
    (OSError(errno.EDQUOT, "quota"), "quota", "make room"),
    (PermissionError(errno.EACCES, "Permission denied", "/data/secret/patient_4711.csv"), "may not be used", "own"),
    (OSError(errno.EROFS, "Read-only file system"), "read-only", "mount it for writing"),
    (OSError(errno.EMFILE, "Too many open files"), "too many files", "ulimit -n"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory", "fewer rows"),
    (MemoryError(), "not enough memory", "fewer rows"),
    (OSError(errno.EIO, "I/O error"), "disk reports errors", "health"),
    (RuntimeError("can't start new thread"), "no more threads", "ulimit -u"),
    (FileNotFoundError(errno.ENOENT, "No such file", "patient_4711"), "not there", "policy"),
]


@pytest.mark.parametrize(("error", "what", "remedy"), LACKS)
def test_what_a_machine_lacks_is_said_with_the_remedy_and_without_paths(error, what, remedy):
    for text in (machine_failure(error), reason_of(error), error_text(error)):
        assert what in text and remedy in text and "4711" not in text and "defect" not in text


def test_every_code_of_the_system_has_a_text_and_other_errors_have_none():
    for code in errno.errorcode:
        assert errno.errorcode[code] in machine_failure(OSError(code, "4711"))
    assert machine_failure(OSError("4711")) is None and machine_failure(ValueError("4711")) is None
    assert reason_of(ValueError("4711")) == "unexpected ValueError" and "4711" not in error_text(OSError("4711"))
    assert reason_of(PolicyRefusal("no")) == "no" and "ended from outside" in reason_of(KeyboardInterrupt())


PASSES = [
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EDQUOT, "quota"),
    OSError(errno.ESTALE, "stale"),
    WorkerLost("worker 1"),
    HeldElsewhere("the memory is held"),
]
FINAL = [
    *(error for error, *_ in LACKS[2:]),
    OSError("4711"),
    VeilBoostError("no"),
    PolicyRefusal("no"),
    DataRefusal("rows"),
    WorkerFailure("worker 1"),
    JobAborted("by an operator"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", PASSES)
def test_what_is_listed_is_mended_by_time_and_what_it_brings_about_too(error: BaseException) -> None:
    told = JobAborted("the ledger cannot be written")
    told.__cause__ = error
    assert time_mends(error) and time_mends(told)
    beside = ValueError("another, while it was handled")
    beside.__context__ = error
    assert not time_mends(beside)


@pytest.mark.parametrize("error", FINAL)
def test_all_else_is_final(error: BaseException) -> None:
    assert not time_mends(error)


@pytest.mark.parametrize("refusal", [DataRefusal("rows"), PolicyRefusal("no"), CapacityExceeded("4711")])
def test_a_refusal_that_a_full_disk_keeps_from_being_noted_is_final(refusal: Exception) -> None:
    try:
        try:
            raise refusal
        except VeilBoostError:
            raise OSError(errno.ENOSPC, "full") from None
    except OSError as error:
        assert not time_mends(error)


class _Context:
    """As much of FLARE's context as ``execute`` asks for."""

    def __init__(self, workspace: Path) -> None:
        self._root = str(workspace)

    def get_identity_name(self) -> str:
        return "site-1"

    def get_job_id(self) -> str:
        return "job"

    def get_engine(self) -> _Context:
        return self

    def get_workspace(self) -> _Context:
        return self

    def get_root_dir(self) -> str:
        return self._root


@pytest.mark.parametrize(("error", "what", "remedy"), LACKS)
def test_the_site_reports_it_and_calls_it_no_defect(tmp_path, monkeypatch, error, what, remedy):
    executor, said = JobExecutor(), []
    for name in ("log_error", "log_exception", "log_info"):
        monkeypatch.setattr(executor, name, lambda context, text, name=name: said.append((name, text)))

    def fail(*_):
        raise error

    monkeypatch.setattr(executor_module, "check_set_up", fail)
    reply = executor.execute("veilboost_train", Shareable(), _Context(tmp_path), None)
    assert what in reply["error"] and remedy in reply["error"] and "4711" not in reply["error"]
    [(how, text)] = said
    assert how == "log_error" and what in text and "4711" not in text and "defect" not in text


@pytest.fixture
def place(tmp_path):
    federation = Federation(tmp_path)
    frame = pd.DataFrame({"a": np.arange(60.0), "y": np.arange(60) % 2})
    federation.give_data("train", frame)
    policy = SitePolicy.load(federation.workspace("site-1"), "site-1")
    return SiteContext(
        "site-1", federation.sites, "job", bytes(16), tmp_path / "runs", policy, Identity.unsigned("site-1")
    )


ENDS = [
    *(error for error, _, _ in LACKS[:7]),
    KeyError("4711"),
    ZeroDivisionError(),
    JobAborted("said so"),
    KeyboardInterrupt(),
    SystemExit(1),
]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_evidence_ends_with_a_record_whatever_ends_the_attempt(place, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(site_attempt, "open_session", fail)
    job = HorizontalJob("train", "y", params={"objective": "binary:logistic"})
    with pytest.raises(type(error)) as raised:
        run_site(job, place, None, 1.0)
    assert raised.value is error
    [path] = (place.runs / "job" / "evidence").iterdir()
    log = read_log(path)
    assert not log.unfinished and log.end["status"] == "aborted"
    expected = str(error) if isinstance(error, VeilBoostError) else reason_of(error)
    assert log.end["reason"] == expected and "4711" not in log.end["reason"]


def test_a_report_that_cannot_be_written_does_not_undo_the_run(tmp_path, caplog):
    (tmp_path / "run.json").mkdir()
    keep_report(RunRecord("job", "a1", "site-1", ("site-1",), "masks"), tmp_path)
    assert "the run is complete" in caplog.text and str(tmp_path) not in caplog.text
