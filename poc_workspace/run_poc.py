"""A whole round trip in a FLARE proof of concept: three sites and a server, with certificates as in production.

    python poc_workspace/run_poc.py                       runs jobs/horizontal_masks on scikit-learn's breast cancer set
    python poc_workspace/run_poc.py --scenario vertical   the same set by columns: alignment, training, prediction
    python poc_workspace/run_poc.py --scenario private    private trees on invented rows, and each site's ledger
    python poc_workspace/run_poc.py --job JOB --keep      runs another job folder and leaves the files for a look

Provisions, gives each site its data and its policy, prepares all with ``veilboost site-setup``, starts, submits through
the admin interface, waits, downloads, checks the evidence with ``veilboost verify``, and stops. Whatever happens, no
process is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import pandas as pd
from nvflare.fuel.flare_api.flare_api import (
    MonitorReturnCode,
    Session,
    new_secure_session,
)

from nvflare_plugins.base.files import copy_folder, make_folder, write_private_table
from nvflare_plugins.flare.components import ignore_settings_here
from nvflare_plugins.recipes.examples import LABEL, breast_cancer, deal_columns, write_breast_cancer
from nvflare_plugins.recipes.poc_env import wait_for_sites
from nvflare_plugins.site.setup import set_up

HERE = Path(__file__).resolve().parent
JOBS = HERE.parent / "jobs"
HORIZONTAL = "horizontal"
PROJECT = "veilboost_poc"
ADMIN = "admin@consortium.org"
SITES = ("site-1", "site-2", "site-3")
DEFAULT_PORT = 8002
STOP_TIMEOUT_S = 30
COMMAND_TIMEOUT_S = 180
JOB_TIMEOUT_S = 600
_N_INVENTED = 2_000


@dataclass(slots=True)
class Poc:
    """One proof of concept in a folder of its own; a context manager that always stops it.

    Args:
        folder: an empty folder; everything happens below it, FLARE's own settings in the home folder included.
        port: the server's port; 0 takes a free one.
        scenario: which data and policies the sites get.
    """

    folder: Path
    port: int = 0
    scenario: str = HORIZONTAL
    _environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        home = make_folder(self.folder / "home", is_new=True)
        self.port = self.port or _free_port()
        self._environment = {**os.environ, "HOME": str(home), "NVFLARE_POC_WORKSPACE": str(self.folder / "poc")}

    @property
    def kits(self) -> Path:
        """The folder of all participants' kits."""
        return self.kits_of(self.folder)

    @staticmethod
    def kits_of(folder: Path) -> Path:
        """Return the folder of all kits of a proof of concept in ``folder``."""
        return folder / "poc" / PROJECT / "prod_00"

    def __enter__(self) -> Poc:
        try:
            self._prepare()
            # FLARE's own wait logs in at once, and hangs if the server is only just coming up.
            self._nvflare("poc", "start", "--no-wait")
            wait_for_sites(self.kits / site for site in SITES)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _prepare(self) -> None:
        project = self.folder / "project.yml"
        template = (HERE / "project.yml").read_text()
        project.write_text(template.replace(f"fed_learn_port: {DEFAULT_PORT}", f"fed_learn_port: {self.port}"))
        self._nvflare("poc", "prepare", "-i", str(project), "--force")
        SCENARIOS[self.scenario].write_data([self.folder / "data" / site for site in SITES])
        for site in SITES:
            policy = HERE / "site_policies" / self.scenario / f"{site}.json"  # its paths lead to that folder
            shutil.copy(policy, self.kits / site / "local" / "veilboost.json")
        for change in set_up(self.folder / "poc"):
            say(f"site-setup: {change}")

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """An administrator's session with the running system."""
        ignore_settings_here()
        session = new_secure_session(ADMIN, str(self.kits / ADMIN), timeout=30.0, command_timeout=60.0)
        try:
            yield session
        finally:
            session.close()

    def run_job(
        self, job: Path, timeout_s: float = JOB_TIMEOUT_S, changes: Mapping[str, object] | None = None
    ) -> tuple[str, str, Path]:
        """Submit a job folder, wait for its end and download the result.

        Args:
            changes: fields of the job to set, such as the id of a job before it.

        Returns:
            Job id, status, folder of the result.
        """
        copy = copy_folder(job, self.folder / "jobs" / job.name)  # FLARE signs the folder it submits, in place
        for path in copy.glob("*/config/config_fed_server.json"):
            config = json.loads(path.read_text())
            config["workflows"][0]["args"]["job"].update(changes or {})
            path.write_text(json.dumps(config, indent=2))
        with self.session() as session:
            job_id = session.submit_job(str(copy))
            say(f"submitted {job.name}: {job_id}")
            outcome, meta = session.monitor_job_and_return_job_meta(job_id, timeout=timeout_s, poll_interval=1.0)
            if outcome is not MonitorReturnCode.JOB_FINISHED:
                session.abort_job(job_id)
                raise TimeoutError(f"the job did not end within {timeout_s:.0f} s and was aborted")
            result = session.download_job_result(job_id, str(self.folder / "downloads"))
            return job_id, str(meta["status"]), Path(result)

    def pids(self) -> list[int]:
        """Return the processes of this proof of concept that are alive: their command lines name its folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder / "poc").encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    def stop(self) -> None:
        """Stop the system; end what does not stop by itself."""
        with contextlib.suppress(RuntimeError):
            self._nvflare("poc", "stop")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.5)
        for pid in self.pids():
            say(f"process {pid} did not stop by itself: ended")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _nvflare(self, *arguments: str) -> None:
        command = [str(Path(sys.executable).with_name("nvflare")), "--format", "json", *arguments]
        # A file, not a pipe: the processes that FLARE starts would keep a pipe open, and the wait for its end.
        log = self.folder / f"nvflare_{'_'.join(arguments[:2])}.log"
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    check=False,
                    timeout=COMMAND_TIMEOUT_S,
                )
                outcome = f"exit code {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                outcome = f"no end within {COMMAND_TIMEOUT_S} s"
        if outcome:
            raise RuntimeError(f"nvflare {' '.join(arguments)} failed ({outcome}):\n{log.read_text()[-4000:]}")


def write_columns(folders: Sequence[Path]) -> None:
    """Write each site its columns of the same set, with ids; every site lacks some rows that others have."""
    deal_columns(breast_cancer(), LABEL, folders)


def write_invented_credit(folders: Sequence[Path]) -> None:
    """Write each site rows with the columns of the private job, invented within their public bounds."""
    random = np.random.default_rng(0)
    config = json.loads((JOBS / "private_trees_default" / "app" / "config" / "config_fed_server.json").read_text())
    bounds = config["workflows"][0]["args"]["job"]["feature_bounds"]
    for folder in folders:
        columns = {name: random.integers(low, high + 1, _N_INVENTED) for name, (low, high) in bounds.items()}
        risk = (columns["PAY_0"] + random.normal(scale=3.0, size=_N_INVENTED)) > 4
        make_folder(folder)
        write_private_table(folder / "credit2.parquet", pd.DataFrame({**columns, "label": risk.astype(int)}))


@dataclass(frozen=True, slots=True)
class Step:
    """A job of a scenario. ``ids`` sets fields of the job to the ids of earlier steps, by their numbers."""

    job: str
    ids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Data, and jobs one after the other; the policies lie in ``site_policies``."""

    write_data: Callable[[Sequence[Path]], None]
    steps: tuple[Step, ...]


