"""The POC: provisioned certificates, the admin interface, an abort, a killed site."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from jobs import examples
from poc_workspace.run_poc import SITES, Poc

JOBS = Path(examples.__file__).parent
SCRIPT = JOBS.parent / "poc_workspace" / "run_poc.py"

pytestmark = [pytest.mark.poc, pytest.mark.slow]


def test_round_trip_with_one_command(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--workspace", str(tmp_path / "poc")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FINISHED:COMPLETED" in done.stdout and "by every site's certificate" in done.stdout
    assert "\nVERIFIED: job " in done.stdout and "no process left" in done.stdout
    assert not (tmp_path / "poc").exists()


def test_vertical_round_trip_aligns_trains_and_predicts(tmp_path: Path) -> None:
    folder = tmp_path / "poc"
    command = [sys.executable, str(SCRIPT), "--scenario", "vertical", "--workspace", str(folder), "--keep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("FINISHED:COMPLETED") == 3 and done.stdout.count("\nVERIFIED: job ") == 3
    assert "Paillier ciphertexts" in done.stdout and "key_bits 3072" in done.stdout
    kits = Poc.kits_of(folder)
    (predictions,) = kits.glob("site-1/veilboost_runs/*/predictions.parquet")
    assert len(pd.read_parquet(predictions)) > 100
    for site in ("site-2", "site-3"):
        assert not list(kits.glob(f"{site}/veilboost_runs/*/predictions.*"))
        assert not list(kits.glob(f"{site}/veilboost_runs/*/model.json"))
        (table,) = kits.glob(f"{site}/veilboost_runs/*/private_table.json")
        assert table.stat().st_mode & 0o077 == 0


def test_private_round_trip_pays_from_every_sites_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "poc"
    command = [sys.executable, str(SCRIPT), "--scenario", "private", "--workspace", str(folder), "--keep"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FINISHED:COMPLETED" in done.stdout and "\nVERIFIED: job " in done.stdout
    assert done.stdout.count("privacy spent at site-") == 3
    assert len({path.read_bytes() for path in Poc.kits_of(folder).glob("site-*/veilboost_runs/*/model.json")}) == 1


def test_a_vertical_job_whose_party_is_killed_in_round_6_of_8_is_resumed(tmp_path: Path) -> None:
    """Real processes, real keys: nothing that was done is done again, and the model is the same to the byte."""
    job, folder = JOBS / "vertical_paillier", tmp_path / "poc"
    with Poc(folder, scenario="vertical") as poc:
        rounds = {"num_rounds": 8, "alignment": "first"}
        whole, status, _ = poc.run_job(job, changes=rounds)
        assert status == "FINISHED:COMPLETED"
        killer = threading.Thread(target=kill_after, args=(poc, "site-2", 5, whole), daemon=True)
        killer.start()
        lost, status, _ = poc.run_job(job, changes={**rounds, "alignment": whole})
        killer.join(10)
        assert not killer.is_alive() and status != "FINISHED:COMPLETED"
        kept = [
            {int(path.stem.split("-")[1]) for path in poc.kits.glob(f"{site}/veilboost_runs/{lost}/checkpoint-*")}
            for site in SITES
        ]
        done = max(set.intersection(*kept))
        assert 5 <= done <= 8, kept
        resumed, status, _ = poc.run_job(job, changes={**rounds, "alignment": whole, "resume_from": lost})
        assert status == "FINISHED:COMPLETED" and f"after {done} rounds" in site_log(poc, "site-3", resumed)
    models = [
        (poc.kits / "site-1" / "veilboost_runs" / name / "masked_model.json").read_bytes() for name in (whole, resumed)
    ]
    assert models[0] == models[1]
    for site in SITES:
        assert not list(poc.kits.glob(f"{site}/veilboost_runs/{resumed}/checkpoint-*"))


def kill_after(poc: Poc, site: str, n_rounds: int, other_than: str) -> None:
    """Kill a site's job process as soon as it has kept so many rounds of a new job."""

    def kept() -> list[Path]:
        found = poc.kits.glob(f"{site}/veilboost_runs/*/checkpoint-{n_rounds}.json")
        return [path for path in found if path.parent.name != other_than]

    wait_until(lambda: bool(kept()), 300)
    (pid,) = job_processes(poc, kept()[0].parent.name, site)
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poc]:
    poc = Poc(tmp_path_factory.mktemp("poc") / "poc")
    with poc:
        yield poc
    assert poc.pids() == []


