"""Use of a finished vertical model as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvflare_plugins.recipes.job_recipe import JobRecipe


class VerticalInferenceRecipe(JobRecipe):
    """Predict, explain, merge, or score rows as they are asked for, with a vertical model, by all of its parties.

    Every site holds its part of the model since the training (``veilboost_runs/<job id>/``). The result is written at
    the active party, in the run folder of this job: ``predictions.parquet``, ``contributions.parquet`` or
    ``merged_model.json``, and ``importance.csv``.

        recipe = VerticalInferenceRecipe(
            "score_loans", model="5d0c...", data_set="loans_2026", alignment="first", sites=["bank", "shop", "telco"]
        )
        recipe.export("jobs")

    Args:
        name: Name of the FLARE job.
        model: Id of the job that trained the model. Every site reads its part from that job's run folder, or from
            ``<id>.<site>.json`` in its input folder.
        action: ``predict``; ``explain`` (SHAP values; every passive party's policy must consent to ``explain``);
            ``merge`` (one ordinary XGBoost model; every passive party must consent to ``merge_model``); or ``serve``
            (the job stays and scores rows as they are asked for at the active party; every passive party must consent
            to ``scoring``).
        data_set: Name in every site's policy of the rows to predict or explain.
        alignment: ``first`` finds the common rows by private set intersection; the id of a finished job of the same
            sites takes those that it found (a training job that aligned this data set will do; a set is aligned only
            once); None means that the files of all sites hold the same rows in the same order.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 2, or the number of ``sites``.
        settings: Any other field of ``InferenceJob``: ``rows``, ``unknown_category_is_missing``, ``rounds``,
            ``file_format``, ``batch_rows``, ``serve_s``, ``idle_s``, ``evidence_mib``, ``on_lost_site``,
            ``lost_site_deadline_s``, ``deadline_s``.

    Raises:
        ConfigurationError: a setting that no site would accept.
    """

    kind = "vertical_inference"
    stated = ("model", "action")
    fewest = 2

    def __init__(
        self,
        name: str,
        *,
        model: str,
        action: str = "predict",
        data_set: str | None = None,
        alignment: str | None = None,
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {"model": model, "action": action, "data_set": data_set, "alignment": alignment, **settings}
        super().__init__(name, document, sites, min_clients)
