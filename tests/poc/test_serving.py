"""The POC: a job that stays scores rows, survives a killed party, takes newer rows, and ends when it is told to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from nvflare_plugins.kinds.vertical_inference.score_socket import reachable
from nvflare_plugins.recipes.recipe import AlignmentRecipe, write_folder
from poc_workspace.run_poc import ADMIN, SITES, verify
from tests.poc.test_poc import job_processes, site_log, wait_until
from tests.support.serving_poc import ServingPoc

pytestmark = [pytest.mark.poc, pytest.mark.slow]


def ask(path: Path, **request: Any) -> dict[str, Any]:
    """Ask once; an error also where nobody is there."""
    try:
        with reachable(path) as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(60)
            caller.connect(name)
            caller.sendall(json.dumps(request).encode() + b"\n")
            answer = caller.makefile("rb").readline()
            return dict(json.loads(answer)) if answer else {"error": "left"}
    except OSError as error:
        return {"error": str(error)}


def test_a_job_that_stays_survives_a_killed_party_and_takes_newer_rows(tmp_path: Path) -> None:
    with ServingPoc(tmp_path / "poc", scenario="vertical") as poc:
        model = poc.train(10, 4)
        job_id = poc.serve(model, on_lost_site="wait")
        path = poc.socket(job_id)
        before = ask(path, rows=[0, 7])["scores"]
        assert path.stat().st_mode & 0o777 == 0o600

        (pid,) = job_processes(poc, job_id, "site-2")
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: "error" in ask(path, rows=[0]), 60)
        print(f"a caller was told {time.monotonic() - killed:.1f} s after a party was killed")
        wait_until(lambda: "scores" in ask(path, rows=[0]), 120)
        print(f"rows were scored again {time.monotonic() - killed:.1f} s after a party was killed")
        assert ask(path, rows=[0, 7])["scores"] == before

        status = ask(path, status=True)
        assert status["alignment"] == job_id, "the second attempt went on with what the first had found"
        ask(path, stop=True)
        status, result = poc.end_of(job_id)
        assert status == "FINISHED:COMPLETED" and verify(result, poc.kits / ADMIN / "startup" / "rootCA.pem") == 0
        assert not path.exists() and not job_processes(poc, job_id)
        for site in SITES:
            assert "customer-" not in site_log(poc, site, job_id)

        again = poc.serve(model, alignment=job_id)
        refused = ask(poc.socket(again), refresh="nothing")
        assert "cannot take it" in refused["error"] and ask(poc.socket(again), rows=[7])["scores"][0] == before[1]
        with poc.session() as session:
            session.abort_job(again)
        wait_until(lambda: not poc.socket(again).exists() and not job_processes(poc, again), 60)


def test_rows_of_the_night_are_taken_by_the_next_job_or_at_once(tmp_path: Path) -> None:
    """One slot at a POC's server: the alignment of the night runs between two jobs that stay."""
    with ServingPoc(tmp_path / "poc", scenario="vertical") as poc:
        model = poc.train(5, 3)
        recipe = AlignmentRecipe("night", data_sets=["new"])
        night, status, _ = poc.run_job(write_folder(recipe, poc.folder / "written"))
        assert status == "FINISHED:COMPLETED"
        job_id = poc.serve(model, alignment=night, idle_s=20.0)
        path = poc.socket(job_id)
        assert ask(path, refresh=night)["refreshed"] == night
        assert ask(path, rows=[3])["scores"][0]["row"] == 3
        status, _ = poc.end_of(job_id)
        assert status == "FINISHED:COMPLETED" and "idle_s" in site_log(poc, "site-1", job_id)
        shutil.rmtree(poc.folder / "written")
