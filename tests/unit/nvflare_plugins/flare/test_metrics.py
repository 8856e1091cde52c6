"""Metrics: what the files say, who may read them, and that they never hold a job up."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from pathlib import Path
from typing import ClassVar

import pytest
from nvflare.apis.fl_constant import ReservedTopic
from nvflare.fuel.data_event.data_bus import DataBus

from nvflare_plugins.attempt.job_context import Silent
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.flare.metrics import (
    KEPT_S,
    Family,
    MetricsFile,
    ServerMetrics,
    SiteMetrics,
    metrics_folder,
    rendered,
)
from nvflare_plugins.pages.run_record import RoundRow, Spending
from nvflare_plugins.wire.envelope import (
    Codec,
    Commitment,
    Frame,
    Kind,
    Operation,
    Phase,
    TrainingStep,
    Transfer,
)
from nvflare_plugins.workers.workers import TRIAL, Work, begin
from tests.support import frames
from tests.support.workers_here import workers_here

LABELS = (("site", "site-1"), ("job_id", "j"), ("kind", "horizontal"), ("profile", "masks"))
LINE = re.compile(r'[a-z_]+\{([a-z_]+="([^"\\\n]|\\[\\"n])*",?)+\} [-+.e0-9a-z]+')


def frame(payload: bytes, kind: Kind = Kind.HISTOGRAM, round_: int = 3) -> Frame:
    moment = TrainingStep(Phase.SETUP, round_)
    return frames.frame(payload, operation=Operation.GATHER, kind=kind, moment=moment, codec=Codec.PUBLIC)


class Echo:
    """A transport whose server answers with twice the bytes."""

    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        return 2 * data

    def abort(self, reason: str) -> None:
        raise JobAborted(reason)


def site_metrics(folder: Path | None, budgets: object = lambda: ()) -> SiteMetrics:
    return SiteMetrics(MetricsFile(folder, "site-1", "j"), LABELS, 2, budgets, clock=lambda: 1000.0)  # type: ignore[arg-type]


def values(text: str) -> dict[str, float]:
    """Return a metric's value by its name and the labels that are its own."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert LINE.fullmatch(line), line
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            own = [one for one in labels.split(",") if one.split("=")[0] not in dict(LABELS) or name.startswith("x")]
            found[f"{name} {' '.join(own)}".strip()] = float(value)
    return found


def joined() -> None:
    for thread in threading.enumerate():
        if thread.name == "veilboost_metrics":
            thread.join(10)


def test_a_site_writes_rounds_stages_bytes_and_budget(tmp_path: Path) -> None:
    spending = [Spending("d", 4.0, 1e-6, 1.5), Spending("unread", 2.0, 1e-6, None)]
    metrics = site_metrics(tmp_path, lambda: spending)
    sent = frame(b"12345").pack()
    with metrics.running(lambda: 7.5):
        progress = metrics.watched(Silent())
        progress(RoundRow(0, 2.0, {"eval-auc": 0.5}, {"xgboost": 1.0, "network": 0.25}), 10)
        progress(RoundRow(1, 2.0, {"eval-auc": 0.5}, {"xgboost": 1.0}), 10)
        assert metrics.metered(Echo()).exchange(sent, 1.0) == 2 * sent
        metrics.write()
        running = values((tmp_path / "veilboost_site-1_j.prom").read_text())
    joined()
    assert running['veilboost_site_job_state state="running"'] == 1
    assert running["veilboost_site_waiting_seconds"] == 7.5
    assert running["veilboost_site_attempt"] == 2
    found = values((tmp_path / "veilboost_site-1_j.prom").read_text())
    assert found['veilboost_site_job_state state="completed"'] == 1
    assert found['veilboost_site_job_state state="running"'] == 0
    assert (found["veilboost_site_round"], found["veilboost_site_rounds_planned"]) == (2, 10)
    assert found['veilboost_site_stage_seconds_total stage="xgboost"'] == 2.0
    assert found['veilboost_site_sent_bytes_total message="HISTOGRAM"'] == len(sent)
    assert found['veilboost_site_received_bytes_total message="HISTOGRAM"'] == 2 * len(sent)
    assert found['veilboost_site_budget_left_epsilon data_set="d"'] == 2.5
    assert found['veilboost_site_budget_epsilon data_set="unread"'] == 2.0
    assert 'veilboost_site_budget_left_epsilon data_set="unread"' not in found  # unknown is not "all of it"
    assert not any("auc" in name for name in found)


