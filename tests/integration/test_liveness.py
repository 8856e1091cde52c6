"""Real processes that get stuck: they report, end their evidence and leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvflare.apis.fl_constant import FLMetaKey

from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.reader import read_log

pytestmark = pytest.mark.slow

# A site whose XGBoost may not make a thread: it waits for ever inside native code (RLIMIT_AS as in a small container).
STUCK_SITE = """
import resource, sys, threading, types
from pathlib import Path
import numpy as np
import xgboost as xgb
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare_plugins.flare import timeouts, work
from nvflare_plugins.flare.executor import TRAIN_TASK
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.pooled.mediated.communicator import Federated
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.pooled.mediated.mediator import Mediator
from tests.unit.nvflare_plugins.flare.test_work import executor_that, flare_context, task

workspace, leaver = Path(sys.argv[1]), sys.argv[2]
sys.modules["__main__"].__spec__ = types.SimpleNamespace(name="nvflare.private.fed.app.client.worker_process")
timeouts.LEAVE_S = 2.0


def stuck(job, context, transport, timeout_s, progress):
    folder = RunFolder(context.runs, context.job_id).create()
    path = folder.evidence / export_name(context.site)
    log = EvidenceLog(path, context.site, context.job_id, context.attempt.hex(), job.profile)
    matrix = xgb.DMatrix(np.random.default_rng(0).random((100, 3)), label=np.arange(100) % 2, nthread=1)
    everything = types.SimpleNamespace(
        largest_message_bytes=1 << 20,
        enter=lambda moment: None, answer=lambda message, buffer: buffer,
        classify=lambda call, dtype, op, size: types.SimpleNamespace(kind=None, reply_size=size),
    )
    with Mediator(everything, 0, everything) as mediator:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        with Federated(mediator, 2, 0):
            xgb.Booster({"nthread": 1, "tree_method": "hist"}, [matrix]).update(matrix, 0)
    raise SystemExit(f"not stuck: {log.site}")


def main():
    context, signal = flare_context(workspace), Signal()
    threading.Timer(3.0, signal.trigger, [True]).start()
    with executor_that(stuck) as executor:
        reply = executor.execute(TRAIN_TASK, task(), context, signal)
    print("REPORT", reply["status"], reply["error"], flush=True)
    if leaver == "guard":
        threading.Event().wait()


(workspace / "job").mkdir()
MainProcessMonitor.run(main, run_dir=str(workspace / "job"), shutdown_grace_time=0)
"""


@pytest.mark.parametrize("leaver", ["guard", "flare"])
def test_a_site_that_may_not_make_a_thread_reports_and_leaves_after_an_abort(tmp_path: Path, leaver: str) -> None:
    """XGBoost's part hung for ever, also after abort_job, and no evidence was ever finished."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STUCK_SITE, str(tmp_path), leaver],
        timeout=240,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))},
    )
    assert "REPORT failed FLARE stopped this site's part" in done.stdout, (done.stdout, done.stderr[-3000:])
    assert time.monotonic() - started < 120
    assert (tmp_path / "job" / FLMetaKey.PROCESS_RC_FILE).read_text() == str(done.returncode)
    if leaver == "guard":
        assert done.returncode == 9  # FLARE's code of an aborted job
    log = read_log(tmp_path / "veilboost_runs" / "job" / "evidence" / export_name("site-1"))
    assert not log.completed and "did not say why" in log.end["reason"]
