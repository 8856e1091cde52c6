"""The POC: the server's processes are killed while a job runs, and the job goes on with nobody at the keyboard."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from nvflare_plugins.base.files import copy_folder
from poc_workspace.run_poc import ADMIN, JOBS, SITES, Poc, verify
from tests.poc.test_lost_sites import ROUNDS, WAITING, attempts
from tests.poc.test_poc import job_processes, rounds_done, site_log, wait_until

pytestmark = [pytest.mark.poc, pytest.mark.slow]

OF_SERVER = (b"nvflare.private.fed.app.server.server_train", b"nvflare.private.fed.app.server.runner_process")
"""Modules of FLARE's own process of a server, and of its process of a job."""


def processes(poc: Poc, *modules: bytes) -> list[int]:
    """Return the server's processes of these modules; FLARE's start script is none of them, and lives on."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in poc.pids()}
    return [pid for pid, line in lines.items() if any(module in line for module in modules)]


def run(poc: Poc, deaths: list[tuple[int, tuple[bytes, ...]]]) -> str:
    """Run the job; after so many rounds kill these processes of the server. Return the job's id."""
    copy = copy_folder(JOBS / "horizontal_masks", poc.folder / "jobs" / f"job_{len(deaths)}")
    for path in copy.glob("*/config/config_fed_server.json"):
        config = json.loads(path.read_text())
        config["workflows"][0]["args"]["job"].update(WAITING)
        path.write_text(json.dumps(config))
    with poc.session() as session:
        job_id = session.submit_job(str(copy))
    for number, (n_rounds, modules) in enumerate(deaths, start=2):
        wait_until(lambda n=n_rounds: rounds_done(poc, "site-3", job_id) >= n, 240)
        killed = time.monotonic()
        for pid in processes(poc, *modules):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda n=number: attempts(poc, "site-3", job_id) >= n, 300)
        wait_until(lambda: " round " in site_log(poc, "site-3", job_id).rpartition("in attempt")[2], 120)
        print(f"a round was done {time.monotonic() - killed:.1f} s after {len(modules)} of the server's had died")
    wait_until(lambda: all("finished: " in site_log(poc, site, job_id) for site in SITES), 600)
    wait_until(lambda: not job_processes(poc, job_id), 120)
    return job_id


def model(poc: Poc, job_id: str) -> bytes:
    models = {path.read_bytes() for path in poc.kits.glob(f"site-*/veilboost_runs/{job_id}/model.json")}
    assert len(models) == 1
    return models.pop()


def test_a_job_goes_on_after_the_death_of_all_processes_of_the_server(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc") as poc:
        whole = run(poc, [])
        died = run(poc, [(10, OF_SERVER), (60, OF_SERVER[1:])])
        assert model(poc, died) == model(poc, whole)
        with poc.session() as session:
            wait_until(lambda: session.get_job_meta(died)["status"].startswith("FINISHED"), 60)
            assert session.get_job_meta(died)["status"] == "FINISHED:COMPLETED"
            result = Path(session.download_job_result(died, str(poc.folder / "downloads")))
        summary = json.loads(next(result.rglob("veilboost/summary.json")).read_text())
        assert summary["attempts"] == 3 and summary["reason"] is None
        assert verify(result, poc.kits / ADMIN / "startup" / "rootCA.pem") == 0
        trees = json.loads(model(poc, died))["learner"]["gradient_booster"]["model"]["trees"]
        assert len(trees) == ROUNDS
