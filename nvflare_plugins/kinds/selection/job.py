"""What a selection says, and its plan. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.declared import (
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
    document,
)
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.data.labels import LabelColumns
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.kinds.profile.job import count_messages
from nvflare_plugins.kinds.tuning.folds import LEAST_ROWS
from nvflare_plugins.kinds.tuning.job import (
    MOST_FOLDS,
    InFolds,
    ProfileOfTuning,
    TuningJob,
    bytes_before_rounds,
    check_rows,
    estimates_of,
    workload_of,
)
from nvflare_plugins.pooled.job import Engine, HorizontalJob, check_horizontal_early
from nvflare_plugins.pooled.plan import Planned, Workload, cost_of, training_messages
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.profiles import Profile
from nvflare_plugins.xgb.parameters import ALIASES

MOST_SHADOWS = 100
_CONSTRAINTS = ("monotone_constraints", "interaction_constraints")


class Importance(StrEnum):
    """By what columns are eliminated."""

    GAIN = "gain"
    PERMUTATION = "permutation"


class Rule(StrEnum):
    """Which of the sets is chosen."""

    ONE_STANDARD_ERROR = "one_standard_error"
    BEST = "best"


@document
class SelectionJob(InFolds):
    """Selection of columns over the rows of all sites: same columns, other rows."""

    KIND: ClassVar[str] = "selection"
    REFUSED: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in TuningJob.REFUSED.items() if name not in ("active", "preset", "resume_from")},
        **dict.fromkeys(
            ("active", "preset"),
            "parties that hold other columns of the same rows select none together yet: leave columns out of "
            "`features` of the vertical training, by its importances",
        ),
        "resume_from": "nothing is kept of a selection that was broken off; submit it again",
        "engine": "the sites grow the trees of a selection themselves; leave it out",
        "early_stopping_rounds": "sets of columns are compared after as many rounds; leave it out",
        "trials": "sets of columns are compared with the same parameters; tune before or after it",
        "search": "sets of columns are compared with the same parameters; tune before or after it",
    }
    REFUSED_IN: ClassVar[str] = "a selection"

    data_set: Name
    """Name of the data set in every site's policy."""
    label: LabelColumns
    """Label column, or columns of times, as in horizontal jobs."""
    params: Parameters = field(default_factory=dict)
    """XGBoost parameters of every training (jobs/MODEL.md lists the supported ones). The last `eval_metric` decides.
    `monotone_constraints` name columns.
    """
    folds: Annotated[Whole, Ge(2), Le(MOST_FOLDS)] = 5
    """Folds: each set of columns is trained on once for each, on all other folds, and scored on it."""
    group: Name | None = None
    """Column that says which rows belong together, as in a tuning. It is no feature."""
    num_rounds: Rounds = 50
    """Boosting rounds of each training."""
    min_features: Annotated[Whole, Ge(1)] = 1
    """Columns at which elimination ends."""
    step: Annotated[Whole, Ge(1)] = 1
    """Columns that are taken away at once, those of least importance."""
    importance: Annotated[str, OneOf(Importance)] = Importance.GAIN.value
    """By what columns are taken away, as the mean over the folds. ``gain``: share of the trees' loss change.
    ``permutation``: how much worse the fold's score is where each site deals the column's values out anew among its
    rows. All sites learn these scores.
    """
    rule: Annotated[str, OneOf(Rule)] = Rule.ONE_STANDARD_ERROR.value
    """``one_standard_error``: the fewest columns whose mean score is within a standard error of the best one.
    ``best``: those of the best mean score.
    """
    shadows: Annotated[Whole, Ge(0), Le(MOST_SHADOWS)] = 0
    """Further trainings for each fold with all columns and a permuted copy of each, as Boruta does: how often a
    column's gain is above that of every copy. Each site draws the permutations, of its own rows, from a secret.
    """
    information_value: Flag = True
    """Count also the information value of each column by fold, for which every policy must consent
    (`feature_profile`). For labels that are classes.
    """
    profile: ProfileOfTuning = Profile.MASKS.value
    """``masks`` or ``bfv``."""
    features: Names | None = None
    """Columns to begin with; None means all columns of the file but label and group."""
    categories: EntriesOfColumns = field(default_factory=dict)
    """Public category list of each categorical column."""
    unknown_category_is_missing: Flag = False
    """Treat other categories as missing instead of refusing the data."""
    label_classes: Entries | None = None
    """Public list of label values; None means that labels are numbers (classes 0 .. k-1)."""
    min_rows_per_cut: Annotated[Whole, Ge(2)] = 10
    """The one cut search stops where fewer pooled rows would be singled out. Bins of information values hold as many
    pooled rows of every class in every fold.
    """
    arithmetic: Annotated[str, OneOf("auto", *ARITHMETICS)] = "auto"
    """Whose arithmetic the sites follow, as in horizontal jobs."""
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it."""

    def __post_init__(self) -> None:
        self._check_folds("Select by survival:aft", "leave columns out by the importances of a training")
        expect(
            "information values are of classes, and label names times: set information_value to false",
            isinstance(self.label, str) or not self.information_value,
        )
        given = {ALIASES.get(name, name): value for name, value in self.params.items()}
        expect(
            "interaction_constraints name columns together, some of which go: give them to the training that follows",
            "interaction_constraints" not in given,
        )
        expect(
            'monotone_constraints must name columns, as {"age": 1}: others are gone after the first step',
            isinstance(given.get("monotone_constraints", {}), dict),
        )
        if self.features is not None:
            self.sizes(len(self.features))
        self.training([] if self.features is None else self.features)

    def sizes(self, n_features: int) -> list[int]:
        """Return how many columns each set has. Raises: ConfigurationError: there are fewer than the job keeps."""
        if n_features < self.min_features:
            raise ConfigurationError(
                f"min_features={self.min_features} and there are {n_features} columns: lower it, or name more features"
            )
        sizes = list(range(n_features, self.min_features, -self.step))
        return [*sizes, self.min_features]

    def n_trials(self, n_features: int) -> int:
        """Return how many trainings there are for each fold, as the consent ``tuning`` counts them."""
        return len(self.sizes(n_features)) + self.shadows

    def params_of(self, features: Sequence[str]) -> dict[str, Any]:
        """Return the parameters of a training on some of the columns."""
        return {
            name: {column: sign for column, sign in value.items() if column in features}
            if ALIASES.get(name, name) in _CONSTRAINTS
            else value
            for name, value in self.params.items()
        }

    def training(self, features: Sequence[str]) -> HorizontalJob:
        """Return a training on these columns, under the conditions of this job; it is never run."""
        return self._training(self.params_of(features), list(features) or None, Engine.OWN.value)

    def settings_of(self, features: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of a recipe that trains on the chosen columns and all rows."""
        categories = {name: entries for name, entries in self.categories.items() if name in features}
        chosen = replace(self, features=list(features), categories=categories)
        return {**chosen._settings(self.params_of(features), self.num_rounds), "features": list(features)}


