"""A profile of the data of several sites as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvflare_plugins.recipes.job_recipe import JobRecipe


class ProfileRecipe(JobRecipe):
    """Look at the data of all sites before a horizontal training: missing values, rates, information value.

    Each site gets ``profile.json``, whose ``ranking`` lists columns for ``features`` of a training, ``profile.html``
    and, about its own rows, ``local.html``. Cut points are searched once: a later ``HorizontalXGBRecipe`` over the same
    data, sites, ``max_bin`` and ``min_rows_per_cut`` uses them again. Sites refuse it unless their policy consents
    (``feature_profile``).

        recipe = ProfileRecipe(name="look", data_set="credit", label="default")

    Args:
        name: Name of the FLARE job.
        data_set: Name of the data set in every site's policy.
        label: Label column.
        profile: ``masks``, ``bfv``, ``ckks``, or ``plain``, which sites refuse unless they consent; or ``plugin.NAME``,
            a plugin that every site's policy names (``plugins``).
        features: Columns to look at; None means all columns of the file but the label.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 3, or the number of ``sites``.
        settings: Any other field of ``ProfileJob``: ``categories``, ``unknown_category_is_missing``, ``label_classes``,
            ``max_bin``, ``min_rows_per_cut``, ``deadline_s``.

    Raises:
        ConfigurationError: a setting that no site would accept.
    """

    kind = "profile"
    stated = ("data_set", "label", "profile")

    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        profile: str = "masks",
        features: Sequence[str] | None = None,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {
            "data_set": data_set,
            "label": label,
            "profile": profile,
            "features": list(features) if isinstance(features, tuple) else features,
            **settings,
        }
        super().__init__(name, document, sites, min_clients)
