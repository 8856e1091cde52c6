"""What a tuning says, what every tuning asks of a site first, and its plan."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le, Len
from pydantic import AfterValidator, Field

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.job_context import JobDocument
from nvflare_plugins.attempt.plan import Network, Plan, PlanRequest, process_memory_bytes
from nvflare_plugins.base.checks import expect, is_number, one_of, shown
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
from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.data.labels import LabelColumns, columns_of
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.kinds.tuning.folds import LEAST_ROWS
from nvflare_plugins.pooled.job import Engine, HorizontalJob, check_horizontal_early, never_run
from nvflare_plugins.pooled.plan import (
    Estimate,
    Planned,
    TreeRate,
    Workload,
    cost_of,
    estimate,
    measure_protection,
    measure_trees,
    message_bytes,
    training_messages,
    workload_of_job,
)
from nvflare_plugins.pooled.row_floors import N_COUNTS
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.profiles import Profile
from nvflare_plugins.xgb.objectives import COX, refuse_ranking
from nvflare_plugins.xgb.parameters import ALIASES, check_parameters

# The search space of a tuning job: a list of parameter sets, or ranges from which all sites draw the same sets.
#
# The draw is declared, so that any program can repeat it: the number u of trial t (from 0) and parameter p is the first
# 53 bits of SHA-256("veilboost/tuning/SEED/t/p"), divided by 2^53. A list of n values gives the one at floor(u n); a
# range low + u (high - low), or low (high / low)^u on a logarithmic scale, to six significant digits; whole numbers are
# floor(low + u (high - low + 1)), on a logarithmic scale the nearest whole number. A draw that repeats an earlier trial
# is passed over, and the next t takes its place. Nothing here is secret: the seed stands in the job.


MOST_TRIALS = 1000
_DRAWS_PER_TRIAL = 100
_DIGITS = 6

TUNABLE = (
    "learning_rate",
    "min_split_loss",
    "max_depth",
    "max_leaves",
    "min_child_weight",
    "reg_lambda",
    "reg_alpha",
    "max_delta_step",
    "subsample",
    "colsample_bytree",
    "colsample_bylevel",
    "colsample_bynode",
    "grow_policy",
    "rate_drop",
    "skip_drop",
)
"""Parameters that trials may differ in, under XGBoost's canonical names; their aliases will do too."""

_FIXED = {
    "max_bin": "all trials share one cut search and its bins",
    "objective": "scores of different objectives cannot be compared",
    "eval_metric": "scores of different metrics cannot be compared",
    "seed": "the best of several seeds is the luckiest, not the best parameters",
    "scale_pos_weight": "it changes what rows weigh, and with it how many rows a fold needs",
    "base_score": "it moves every score alike",
    "num_class": "it follows from the labels",
}

Trial = dict[str, Any]


def checked_trials(
    params: Mapping[str, Any],
    trials: Sequence[Trial] | None,
    search: Mapping[str, Any] | None,
    n_trials: int | None,
    seed: int,
) -> tuple[Trial, ...]:
    """Return the parameter sets of a job in order, from its fields of these names. Raises: ConfigurationError."""
    expect("give either trials or search", (trials is None) != (search is None))
    if trials is not None:
        expect("n_trials is for search: trials are as many as they are listed", n_trials is None)
    expect("search needs n_trials, how many parameter sets to draw", trials is not None or n_trials is not None)
    found = listed(trials) if trials is not None else drawn(search or {}, int(n_trials or 0), seed)
    check_together(params, found)
    return found