def check_selection_early(job: SelectionJob, sites: object, n_sites: int) -> None:
    """Refuse parameters that every site would refuse. Raises: ConfigurationError."""
    check_horizontal_early(job.training(job.features or []), sites, n_sites)


def plan(request: PlanRequest, job: SelectionJob) -> Plan:
    """Return what a site sends, how long that takes and who reads what. Raises: ConfigurationError."""
    rows, features = request.shape()
    features = features if job.features is None else len(job.features)
    check_rows(rows, job.folds)
    names = job.features or [f"f{place}" for place in range(features)]
    sizes = [*job.sizes(features), *([2 * features] * job.shadows)]
    names = [*names, *(f"shadow {place}" for place in range(features))]
    workloads = [workload_of(request, job.training(names[:size]), job.folds) for size in sizes]
    estimates, network = estimates_of(workloads, job.profile, request.network), request.network
    by_columns = [one.xgboost_s * size / features for one, size in zip(estimates, sizes, strict=True)]
    rounds_s = sum(
        one.n_rounds * (one.round_s - one.xgboost_s + tree_s) for one, tree_s in zip(estimates, by_columns, strict=True)
    )
    further = list(_further_messages(job, sizes, features, workloads[0]))
    further_bytes, further_s = cost_of(further, job.profile, network, request.sites)
    seconds = job.folds * rounds_s + estimates[0].setup_s + further_s
    sent = job.folds * sum(one.n_rounds * one.round_bytes for one in estimates) + further_bytes
    sent += bytes_before_rounds(estimates[0], job.folds, job.profile)
    n_trials = job.n_trials(features)
    size = n_trials * job.folds * job.num_rounds
    memory = estimates[0].site_memory + 2 * rows // request.sites * features
    figures = {"steps": len(job.sizes(features)), "shadows": job.shadows, "folds": job.folds, "rounds": job.num_rounds}
    asked = " and feature_profile" if job.information_value else ""
    values = [
        "          and rows of each class in each fold by bins of each column, at least "
        f"{job.min_rows_per_cut} of all sites together",
    ]
    text = [
        f"{n_trials} trainings for each of {job.folds} folds, of {job.num_rounds} rounds = {size:,}: every policy must "
        f"consent to as many (tuning{asked})",
        f"time      {human_seconds(seconds)} at most under {job.profile}, with full trees, without the start of "
        "FLARE's processes",
        f"sent      at most {human_bytes(sent)} by each site, and as much received",
        f"memory    {human_bytes(memory)} at a site",
        f"shows     all sites: pooled sums over the rows of every fold, each at least {LEAST_ROWS:,} of all sites "
        "together, and every model with its metrics",
        *(values if job.information_value else []),
        "          (SECURITY.md)",
        "spends    nothing: data sets with a privacy budget are refused",
        f"privacy   {THREAT_MODELS[job.profile].summary}",
        "later     train_chosen.py writes the training on the chosen columns, which uses the cut points again",
    ]
    told = {**figures, "tuning": size, "seconds": seconds, "bytes_sent": sent, "sites": request.sites}
    return Plan(told, "\n".join(text))


def _further_messages(job: SelectionJob, sizes: list[int], features: int, workload: Workload) -> Iterator[Planned]:
    """Yield counts by bins, by what each further training begins, and scores of permuted columns."""
    yield from [*training_messages(workload)] * (len(sizes) * job.folds - 1)
    if job.information_value:
        listed = [len(entries) for entries in job.categories.values()]
        n_columns = job.folds * len(job.label_classes or (0, 1))
        yield from count_messages(listed, features - len(listed), workload.bins, n_columns)
    if job.importance == Importance.PERMUTATION.value:
        parts = 3 * workload.outputs if workload.outputs > 1 else 2
        for size in sizes[: len(sizes) - job.shadows]:
            for _ in range(job.folds):
                yield Planned(Kind.METRIC, 1, size * parts)