def test_a_site_writes_what_its_workers_have_done_and_do(tmp_path: Path) -> None:
    metrics = site_metrics(tmp_path)
    with metrics.running(lambda: None), workers_here(2) as workers:
        metrics.watched(Silent()).note_workers(workers.work)
        begin(workers, TRIAL, [()] * 2)
        workers.work[1].rows.update(held=7, encrypted=14)
        workers.work[1].told = ("reads its rows", 3, 7)
        metrics.write()
        found = values((tmp_path / "veilboost_site-1_j.prom").read_text())
    joined()
    assert found['veilboost_site_worker_rows worker="1"'] == 7  # no counter: another trial of a tuning may have fewer
    assert found['veilboost_site_worker_rows_total worker="1" done="encrypted"'] == 14
    assert 'veilboost_site_worker_rows_total worker="1" done="held"' not in found
    assert found['veilboost_site_worker_rows_read worker="1"'] == 3
    assert found['veilboost_site_worker_busy worker="0"'] == 0
    for name in ("busy_seconds", "sent_bytes", "received_bytes"):
        assert found[f'veilboost_site_worker_{name}_total worker="0"'] > 0


def test_a_worker_that_comes_to_an_end_while_it_is_told_of_does_not_end_the_file(tmp_path: Path) -> None:
    class Ending(Work):
        said: ClassVar = iter([("reads its rows", 3, 7)])
        told = property(lambda self: next(self.said, None), lambda self, value: None)

    metrics = site_metrics(tmp_path)
    metrics.watched(Silent()).note_workers([Ending()])
    metrics.write()
    assert values((tmp_path / "veilboost_site-1_j.prom").read_text())['veilboost_site_worker_rows_read worker="0"'] == 3


def test_the_time_of_a_worker_that_waited_for_others_does_not_fall(tmp_path: Path) -> None:
    """Prometheus takes a counter that falls for one that began anew, and shows all of it as of the last minutes."""
    metrics, work = site_metrics(tmp_path), Work()
    metrics.watched(Silent()).note_workers([work])
    found = []
    for seconds, waited_s in ((30.0, 0.0), (1.0, 20.0), (25.0, 0.0)):
        work._clock = (work.seconds + seconds, "", 0.0)
        work.exchanged(0, waited_s)
        metrics.write()
        text = (tmp_path / "veilboost_site-1_j.prom").read_text()
        found.append(values(text)['veilboost_site_worker_busy_seconds_total worker="0"'])
    assert found == [30.0, 30.0, 36.0]


def test_a_job_that_ends_with_an_error_has_failed(tmp_path: Path) -> None:
    metrics = site_metrics(tmp_path)
    with pytest.raises(JobAborted), metrics.running(lambda: None):
        metrics.metered(Echo()).abort("told so")
    joined()
    assert values((tmp_path / "veilboost_site-1_j.prom").read_text())['veilboost_site_job_state state="failed"'] == 1


def test_without_a_folder_nothing_is_wrapped_or_asked(tmp_path: Path) -> None:
    transport, progress = Echo(), Silent()
    metrics = site_metrics(None, lambda: pytest.fail("asked"))
    assert metrics.metered(transport) is transport
    assert metrics.watched(progress) is progress
    with metrics.running(lambda: None):
        pass
    assert metrics_folder({}) is None
    assert metrics_folder({"VEILBOOST_METRICS": str(tmp_path)}) == tmp_path


def test_a_folder_that_is_gone_and_a_ledger_that_fails_end_no_job(tmp_path: Path) -> None:
    def broken() -> tuple[Spending, ...]:
        raise OSError

    metrics = site_metrics(tmp_path / "gone", broken)
    with metrics.running(lambda: None):
        metrics.write()
        metrics.write()
    joined()
    assert list(tmp_path.iterdir()) == []


