"""Horizontal federated XGBoost as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from he_processors.errors import ConfigurationError
from nvflare_plugins.flare.controller import TRAIN_TASK, HorizontalController
from nvflare_plugins.flare.executor import HorizontalExecutor
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.horizontal.parameters import check_parameters

OUR_PACKAGES = ["nvflare_plugins", "he_processors", "dp_components"]
_NEEDS_COLUMNS = ("monotone_constraints", "interaction_constraints")


class HorizontalXGBRecipe(Recipe):
    """Train XGBoost over sites that hold the same columns for other rows, every private message protected.

    The job names a data set; where it lies, and what a job may do there, each site's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job.

        recipe = HorizontalXGBRecipe(
            name="credit", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=20
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or PocEnv(...), ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    Args:
        name: name of the FLARE job.
        data_set: name of the training set in every site's policy.
        label: the label column.
        params: XGBoost parameters; unsupported ones are refused here already.
        num_rounds: boosting rounds.
        profile: ``masks`` (default), ``bfv``, ``ckks``, or ``plain``, which sites refuse unless they consent.
        cuts: how cut points are agreed: ``quantile``, ``exact``, ``uniform`` or ``logarithmic``.
        sites: the sites that take part; None means all that FLARE assigns to the job.
        min_clients: fewest sites; default 3, or the number of ``sites``.
        settings: any other field of ``HorizontalJob``, such as ``eval_data_set``, ``early_stopping_rounds``,
            ``features``, ``categories``, ``weight``, ``tracking``, ``resume_from``.

    Raises:
        ConfigurationError: a setting or parameter that no site would accept.
    """

    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        params: dict[str, Any] | None = None,
        num_rounds: int = 10,
        profile: str = "masks",
        cuts: str = "quantile",
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {
            "data_set": data_set, "label": label, "params": dict(params or {}), "num_rounds": num_rounds,
            "profile": profile, "cuts": cuts, **settings,
        }  # fmt: skip
        self.job = HorizontalJob.from_dict(document)
        _check_early(self.job)
        self.sites = _checked_sites(sites)
        self.min_clients = min_clients if min_clients is not None else len(self.sites or ()) or 3
        if self.sites is not None and self.min_clients > len(self.sites):
            raise ConfigurationError(f"min_clients is {self.min_clients}, but only {len(self.sites)} sites are named")
        super().__init__(self._configure(name))

    def _configure(self, name: str) -> FedJob:
        # fail_fast: without a site the training cannot go on, so FLARE need not wait whether it comes back.
        job = FedJob(name=name, min_clients=self.min_clients, mandatory_clients=self.sites, fail_fast=True)
        job.set_app_packages(OUR_PACKAGES)  # sites have the package installed; no code travels with the job
        controller = HorizontalController(self._changed_fields(), self.sites, self.min_clients)
        job.to_server(controller, id="veilboost_controller")
        if self.job.tracking:
            job.to_server(TBAnalyticsReceiver(tb_folder="tb_events"), id="tb_receiver")
        if self.sites is None:
            job.to_clients(HorizontalExecutor(), tasks=[TRAIN_TASK])
        else:
            for site in self.sites:
                job.to(HorizontalExecutor(), site, tasks=[TRAIN_TASK])
        return job

    def _changed_fields(self) -> dict[str, Any]:
        """Return the job without the fields at their defaults, so that a person can read the job folder."""
        required = HorizontalJob(self.job.data_set, self.job.label).to_dict()
        fields = self.job.to_dict()
        kept = ("data_set", "label", "profile", "num_rounds")
        return {name: value for name, value in fields.items() if name in kept or value != required[name]}


def _check_early(job: HorizontalJob) -> None:
    """Refuse parameters that every site would refuse; constraints that name columns wait for the columns."""
    params = dict(job.params)
    if job.features is None:
        params = {key: value for key, value in params.items() if key not in _NEEDS_COLUMNS}
    check_parameters(params, job.features if job.features is not None else ["any"])


def _checked_sites(sites: Sequence[str] | None) -> list[str] | None:
    if sites is None:
        return None
    names = sorted(sites)
    if not names or len(set(names)) != len(names) or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError("sites must be different names, at least one")
    return names
