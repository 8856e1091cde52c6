"""FederBoost's vertical training as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvflare_plugins.federboost_vertical.training import check_bucket_parameters
from nvflare_plugins.recipes.job_recipe import JobRecipe


class FederBoostVerticalRecipe(JobRecipe):
    """Train over parties that hold other columns of the same rows, under local differential privacy of each value.

    The passive parties send the bucket of every value once, randomised; the active party, which has the label, trains
    stock XGBoost on them. What is public about a passive party's features stands in a file at that party.

        recipe = FederBoostVerticalRecipe(
            name="credit", data_set="credit", active="bank", label="default", epsilon=4.0, num_rounds=20
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Args:
        name: Name of the FLARE job.
        data_set: Name of the training set in every party's policy; its files share their rows by the id column.
        active: The site with the label.
        label: Label column there.
        epsilon: What each passive party spends, for one ``unit``, edges included.
        unit: ``value`` (the paper's: one value of one row) or ``row`` (all its features together), see ``Unit``.
        edges_epsilon: The part of epsilon that pays for equal-count buckets; 0 takes public edges.
        n_buckets: Most buckets of a feature; a discrete feature has at most as many as values.
        params: XGBoost parameters.
        num_rounds: Boosting rounds.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 3, or the number of ``sites``.
        settings: Any other field of ``BucketJob``: ``features``, ``description``, ``alignment``, ``buckets_from``,
            ``deadline_s``.

    Raises:
        ConfigurationError: a setting or parameter that no site would accept.
    """

    kind = "federboost_vertical"
    stated = (
        "data_set",
        "active",
        "label",
        "epsilon",
        "unit",
        "edges_epsilon",
        "n_buckets",
        "num_rounds",
        "profile",
    )

    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        active: str,
        label: str,
        epsilon: float = 4.0,
        unit: str = "value",
        edges_epsilon: float = 0.0,
        n_buckets: int = 16,
        params: dict[str, Any] | None = None,
        num_rounds: int = 20,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {
            "data_set": data_set,
            "active": active,
            "label": label,
            "epsilon": epsilon,
            "unit": unit,
            "edges_epsilon": edges_epsilon,
            "n_buckets": n_buckets,
            "params": params or {},
            "num_rounds": num_rounds,
            **settings,
        }
        super().__init__(name, document, sites, min_clients)
        check_bucket_parameters(self.job.params, self.job.n_buckets)
        self.needs_site(active)