def test_the_collector_may_read_whatever_the_umask_and_old_files_go(tmp_path: Path) -> None:
    import os

    old, young, foreign = (tmp_path / name for name in ("veilboost_a_b.prom", "veilboost_c_d.prom", "other.prom"))
    for path in (old, young, foreign):
        path.write_text("")
    for path in (old, foreign):
        os.utime(path, (path.stat().st_mtime - KEPT_S - 60,) * 2)
    before = os.umask(0o077)
    try:
        MetricsFile(tmp_path, "server", "j").write("")
    finally:
        os.umask(before)
    assert (tmp_path / "veilboost_server_j.prom").stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other.prom",
        "veilboost_c_d.prom",
        "veilboost_server_j.prom",
    ]


def test_names_cannot_leave_the_folder_or_the_quotes(tmp_path: Path) -> None:
    MetricsFile(tmp_path, "../up/site one", "j").write("")
    assert [path.name for path in tmp_path.iterdir()] == ["veilboost_.._up_site_one_j.prom"]
    text = rendered([Family("x_total", "X.", {(("a", 'q"u\\o\nte'),): 1.0})], ())
    assert text == '# HELP x_total X.\n# TYPE x_total counter\nx_total{a="q\\"u\\\\o\\nte"} 1.0\n'


def test_the_server_says_whom_it_waits_for_and_publishes_what_was_added(tmp_path: Path) -> None:
    heard: list[dict[str, object]] = []
    now = [1000.0]
    metrics = ServerMetrics(MetricsFile(tmp_path, "server", "j"), LABELS[1:], clock=lambda: now[0], interval_s=5)
    received = Transfer(("site-1",), "received", frame(b""), Commitment(b"", b"12345"))
    answered = Transfer(("site-1", "site-2"), "sent", frame(b""), Commitment(b"", b"123"))

    def take(topic: str, facts: list[dict[str, object]], bus: object) -> None:
        heard.extend(facts)

    DataBus().subscribe([ReservedTopic.APP_METRICS], take)
    try:
        metrics.transfer(received)
        metrics.look(1, {"site-1": 0.0, "site-2": 4.0}, {"site-1": 1.0, "site-2": 2.0})
        first, heard[:] = list(heard), []
        metrics.transfer(received)
        metrics.transfer(answered)
        metrics.look(1, {}, {})  # not yet due
        assert heard == []
        now[0] += 6
        metrics.look(2, {"site-1": 0.0, "site-2": 0.0}, {}, "completed")
    finally:
        DataBus().unsubscribe(ReservedTopic.APP_METRICS, take)
    grown = [f["value"] for f in (*first, *heard) if f["metric_name"] == "veilboost_server_received_bytes_total"]
    assert grown == [5, 5]
    found = values((tmp_path / "veilboost_server_j.prom").read_text())
    text = (tmp_path / "veilboost_server_j.prom").read_text()
    assert 'veilboost_server_sent_bytes_total{job_id="j",kind="horizontal",profile="masks",site="site-2"' in text
    assert found["veilboost_server_round"] == 3
    assert found["veilboost_server_attempt"] == 2
    waiting = {f["tags"]["site"]: f["value"] for f in first if f["metric_name"] == "veilboost_server_waiting_seconds"}  # type: ignore[index]
    assert waiting == {"site-1": 0.0, "site-2": 4.0}
    assert not any("budget" in str(fact) for fact in (*first, *heard))


@pytest.mark.parametrize("module", ["os.replace", "pathlib.Path.replace"])
def test_who_may_write_in_the_folder_makes_no_other_file_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """The collector's user puts a link to a key of the site in the place of each name as soon as it is there."""
    key, folder = tmp_path / "client.key", tmp_path / "metrics"
    key.touch(0o600)
    folder.mkdir()
    replace = os.replace

    def replaced(source: Path, target: Path) -> None:
        replace(source, target)
        os.unlink(target)
        os.symlink(key, target)

    monkeypatch.setattr(module, replaced)
    with contextlib.suppress(OSError):
        MetricsFile(folder, "site-1", "j").write("text")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and key.read_bytes() == b""
