"""DPBoost as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvflare_plugins.recipes.job_recipe import JobRecipe


class DpBoostRecipe(JobRecipe):
    """Train DPBoost (Li et al., AAAI 2020) over sites that hold the same columns for other rows: pure epsilon.

    The server is trusted with exact sums over all sites: it chooses the splits and adds the noise. Sites must allow the
    profile dp_trusted. Where nobody is to be trusted so far, ``PrivateTreesRecipe`` is the better choice.

        recipe = DpBoostRecipe(
            name="abalone", data_set="abalone", label="rings", epsilon=4.0, label_bounds=(1, 29),
            feature_bounds={"length": (0, 1), "height": (0, 0.5)}, categories={"sex": ["F", "I", "M"]},
        )
        recipe.execute(SimEnv(num_clients=3, workspace_root=...))      # or ProdEnv(...)

    Args:
        name: name of the FLARE job.
        data_set: name of the training set in every site's policy, with an id column and a pure privacy budget.
        label: the label column: 0 and 1, or numbers within ``label_bounds``.
        epsilon: what this job spends.
        feature_bounds: public (low, high) of every numeric feature.
        categories: public list of every categorical feature.
        label_bounds: public (low, high) of a regression's label; None for two classes.
        variant: ``dpboost``, or the baselines ``para`` and ``seq``.
        sites: the sites that take part; None means all that FLARE assigns to the job.
        min_clients: fewest sites; default 3, or the number of ``sites``.
        settings: any other field of ``DpBoostJob``, such as ``n_trees``, ``depth`` or ``trees_per_ensemble``.

    Raises:
        ConfigurationError: a setting that no site would accept.
    """

    kind = "dpboost"
    stated = ("data_set", "label", "epsilon", "feature_bounds", "variant", "n_trees", "depth", "profile")

    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        epsilon: float,
        feature_bounds: Mapping[str, Sequence[float]] | None = None,
        categories: Mapping[str, Sequence[Any]] | None = None,
        label_bounds: Sequence[float] | None = None,
        variant: str = "dpboost",
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {
            "data_set": data_set,
            "label": label,
            "epsilon": epsilon,
            "variant": variant,
            "feature_bounds": feature_bounds or {},
            "categories": categories or {},
            "label_bounds": label_bounds,
            **settings,
        }
        super().__init__(name, document, sites, min_clients)
