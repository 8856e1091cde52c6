"""A simulation in processes of its own: ended with whoever waits for it, and followed by its sites' own lines."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nvflare_plugins.api.simulator import MARK, Progress, progress_line, run_watched
from tests.support.threads import wait_until

ROOT = Path(__file__).parents[4]
# As FLARE's simulator: a process that starts another one in a session of its own, which no signal to a group reaches.
JOB = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "open(sys.argv[1], 'w').close()\n"
    "time.sleep(600)\n"
)
CALLER = (
    "import signal, sys\nfrom pathlib import Path\nfrom nvflare_plugins.api.simulator import run_watched\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job is started without it
    "try:\n    run_watched(['-c', sys.argv[1], sys.argv[2]], Path(sys.argv[3]), lambda: None)\n"
    "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
)


def running() -> list[int]:
    """Return the processes of simulations that this test has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STARTED_BY") == str(os.getpid()) and process.environ().get(MARK):
                found += [process.pid] if process.status() != psutil.STATUS_ZOMBIE else []
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_runs_on_after_an_interrupt_or_the_death_of_the_caller(how: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STARTED_BY": str(os.getpid())}
    begun = tmp_path / "begun"
    command = [sys.executable, "-c", CALLER, JOB, str(begun), str(tmp_path / "log")]
    caller = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(begun.exists)
        assert len(running()) == 3  # the watcher, the job, and what that has started
        caller.send_signal(how)
        assert caller.communicate(timeout=60)[0] == ("interrupted\n" if how is signal.SIGINT else "")
        wait_until(lambda: not running(), why=running)
    finally:
        caller.kill()


def test_what_a_job_leaves_running_ends_with_it_and_its_exit_code_is_told(tmp_path: Path) -> None:
    quick = JOB.replace("time.sleep(600)\n", "sys.exit(3)\n")
    assert run_watched(["-c", quick, str(tmp_path / "begun")], tmp_path / "log", lambda: None) == 3
    assert not [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


LINE = "2026-11-24 15:19:41,503 - JobExecutor - INFO - [identity=ulm, run=simulate_job] - "


def test_progress_is_read_from_the_lines_that_a_site_writes_anyway(tmp_path: Path) -> None:
    for site in ("berlin", "ulm", "kiel"):
        (tmp_path / site).mkdir()
    (tmp_path / "berlin" / "log.txt").write_text(LINE + "round 12 of 20: 0.05 s, train-auc 0.9, eval-auc 0.97478\n")
    (tmp_path / "ulm" / "log.txt").write_text(LINE + "taking part with berlin under profile masks\n")
    line = progress_line(tmp_path, ["berlin", "ulm", "kiel"])
    assert line == "berlin 12/20 · ulm taking part · kiel starting, train-auc 0.9, eval-auc 0.97478"


def test_progress_is_one_line_where_somebody_looks_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, written in ((Terminal(), True), (io.StringIO(), False)):
        texts = iter(["a long text", "short"])
        line = Progress(lambda texts=texts: next(texts), stream)
        line.show()
        line.show() if written else None
        line.end()
        assert (stream.getvalue().count("\r") == 2 and stream.getvalue().endswith("\n")) is written


def test_a_notebook_keeps_one_line_and_not_hundreds(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cell = SimpleNamespace(update=lambda data, raw: said.append(data["text/plain"]))
    shown = SimpleNamespace(display=lambda *data, **how: cell)
    for name, module in {
        "ipykernel": SimpleNamespace(),
        "IPython": SimpleNamespace(),
        "IPython.display": shown,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    line = Progress(lambda: "ulm 3/20")
    line.show()
    line.end()
    assert [one.split("s  ")[1] for one in said] == ["ulm 3/20"]
