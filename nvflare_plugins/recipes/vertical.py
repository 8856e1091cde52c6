"""Vertical federated XGBoost as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import VerticalRules
from nvflare_plugins.recipes.job_recipe import JobRecipe
from nvflare_plugins.vertical.parameters import check_vertical_parameters
from nvflare_plugins.xgb.parameters import ALIASES

_NEEDS_COLUMNS = ("monotone_constraints", "interaction_constraints")


class VerticalXGBRecipe(JobRecipe):
    """Train XGBoost over parties that hold other columns of the same rows; one of them has the label.

    The job names a data set; where it lies, and what a job may do there, each party's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job. In the preset ``guarded`` max_bin is 32
    unless given: what parties allow by default.

        recipe = VerticalXGBRecipe(
            "credit", active="bank", data_set="loans", label="default", alignment="first",
            params={"objective": "binary:logistic", "max_bin": 32}, num_rounds=20, sites=["bank", "shop", "telco"],
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    Args:
        name: Name of the FLARE job.
        active: Site that has the label; all other sites of the job are passive parties.
        data_set: Name of the training set in every site's policy.
        label: Label column at the active party.
        params: XGBoost parameters (jobs/MODEL.md lists the supported ones). Columns of passive parties have the names
            ``<site>.<alias>`` in constraints. With ``subsample`` below 1 the active party replaces ``seed`` by a secret
            one, which its ``run.json`` names: a public seed would tell which rows a tree sampled.
        num_rounds: Boosting rounds.
        profile: ``paillier``, ``okamoto_uchiyama``, ``elgamal``, or ``plain``, which parties refuse unless they
            consent.
        preset: ``guarded``; ``exact``, which equals centralized training; or ``noised``, whose sums are differentially
            private given the split bits. Parties refuse ``exact`` and ``noised`` unless they consent.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 2, or the number of ``sites``.
        settings: Any other field of ``VerticalJob``: ``key_bits``, ``fraction_bits``, ``epsilon``, ``delta``,
            ``noised_features``, ``noised_bins``, ``noised_repeats``, ``own_rounds``, ``eval_data_set``,
            ``evaluate_training``, ``weight``, ``features``, ``categories``, ``unknown_category_is_missing``,
            ``label_classes``, ``alignment``, ``early_stopping_rounds``, ``checkpoint_every``, ``initial_model``,
            ``resume_from``, ``tracking``, ``deadline_s``, ``on_lost_site``, ``lost_site_deadline_s``.

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
        for field in ("features", "categories"):
            for site in getattr(self.job, field):
                if self.sites is not None and site not in self.sites:
                    raise ConfigurationError(f"{field} names {site!r}, which is not among the sites")
