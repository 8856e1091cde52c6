"""Tuning and cross validation of vertical jobs as a FLARE recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvflare_plugins.recipes.job_recipe import JobRecipe
from nvflare_plugins.vertical.parameters import check_vertical_parameters
from nvflare_plugins.xgb.parameters import ALIASES

_NEEDS_COLUMNS = ("monotone_constraints", "interaction_constraints")


class VerticalTuningRecipe(JobRecipe):
    """Try parameter sets by cross validation over parties that hold other columns of the same rows.

    The active party gets ``tuning.csv``, ``tuning.json``, ``tuning.html`` and ``train_best.py``, which writes the job
    that trains the best parameters on all rows; the others get nothing but their reports. Parties refuse it unless
    their policy allows as many trials times folds times rounds (``tuning``) and, passive ones, ``exact_bins``.

        recipe = VerticalTuningRecipe(
            "tune", active="bank", data_set="loans", label="default", alignment="first", profile="elgamal",
            params={"objective": "binary:logistic"}, trials=[{"eta": 0.1}, {"eta": 0.3}], sites=["bank", "shop"],
        )

    Args:
        name: Name of the FLARE job.
        active: Site that has the label; all other sites of the job are passive parties.
        data_set: Name of the data set in every site's policy.
        label: Label column at the active party.
        params: XGBoost parameters of every trial (jobs/MODEL.md lists the supported ones): the objective, the metric
            that decides (the last `eval_metric`), `max_bin`, constraints.
        trials: List of parameter sets to try, each an object of XGBoost parameters; this or `search`.
        search: Random search, as of kind `tuning`.
        n_trials: How many different sets `search` draws.
        folds: Folds, drawn by the active party alone: each trial trains once for each, on all others, and is scored on
            it.
        num_rounds: Most boosting rounds of each training.
        profile: ``paillier``, ``okamoto_uchiyama``, ``elgamal``, or ``plain``, which parties refuse unless they
            consent.
        sites: The sites that take part; None means all that FLARE assigns to the job.
        min_clients: Fewest sites; default 2, or the number of ``sites``.
        settings: Any other field of ``VerticalTuningJob``: ``seed``, ``group``, ``early_stopping_rounds``,
            ``key_bits``, ``features``, ``categories``, ``unknown_category_is_missing``, ``label_classes``,
            ``alignment``, ``deadline_s``.

    Raises:
        ConfigurationError: a setting, or a parameter of any trial, that no party would accept.
    """

    kind = "vertical_tuning"
    stated = ("active", "data_set", "label", "profile", "preset", "num_rounds", "folds")
    fewest = 2

    def __init__(
        self,
        name: str,
        *,
        active: str,
        data_set: str,
        label: str,
        params: dict[str, Any] | None = None,
        trials: Sequence[Mapping[str, Any]] | None = None,
        search: Mapping[str, Any] | None = None,
        n_trials: int | None = None,
        folds: int = 5,
        num_rounds: int = 50,
        profile: str = "paillier",
        sites: Sequence[str] | None = None,
        min_clients: int | None = None,
        **settings: Any,
    ) -> None:
        document = {
            "active": active,
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
            given = {**self.job.params, **trial}
            free = {key: value for key, value in given.items() if ALIASES.get(key, key) not in _NEEDS_COLUMNS}
            check_vertical_parameters(free, ["any"])
        self.needs_site(active)
