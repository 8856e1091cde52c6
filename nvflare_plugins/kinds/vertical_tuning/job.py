"""What a vertical tuning says, and its plan. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.base.checks import expect, one_of
from nvflare_plugins.base.declared import (
    STRICT,
    Entries,
    EntriesOfSites,
    Flag,
    Name,
    Parameters,
    Rounds,
    Seconds,
    Whole,
    Words,
    document,
)
from nvflare_plugins.data.labels import LabelColumns, columns_of
from nvflare_plugins.kinds.tuning.job import MOST_FOLDS, MOST_TRIALS, Search, Trial, Trials, Tuned
from nvflare_plugins.kinds.vertical.job import (
    AlignmentId,
    NamesOfSites,
    Preset,
    ProfileOfParties,
    VerticalJob,
    VerticalProfile,
    check_active_party,
    check_vertical_parameters,
)
from nvflare_plugins.kinds.vertical.planner import plan as plan_training
from nvflare_plugins.xgb.objectives import refuse_ranking
from nvflare_plugins.xgb.parameters import without_columns


def _exact(value: str) -> str:
    if value == Preset.GUARDED.value:
        raise ConfigurationError(
            "preset=guarded is refused in a vertical tuning: its guards let the sums of a few trees go, which one "
            "trial would use up. Choose exact, where every passive party consents, or train the guarded job as it is"
        )
    one_of("preset", value, [Preset.EXACT.value])
    return value


ExactPreset = Annotated[
    str, STRICT, AfterValidator(_exact), Field(json_schema_extra={"const": Preset.EXACT.value}), Words("exact")
]
_PRIVATE = "private methods pay for every trial from the budget"


_OF_TRAININGS = (
    *("active", "data_set", "label", "num_rounds", "profile", "key_bits", "preset", "features", "categories"),
    *("unknown_category_is_missing", "label_classes", "alignment", "deadline_s"),
)
"""Fields that a training has as the tuning has them."""


@document
class VerticalTuningJob(Tuned):
    """Cross validation of declared parameter sets: the same rows at every party, other columns, the label at one."""

    KIND: ClassVar[str] = "vertical_tuning"
    REFUSED: ClassVar[Mapping[str, str]] = {
        "epsilon": _PRIVATE,
        "delta": _PRIVATE,
        "weight": "rows count as one each here, so that every fold has as many as it seems; leave it out",
        "eval_data_set": "the folds take its place; leave it out",
        "initial_model": "every trial begins anew; continue a model in the training that follows",
        "resume_from": "nothing is kept of a trial that was broken off; submit the job again without the trials that "
        "the log of the active party shows as done",
        "own_rounds": "its first rounds use the active party's columns alone; ask for it in the training that follows",
        "fraction_bits": "scores of rounded gradients are those of another model; leave it out",
    }
    REFUSED_IN: ClassVar[str] = "a vertical tuning"
    best_recipe: ClassVar[str] = "VerticalXGBRecipe"

    active: Name
    """Site that has the label; all other sites of the job are passive parties."""
    data_set: Name
    """Name of the data set in every site's policy."""
    label: LabelColumns
    """Label column at the active party, or its columns of times, as in horizontal jobs."""
    params: Parameters = field(default_factory=dict)
    """XGBoost parameters of every trial (jobs/MODEL.md lists the supported ones): the objective, the metric that
    decides (the last `eval_metric`), `max_bin`, constraints.
    """
    trials: Trials | None = None
    """List of parameter sets to try, each an object of XGBoost parameters; this or `search`."""
    search: Search | None = None
    """Random search, as of kind `tuning`."""
    n_trials: Annotated[Whole, Ge(1), Le(MOST_TRIALS)] | None = None
    """How many different sets `search` draws."""
    seed: Annotated[Whole, Ge(0)] = 0
    """Seed of `search`, public like the whole job. Folds are never drawn from it."""
    folds: Annotated[Whole, Ge(2), Le(MOST_FOLDS)] = 5
    """Folds, drawn by the active party alone: each trial trains once for each, on all others, and is scored on it."""
    group: Name | None = None
    """Column of the active party that says which rows belong together; they are never in two folds. It is no feature.
    """
    num_rounds: Rounds = 50
    """Most boosting rounds of each training."""
    early_stopping_rounds: Rounds | None = None
    """End a training after so many rounds without improvement of the last metric on its fold; its best round counts."""
    profile: ProfileOfParties = VerticalProfile.PAILLIER.value
    """``paillier``, ``elgamal``, or ``plain``, which parties refuse unless they consent."""
    key_bits: Annotated[Whole, Ge(2048)] = 3072
    """Length of the keys that the active party generates, one for each training; ``elgamal`` has 128-bit strength."""
    preset: ExactPreset = Preset.EXACT.value
    """``exact``, which parties refuse unless they consent; ``guarded`` is refused."""
    features: NamesOfSites = field(default_factory=dict)
    """By site, the columns to train on in this order; a site that is not named takes all columns of its file but label,
    group and id.
    """
    categories: EntriesOfSites = field(default_factory=dict)
    """By site, the public category list of each of its categorical columns."""
    unknown_category_is_missing: Flag = False
    """Treat other categories as missing instead of refusing the data."""
    label_classes: Entries | None = None
    """Public list of label values; None means that labels are numbers (classes 0 .. k-1)."""
    alignment: AlignmentId | None = None
    """``first`` finds the common rows by private set intersection before training; the id of a finished job of the same
    sites takes those that it found; None means that the files of all sites hold the same rows in the same order.
    """
    deadline_s: Seconds = 0.0
    """Longest silence of a site, and longest time for one answer; 0 means 10 minutes and one hour."""

    def __post_init__(self) -> None:
        expect("group must not be the label", self.group not in columns_of(self.label))
        refuse_ranking(self.params, "a tuning", "folds divide rows, and queries are ranked whole; train it by itself")
        for trial in self.all_trials():
            self.training_of(trial)

    def training_of(self, trial: Trial, *, is_scored: bool = True) -> VerticalJob:
        """Return the training that a parameter set stands for.

        Args:
            is_scored: it has an evaluation set, which is the same rows with other weights.
        """
        return VerticalJob(
            **{name: getattr(self, name) for name in _OF_TRAININGS},
            params={**self.params, **trial},
            eval_data_set=self.data_set if is_scored else None,
            early_stopping_rounds=self.early_stopping_rounds if is_scored else None,
            checkpoint_every=0,
        )

    def best_settings(self, params: dict[str, Any], num_rounds: int, features: Sequence[str]) -> dict[str, Any]:
        """See ``Tuned``."""
        by_site = {**self.features, **({} if self.group is None else {self.active: list(features)})}
        found = {
            "active": self.active,
            "data_set": self.data_set,
            "label": self.label,
            "params": params,
            "num_rounds": num_rounds,
            "profile": self.profile,
            "preset": self.preset,
            "key_bits": self.key_bits,
        }
        found |= {"features": by_site} if by_site else {}
        return found | self._lists() | ({} if self.alignment is None else {"alignment": self.alignment})


def check_vertical_tuning_early(job: VerticalTuningJob, sites: Sequence[str] | None, n_sites: int) -> None:
    """Refuse parameters of any trial that no party would accept. Raises: ConfigurationError."""
    for trial in job.all_trials():
        check_vertical_parameters(without_columns({**job.params, **trial}), ["any"], label=job.label)
    check_active_party(job.active, sites)


def plan(request: PlanRequest, job: VerticalTuningJob) -> Plan:
    """Return the plan of the deepest trial's training, of which there are as many as trials and folds."""

    def depth(trial: Trial) -> int:  # without a limit as deep as it gets
        return int({**job.params, **trial}.get("max_depth", 6)) or 30

    training = plan_training(request, job.training_of(max(job.all_trials(), key=depth)))
    n_trainings = job.n_of_trials * job.folds
    text = (
        f"{job.n_of_trials} trials x {job.folds} folds x {job.num_rounds} rounds = {job.size:,}: every policy must "
        f"consent to as many (tuning), a passive party's to exact_bins.\n"
        f"{n_trainings} trainings, each at most:\n\n{training.text}"
    )
    return Plan({"trainings": n_trainings, "tuning": job.size, "training": training.figures}, text)
