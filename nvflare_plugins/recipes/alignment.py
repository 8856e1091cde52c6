"""Alignment of rows as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Sequence

from nvflare_plugins.recipes.job_recipe import JobRecipe


class AlignmentRecipe(JobRecipe):
    """Find the rows that all sites have, by private set intersection over their ids.

    Each site ends with the positions of its own common rows, in an order that all sites share, in the job's run folder
    (``alignment.npz``); vertical jobs name this job to use them. Which column holds the ids, each site's policy says
    (``veilboost site-setup --id NAME=COLUMN``).

        recipe = AlignmentRecipe("align_loans", data_sets=["loans", "loans_test"], sites=["bank", "shop", "telco"])
        recipe.export("jobs")

    Args:
        name: Name of the FLARE job.
        data_sets: Names in every site's policy, such as those of the training and the evaluation set; each is aligned
            on its own.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 2, or the number of ``sites``.
        deadline_s: Longest time that an exchange may wait for the slowest site; 0 derives it. However large a set is, a
            site works for a few seconds between two exchanges, and reads its files before the first.

    Raises:
        ConfigurationError: a setting that no site would accept.
    """

    kind = "alignment"
    fewest = 2

    def __init__(
        self,
        name: str,
        *,
        data_sets: Sequence[str],
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        deadline_s: float = 0.0,
    ) -> None:
        super().__init__(name, {"data_sets": data_sets, "deadline_s": deadline_s}, sites, min_clients)
