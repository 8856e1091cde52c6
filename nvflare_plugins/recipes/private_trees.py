"""Differentially private trees as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvflare_plugins.private_trees.job_plan import JobPlan
from nvflare_plugins.recipes.job_recipe import JobRecipe


class PrivateTreesRecipe(JobRecipe):
    """Train trees under differential privacy over sites that hold the same columns for other rows.

    Each site's policy must give the data set a privacy budget, from which its ledger pays for the job. Everything here
    is public and must come from public knowledge: bounds, category lists, delta.

        recipe = PrivateTreesRecipe(
            name="credit", data_set="credit2", label="label", epsilon=0.5, delta=1e-6,
            feature_bounds={"AGE": (18, 100), "LIMIT_BAL": (0, 1_000_000)}, features=["AGE", "LIMIT_BAL"],
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Args:
        name: Name of the FLARE job.
        data_set: Name of the training set in every site's policy, which must give it a privacy budget.
        label: Label column: 0 and 1, ``label_classes``, or numbers within ``label_bounds``.
        epsilon: What this job may spend; delta is given, never computed from the data.
        delta: What this job may spend; delta is given, never computed from the data.
        feature_bounds: Public (low, high) of every numeric feature; values outside are clipped to it.
        categories: Public category list of each categorical column; unknown categories count as missing.
        method: A preset: ``default`` (now ``default_2026_12``), ``default_2026_11``, ``few_rounds``, or a paper's name
            such as ``dp_rf`` (presets.py).
        components: Components of the method to exchange one by one: ``split_method`` (C1), ``weight_update`` (C2),
            ``candidates`` (C3), ``interactions`` and ``n_features_per_tree`` (A1), ``batch_size`` (A2), ``query``,
            ``n_trees``, ``depth``, ``n_candidates``, ``learning_rate``, ``ridge``, ``noise_ridge``, ``clip``,
            ``hessian_rounds``, ``candidate_share``, and ``grower``: ``sites`` (the default) or, for totally random
            trees of two classes, ``xgboost`` (the same: the sites grow what XGBoost's refresh would set).
        trust: ``distributed`` (each site adds a share of the noise under masks), ``trusted_aggregator`` (the server
            sees exact sums and adds the noise once) or ``local`` (a baseline: every row is noised by itself).
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 3, or the number of ``sites``.
        settings: Any other field of ``PrivateTreesJob``: ``features``, ``label_classes``, ``label_bounds``,
            ``colluders``, ``n_sites``, ``n_rows``, ``rows_per_person``, ``structure_seed``, ``weight``, ``max_weight``,
            ``resume_from``, ``deadline_s``, ``on_lost_site``, ``lost_site_deadline_s``.

    Raises:
        ConfigurationError: a setting that no site would accept.
    """

    kind = "private_trees"
    stated = ("data_set", "label", "epsilon", "delta", "method", "trust")

    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        epsilon: float,
        delta: float,
        feature_bounds: Mapping[str, Sequence[float]] | None = None,
        categories: Mapping[str, Sequence[Any]] | None = None,
        method: str = "default",
        components: Mapping[str, Any] | None = None,
        trust: str = "distributed",
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {
            "data_set": data_set,
            "label": label,
            "epsilon": epsilon,
            "delta": delta,
            "feature_bounds": feature_bounds or {},
            "categories": categories or {},
            "method": method,
            "components": components or {},
            "trust": trust,
            **settings,
        }
        super().__init__(name, document, sites, min_clients)
        JobPlan.of(self.job, len(self.sites or ()) or self.min_clients)  # refuses what no site could train