SCENARIOS = {
    HORIZONTAL: Scenario(write_breast_cancer, (Step("horizontal_masks"),)),
    "vertical": Scenario(
        write_columns,
        (
            Step("alignment"),
            Step("vertical_paillier", {"alignment": 0}),
            Step("vertical_predict", {"model": 1, "alignment": 0}),
        ),
    ),
    "private": Scenario(write_invented_credit, (Step("private_trees_default"),)),
}


def verify(result: Path, root_certificate: Path) -> int:
    """Check the evidence in a downloaded result; return veilboost verify's exit code."""
    evidence = next(result.rglob("veilboost/evidence")).parent  # the evidence of earlier attempts lies beside it
    command = [
        sys.executable,
        "-m",
        "nvflare_plugins.cli.main",
        "verify",
        str(evidence),
        "--root-ca",
        str(root_certificate),
    ]
    return subprocess.run(command, check=False).returncode


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"poc: {text}", flush=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_steps(poc: Poc, steps: Sequence[Step]) -> bool:
    """Run jobs one after the other; return whether each completed and its evidence holds."""
    ids: list[str] = []
    for step in steps:
        job_id, status, result = poc.run_job(JOBS / step.job, changes={name: ids[n] for name, n in step.ids.items()})
        ids.append(job_id)
        summary = json.loads(next(result.rglob("veilboost/summary.json")).read_text())
        say(f"job {job_id} ended: {status}" + (f" ({summary['reason']})" if summary["reason"] else ""))
        holds = verify(result, poc.kits / ADMIN / "startup" / "rootCA.pem") == 0
        if status != "FINISHED:COMPLETED" or not holds:
            return False
    return True


def show_ledgers(poc: Poc) -> None:
    """Print what each site has spent, if it keeps ledgers."""
    for site in SITES:
        if list((poc.kits / site).glob("veilboost_ledgers/*/*.ledger")):
            command = [sys.executable, "-m", "nvflare_plugins.cli.main", "ledger", str(poc.kits / site), "--site", site]
            subprocess.run(command, check=False)


def main() -> int:
    """Run the round trip; 0 if the job completed and its evidence holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default=HORIZONTAL, help="data, policies and jobs")
    parser.add_argument("--job", type=Path, help="a job folder in place of the scenario's jobs")
    parser.add_argument("--workspace", type=Path, help="empty folder to work in; default: a temporary one")
    parser.add_argument("--port", type=int, default=0, help="the server's port; default: a free one")
    parser.add_argument("--keep", action="store_true", help="leave the files behind (never a process)")
    args = parser.parse_args()
    folder = args.workspace or Path(tempfile.mkdtemp(prefix="veilboost_poc_"))
    poc = Poc(folder, args.port, args.scenario)
    steps = SCENARIOS[args.scenario].steps if args.job is None else (Step(str(args.job.resolve())),)
    say(f"working in {poc.folder}, port {poc.port}")
    try:
        with poc:
            say("server and sites are up")
            done = run_steps(poc, steps)
            show_ledgers(poc)
    finally:
        if not args.keep:
            shutil.rmtree(poc.folder, ignore_errors=True)
    say("stopped; no process left" if not poc.pids() else "processes left behind")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
