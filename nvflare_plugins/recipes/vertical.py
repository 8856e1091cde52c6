"""Vertical federated XGBoost as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvflare_plugins.data_sets.declaration import VerticalRules
from nvflare_plugins.recipes.job_recipe import JobRecipe
from nvflare_plugins.vertical.parameters import check_vertical_parameters
from nvflare_plugins.xgb.parameters import ALIASES

_NEEDS_COLUMNS = ("monotone_constraints", "interaction_constraints")


class VerticalXGBRecipe(JobRecipe):
    """Train XGBoost over parties that hold other columns of the same rows; one of them has the label.

    The job names a data set; where it lies, and what a job may do there, each party's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job.

        recipe = VerticalXGBRecipe(
            "credit", active="bank", data_set="loans", label="default", alignment="first",
            params={"objective": "binary:logistic", "max_bin": 32}, num_rounds=20, sites=["bank", "shop", "telco"],
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    Args:
        name: name of the FLARE job.
        active: the party with the label.
        data_set: name of the training set in every party's policy.
        label: the label column at the active party.
        params: XGBoost parameters; unsupported ones are refused here already. In the preset ``guarded`` max_bin is 32
            unless given: what parties allow by default.
        num_rounds: boosting rounds.
        profile: ``paillier`` (default), ``okamoto_uchiyama``, or ``plain``, which parties refuse unless they consent.
        preset: ``guarded`` (default), or ``exact``, which equals centralized training and which parties refuse unless
            they consent.
        sites: the parties; None means all sites that FLARE assigns to the job.
        min_clients: fewest parties; default 2, or the number of ``sites``.
        settings: any other field of ``VerticalJob``, such as ``alignment``, ``key_bits``, ``own_rounds``,
            ``eval_data_set``, ``early_stopping_rounds``, ``features``, ``weight``, ``tracking``, ``resume_from``.

    Raises:
        ConfigurationError: a setting or parameter that no party would accept.
    """

    kind = "vertical"
    stated = ("active", "data_set", "label", "profile", "preset", "num_rounds")
    fewest = 2

    def __init__(
        self,
        name: str,
        *,
        active: str,
        data_set: str,
        label: str,
        params: dict[str, Any] | None = None,
        num_rounds: int = 10,
        profile: str = "paillier",
        preset: str = "guarded",
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        given = params or {}
        if preset == "guarded" and isinstance(given, Mapping) and not {"max_bin", "max_bins"} & set(given):
            given = {**given, "max_bin": VerticalRules().max_bins}
        document = {
            "active": active,
            "data_set": data_set,
            "label": label,
            "params": given,
            "num_rounds": num_rounds,
            "profile": profile,
            "preset": preset,
            **settings,
        }
        super().__init__(name, document, sites, min_clients)
        # Constraints name columns of all parties, which are known only when these meet.
        free = {key: value for key, value in self.job.params.items() if ALIASES.get(key, key) not in _NEEDS_COLUMNS}
        check_vertical_parameters(free, ["any"])
        self.needs_site(active)
