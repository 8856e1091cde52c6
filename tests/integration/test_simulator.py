"""Whole jobs in the FLARE simulator: one that goes well per way of running, and sites that fail."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import xgboost as xgb
from nvflare.recipe import SimEnv

from jobs import examples
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.recipes.examples import put_on_cluster
from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe
from nvflare_plugins.site.setup import SetupOptions, set_up
from poc_workspace.run_poc import write_breast_cancer
from tests.support.simulator import FLARES, SITES, completed, run_simulator, simulate

JOBS = Path(examples.__file__).parent

pytestmark = pytest.mark.sim


@pytest.fixture
def options(tmp_path: Path) -> SetupOptions:
    write_breast_cancer([tmp_path / "data" / site for site in SITES])
    data = str(tmp_path / "data" / "{site}" / "breast_")
    return SetupOptions({"breast": f"{data}train.csv", "breast_test": f"{data}test.csv"})


def test_job_folder_as_it_stands(tmp_path: Path, options: SetupOptions) -> None:
    run = completed(run_simulator(JOBS / "horizontal_masks", tmp_path / "ws", options))
    models = {(run.site(site) / "model.json").read_bytes() for site in SITES}
    assert len(models) == 1
    booster = xgb.Booster()
    booster.load_model(bytearray(models.pop()))
    assert booster.num_boosted_rounds() == 10
    assert list((run.workspace / "server" / "simulate_job" / "tb_events").rglob("events.out.tfevents.*"))
    log = run.log("site-1")
    assert "round 1 of 10" in log and "round 10 of 10" in log
    n_lines = sum("JobExecutor" in line for line in log.splitlines())
    assert n_lines < 30, "the log must not have a line per message"


@pytest.mark.slow
def test_job_folder_under_flares_own_command(tmp_path: Path, options: SetupOptions) -> None:
    set_up(tmp_path / "ws", options)
    run = completed(simulate(JOBS / "horizontal_masks", tmp_path / "ws", FLARES))
    assert len({(run.site(site) / "model.json").read_bytes() for site in SITES}) == 1


@pytest.mark.slow
def test_recipe_in_sim_env(tmp_path: Path, options: SetupOptions) -> None:
    recipe = examples.recipe("horizontal_bfv")
    set_up(tmp_path / "ws" / recipe.name, options)
    recipe.execute(SimEnv(num_clients=3, workspace_root=str(tmp_path / "ws")))
    folder = tmp_path / "ws" / recipe.name
    models = {(folder / site / "veilboost_runs" / "simulate_job" / "model.json").read_bytes() for site in SITES}
    assert len(models) == 1
    assert verify([folder / "server" / "simulate_job" / "veilboost" / "evidence"]).sound


@pytest.mark.slow
def test_a_killed_process_ends_a_job_that_waits_for_lost_sites(tmp_path: Path, options: SetupOptions) -> None:
    """The simulator starts no process again; its loss is noticed by its silence."""
    recipe = HorizontalXGBRecipe(
        "lost",
        data_set="breast",
        label="target",
        params={"objective": "binary:logistic", "max_depth": 3},
        num_rounds=5000,
        on_lost_site="wait",
        lost_site_deadline_s=3600.0,
    )
    recipe.export(str(tmp_path / "jobs"))
    workspace, killed = tmp_path / "ws", []

    def kill() -> None:
        for _ in range(1200):
            time.sleep(0.1)
            if not list((workspace / "site-2" / "veilboost_runs" / "simulate_job").glob("checkpoint*")):
                continue
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    command = (process / "cmdline").read_bytes().split(b"\0")
                    is_of_site = str(workspace / "site-2").encode() in command
                    if is_of_site and b"nvflare.private.fed.app.simulator.simulator_worker" in command:
                        os.kill(int(process.name), signal.SIGKILL)
                        killed.append(process.name)
                        return

    killer = threading.Thread(target=kill)
    killer.start()
    set_up(workspace, options)
    run = simulate(tmp_path / "jobs" / recipe.name, workspace)
    killer.join()
    assert killed and run.code != 0
    assert "FLARE's simulator starts no site's process again" in run.summary["reason"]
    assert "site-2" in run.summary["reason"] and not list(workspace.rglob("model.json"))


@pytest.mark.slow
def test_wrong_column_at_one_site_is_everyones_clear_error(tmp_path: Path, options: SetupOptions) -> None:
    table = tmp_path / "data" / "site-2" / "breast_train.csv"
    table.write_text(table.read_text().replace("target", "outcome", 1))
    run = run_simulator(JOBS / "horizontal_masks", tmp_path / "ws", options)
    assert run.code != 0 and run.summary["status"] == "failed"
    reason = run.summary["reason"]
    assert reason.startswith("site-2: ") and "'target'" in reason
    for place in (*SITES, "server"):
        assert reason.removeprefix("site-2: ") in run.log(place)
    assert not list(run.workspace.rglob("model.json"))


@pytest.mark.slow
def test_policy_refusal_names_the_key_and_nothing_is_sent(tmp_path: Path, options: SetupOptions) -> None:
    run = run_simulator(JOBS / "horizontal_ckks", tmp_path / "ws", options)
    assert run.code != 0
    assert "does not allow profile 'ckks'" in run.summary["reason"] and "allowed_profiles" in run.summary["reason"]
    records = [json.loads(line) for line in (run.result / "evidence" / "server.evidence.jsonl").open()]
    assert not [record for record in records if record["type"] == "message"]


@pytest.mark.slow
def test_unprepared_workspace_is_refused_by_flare(tmp_path: Path) -> None:
    """Without site-setup no component of ours may start: the allow-list is FLARE's own."""
    (tmp_path / "ws" / "local").mkdir(parents=True)
    (tmp_path / "ws" / "local" / "resources.json").write_text('{"format_version": 2, "class_allow_list": []}')
    run = simulate(JOBS / "horizontal_masks", tmp_path / "ws")
    assert run.code != 0 and "not in allow_list" in run.output


@pytest.mark.slow
def test_a_site_on_workers_of_its_own(tmp_path: Path, options: SetupOptions) -> None:
    pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    name, scores = "horizontal_masks", {}
    for place, workers in (("alone", 0), ("workers", 2)):
        workspace = tmp_path / place / name
        set_up(workspace, options)
        if workers:
            put_on_cluster(workspace, "site-2", workers)
        run = simulate(JOBS / name, workspace)
        assert run.code == 0, run.output[-4000:]
        record = json.loads((run.site("site-2") / "run.json").read_text())
        assert ("Workers" in [one["title"] for one in record["sections"]]) == bool(workers)
        scores[place] = record["rounds"][-1]["metrics"]
    assert scores["alone"] == pytest.approx(scores["workers"], rel=1e-6)