def listed(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Check a list of parameter sets.

    Raises:
        ConfigurationError: one is empty, repeats another, or names a parameter that trials may not differ in.
    """
    seen: dict[str, int] = {}
    for number, trial in enumerate(trials, start=1):
        where = f"trials, entry {number}"
        expect(f"{where} must be an object of parameters, at least one", isinstance(trial, dict) and bool(trial))
        for name in trial:
            _check_name(where, name)
        first = seen.setdefault(_canonical(trial), number)
        if first != number:
            raise ConfigurationError(f"trials, entries {first} and {number} are the same parameters: leave one out")
    return tuple(dict(trial) for trial in trials)


def drawn(search: Mapping[str, Any], n_trials: int, seed: int) -> tuple[Trial, ...]:
    """Draw parameter sets, no two alike.

    Raises:
        ConfigurationError: a range is none, or the space holds fewer different sets.
    """
    for name, choice in search.items():
        _check_name("search", name)
        _check_choice(name, choice)
    found: dict[str, Trial] = {}
    for t in range(_DRAWS_PER_TRIAL * n_trials):
        trial = {name: _value(choice, _uniform(seed, t, name)) for name, choice in sorted(search.items())}
        found.setdefault(_canonical(trial), trial)
        if len(found) == n_trials:
            return tuple(found.values())
    raise ConfigurationError(
        f"search holds fewer than n_trials={n_trials} different parameter sets (found {len(found)}): widen it, or "
        "lower n_trials"
    )


def check_together(params: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    """Refuse a parameter that both the params and a trial give, under whatever names. Raises: ConfigurationError."""
    fixed = {ALIASES.get(name, name) for name in params}
    for trial in trials:
        for name in trial:
            if ALIASES.get(name, name) in fixed:
                raise ConfigurationError(f"parameter {shown(name)} is in params and in a trial: give it in one of them")


def _canonical(trial: Trial) -> str:
    values = {ALIASES.get(name, name): value for name, value in trial.items()}
    return json.dumps({n: float(v) if is_number(v) else v for n, v in values.items()}, sort_keys=True)


def _check_name(where: str, name: str) -> None:
    canonical = ALIASES.get(name, name)
    if canonical not in TUNABLE:
        why = _FIXED.get(canonical, f"trials may differ in {', '.join(TUNABLE)}")
        raise ConfigurationError(
            f"{where}: {shown(name)} cannot be tuned: {why}. Give it in params, once for all trials"
        )


def _check_choice(name: str, choice: Any) -> None:
    where = f"search.{name}"
    if isinstance(choice, list):
        expect(f"{where} must hold at least one value", bool(choice))
        expect(f"{where} must hold numbers or texts", all(is_number(v) or isinstance(v, str) for v in choice))
        return
    expect(
        f'{where} must be a list of values, or an object {{"low": ..., "high": ..., "log": true, "whole": true}}',
        isinstance(choice, dict) and {"low", "high"} <= set(choice) <= {"low", "high", "log", "whole"},
    )
    low, high = choice["low"], choice["high"]
    is_range = is_number(low) and is_number(high) and math.isfinite(low) and math.isfinite(high) and low < high
    expect(f"{where}: low and high must be finite numbers, low below high", is_range)
    for flag in ("log", "whole"):
        expect(f"{where}: {flag} must be true or false", isinstance(choice.get(flag, False), bool))
    if choice.get("log"):
        expect(f"{where}: low must be above 0 on a logarithmic scale", low > 0)
    if choice.get("whole"):
        expect(f"{where}: low and high must be whole numbers", isinstance(low, int) and isinstance(high, int))


def _uniform(seed: int, t: int, name: str) -> float:
    digest = hashlib.sha256(f"veilboost/tuning/{seed}/{t}/{name}".encode()).digest()
    return float((int.from_bytes(digest[:8], "big") >> 11) / 2**53)


def _value(choice: Any, u: float) -> Any:
    if isinstance(choice, list):
        return choice[int(u * len(choice))]
    low, high = choice["low"], choice["high"]
    if choice.get("whole") and not choice.get("log"):
        return low + int(u * (high - low + 1))
    value = low + u * (high - low)
    if choice.get("log"):
        value = math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
    # Six digits: the last of twelve may differ between two machines' logarithms, and all sites must draw the same.
    value = round(value) if choice.get("whole") else float(f"{value:.{_DIGITS}g}")
    return min(max(value, low), high)


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


class Trained(JobDocument):
    """What every job says that trains often and keeps no model."""

    __slots__ = ()
    tracking: ClassVar[bool] = False
    data_set: Name
    label: LabelColumns
    params: Parameters
    num_rounds: int
    categories: Mapping[str, Any]
    unknown_category_is_missing: bool
    label_classes: Entries | None

    def _lists(self) -> dict[str, Any]:
        """Return those of the recipe's arguments that say what values mean."""
        found: dict[str, Any] = {"categories": self.categories} if self.categories else {}
        found |= {"unknown_category_is_missing": True} if self.unknown_category_is_missing else {}
        return found | ({} if self.label_classes is None else {"label_classes": self.label_classes})


class InFolds(Trained):
    """What every job says that trains on all rows but those of a fold, each site on its own."""

    __slots__ = ()
    group: str | None
    categories: EntriesOfColumns
    profile: str
    min_rows_per_cut: int
    arithmetic: str

    def _check_folds(self, without_grid: str, whole: str) -> None:
        """Refuse what folds do not take. Args: without_grid, whole: remedies, where times or queries are the label."""
        expect("group must not be the label", self.group not in columns_of(self.label))
        expect(
            f"objective {COX} is refused in {self.REFUSED_IN}: each fold would need a grid of times of its own. "
            + without_grid,
            self.params.get("objective") != COX,
        )
        refuse_ranking(self.params, self.REFUSED_IN, f"folds divide rows, and queries are ranked whole; {whole}")

    def _settings(self, params: dict[str, Any], num_rounds: int) -> dict[str, Any]:
        """Return arguments of the recipe that trains on all rows, but those that one kind alone knows."""
        found: dict[str, Any] = {
            "data_set": self.data_set,
            "label": self.label,
            "params": params,
            "num_rounds": num_rounds,
            "profile": self.profile,
            "min_rows_per_cut": self.min_rows_per_cut,
        }
        return found | self._lists() | ({} if self.arithmetic == "auto" else {"arithmetic": self.arithmetic})

    def _training(self, params: dict[str, Any], features: list[str] | None, engine: str) -> HorizontalJob:
        """Return a training under the conditions of this job."""
        return never_run(self, params, features, self.num_rounds, engine=engine, arithmetic=self.arithmetic)


class Tuned(Trained):
    """What every tuning's job says.

    Attributes:
        best_recipe: name of the recipe that trains the best parameters.
    """

    __slots__ = ()
    best_recipe: ClassVar[str]
    trials: Trials | None
    search: Search | None
    n_trials: int | None
    seed: int
    folds: int

    def best_settings(self, params: dict[str, Any], num_rounds: int, features: Sequence[str]) -> dict[str, Any]:
        """Return that recipe's arguments, but for its name. Args: features: of the party that has the label."""
        raise NotImplementedError

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


@document
class TuningJob(Tuned, InFolds):
    """Horizontal cross validation of declared parameter sets: same columns at every site, other rows."""

    KIND: ClassVar[str] = "tuning"
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
    best_recipe: ClassVar[str] = "HorizontalXGBRecipe"

    data_set: Name
    """Name of the data set in every site's policy."""
    label: LabelColumns
    """Label column, or columns of times, as in horizontal jobs."""
    params: Parameters = field(default_factory=dict)
    """XGBoost parameters of every trial (jobs/MODEL.md lists the supported ones): the objective, the metric that
    decides (the last `eval_metric`), `max_bin`, constraints.
    """
    trials: Trials | None = None
    """List of parameter sets to try, each as objects of XGBoost parameters; this or `search`."""
    search: Search | None = None
    """Random search: for each parameter a list of values, or a range such as `{"low": 0.01, "high": 0.3, "log": true}`
    (`"whole": true` for whole numbers). All sites draw the same sets (nvflare_plugins/kinds/tuning/job.py says how).
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
        self._check_folds(
            "Tune survival:aft, or train with eval_data_set and early_stopping_rounds", "train it by itself"
        )
        for trial in self.all_trials():
            self.training_of(trial)

    def best_settings(self, params: dict[str, Any], num_rounds: int, features: Sequence[str]) -> dict[str, Any]:
        """See ``Tuned``."""
        found = self._settings(params, num_rounds)
        found |= {"features": list(features)} if self.features is not None or self.group is not None else {}
        return found | ({} if self.engine == Engine.AUTO.value else {"engine": self.engine})

    def training_of(self, trial: Trial, features: list[str] | None = None) -> HorizontalJob:
        """Return the training of all rows with these parameters, under the conditions of this job; it is never run."""
        return self._training({**self.params, **trial}, self.features if features is None else features, self.engine)


def check_tuning_early(job: TuningJob, sites: object, n_sites: int) -> None:
    """Refuse parameters of any trial that every site would refuse. Raises: ConfigurationError."""
    for trial in job.all_trials():
        check_horizontal_early(job.training_of(trial), sites, n_sites)


# What every tuning asks of a site first, and how its errors say where they came.


def check_consent(policy: SitePolicy, data_set: str, n_trials: int, folds: int, num_rounds: int) -> None:
    """Check the site's consent to so many trainings. Raises: PolicyRefusal."""
    size = n_trials * folds * num_rounds
    if size > policy.consents.tuning or not policy.consents.gives("tuning"):
        raise PolicyRefusal(
            f"the policy of {policy.site} allows trials x folds x rounds of at most {policy.consents.tuning} in one "
            f"tuning or selection, and the job asks for {n_trials} x {folds} x {num_rounds} = {size}. Policy "
            f"key: consents.tuning. Remedy: fewer trials, folds or rounds, or ask {policy.site} to change it."
        )
    remedy = "take a data set of other rows without a budget"
    policy.check_no_budget(data_set, "the models of a tuning or selection are", remedy)


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


def plan(request: PlanRequest, job: TuningJob) -> Plan:
    """Return what a site sends, how long that takes and who reads what. Raises: ConfigurationError."""
    rows, _ = request.shape()
    check_rows(rows, job.folds)
    trainings = [job.training_of(trial) for trial in job.all_trials()]
    workloads, network = [workload_of(request, one, job.folds) for one in trainings], request.network
    estimates = estimates_of(workloads, job.profile, network)
    again = [*training_messages(workloads[0])] * (job.n_of_trials * job.folds - 1)
    again_bytes, again_s = cost_of(again, job.profile, network, request.sites)
    seconds = job.folds * sum(one.n_rounds * one.round_s for one in estimates) + estimates[0].setup_s + again_s
    sent = again_bytes + job.folds * sum(one.n_rounds * one.round_bytes for one in estimates)
    sent += bytes_before_rounds(estimates[0], job.folds, job.profile)
    figures = {"trials": job.n_of_trials, "folds": job.folds, "rounds": job.num_rounds, "tuning": job.size}
    n_held = 1 if workloads[0].grown else job.folds
    memory = n_held * rows / request.sites * workloads[0].features * 5
    text = [
        f"{job.n_of_trials} trials x {job.folds} folds x {job.num_rounds} rounds = {job.size:,}: every policy must "
        "consent to as many (tuning)",
        f"time      {human_seconds(seconds)} at most under {job.profile}, with all rounds and full trees, without "
        "the start of FLARE's processes",
        f"sent      at most {human_bytes(sent)} by each site, and as much received",
        f"memory    {human_bytes(estimates[0].site_memory + int(memory))} at a site: its rows are held once"
        f"{'' if n_held == 1 else ' for each fold'}",
        f"shows     all sites: pooled sums over the rows of every fold, each at least {LEAST_ROWS:,} of all sites "
        "together, and the metrics of every model (SECURITY.md)",
        "spends    nothing: data sets with a privacy budget are refused",
        f"privacy   {THREAT_MODELS[job.profile].summary}",
        "later     train_best.py writes the training on all rows, which uses the cut points again",
    ]
    return Plan({**figures, "seconds": seconds, "bytes_sent": sent, "sites": request.sites}, "\n".join(text))


def check_rows(rows: int, folds: int) -> None:
    """Refuse what every site would refuse. Raises: ConfigurationError."""
    if rows < LEAST_ROWS * folds:
        raise ConfigurationError(
            f"{rows:,} rows in {folds} folds are fewer than {LEAST_ROWS:,} in each, and sites refuse the job. "
            "Remedy: fewer folds, or more rows"
        )


def workload_of(request: PlanRequest, training: HorizontalJob, folds: int) -> Workload:
    """Return the size of a training on all rows but those of a fold."""
    n_rows, n_features = request.shape()
    rows = n_rows - n_rows // folds
    workload = workload_of_job(training, rows, n_features, request.sites, missing=request.missing)
    names = training.features or [f"f{i}" for i in range(n_features)]
    columns = {"monotone_constraints", "interaction_constraints"}
    checked = check_parameters(
        {k: v for k, v in training.params.items() if k not in columns}, names, label=training.label
    )
    return dataclasses.replace(workload, metrics=len(checked.metrics), metrics_wait=True)


def estimates_of(workloads: Sequence[Workload], profile: str, network: Network) -> list[Estimate]:
    """Estimate each training; trees of one size are measured once, on as many columns as the first has."""
    rate, memory = measure_protection(profile, workloads[0].sites), process_memory_bytes()
    trees: dict[tuple[int, int], TreeRate] = {}
    found = []
    for one in workloads:
        size = (one.depth, one.max_leaves)
        trees[size] = trees.get(size) or measure_trees(one)
        found.append(estimate(one, profile, network, trees[size], rate, memory))
    return found


def bytes_before_rounds(one: Estimate, folds: int, profile: str) -> int:
    """Return what is sent before the first round, the cut search most of it."""
    of_folds = message_bytes(Planned(Kind.EFFECTIVE_ROWS, 1, 2 * folds, wide=False), profile)
    return one.total_bytes - one.n_rounds * one.round_bytes + of_folds - N_COUNTS * 8  # added rows are not counted
