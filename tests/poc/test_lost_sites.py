"""The POC: processes and machines of a job that waits are killed, and the job goes on when they are back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from poc_workspace.run_poc import ADMIN, SITES, Poc, verify
from tests.poc.test_poc import JOBS, job_processes, machine, rounds_done, site_log, wait_until

pytestmark = [pytest.mark.poc, pytest.mark.slow]

ROUNDS = 150
WAITING = {"num_rounds": ROUNDS, "on_lost_site": "wait", "tracking": False}


def submitted(poc: Poc, outcome: dict) -> threading.Thread:
    """Run the job in a thread of its own; ``outcome`` is filled with its id, status and result."""

    def run() -> None:
        job_id, status, result = poc.run_job(
            JOBS / "horizontal_masks", changes={**WAITING, **outcome.pop("changes", {})}
        )
        outcome.update(job_id=job_id, status=status, result=result)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def job_of(poc: Poc, known: set[str]) -> str:
    """Return the id of the job that has begun at site-1."""

    def new() -> set[str]:
        return {path.parent.name for path in poc.kits.glob("site-1/*/fl_app.txt")} - known

    wait_until(lambda: bool(new()), 60)
    return new().pop()


def attempts(poc: Poc, site: str, job_id: str) -> int:
    return max(map(int, re.findall(r"in attempt (\d+) of the job", site_log(poc, site, job_id))), default=1)


def check_result(poc: Poc, outcome: dict, n_attempts: int) -> None:
    assert outcome["status"] == "FINISHED:COMPLETED"
    summary = json.loads(next(outcome["result"].rglob("veilboost/summary.json")).read_text())
    assert summary["attempts"] == n_attempts and summary["reason"] is None
    assert verify(outcome["result"], poc.kits / ADMIN / "startup" / "rootCA.pem") == 0
    models = {path.read_bytes() for path in poc.kits.glob(f"site-*/veilboost_runs/{outcome['job_id']}/model.json")}
    assert len(models) == 1 and len(json.loads(models.pop())["learner"]["gradient_booster"]["model"]["trees"]) == ROUNDS
    for number in range(2, n_attempts + 1):
        (folder,) = outcome["result"].rglob(f"veilboost/evidence_before_attempt_{number}")
        assert {path.name.split(".")[0] for path in folder.glob("*.jsonl")} == {"server", *SITES}
    for site in SITES:
        assert not (poc.kits / site / outcome["job_id"] / "veilboost_waits.json").exists()


def verifies_all(poc: Poc, outcome: dict) -> subprocess.CompletedProcess:
    """Run veilboost verify on the evidence of all attempts."""
    import sys

    folder = next(outcome["result"].rglob("veilboost/summary.json")).parent
    command = [sys.executable, "-m", "nvflare_plugins", "verify", str(folder), "--root-ca"]
    root = poc.kits / ADMIN / "startup" / "rootCA.pem"
    return subprocess.run([*command, str(root)], capture_output=True, text=True, check=False)


def kill_and_wait(poc: Poc, job_id: str, site: str, number: int) -> None:
    """Kill a site's process in the middle of training; return when rounds are done in the attempt of that number."""
    wait_until(lambda: rounds_done(poc, "site-3", job_id) >= 10 * (number - 1), 120)
    (pid,) = job_processes(poc, job_id, site)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: attempts(poc, "site-3", job_id) == number, 60)
    wait_until(lambda: " round " in site_log(poc, "site-3", job_id).rpartition("in attempt")[2], 60)
    lasted = time.monotonic() - killed
    print(f"{site}: a round was done {lasted:.1f} s after its process was killed")
    assert lasted < 60


def test_a_killed_process_costs_a_round_and_the_job_goes_on_within_30_seconds(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc") as poc:
        outcome: dict = {}
        thread = submitted(poc, outcome)
        job_id = job_of(poc, set())
        for number, site in ((2, "site-2"), (3, "site-1")):
            kill_and_wait(poc, job_id, site, number)
        thread.join(300)
        check_result(poc, outcome, 3)
        done = verifies_all(poc, outcome)
        assert done.returncode == 0 and done.stdout.count("by every site's certificate") >= 1, done.stdout
        assert "process ended without closing this log" in done.stdout


def test_a_machine_that_is_back_after_its_death_is_taken_in_again(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc") as poc:
        outcome: dict = {}
        thread = submitted(poc, outcome)
        job_id = job_of(poc, set())
        wait_until(lambda: rounds_done(poc, "site-3", job_id) >= 10, 120)
        parents = [
            pid for pid in machine(poc, "site-2") if b"client_train" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        command = Path(f"/proc/{parents[0]}/cmdline").read_bytes().decode().split("\0")[:-1]
        environment = dict(
            entry.split("=", 1)
            for entry in Path(f"/proc/{parents[0]}/environ").read_bytes().decode().split("\0")
            if entry
        )
        for pid in machine(poc, "site-2"):
            os.kill(pid, signal.SIGKILL)
        time.sleep(5)
        back = time.monotonic()
        with (poc.kits / "site-2" / "poc_console.log").open("ab") as console:
            child = subprocess.Popen(
                command,
                cwd=poc.kits / "site-2",
                env=environment,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        try:
            wait_until(lambda: attempts(poc, "site-2", job_id) == 2, 150)
            print(f"the new attempt began {time.monotonic() - back:.1f} s after the machine was back")
            thread.join(300)
            check_result(poc, outcome, 2)
        finally:
            child.kill()
            child.wait()


def test_a_site_that_does_not_come_back_ends_the_job_at_the_deadline(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc") as poc:
        outcome: dict = {"changes": {"lost_site_deadline_s": 15.0}}
        thread = submitted(poc, outcome)
        job_id = job_of(poc, set())
        wait_until(lambda: rounds_done(poc, "site-3", job_id) >= 10, 120)
        for pid in machine(poc, "site-2"):
            os.kill(pid, signal.SIGKILL)
        thread.join(300)
        assert outcome["status"] != "FINISHED:COMPLETED"
        summary = json.loads(next(outcome["result"].rglob("veilboost/summary.json")).read_text())
        assert "not back within lost_site_deadline_s (15 s): site-2" in summary["reason"]
        wait_until(lambda: not job_processes(poc, job_id), 60)
