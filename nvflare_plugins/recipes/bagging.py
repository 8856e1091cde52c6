"""Tree-based bagging as a FLARE recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nvflare_plugins.recipes.job_recipe import JobRecipe

_NEEDS_COLUMNS = ("monotone_constraints", "interaction_constraints")


class BaggingXGBRecipe(JobRecipe):
    """Train XGBoost by bagging: each round every site grows a tree on its own rows, and all sites take all of them.

    A round costs one sealed message of a few kilobytes, whatever the number of rows. In return the other sites get each
    site's own trees, which tell of its rows alone; sites refuse that unless their policy consents
    (``share_own_trees``). ``HorizontalXGBRecipe`` shows pooled sums only, and gives the model of centralized training.

        recipe = BaggingXGBRecipe(
            name="credit", data_set="credit", label="default", params={"objective": "binary:logistic"}, num_rounds=20
        )

    Args:
        name: Name of the FLARE job.
        data_set: Name of the training set in every site's policy.
        label: Label column.
        params: XGBoost parameters, as for horizontal jobs, but for objectives with one output and a bounded hessian,
            every row at the same weight, no metric, and trees of depth 1 to 12. Each tree counts 1/W of
            ``learning_rate``, W the number of sites. ``base_score`` is public, 0.5 unless given: there is no exchange
            that would estimate it.
        num_rounds: Rounds; each adds one tree of every site, so that the model has as many trees as rounds times sites.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 3, or the number of ``sites``.
        settings: Any other field of ``BaggingJob``: ``features``, ``label_classes``, ``deadline_s``.

    Raises:
        ConfigurationError: a setting or parameter that no site would accept.
    """

    kind = "bagging"
    stated = ("data_set", "label", "num_rounds")

    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        params: dict[str, Any] | None = None,
        num_rounds: int = 10,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {
            "data_set": data_set,
            "label": label,
            "params": params or {},
            "num_rounds": num_rounds,
            **settings,
        }
        super().__init__(name, document, sites, min_clients)
        _check_early(self)


def _check_early(recipe: BaggingXGBRecipe) -> None:
    """Refuse parameters that every site would refuse; constraints that name columns wait for the columns."""
    job = recipe.job
    if job.features is None:
        free = {name: value for name, value in job.params.items() if name not in _NEEDS_COLUMNS}
        dataclasses.replace(job, params=free).parameters(["any"])
    else:
        job.parameters(job.features)
