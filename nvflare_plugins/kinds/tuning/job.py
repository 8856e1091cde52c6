"""What a tuning says, and what every tuning asks of a site first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Annotated, Any, ClassVar, Protocol

from annotated_types import Ge, Le, Len
from pydantic import AfterValidator, Field

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.job_context import JobDocument
from nvflare_plugins.base.checks import expect, one_of, shown
from nvflare_plugins.base.declared import (
    STRICT,
    Entries,
    EntriesOfColumns,
    Flag,
    Name,
    Names,
    OneOf,
    Parameters,
    Rounds,
    Seconds,
    Whole,
    Words,
    document,
)
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.kinds.tuning.space import MOST_TRIALS, Trial, checked_trials
from nvflare_plugins.pooled.job import Engine, HorizontalJob, check_horizontal_early
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.profiles import Profile

# What a tuning says. Where the data lie and what is allowed, each site's own policy says.


MOST_FOLDS = 10
PROFILES = (Profile.MASKS.value, Profile.BFV.value)
_PRIVATE = (
    "is differentially private: every trial would be paid for from the budget. Choose masks or bfv, or take the preset "
    "of private_trees as it is"
)
_VERTICAL = "is of vertical jobs: choose masks or bfv, or for sites that hold other columns the kind vertical_tuning"
_WHY_NOT: Mapping[str, str] = {
    "plain": "would show the server the sums of every fold: choose masks or bfv",
    "ckks": "lets the server together with any one site open all messages, and here these are of every fold: choose "
    "masks or bfv",
    "paillier": _VERTICAL,
    "elgamal": _VERTICAL,
    "dp_distributed": _PRIVATE,
    "dp_trusted": _PRIVATE,
    "dp_local": _PRIVATE,
}


def _exact_sums(value: str) -> str:
    if value.startswith("plugin."):
        raise ConfigurationError(
            f"profile={shown(value)}: a plugin says nothing of many sums over overlapping rows. Choose masks or bfv"
        )
    if value in _WHY_NOT:
        raise ConfigurationError(f"profile={value} {_WHY_NOT[value]}")
    one_of("profile", value, list(PROFILES))
    return value


ProfileOfTuning = Annotated[
    str,
    STRICT,
    AfterValidator(_exact_sums),
    Field(json_schema_extra={"enum": list(PROFILES)}),
    Words(f"one of {', '.join(PROFILES)}"),
]
Trials = Annotated[list[Parameters], Len(1, MOST_TRIALS), Words(f"a list of 1 to {MOST_TRIALS} parameter sets")]
Search = Annotated[dict[Name, Any], Len(1), Words("an object that gives parameters a list of values or a range")]


@document
class TuningJob(JobDocument):
    """Horizontal cross validation of declared parameter sets: same columns at every site, other rows."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "active": "vertical jobs have a kind of their own, vertical_tuning",
        "preset": "vertical jobs have a kind of their own, vertical_tuning",
        "epsilon": "private methods pay for every trial from the budget",
        "delta": "private methods pay for every trial from the budget",
        "method": "private methods pay for every trial from the budget",
        "weight": "rows count as one each here, so that every fold has as many as it seems; leave it out",
        "eval_data_set": "the folds take its place; leave it out",
        "pooled_metrics": "it counts rows by the scores of one final model; ask for it in the training that follows",
        "initial_model": "every trial begins anew; continue a model in the training that follows",
        "continue_from": "every trial begins anew; continue a model in the training that follows",
        "resume_from": "nothing is kept of a trial that was broken off; submit the job again without the trials that "
        "the log shows as done",
        "word_bits": "trials are compared in words of 64 bits; give it to the training that follows",
        "cuts": "cut points are searched as `quantile`; leave it out",
        "cut_bounds": "cut points are searched as `quantile`; leave it out",
    }
    REFUSED_IN: ClassVar[str] = "a tuning"
    tracking: ClassVar[bool] = False

    data_set: Name
    """Name of the data set in every site's policy."""
    label: Name
    """Label column."""
    params: Parameters = field(default_factory=dict)
    """XGBoost parameters of every trial (jobs/MODEL.md lists the supported ones): the objective, the metric that
    decides (the last `eval_metric`), `max_bin`, constraints.
    """
    trials: Trials | None = None
    """List of parameter sets to try, each as objects of XGBoost parameters; this or `search`."""
    search: Search | None = None
    """Random search: for each parameter a list of values, or a range such as `{"low": 0.01, "high": 0.3, "log": true}`
    (`"whole": true` for whole numbers). All sites draw the same sets (nvflare_plugins/kinds/tuning/space.py says how).
    """
    n_trials: Annotated[Whole, Ge(1), Le(MOST_TRIALS)] | None = None
    """How many different sets `search` draws."""
    seed: Annotated[Whole, Ge(0)] = 0
    """Seed of `search`, public like the whole job. Folds are never drawn from it."""
    folds: Annotated[Whole, Ge(2), Le(MOST_FOLDS)] = 5
    """Folds: each trial trains once for each, on all other folds, and is scored on it."""
    group: Name | None = None
    """Column that says which rows belong together, such as a person's: they are never in two folds of a site. It is no
    feature.
    """
    num_rounds: Rounds = 50
    """Most boosting rounds of each training."""
    early_stopping_rounds: Rounds | None = None
    """End a training after so many rounds without improvement of the last metric on its fold; its best round counts."""
    profile: ProfileOfTuning = Profile.MASKS.value
    """``masks`` or ``bfv``."""
    features: Names | None = None
    """Columns to train on, in this order; None means all columns of the file but label and group."""
    categories: EntriesOfColumns = field(default_factory=dict)
    """Public category list of each categorical column."""
    unknown_category_is_missing: Flag = False
    """Treat other categories as missing instead of refusing the data."""
    label_classes: Entries | None = None
    """Public list of label values; None means that labels are numbers (classes 0 .. k-1)."""
    min_rows_per_cut: Annotated[Whole, Ge(2)] = 10
    """The one cut search stops where fewer pooled rows would be singled out."""
    engine: Annotated[str, OneOf(Engine)] = Engine.AUTO.value
    """Who grows the trees of the trials, as in horizontal jobs: ``own``, ``xgboost``, or ``auto``."""
    arithmetic: Annotated[str, OneOf("auto", *ARITHMETICS)] = "auto"
    """Whose arithmetic ``own`` follows, as in horizontal jobs."""
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it."""

    def __post_init__(self) -> None:
        expect("group must not be the label", self.group != self.label)
        for trial in checked_trials(self.params, self.trials, self.search, self.n_trials, self.seed):
            self.training_of(trial)

    @property
    def best_recipe(self) -> str:
        """Return the name of the recipe that trains the best parameters."""
        return "HorizontalXGBRecipe"

    def best_settings(self, params: dict[str, Any], num_rounds: int, features: Sequence[str]) -> dict[str, Any]:
        """Return that recipe's arguments, but for its name."""
        found = {
            "data_set": self.data_set,
            "label": self.label,
            "params": params,
            "num_rounds": num_rounds,
            "profile": self.profile,
            "min_rows_per_cut": self.min_rows_per_cut,
        }
        found |= {"features": list(features)} if self.features is not None or self.group is not None else {}
        found |= {"categories": self.categories} if self.categories else {}
        found |= {"unknown_category_is_missing": True} if self.unknown_category_is_missing else {}
        found |= {} if self.engine == Engine.AUTO.value else {"engine": self.engine}
        found |= {} if self.arithmetic == "auto" else {"arithmetic": self.arithmetic}
        return found | ({} if self.label_classes is None else {"label_classes": self.label_classes})

    @property
    def n_of_trials(self) -> int:
        """Number of parameter sets."""
        return len(self.trials) if self.trials is not None else int(self.n_trials or 0)

    @property
    def size(self) -> int:
        """Trials times folds times rounds, which the sites' consent bounds."""
        return self.n_of_trials * self.folds * self.num_rounds

    def all_trials(self) -> tuple[Trial, ...]:
        """Return the parameter sets in order, without those that all have in common."""
        return checked_trials(self.params, self.trials, self.search, self.n_trials, self.seed)

    def training_of(self, trial: Trial, features: list[str] | None = None) -> HorizontalJob:
        """Return the training of all rows with these parameters, under the conditions of this job; it is never run."""
        return HorizontalJob(
            self.data_set,
            self.label,
            {**self.params, **trial},
            num_rounds=self.num_rounds,
            profile=self.profile,
            features=self.features if features is None else features,
            categories=self.categories,
            unknown_category_is_missing=self.unknown_category_is_missing,
            label_classes=self.label_classes,
            min_rows_per_cut=self.min_rows_per_cut,
            engine=self.engine,
            arithmetic=self.arithmetic,
            tracking=False,
        )


