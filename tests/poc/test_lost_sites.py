"""The POC: processes and machines of a job that waits are killed, and the job goes on when they are back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dp_components.ledger import Ledger
from nvflare_plugins.base.files import copy_folder
from nvflare_plugins.flare.loading import NOTE as STARTS
from nvflare_plugins.recipes.examples import PATIENTS, write_patients
from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe
from poc_workspace.run_poc import ADMIN, SITES, Poc, verify
from tests.poc.test_poc import JOBS, job_processes, machine, rounds_done, site_log, wait_until

pytestmark = [pytest.mark.poc, pytest.mark.slow]

ROUNDS = 150
WAITING = {"num_rounds": ROUNDS, "on_lost_site": "wait", "tracking": False}


def submitted(poc: Poc, outcome: dict) -> threading.Thread:
    """Run the horizontal job in a thread of its own."""
    return in_thread(poc, outcome, JOBS / "horizontal_masks", {**WAITING, **outcome.pop("changes", {})})


def in_thread(poc: Poc, outcome: dict, job: Path, changes: dict) -> threading.Thread:
    """Run a job in a thread of its own; ``outcome`` is filled with its id, status and result."""

    def run() -> None:
        job_id, status, result = poc.run_job(job, changes=changes)
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


def started_by(poc: Poc, site: str) -> Callable[..., subprocess.Popen]:
    """Return what starts FLARE's process of a site again, as it was started."""
    parents = [pid for pid in machine(poc, site) if b"client_train" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    command = Path(f"/proc/{parents[0]}/cmdline").read_bytes().decode().split("\0")[:-1]
    entries = Path(f"/proc/{parents[0]}/environ").read_bytes().decode().split("\0")
    environment = dict(entry.split("=", 1) for entry in entries if entry)

    def start(changes: Mapping[str, str] | None = None) -> subprocess.Popen:
        with (poc.kits / site / "poc_console.log").open("ab") as console:
            return subprocess.Popen(
                command,
                cwd=poc.kits / site,
                env={**environment, **(changes or {})},
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    return start


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
        start = started_by(poc, "site-2")
        for pid in machine(poc, "site-2"):
            os.kill(pid, signal.SIGKILL)
        time.sleep(5)
        back = time.monotonic()
        child = start()
        try:
            wait_until(lambda: attempts(poc, "site-2", job_id) == 2, 150)
            print(f"the new attempt began {time.monotonic() - back:.1f} s after the machine was back")
            thread.join(300)
            check_result(poc, outcome, 2)
        finally:
            child.kill()
            child.wait()


def killed_before_its_part(poc: Poc, site: str, known: set[str]) -> str:
    """Kill a site with all its processes as soon as that of a new job was started there; return the job's id."""

    def new() -> set[str]:
        return {path.parent.name for path in poc.kits.glob(f"{site}/*/{STARTS}")} - known

    wait_until(lambda: bool(new()), 60)
    for pid in machine(poc, site):
        os.kill(pid, signal.SIGKILL)
    (job_id,) = new()
    assert "taking part" not in site_log(poc, site, job_id)
    return job_id


def test_a_machine_that_dies_before_its_part_began_is_named_and_waited_for(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc") as poc:
        start, children, known = started_by(poc, "site-2"), list[subprocess.Popen](), set[str]()
        try:
            for on_loss, begins in (("stop", "VeilBoost job failed: "), ("wait", "the job waits for site-2, until ")):
                outcome: dict = {"changes": {"on_lost_site": on_loss}}
                thread = submitted(poc, outcome)
                job_id = killed_before_its_part(poc, "site-2", known)
                killed = time.monotonic()
                known.add(job_id)
                log = lambda job_id=job_id: site_log(poc, "server", job_id)  # noqa: E731
                wait_until(lambda begins=begins, log=log: begins in log(), 240)
                print(f"{on_loss}: noticed {time.monotonic() - killed:.0f} s after its machine had died")
                said = "no sign of life from site-2 for 90 s"
                assert said in log() and said in site_log(poc, "site-1", job_id)
                children.append(start())
                thread.join(400)
            assert outcome["status"] == "FINISHED:COMPLETED" and attempts(poc, "site-2", job_id) == 2
            models = {(poc.kits / site / "veilboost_runs" / job_id / "model.json").read_bytes() for site in SITES}
            assert len(models) == 1
        finally:
            for child in children:
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


def test_a_killed_party_of_a_vertical_job_costs_a_round(tmp_path: Path) -> None:
    """Real keys and alignment: the next attempt goes on with a new key, and the model is that of an undisturbed job."""
    job, rounds = JOBS / "vertical_paillier", {"num_rounds": 8, "alignment": "first"}
    with Poc(tmp_path / "poc", scenario="vertical") as poc:
        whole, status, _ = poc.run_job(job, changes=rounds)
        assert status == "FINISHED:COMPLETED"
        outcome: dict = {}
        thread = in_thread(poc, outcome, job, {**rounds, "alignment": whole, "on_lost_site": "wait"})
        job_id = job_of(poc, {whole})
        wait_until(lambda: (poc.kits / "site-2" / "veilboost_runs" / job_id / "checkpoint-4.json").exists(), 300)
        (pid,) = job_processes(poc, job_id, "site-2")
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: attempts(poc, "site-1", job_id) == 2, 90)
        print(f"vertical: the next attempt began {time.monotonic() - killed:.1f} s after a process was killed")
        thread.join(400)
        assert outcome["status"] == "FINISHED:COMPLETED"
        assert re.search(f"resuming {job_id} after [4-8] rounds", site_log(poc, "site-3", job_id))
        folder = poc.kits / "site-1" / "veilboost_runs"
        assert len({(folder / name / "masked_model.json").read_bytes() for name in (whole, job_id)}) == 1
        assert verifies_all(poc, outcome).returncode == 0


def test_a_killed_site_of_a_private_job_is_charged_once(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc", scenario="private") as poc:
        outcome: dict = {}
        thread = in_thread(poc, outcome, JOBS / "private_trees_default", {"on_lost_site": "wait"})
        job_id = job_of(poc, set())
        wait_until(lambda: rounds_done(poc, "site-2", job_id) >= 1, 200)
        (pid,) = job_processes(poc, job_id, "site-2")
        os.kill(pid, signal.SIGKILL)
        thread.join(400)
        assert outcome["status"] == "FINISHED:COMPLETED" and attempts(poc, "site-1", job_id) == 2
        spent = [
            float(said[1])
            for site in SITES
            for said in [re.search(r"this job has spent epsilon ([0-9.]+)", site_log(poc, site, job_id))]
            if said is not None
        ]
        config = json.loads((JOBS / "private_trees_default/app/config/config_fed_server.json").read_text())
        assert len(spent) == 3 and max(spent) <= config["workflows"][0]["args"]["job"]["epsilon"]
        evidence = poc.kits / "site-1" / "veilboost_runs" / job_id / "evidence"
        assert "replayed" in next(evidence.glob("*.jsonl")).read_text()
        assert verifies_all(poc, outcome).returncode == 0


def test_a_killed_site_of_dpboost_costs_an_exchange_and_no_charge(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc", scenario="private") as poc:
        write_patients([poc.folder / "data" / site for site in SITES])
        for site in SITES:
            path = poc.kits / site / "local" / "veilboost.json"
            policy = json.loads(path.read_text())
            privacy = {"epsilon": 5.0, "delta": 1e-6, "pure_epsilon": 4.5}
            file = str(poc.folder / "data" / site / f"{PATIENTS}.csv")
            policy["data_sets"][PATIENTS] = {"path": file, "id": "patient", "privacy": privacy}
            path.write_text(json.dumps({**policy, "allowed_profiles": ["dp_trusted"]}))
        outcome: dict = {}
        trees = {"n_trees": 300, "trees_per_ensemble": 10, "on_lost_site": "wait"}
        thread = in_thread(poc, outcome, JOBS / "dpboost", trees)
        job_id = job_of(poc, set())
        for number, site in ((2, "site-2"), (3, "site-1")):
            kill_and_wait(poc, job_id, site, number)
        thread.join(400)
        assert outcome["status"] == "FINISHED:COMPLETED"
        runs = [poc.kits / site / "veilboost_runs" / job_id for site in SITES]
        models = {(run / "model.json").read_bytes() for run in runs}
        assert (
            len(models) == 1 and len(json.loads(models.pop())["learner"]["gradient_booster"]["model"]["trees"]) == 300
        )
        assert not [run for run in runs if (run / "dpboost_kept").exists()]
        for site in SITES:
            (ledger,) = (poc.kits / site).rglob(f"{PATIENTS}.ledger")
            assert 4.0 * (1 - 1e-6) < Ledger(ledger).spent().pure_epsilon <= 4.0
        assert verifies_all(poc, outcome).returncode == 0


def going_on(poc: Poc, folder: Path, rounds: int) -> Path:
    """Return a job folder of which two of the three sites may be left, once the sites' policies consent."""
    for site in SITES:
        path = poc.kits / site / "local" / "veilboost.json"
        policy = json.loads(path.read_text())
        consents = {"continue_without_site": True, "fewer_than_three_sites": True}
        policy.update(consents={**policy.get("consents", {}), **consents}, min_sites=2, max_colluders=0)
        path.write_text(json.dumps(policy))
    config = json.loads((JOBS / "horizontal_masks/app/config/config_fed_server.json").read_text())
    fields = {name: value for name, value in config["workflows"][0]["args"]["job"].items() if "eval" not in name}
    fields.update(num_rounds=rounds, on_lost_site="continue", tracking=False)
    recipe = HorizontalXGBRecipe("going_on", **fields, sites=list(SITES), min_clients=2)
    recipe.export(str(folder))
    return folder / "going_on"


def test_a_machine_that_stays_away_is_gone_on_without_and_told_when_it_is_back(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc") as poc:
        outcome: dict = {}
        thread = in_thread(poc, outcome, going_on(poc, tmp_path / "jobs", 600), {})
        job_id = job_of(poc, set())
        wait_until(lambda: rounds_done(poc, "site-3", job_id) >= 10, 120)
        start = started_by(poc, "site-2")
        for pid in machine(poc, "site-2"):
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: attempts(poc, "site-3", job_id) == 2, 240)
        print(f"the job went on without site-2 {time.monotonic() - killed:.1f} s after its machine had died")
        child = start()
        try:
            wait_until(lambda: "goes on without site-2" in site_log(poc, "site-2", job_id), 120)
            thread.join(400)
        finally:
            child.kill()
            child.wait()
        assert outcome["status"] == "FINISHED:COMPLETED"
        summary = json.loads(next(outcome["result"].rglob("veilboost/summary.json")).read_text())
        assert summary["without"] == ["site-2"] and summary["reason"] is None
        runs = {site: poc.kits / site / "veilboost_runs" / job_id for site in SITES}
        assert len({(runs[site] / "model.json").read_bytes() for site in ("site-1", "site-3")}) == 1
        assert not (runs["site-2"] / "model.json").exists()
        done = verifies_all(poc, outcome)
        assert done.returncode == 0, done.stdout
        assert "handed in no log" not in done.stdout and "without_sites site-2" in done.stdout


# -- the server's processes are killed, and the job goes on with nobody at the keyboard --------------------------------


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
