"""The POC: a disk that is full for a while pauses a job, and a site whose packages do not load is named at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from poc_workspace.run_poc import SITES, Poc
from tests.poc.soak import MOUNT, UMOUNT
from tests.poc.test_lost_sites import check_result, in_thread, job_of, started_by, submitted
from tests.poc.test_poc import JOBS, machine, rounds_done, site_log, wait_until

pytestmark = [pytest.mark.poc, pytest.mark.slow]


def mounts(folder: Path) -> bool:
    folder.mkdir(exist_ok=True, mode=0o700)
    command = [*MOUNT, "size=16m,mode=0700", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_full_disk_pauses_a_job_that_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc") as poc:
        disk = poc.kits / "site-2" / "veilboost_runs"
        if not mounts(disk):
            pytest.skip("no small disk can be mounted here")
        try:
            outcome: dict = {}
            thread = submitted(poc, outcome)
            job_id = job_of(poc, set())
            wait_until(lambda: rounds_done(poc, "site-3", job_id) >= 5, 120)
            with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(1 << 12))
            for site in SITES:
                wait_until(lambda site=site: "the job waits for site-2, until " in site_log(poc, site, job_id), 120)
                assert "the disk is full" in site_log(poc, site, job_id)
            (disk / "filler").unlink()
            thread.join(300)
            check_result(poc, outcome, 2)
        finally:
            subprocess.run([UMOUNT, "-l", str(disk)], check=False)


def test_a_site_whose_wheel_does_not_load_is_named_to_all(tmp_path: Path) -> None:
    wheel = tmp_path / "wheel" / "xgboost"
    wheel.mkdir(parents=True)
    (wheel / "__init__.py").write_text("raise ImportError('libxgboost.so: undefined symbol: XGBuildInfo')\n")
    with Poc(tmp_path / "poc") as poc:
        start = started_by(poc, "site-2")
        for pid in machine(poc, "site-2"):
            os.kill(pid, signal.SIGKILL)
        started = poc.kits / "site-2" / "local" / "veilboost_guard_started.json"
        started.unlink()
        before, found = os.environ.get("PYTHONPATH", ""), f"{wheel.parent}{os.pathsep}"
        child = start({"PYTHONPATH": found + before})
        try:
            wait_until(started.exists, 120)
            outcome: dict = {}
            begun = time.monotonic()
            in_thread(poc, outcome, JOBS / "horizontal_masks", {"num_rounds": 5, "tracking": False}).join(300)
            print(f"the job ended {time.monotonic() - begun:.0f} s after it was submitted")
            said = "site-2: the job's process cannot load xgboost: its build does not fit this Python"
            summary = json.loads(next(outcome["result"].rglob("veilboost/summary.json")).read_text())
            assert outcome["status"] != "FINISHED:COMPLETED" and said in summary["reason"]
            for site in ("site-1", "site-3"):
                assert said in site_log(poc, site, outcome["job_id"])
            command = ["veilboost", "site-setup", str(poc.kits / "site-2"), "--check"]
            checked = subprocess.run(command, capture_output=True, text=True, check=False)
            assert checked.returncode == 1 and "cannot load xgboost: its build does not fit" in checked.stdout
        finally:
            child.kill()
            child.wait()
