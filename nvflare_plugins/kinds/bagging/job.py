"""What a bagging job says. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import ClassVar

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument
from nvflare_plugins.base.declared import Entries, Name, Names, Parameters, Rounds, Seconds, document
from nvflare_plugins.data.labels import OneColumn
from nvflare_plugins.xgb.objectives import refuse_ranking
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters, without_columns

PROFILE = "own_trees"  # the one way in which this job protects trees; the evidence names it
MOST_DEPTH = 12
BASE_SCORE = 0.5
_ONLY: dict[str, tuple[object, str]] = {
    "num_parallel_tree": (1, "a round holds one tree of every site"),
    "subsample": (1.0, "every tree is grown on all rows of its site"),
    "booster": ("gbtree", "trees are not dropped again"),
    "multi_strategy": ("one_output_per_tree", "a tree has one output"),
    "scale_pos_weight": (1.0, "a leaf holds enough rows because all rows count alike"),
    "seed_per_iteration": (False, "columns are drawn anew in each round as it is"),
}
"""Parameter -> the only value that a job may give, and why."""
_WITHOUT_USE = {
    "max_cat_to_onehot": "columns are numbers",
    "max_cat_threshold": "columns are numbers",
}


@document
class BaggingJob(JobDocument):
    """One training by tree-based bagging: same columns at every site, other rows."""

    KIND: ClassVar[str] = "bagging"
    profile: ClassVar[str] = PROFILE
    tracking: ClassVar[bool] = False

    data_set: Name
    """Name of the training set in every site's policy."""
    label: OneColumn
    """Label column."""
    params: Parameters = field(default_factory=dict)
    """XGBoost parameters, as for horizontal jobs, but for objectives with one output and a bounded hessian, every row
    at the same weight, and trees of depth 1 to 12. ``eval_metric`` has no effect: nothing is evaluated. Each tree
    counts 1/W of ``learning_rate``, W the number of sites. ``base_score`` is public, 0.5 unless given: there is no
    exchange that would estimate it.
    """
    num_rounds: Rounds = 10
    """Rounds; each adds one tree of every site, so that the model has as many trees as rounds times sites."""
    features: Names | None = None
    """Columns to train on, in this order; None means all columns of the file but the label."""
    label_classes: Entries | None = None
    """Public list of label values; None means that labels are numbers."""
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it."""

    def parameters(self, features: Sequence[str]) -> TrainingParameters:
        """Return the job's XGBoost parameters. Raises: ConfigurationError."""
        refuse_ranking(
            self.params,
            "bagging",
            "a tree's leaves hold enough rows because hessians are bounded; use a horizontal training",
        )
        check_parameters({"base_score": BASE_SCORE, **self.params}, features)  # the metric too, which is not used
        used = {name: value for name, value in self.params.items() if name != "eval_metric"}
        parameters = check_parameters({"base_score": BASE_SCORE, **used}, features)
        agreed, facts = parameters.agreed, parameters.objective
        for name, (only, why) in _ONLY.items():
            if agreed.get(name, only) != only:
                raise ConfigurationError(f"bagging takes {name}={only} only, because {why}: leave it out")
        for name, why in _WITHOUT_USE.items():
            if self.params.get(name) is not None:
                raise ConfigurationError(f"bagging takes no {name}, because {why}: leave it out")
        if facts.n_outputs != 1 or facts.hessian_bound is None or facts.adaptive_leaf:
            raise ConfigurationError(
                f"bagging does not take {facts.name}: a tree of one site must have one output, and leaves of at least "
                "so many rows, which needs a bounded hessian; use binary:logistic or reg:squarederror"
            )
        if not 1 <= int(parameters.effective["max_depth"]) <= MOST_DEPTH:
            raise ConfigurationError(f"bagging takes max_depth from 1 to {MOST_DEPTH}: messages have that tree's size")
        return parameters


def check_bagging_early(job: BaggingJob, sites: object, n_sites: int) -> None:
    """Refuse parameters that every site would refuse. Raises: ConfigurationError."""
    if job.features is None:
        replace(job, params=without_columns(job.params)).parameters(["any"])
    else:
        job.parameters(job.features)