@pytest.fixture
def endless_job(tmp_path: Path) -> Path:
    job = tmp_path / "horizontal_masks"
    shutil.copytree(JOBS / "horizontal_masks", job)
    path = job / "app" / "config" / "config_fed_server.json"
    config = json.loads(path.read_text())
    config["workflows"][0]["args"]["job"]["num_rounds"] = 5_000  # the most that a policy allows by itself: minutes
    path.write_text(json.dumps(config))
    return job


def job_processes(poc: Poc, job_id: str, site: str = "") -> list[int]:
    return [pid for pid, line in command_lines(poc).items() if job_id in line and site in line]


def command_lines(poc: Poc) -> dict[int, str]:
    """Return the command line of each process of the proof of concept that has not ended meanwhile."""
    lines = {}
    for pid in poc.pids():
        with contextlib.suppress(OSError):
            lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return lines


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def site_log(poc: Poc, site: str, job_id: str) -> str:
    path = poc.kits / site / job_id / "log.txt"
    return path.read_text() if path.is_file() else ""


def test_abort_from_the_admin_console_ends_xgboost_within_seconds(poc: Poc, endless_job: Path) -> None:
    with poc.session() as session:
        job_id = session.submit_job(str(endless_job))
        wait_until(lambda: all("round 1 of" in site_log(poc, site, job_id) for site in SITES))
        session.abort_job(job_id)
        wait_until(lambda: all("the job ended with an error" in site_log(poc, site, job_id) for site in SITES), 10)
        wait_until(lambda: not job_processes(poc, job_id), 30)
        wait_until(lambda: session.get_job_meta(job_id)["status"] == "FINISHED:ABORTED", 20)
        result = Path(session.download_job_result(job_id, str(poc.folder / "downloads")))
    reason = json.loads(next(result.rglob("veilboost/summary.json")).read_text())["reason"]
    assert reason.startswith("aborted by an operator, or by FLARE") and "site-" not in reason
    for site in SITES:
        assert not list((poc.kits / site / "veilboost_runs" / job_id).rglob("model.json"))
        assert not list((poc.kits / site / "veilboost_runs" / job_id).rglob("*.partial"))


def test_killed_site_ends_the_job_everywhere(poc: Poc, endless_job: Path) -> None:
    with poc.session() as session:
        job_id = session.submit_job(str(endless_job))
        wait_until(lambda: all("round 1 of" in site_log(poc, site, job_id) for site in SITES))
        (pid,) = job_processes(poc, job_id, "site-2")
        os.kill(pid, signal.SIGKILL)
        _, meta = session.monitor_job_and_return_job_meta(job_id, timeout=60, poll_interval=0.5)
        assert meta["status"] not in ("RUNNING", "FINISHED:COMPLETED")
        wait_until(lambda: not job_processes(poc, job_id), 30)
        result = Path(session.download_job_result(job_id, str(poc.folder / "downloads")))
    summary = json.loads(next(result.rglob("veilboost/summary.json")).read_text())
    assert summary["status"] == "failed" and "site-2" in summary["reason"]
    for site in ("site-1", "site-3"):
        assert "the job ended with an error" in site_log(poc, site, job_id)
        assert "site-2" in ended_evidence(poc, site, job_id)


def machine(poc: Poc, participant: str) -> list[int]:
    """Return all processes of a participant: FLARE's own and those of jobs."""
    return [pid for pid, line in command_lines(poc).items() if str(poc.kits / participant) in line]


def test_all_hear_why_the_server_refuses_a_job(poc: Poc) -> None:
    job_id, status, result = poc.run_job(JOBS / "horizontal_masks", changes={"on_lost_site": "continue"})
    assert status != "FINISHED:COMPLETED"
    reason = json.loads(next(result.rglob("veilboost/summary.json")).read_text())["reason"]
    assert reason.startswith("on_lost_site='continue' could never go on: the job has 3 sites")
    for site in SITES:
        assert f"the job ends before it began, says the server: {reason}" in site_log(poc, site, job_id)
    with poc.session() as session:
        assert session.get_job_meta(job_id)["veilboost_reason"] == reason


