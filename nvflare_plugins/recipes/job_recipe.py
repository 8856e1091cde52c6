"""What all VeilBoost recipes share: one controller, one executor at each site, no code and no path in the job."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.fuel.utils.validation_utils import JOB_NAME_PATTERN
from nvflare.job_config.api import FedJob
from nvflare.recipe import PocEnv, Run, SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import goes_on_without, waiting_s
from nvflare_plugins.checks import checked_sites, shown
from nvflare_plugins.flare.components import controller_of, executor_of
from nvflare_plugins.flare.config_search import ignore_settings_here
from nvflare_plugins.flare.controller import TRAIN_TASK
from nvflare_plugins.flare.kinds import kind_of
from nvflare_plugins.recipes.poc_env import VeilPocEnv
from nvflare_plugins.site.flare_boundary import check_set_up
from nvflare_plugins.site.job_files import check_references
from nvflare_plugins.site.policy.values import POLICY_FILE
from nvflare_plugins.site.setup import check_place

_LONGEST_NAME = 128
OUR_PACKAGES = ["nvflare_plugins", "he_processors", "dp_components"]


class JobRecipe(Recipe):
    """A FLARE job made of one of our jobs.

    A subclass for each kind of job says what its kind is and which fields its job folders always state, gives the
    settings names and words, and may refuse what the job alone allows.

    Args:
        name: name of the FLARE job.
        document: the job's fields, as its class reads them; a field at its default stays out of the job folder.
        sites: the sites that take part; None means all that FLARE assigns to the job.
        min_clients: fewest sites; default ``fewest``, or the number of ``sites``.

    Raises:
        ConfigurationError: a setting that no site would accept.
    """

    kind: ClassVar[str]
    stated: ClassVar[tuple[str, ...]] = ()
    fewest: ClassVar[int] = 3

    def __init__(
        self,
        name: str,
        document: Mapping[str, Any],
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
    ) -> None:
        _check_name(name)
        kind = kind_of(self.kind)
        self.job: Any = kind.job.from_dict(dict(document))
        self.sites = checked_sites(sites)
        self.min_clients = min_clients if min_clients is not None else len(self.sites or ()) or self.fewest
        if self.sites is not None and self.min_clients > len(self.sites):
            raise ConfigurationError(f"min_clients is {self.min_clients}, but only {len(self.sites)} sites are named")
        if goes_on_without(self.job) and self.sites is not None and self.min_clients == len(self.sites):
            raise ConfigurationError(
                "on_lost_site='continue' with min_clients equal to the number of sites: no site could be missing. Give "
                "min_clients, the fewest sites that may be left"
            )
        # fail_fast: without a site the job cannot go on, so FLARE need not wait whether it comes back; or the job does.
        ends = waiting_s(self.job) is None
        flare_job = FedJob(name=name, min_clients=self.min_clients, mandatory_clients=self.sites, fail_fast=ends)
        flare_job.set_app_packages(OUR_PACKAGES)  # sites have the package installed; no code travels with the job
        fields = stated_fields(self.job, self.stated)
        check_references(fields, "the job")
        flare_job.to_server(controller_of(kind, fields, self.sites, self.min_clients), id="veilboost_controller")
        if self.job.tracking:
            flare_job.to_server(TBAnalyticsReceiver(tb_folder="tb_events"), id="tb_receiver")
        if self.sites is None:
            flare_job.to_clients(executor_of(kind), tasks=[TRAIN_TASK])
        else:
            for site in self.sites:
                flare_job.to(executor_of(kind), site, tasks=[TRAIN_TASK])
        super().__init__(flare_job)

    def needs_site(self, site: str) -> None:
        """Refuse a job whose sites are named and lack one that it cannot do without. Raises: ConfigurationError."""
        if self.sites is not None and site not in self.sites:
            raise ConfigurationError(f"the active party {site!r} is not among the sites")

    def run(self, env: ExecEnv, *args: Any, **kwargs: Any) -> Run:
        """Run the job as FLARE does; where sites would not be set up, it is refused before anything starts.

        Raises:
            ConfigurationError: ``veilboost site-setup`` has not been run on the simulator's folder; or the environment
                is FLARE's PocEnv, which provisions and starts without a set-up in between.
        """
        if isinstance(env, PocEnv) and not isinstance(env, VeilPocEnv):
            raise ConfigurationError(
                "PocEnv provisions its sites anew and starts them without a set-up, so that every job is refused. "
                "Remedy: nvflare_plugins.recipes.VeilPocEnv, which sets them up in between."
            )
        if isinstance(env, SimEnv):
            folder = Path(env.workspace_root) / self.name
            check_place(folder)
            if not (folder / POLICY_FILE).is_file():
                raise ConfigurationError(
                    f"the simulator's sites have no policy: run `veilboost site-setup {folder} --data-set NAME=PATH` "
                    "first"
                )
            check_set_up(folder, str(folder))
        ignore_settings_here()
        return super().run(env, *args, **kwargs)


def _check_name(name: object) -> None:
    """Refuse a name that FLARE would refuse when the job is submitted, or that cannot be a folder's."""
    if not isinstance(name, str) or not re.fullmatch(JOB_NAME_PATTERN, name) or len(name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"name={shown(name)} is no name that FLARE takes for a job. Remedy: a name of at most {_LONGEST_NAME} "
            "letters, digits and . _ - of ASCII, with a letter or digit at first."
        )


def stated_fields(job: Any, stated: Sequence[str]) -> dict[str, Any]:
    """Return the job without the fields at their defaults, so that a person can read the job folder.

    Args:
        stated: fields that are kept in any case.
    """
    defaults = {each.name: _default(each) for each in dataclasses.fields(job)}
    return {name: value for name, value in job.to_dict().items() if name in stated or value != defaults[name]}


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
