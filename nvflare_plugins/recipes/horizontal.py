"""Horizontal federated XGBoost as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.recipes.job_recipe import JobRecipe
from nvflare_plugins.xgb.parameters import check_parameters

_NEEDS_COLUMNS = ("monotone_constraints", "interaction_constraints")


class HorizontalXGBRecipe(JobRecipe):
    """Train XGBoost over sites that hold the same columns for other rows, every private message protected.

    The job names a data set; where it lies, and what a job may do there, each site's own policy says
    (``veilboost site-setup``). Nothing about paths, code or keys is in the job.

        recipe = HorizontalXGBRecipe(
            name="credit", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=20
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)
        recipe.export("jobs")                                          # or write the job folder

    Args:
        name: Name of the FLARE job.
        data_set: Name of the training set in every site's policy.
        label: Label column.
        params: XGBoost parameters (jobs/MODEL.md lists the supported ones); recipes refuse others at once.
        num_rounds: Boosting rounds.
        profile: ``masks``, ``bfv``, ``ckks``, or ``plain``, which sites refuse unless they consent; or ``plugin.NAME``,
            a plugin that every site's policy names (``plugins``).
        cuts: How the histogram's cut points are agreed: `quantile`, `exact`, `uniform` or `logarithmic`.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 3, or the number of ``sites``.
        settings: Any other field of ``HorizontalJob``: ``eval_data_set``, ``evaluate_training``, ``pooled_metrics``,
            ``weight``, ``features``, ``categories``, ``unknown_category_is_missing``, ``label_classes``,
            ``cut_bounds``, ``min_rows_per_cut``, ``early_stopping_rounds``, ``checkpoint_every``, ``initial_model``,
            ``continue_from``, ``resume_from``, ``engine``, ``arithmetic``, ``word_bits``, ``tracking``,
            ``finest_exponent``, ``deadline_s``, ``on_lost_site``, ``lost_site_deadline_s``.

    Raises:
        ConfigurationError: a setting or parameter that no site would accept.
    """

    kind = "horizontal"
    stated = ("data_set", "label", "profile", "num_rounds")

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
            "data_set": data_set,
            "label": label,
            "params": params or {},
            "num_rounds": num_rounds,
            "profile": profile,
            "cuts": cuts,
            **settings,
        }
        super().__init__(name, document, sites, min_clients)
        check_early(self.job)


def check_early(job: HorizontalJob) -> None:
    """Refuse parameters that every site would refuse; constraints that name columns wait for the columns."""
    params = dict(job.params)
    if job.features is None:
        params = {key: value for key, value in params.items() if key not in _NEEDS_COLUMNS}
    check_parameters(params, job.features if job.features is not None else ["any"])
