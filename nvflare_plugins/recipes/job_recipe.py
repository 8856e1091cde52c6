"""What all VeilBoost recipes share: one controller, one executor at each site, no code and no path in the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.job_config.api import FedJob
from nvflare.recipe import Run, SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import Job
from nvflare_plugins.checks import checked_sites
from nvflare_plugins.flare.controller import TRAIN_TASK, JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.site.flare_boundary import check_set_up
from nvflare_plugins.site.policy.policy import POLICY_FILE

OUR_PACKAGES = ["nvflare_plugins", "he_processors", "dp_components"]


class JobRecipe(Recipe):
    """A FLARE job made of one of our jobs.

    Args:
        name: name of the FLARE job.
        job: what the sites shall do.
        controller, executor: classes in ``nvflare_plugins.flare`` for this kind of job.
        fields: the job's fields that the job folder states: those that a person would want to read.
        sites: the sites that take part; None means all that FLARE assigns to the job.
        min_clients: fewest sites; default 3, or the number of ``sites``.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        controller: type[JobController],
        executor: type[JobExecutor],
        fields: dict[str, Any],
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None:
        self.job = job
        self.sites = checked_sites(sites)
        self.min_clients = min_clients if min_clients is not None else len(self.sites or ()) or 3
        if self.sites is not None and self.min_clients > len(self.sites):
            raise ConfigurationError(f"min_clients is {self.min_clients}, but only {len(self.sites)} sites are named")
        # fail_fast: without a site the job cannot go on, so FLARE need not wait whether it comes back.
        flare_job = FedJob(name=name, min_clients=self.min_clients, mandatory_clients=self.sites, fail_fast=True)
        flare_job.set_app_packages(OUR_PACKAGES)  # sites have the package installed; no code travels with the job
        flare_job.to_server(controller(fields, self.sites, self.min_clients), id="veilboost_controller")
        if job.tracking:
            flare_job.to_server(TBAnalyticsReceiver(tb_folder="tb_events"), id="tb_receiver")
        if self.sites is None:
            flare_job.to_clients(executor(), tasks=[TRAIN_TASK])
        else:
            for site in self.sites:
                flare_job.to(executor(), site, tasks=[TRAIN_TASK])
        super().__init__(flare_job)

    def run(self, env: ExecEnv, *args: Any, **kwargs: Any) -> Run:
        """Run the job as FLARE does; a simulator whose folder is not set up is refused before it starts.

        Raises:
            ConfigurationError: ``veilboost site-setup`` has not been run on the simulator's folder.
        """
        if isinstance(env, SimEnv):
            folder = Path(env.workspace_root) / self.name
            if not (folder / POLICY_FILE).is_file():
                raise ConfigurationError(
                    f"the simulator's sites have no policy: run `veilboost site-setup {folder} --data-set NAME=PATH` "
                    "first"
                )
            check_set_up(folder, str(folder))
        return super().run(env, *args, **kwargs)


def changed_fields(job: Job, defaults: Job, kept: Sequence[str]) -> dict[str, Any]:
    """Return the job without the fields at their defaults, so that a person can read the job folder."""
    unset = defaults.to_dict()
    return {name: value for name, value in job.to_dict().items() if name in kept or value != unset[name]}
