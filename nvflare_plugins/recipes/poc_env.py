"""A proof of concept that is set up before it starts, for ``recipe.execute(VeilPocEnv(...))``.

FLARE's own ``PocEnv`` provisions and starts in one method, afresh for each job, so that nobody can set its sites up in
between: its jobs are refused. And what its sites remember lies in the workspace that it deletes.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.job_config.api import FedJob
from nvflare.recipe import PocEnv
from nvflare.recipe.utils import collect_non_local_scripts
from nvflare.tool.poc.poc_commands import _start_poc, prepare_poc_provision

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import copy_folder, make_folder
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.setup import SetupOptions, check_files, check_place, set_up, workspaces

_REGISTERED = "Successfully registered client"  # what FLARE logs at a site
_START_TIMEOUT_S = 180.0
_LOGS = ("log*.txt*", "log*.json*", "audit*", "*/log*.txt*", "*/log*.json*")  # of a kit and of its jobs
_log = logging.getLogger(__name__)


class VeilPocEnv(PocEnv):
    """FLARE's PocEnv, with the set-up between provisioning and start, and a memory that outlives it.

    Registry, ledgers, results and log files of each site lie in ``kept``/SITE, outside the workspace: the next run of
    the same sites finds them, as in production. Deleting the folder forgets what was released.

        env = VeilPocEnv(num_clients=3, kept="/tmp/veilboost/kept", set_up=SetupOptions({"credit": "/data/{site}.csv"}))
        recipe.execute(env)

    Args:
        kept: folder for what sites keep over runs; outside FLARE's POC workspace, which each run deletes.
        set_up: what ``veilboost site-setup`` would be told: data sets, profiles, consents, budgets. Its ``keep_in`` is
            ``kept``.
        arguments: those of FLARE's PocEnv: ``num_clients`` or ``clients``, ``project_conf_path``, ``username``, ...

    Raises:
        ConfigurationError: ``kept`` lies in the POC workspace, or FLARE could not use that one's path; or containers
            are asked for, which run no set-up here.
        ValueError: what FLARE's PocEnv refuses.
    """

    def __init__(self, *, kept: str | Path, set_up: SetupOptions = SetupOptions(), **arguments: Any) -> None:
        super().__init__(**arguments)
        folder, workspace = Path(kept).expanduser().absolute(), Path(self.poc_workspace).absolute()
        if folder.resolve().is_relative_to(workspace.resolve()):
            raise ConfigurationError(
                f"kept ({folder}) lies in the POC workspace {workspace}, which every run deletes: the sites would "
                "forget what they have released. Remedy: a folder outside it as kept."
            )
        check_place(workspace)
        if self.docker_image:
            raise ConfigurationError(
                "docker_image: jobs in containers want mounts of their own; leave it out, or set the prepared "
                "kits up by hand and use ProdEnv"
            )
        self.kept = folder
        self.options = dataclasses.replace(set_up, keep_in=str(folder))

    def deploy(self, job: FedJob) -> str:
        """Provision afresh, set every site and the server up, start them, and submit the job.

        Returns:
            The job's id.

        Raises:
            ConfigurationError: a data set's file is not there, or the set-up is refused; nothing was started.
            RuntimeError: the sites did not come up in time.
        """
        scripts = collect_non_local_scripts(job)
        if scripts:
            raise ConfigurationError(f"the job runs scripts that are not there: {', '.join(map(str, scripts))}")
        self.stop(clean_up=True)
        workspace = Path(self.poc_workspace)
        prepare_poc_provision(
            clients=self.clients or [],
            number_of_clients=self.num_clients,
            workspace=self.poc_workspace,
            docker_image=None,
            use_he=self.use_he,
            project_conf_path=self.project_conf_path,
        )
        check_files(workspace, self.options.data_sets)
        for change in set_up(workspace, self.options):
            self.logger.info(change)
        _start_poc(poc_workspace=self.poc_workspace, gpu_ids=self.gpu_ids, excluded=[self.username], services_list=[])
        try:
            wait_for_sites(path for path, role in workspaces(workspace) if role is Role.SITE)
            return str(self._get_session_manager().submit_job(job))
        except BaseException:
            self.stop()
            raise

    def stop(self, clean_up: bool = False) -> None:  # noqa: FBT001, FBT002 - as FLARE's own
        """Stop the POC. Before its workspace is deleted, every site's log files go to ``kept``/SITE/logs/DATE.

        Refusals that must not tell others why point to them.
        """
        if clean_up:
            super().stop()  # processes log until they have ended
            keep_logs(Path(self.poc_workspace), self.kept)
        super().stop(clean_up)

    def get_job_result(self, job_id: str, timeout: float = 0.0) -> str | None:
        """Return a copy of what FLARE's admin downloads, in ``kept``/results: FLARE deletes its own with the workspace.

        None if the job has not ended within ``timeout`` seconds (0 waits for its end).
        """
        result = super().get_job_result(job_id, timeout)
        if result is None:
            return None
        return str(copy_folder(Path(result), self.kept / "results" / job_id))


def keep_logs(workspace: Path, kept: Path) -> list[Path]:
    """Copy the log files of sites and server, and of their jobs; return the folders, readable for their owner alone."""
    if not workspace.is_dir():
        return []
    try:
        kits = [path for path, role in workspaces(workspace) if role is not Role.SIMULATOR]
    except ConfigurationError:  # whatever it is, FLARE made no sites there
        return []
    stamp, made = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}", []
    for kit in kits:
        found = [path for pattern in _LOGS for path in kit.glob(pattern) if path.is_file() and not path.is_symlink()]
        place, number = kept / kit.name / "logs" / stamp, 1
        while found and place.exists():
            number += 1
            place = place.with_name(f"{stamp}-{number}")
        for path in found:
            copy = place / path.relative_to(kit)
            make_folder(copy.parent)
            shutil.copy2(path, copy)
        if found:
            place.chmod(0o700)
            made.append(place)
            _log.info("log files of %s: %s", kit.name, place)
    return made


def wait_for_sites(kits: Iterable[Path], timeout_s: float = _START_TIMEOUT_S) -> None:
    """Wait until FLARE's processes of sites have registered with their server, by their logs.

    Logging in for that instead can hang while the server is only just coming up.

    Raises:
        RuntimeError: one has not within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    for log in [kit / "log.txt" for kit in kits]:
        while not (log.is_file() and _REGISTERED in log.read_text(errors="replace")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"a site was not up within {timeout_s:.0f} s; see {log}")
            time.sleep(0.5)
