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
        name: Name of the FLARE job.
        data_set: Name of the training set in every site's policy, with an id column and a pure privacy budget. The ids
        label: Label column: 0 and 1, or numbers within ``label_bounds``.
        epsilon: What this job spends.
        feature_bounds: Public (low, high) of every numeric feature.
        categories: Public list of each categorical column, in the order in which splits cut it; other values count as
            missing.
        label_bounds: Public (low, high) of the label of a regression, which is clamped to them; None for labels 0 and
            1.
        variant: ``dpboost``, or the slides' baselines ``para`` (equal shares of rows) and ``seq`` (each tree on all).
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 3, or the number of ``sites``.
        settings: Any other field of ``DpBoostJob``: ``features``, ``label_classes``, ``n_trees``,
            ``trees_per_ensemble``, ``depth``, ``learning_rate``, ``ridge``, ``start_share``, ``n_candidates``,
            ``rows_per_person``, ``deadline_s``, ``on_lost_site``, ``lost_site_deadline_s``.

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
