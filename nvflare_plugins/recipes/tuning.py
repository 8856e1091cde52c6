"""Tuning and cross validation over several sites as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvflare_plugins.recipes.horizontal import check_early
from nvflare_plugins.recipes.job_recipe import JobRecipe


class TuningRecipe(JobRecipe):
    """Try parameter sets by cross validation over sites that hold the same columns for other rows.

    Each site gets ``tuning.csv``, ``tuning.json``, ``tuning.html`` and ``train_best.py``, which writes the job that
    trains the best parameters on all rows. Sites refuse it unless their policy allows as many trials times folds times
    rounds (``tuning``).

        recipe = TuningRecipe(
            name="tune", data_set="credit", label="default", params={"objective": "binary:logistic"},
            search={"eta": {"low": 0.02, "high": 0.3, "log": True}, "max_depth": [3, 4, 6]}, n_trials=8,
        )

    Args:
        name: Name of the FLARE job.
        data_set: Name of the data set in every site's policy.
        label: Label column.
        params: XGBoost parameters of every trial (jobs/MODEL.md lists the supported ones): the objective, the metric
            that decides (the last `eval_metric`), `max_bin`, constraints.
        trials: List of parameter sets to try, each as objects of XGBoost parameters; this or `search`.
        search: Random search: for each parameter a list of values, or a range such as `{"low": 0.01, "high": 0.3,
            "log": true}` (`"whole": true` for whole numbers). All sites draw the same sets
            (nvflare_plugins/tuning/space.py says how).
        n_trials: How many different sets `search` draws.
        folds: Folds: each trial trains once for each, on all other folds, and is scored on it.
        num_rounds: Most boosting rounds of each training.
        profile: ``masks`` or ``bfv``.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 3, or the number of ``sites``.
        settings: Any other field of ``TuningJob``: ``seed``, ``group``, ``early_stopping_rounds``, ``features``,
            ``categories``, ``unknown_category_is_missing``, ``label_classes``, ``min_rows_per_cut``, ``engine``,
            ``arithmetic``, ``deadline_s``.

    Raises:
        ConfigurationError: a setting, or a parameter of any trial, that no site would accept.
    """

    kind = "tuning"
    stated = ("data_set", "label", "profile", "num_rounds", "folds")

    def __init__(
        self,
        name: str,
        *,
        data_set: str,
        label: str,
        params: dict[str, Any] | None = None,
        trials: Sequence[Mapping[str, Any]] | None = None,
        search: Mapping[str, Any] | None = None,
        n_trials: int | None = None,
        folds: int = 5,
        num_rounds: int = 50,
        profile: str = "masks",
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {
            "data_set": data_set,
            "label": label,
            "params": params or {},
            "trials": trials,
            "search": search,
            "n_trials": n_trials,
            "folds": folds,
            "num_rounds": num_rounds,
            "profile": profile,
            **settings,
        }
        super().__init__(name, document, sites, min_clients)
        for trial in self.job.all_trials():
            check_early(self.job.training_of(trial))