def kill_machine(poc: Poc, participant: str, how: signal.Signals = signal.SIGKILL) -> None:
    for pid in machine(poc, participant):
        os.kill(pid, how)


def rounds_done(poc: Poc, site: str, job_id: str) -> int:
    return max((int(number) for number in re.findall(r"round (\d+) of", site_log(poc, site, job_id))), default=0)


def ended_evidence(poc: Poc, site: str, job_id: str) -> str:
    (path,) = (poc.kits / site / "veilboost_runs" / job_id / "evidence").glob("*.evidence.jsonl")
    return path.read_text()


def test_a_stopped_machine_is_waited_for_60_seconds_and_a_dead_one_ends_the_job_in_90(
    tmp_path: Path, endless_job: Path
) -> None:
    with Poc(tmp_path / "poc") as poc, poc.session() as session:
        job_id = session.submit_job(str(endless_job))
        wait_until(lambda: all("round 1 of" in site_log(poc, site, job_id) for site in SITES))
        kill_machine(poc, "site-2", signal.SIGSTOP)
        time.sleep(60)
        before = rounds_done(poc, "site-1", job_id)
        kill_machine(poc, "site-2", signal.SIGCONT)
        wait_until(lambda: rounds_done(poc, "site-1", job_id) > before + 10)
        assert len(machine(poc, "site-2")) >= 2
        kill_machine(poc, "site-2")
        started = time.monotonic()
        _, meta = session.monitor_job_and_return_job_meta(job_id, timeout=200, poll_interval=0.5)
        lasted = time.monotonic() - started
        assert meta["status"] not in ("RUNNING", "FINISHED:COMPLETED") and 60 < lasted < 150, (meta, lasted)
        print(f"noticed and ended after {lasted:.0f} s")
        result = Path(session.download_job_result(job_id, str(poc.folder / "downloads")))
        summary = json.loads(next(result.rglob("veilboost/summary.json")).read_text())
        assert summary["reason"].startswith("no sign of life from site-2 for 90 s")
        for site in ("site-1", "site-3"):
            assert "no sign of life from site-2" in site_log(poc, site, job_id)
            assert "no sign of life from site-2" in ended_evidence(poc, site, job_id)


def test_a_dead_server_ends_the_sites_part_in_90_seconds(tmp_path: Path, endless_job: Path) -> None:
    with Poc(tmp_path / "poc") as poc:
        with poc.session() as session:
            job_id = session.submit_job(str(endless_job))
            wait_until(lambda: all("round 1 of" in site_log(poc, site, job_id) for site in SITES))
        kill_machine(poc, "server")
        started = time.monotonic()
        wait_until(lambda: all("the job ended with an error" in site_log(poc, s, job_id) for s in SITES), 150)
        print(f"noticed after {time.monotonic() - started:.0f} s")
        assert time.monotonic() - started > 60
        for site in SITES:
            assert "no sign of life from the server" in site_log(poc, site, job_id)
            assert "no sign of life from the server" in ended_evidence(poc, site, job_id)
        wait_until(lambda: not job_processes(poc, job_id), 60)


def test_incomplete_set_up_ends_a_job_and_names_the_command(poc: Poc) -> None:
    path = poc.kits / "site-2" / "local" / "resources.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), "allow_log_streaming": True}))
    try:
        _, status, result = poc.run_job(JOBS / "horizontal_masks", timeout_s=180)
    finally:
        path.write_text(before)
    reason = json.loads(next(result.rglob("veilboost/summary.json")).read_text())["reason"]
    assert status != "FINISHED:COMPLETED"
    assert reason.startswith("site-2: ") and "allow_log_streaming" in reason and "veilboost site-setup" in reason


def test_a_policy_that_changed_between_jobs_is_in_the_sites_log(poc: Poc) -> None:
    path = poc.kits / "site-3" / "local" / "veilboost.json"
    before = path.read_text()
    poc.run_job(JOBS / "horizontal_masks", timeout_s=180)
    path.write_text(json.dumps({**json.loads(before), "allowed_profiles": ["bfv"]}))
    try:
        job_id, _, _ = poc.run_job(JOBS / "horizontal_masks", timeout_s=180)
    finally:
        path.write_text(before)
    assert "policy has changed since the last job here: allowed_profiles" in site_log(poc, "site-3", job_id)
    assert "policy has changed" not in site_log(poc, "site-1", job_id)
