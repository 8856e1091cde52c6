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
        name: name of the FLARE job.
        data_set: name of the training set in every site's policy.
        label: the label column, of two classes.
        epsilon, delta: what the job may spend, towards adding or removing the rows of one person.
        feature_bounds: public (low, high) of every numeric feature.
        categories: public list of every categorical feature.
        method: ``default``, ``few_rounds``, or a paper's name: ``dp_rf``, ``dp_tr_newton``, ``dp_tr_newton_ih``,
            ``dp_tr_newton_ih_ebm``, ``dp_ebm``, ``dp_ebm_newton``, ``dp_gbm``, ``feverless``, ``batch_ih_ebm_25``,
            ``batch_ih_ebm_100``. Histogram trees (``dp_gbm``, ``feverless``) are grown by the sites themselves;
            ``components={"grower": "xgboost"}`` lets XGBoost refresh random trees: the same model in more time.
        components: components of the method to exchange one by one (``PrivateTreesJob.components``).
        trust: ``distributed`` or ``trusted_aggregator``, which the sites' policies must allow as ``dp_trusted``.
        sites: the sites that take part; None means all that FLARE assigns to the job.
        min_clients: fewest sites; default 3, or the number of ``sites``.
        settings: any other field of ``PrivateTreesJob``, such as ``colluders``, ``rows_per_person``, ``features``,
            ``label_classes``, ``weight`` and ``max_weight``, ``structure_seed``, ``resume_from``.

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