def check_tuning_early(job: TuningJob, sites: object, n_sites: int) -> None:
    """Refuse parameters of any trial that every site would refuse. Raises: ConfigurationError."""
    for trial in job.all_trials():
        check_horizontal_early(job.training_of(trial), sites, n_sites)


# What every tuning asks of a site first, and how its errors say where they came.


class Sized(Protocol):
    """How much a tuning trains."""

    @property
    def data_set(self) -> str: ...
    @property
    def folds(self) -> int: ...
    @property
    def num_rounds(self) -> int: ...
    @property
    def n_of_trials(self) -> int: ...
    @property
    def size(self) -> int: ...


def check_consent(policy: SitePolicy, job: Sized) -> None:
    """Check the site's consent to so many trainings. Raises: PolicyRefusal."""
    if job.size > policy.consents.tuning or not policy.consents.gives("tuning"):
        raise PolicyRefusal(
            f"the policy of {policy.site} allows trials x folds x rounds of at most {policy.consents.tuning} in one "
            f"tuning, and the job asks for {job.n_of_trials} x {job.folds} x {job.num_rounds} = {job.size}. Policy "
            f"key: consents.tuning. Remedy: fewer trials, folds or rounds, or ask {policy.site} to change it."
        )
    if policy.data_set(job.data_set).privacy is not None:
        raise PolicyRefusal(
            f"data set {job.data_set!r} of {policy.site} has a privacy budget, and the models of a tuning are not "
            f"charged to it. Policy key: data_sets.{job.data_set}.privacy. Remedy: tune on a data set of other rows "
            "without a budget"
        )


@contextmanager
def in_trial(number: int, n_trials: int, fold: int | None = None, n_folds: int = 0) -> Iterator[None]:
    """Let an error say in which trial it came; a public number."""
    try:
        yield
    except DataRefusal:  # its text is the same whatever it was
        raise
    except VeilBoostError as error:
        where = f"trial {number} of {n_trials}" + ("" if fold is None else f", fold {fold} of {n_folds}")
        raise type(error)(f"{error} ({where})") from None
