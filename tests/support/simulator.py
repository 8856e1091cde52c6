"""Runs job folders in the FLARE simulator, with the one retry that its start needs now and then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jobs import examples
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.site.setup import SetupOptions, set_up

TIMEOUT_S = 480
SITES = ("site-1", "site-2", "site-3")
_FLAKE = ("Errno 104", "Communication error with client", "Could not connect to the server cell")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished simulation."""

    workspace: Path
    code: int
    output: str

    @property
    def result(self) -> Path:
        """What a download of the job would bring."""
        return self.workspace / "server" / "simulate_job" / "veilboost"

    @property
    def summary(self) -> dict:
        return json.loads((self.result / "summary.json").read_text())

    def site(self, name: str) -> Path:
        """Where a site keeps its run."""
        return self.workspace / name / "veilboost_runs" / "simulate_job"

    def log(self, name: str) -> str:
        """The log of a site or of the server."""
        return (self.workspace / name / "log.txt").read_text()


def completed(run: Run, profile: str | None = None) -> Run:
    """Assert that a job ended well at all sites, under a profile, and that everybody's evidence agrees."""
    assert run.code == 0, run.output[-4000:]
    assert run.summary["status"] == "completed" and set(run.summary["sites"]) == set(SITES)
    assert profile in (None, run.summary["profile"])
    outcome = verify([run.result / "evidence"])
    assert outcome.sound, outcome
    return run


def run_simulator(job: Path, workspace: Path, options: SetupOptions, prepare: Callable[[], None] = lambda: None) -> Run:
    """Set a fresh workspace up and run a job folder over three sites.

    Args: prepare: called when the workspace is set up, to place further files in it.
    """

    def make_ready() -> None:
        set_up(workspace, options)
        prepare()

    return run_prepared(job, workspace, make_ready)


def run_example(name: str, root: Path, **changes: object) -> Run:
    """Run an example of the folder of jobs, with changes to the policy of its sites."""
    workspace = root / name

    def make_ready() -> None:
        examples.prepare(name, root)
        path = workspace / "local" / "veilboost.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return run_prepared(examples.FOLDER / name, workspace, make_ready)


def run_prepared(job: Path, workspace: Path, make_ready: Callable[[], None]) -> Run:
    """Run a job folder over three sites in a fresh workspace; once more if the simulator stumbles at its start."""
    for _ in range(2):
        shutil.rmtree(workspace, ignore_errors=True)
        make_ready()
        run = simulate(job, workspace)
        if not any(text in run.output for text in _FLAKE):
            break
    return run


OURS = (sys.executable, "-m", "nvflare_plugins.flare.simulator")
FLARES = (str(Path(sys.executable).with_name("nvflare")), "simulator")


def simulate(job: Path, workspace: Path, program: tuple[str, ...] = OURS) -> Run:
    """Run a job folder in a workspace as it is."""
    command = [
        *program,
        str(job),
        "-w",
        str(workspace),
        "-n",
        str(len(SITES)),
        "-t",
        str(len(SITES)),
    ]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        cwd=workspace,
        env={**os.environ, "HOME": str(workspace)},
    )
    return Run(workspace, done.returncode, done.stdout)
