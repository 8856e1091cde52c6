"""What a horizontal job says. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument, MostAttempts, OnLostSite
from nvflare_plugins.base.checks import expect, one_of
from nvflare_plugins.base.declared import (
    STRICT,
    BoundsOfColumns,
    Entries,
    EntriesOfColumns,
    Flag,
    JobId,
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
from nvflare_plugins.data.labels import LabelColumns, check_classes
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.site.profiles import Family, profiles_of
from nvflare_plugins.wire.profiles import PLUGIN, Profile
from nvflare_plugins.xgb.cuts import CutMode
from nvflare_plugins.xgb.objectives import COX, check_query
from nvflare_plugins.xgb.parameters import check_parameters, without_columns


class Engine(Enum):
    """Who grows the trees of a job."""

    AUTO = "auto"
    OWN = "own"
    XGBOOST = "xgboost"


WORD_BITS, SHORT_WORD_BITS = 64, 32
TIME_BINS = 256
SCORE_BINS = 64  # most bins of the final model's probability, of jobs with pooled_metrics
_LARGEST_EXPONENT = 192  # as the scales of sums
PROFILES = profiles_of(Family.HORIZONTAL)
_SHORT_PROFILES = (Profile.PLAIN.value, Profile.MASKS.value)


def _known_profile(value: str) -> str:
    if not PLUGIN.fullmatch(value):
        one_of("profile", value, [*PROFILES, "plugin.NAME"])
    return value


ProfileName = Annotated[
    str,
    STRICT,
    AfterValidator(_known_profile),
    Field(json_schema_extra={"anyOf": [{"enum": list(PROFILES)}, {"pattern": PLUGIN.pattern}]}),
    Words(f"one of {', '.join(PROFILES)}, plugin.NAME"),
]


@document
class HorizontalJob(JobDocument):
    """One horizontal training: same columns at every site, other rows."""

    KIND: ClassVar[str] = "horizontal"

    data_set: Name
    """Name of the training set in every site's policy."""
    label: LabelColumns
    """Label column; for survival:aft the columns of times, as {'time': ..., 'event': ...} (1 seen, 0 not), {'signed':
    ...} (below 0 where none was seen) or {'lower': ..., 'upper': ...}, of which a missing one has no limit.
    """
    params: Parameters = field(default_factory=dict)
    """XGBoost parameters (jobs/MODEL.md lists the supported ones); recipes refuse others at once."""
    num_rounds: Rounds = 10
    """Boosting rounds."""
    profile: ProfileName = Profile.MASKS.value
    """``masks``, ``bfv``, ``ckks``, or ``plain``, which sites refuse unless they consent; or ``plugin.NAME``, a plugin
    that every site's policy names (``plugins``).
    """
    eval_data_set: Name | None = None
    """Name of an evaluation set in every site's policy; evaluated after each round."""
    evaluate_training: Flag = False
    """Evaluate the training set too, which costs one exchange per metric and round."""
    pooled_metrics: Flag = False
    """After training, metrics of the final model on the evaluation rows of all sites together go into each site's
    report: AUC, average precision (AUCPR) and Kolmogorov-Smirnov as intervals, calibration, thresholds. For two
    classes, with an eval_data_set; every site's policy must consent (`score_histogram`). They are never streamed.
    """
    weight: Name | None = None
    """Column of sample weights. Another one over the same rows counts as changed rows at the sites' registries."""
    query: Name | None = None
    """Column that says which rows are ranked together, of objectives `rank:*`; it is no feature. A query's rows lie at
    one site, and equal names at two sites are two queries. Weights are those of queries, the same in each row of one.
    Another column over the same rows counts as changed rows at the sites' registries.
    """
    compare_queries: Flag = False
    """Refuse the job if a query's name stands at several sites. Every site's policy must consent (`compare_queries`).
    """
    features: Names | None = None
    """Columns to train on, in this order; None means all columns of the file but label, weight and query."""
    categories: EntriesOfColumns = field(default_factory=dict)
    """Public category list of each categorical column."""
    unknown_category_is_missing: Flag = False
    """Treat other categories as missing instead of refusing the data."""
    label_classes: Entries | None = None
    """Public list of label values; None means that labels are numbers (classes 0 .. k-1)."""
    cuts: Annotated[str, OneOf(CutMode)] = CutMode.QUANTILE.value
    """How the histogram's cut points are agreed: `quantile`, `exact`, `uniform` or `logarithmic`."""
    cut_bounds: BoundsOfColumns = field(default_factory=dict)
    """Public (low, high) of each feature, for `uniform` and `logarithmic`."""
    min_rows_per_cut: Annotated[Whole, Ge(2)] = 10
    """`quantile` stops where fewer pooled rows would be singled out."""
    time_bins: Annotated[Whole, Ge(2), Le(1 << 16)] = TIME_BINS
    """Most bins of times of ``survival:cox``, in which events are tied. Each holds at least ``min_rows_per_cut`` pooled
    events, or the sites' ``min_rows_per_node`` where that is more, so that there may be fewer.
    """
    early_stopping_rounds: Rounds | None = None
    """Stop after so many rounds without improvement of the last metric on the last set."""
    checkpoint_every: Annotated[Whole, Ge(0)] = 10
    """Rounds between checkpoints at the site; 0 keeps none."""
    initial_model: Name | None = None
    """Name of a model file in every site's input folder that training continues by num_rounds."""
    continue_from: JobId | None = None
    """Id of a finished job whose model training continues by num_rounds, on new rows only: none that this job's chain
    has trained on. It is read from every site's own run of that job.
    """
    resume_from: Name | None = None
    """Id of an interrupted job; its last common checkpoint is continued up to num_rounds in total. All other fields
    stay as they were in that job, initial_model and continue_from included. Without sampling of columns or dropped
    trees the model is that of an uninterrupted job; random draws of these are not those it would have made.
    """
    forgets: JobId | None = None
    """Id of a finished job that is trained again without the persons whom its sites have queued (`veilboost forget`),
    from the start, cut points and all; its other fields are those of that job. Three sites have to leave out ten rows
    each, 1,000 in all, or consent (`recompute_with_changes`). A site that was in that job may be left out of this one,
    if the sites consent (`continue_without_site`) and that job said ``on_lost_site="continue"``.
    """
    engine: Annotated[str, OneOf(Engine)] = Engine.AUTO.value
    """Who grows the trees. ``own``: the sites themselves, as XGBoost would, under any XGBoost from 3.2 on.
    ``xgboost``: stock XGBoost beside a mediator: XGBoost 3.2 or 3.3, the same at all sites. ``auto``: ``own``, but
    ``xgboost`` for dart and vector leaves, which the sites do not grow.
    """
    arithmetic: Annotated[str, OneOf("auto", *ARITHMETICS)] = "auto"
    """Whose arithmetic ``own`` follows, to the bit: that of XGBoost 3.2, 3.3 or 3.4; ``auto`` takes that of the lowest
    XGBoost among the sites.
    """
    word_bits: Annotated[int, OneOf(WORD_BITS, SHORT_WORD_BITS)] = WORD_BITS
    """Bits of the words of histograms: 64, or 32 for half the bytes, where the sites grow the trees under `masks` or
    `plain`. With 32 a row's gradient keeps 12 bits or more, so that trees may differ from those of centralized
    training. For up to 524,287 pooled rows without weights, of two or more classes.
    """
    tracking: Flag = True
    """Stream the pooled metrics of each round to the server."""
    finest_exponent: Annotated[Whole, Ge(-_LARGEST_EXPONENT), Le(_LARGEST_EXPONENT)] | None = None
    """No grid of sums is finer than 2^finest_exponent; set it to compare profiles bit for bit."""
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it from the data's size."""
    on_lost_site: Annotated[str, OneOf(OnLostSite)] = OnLostSite.STOP.value
    """When a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s`` and, when the site
    is back, goes on from the last round that all sites have finished, under fresh keys and without a new submission.
    Each round is then a checkpoint, whatever ``checkpoint_every`` says. ``continue`` does the same and, where the site
    is not back within 15 seconds, goes on without it, if every site's policy consents (`continue_without_site`) and
    ``min_clients`` sites are left; where it cannot, it waits. Rounds after that are not evaluated.
    """
    lost_site_deadline_s: Seconds = 600.0
    """How long a job waits for a lost site, each time."""
    most_attempts: MostAttempts = 20
    """Attempts of a job that waits; each try after a loss, or after what time mends, is one."""

    def __post_init__(self) -> None:
        if self.on_lost_site == OnLostSite.CONTINUE.value:
            for name in ("early_stopping_rounds", "pooled_metrics"):
                expect(
                    f"{name} is refused with on_lost_site='continue': sums over the evaluation rows with and without a "
                    "lost site would tell how many it has. Leave one of the two out",
                    not getattr(self, name),
                )
            expect(
                "resume_from is refused with on_lost_site='continue': the job resumed may have sent sums at states to "
                "go on from. Use 'wait'",
                self.resume_from is None,
            )
        expect(
            "arithmetic is read only where the sites grow the trees: set engine='own', or leave arithmetic out",
            self.arithmetic == "auto" or self.engine != Engine.XGBOOST.value,
        )
        if self.word_bits == SHORT_WORD_BITS:
            self._check_words()
        if self.early_stopping_rounds is not None:
            expect("early_stopping_rounds needs an eval_data_set to watch", self.eval_data_set is not None)
        self._check_start()
        if self.pooled_metrics:
            expect("pooled_metrics needs an eval_data_set, whose rows it is about", self.eval_data_set is not None)
        if self.cuts in (CutMode.UNIFORM.value, CutMode.LOGARITHMIC.value) and not self.cut_bounds:
            raise ConfigurationError(f"cuts={self.cuts} needs cut_bounds, the public bounds of every feature")
        check_classes(self.label, self.label_classes)
        self._check_cox()
        self._check_params()

    def _check_start(self) -> None:
        """Refuse models to start from that do not go together, or with forgetting."""
        if self.continue_from is not None:
            expect("continue_from names the model to continue: leave initial_model out", self.initial_model is None)
        if self.forgets is not None:
            expect(
                "forgets trains from the start: a model that training continues may have seen the rows that are to be "
                "forgotten. Leave initial_model and continue_from out",
                self.initial_model is None and self.continue_from is None,
            )

    def _check_cox(self) -> None:
        """Refuse what sums over rows at risk are not for."""
        if self.params.get("objective") != COX:
            return
        expect(
            f"{COX} is for trees that the sites grow: leave engine at 'auto' or 'own'",
            self.engine != Engine.XGBOOST.value,
        )
        expect(
            f"on_lost_site='continue' is refused with {COX}: sums over the rows at risk with and without a lost site "
            "would differ by that site's own. Use 'wait' or 'stop'",
            self.on_lost_site != OnLostSite.CONTINUE.value,
        )
        for name in ("initial_model", "continue_from"):
            expect(
                f"{name} is refused with {COX}: its model would give other rows hazards that no grid of times was "
                "agreed for. Train anew",
                getattr(self, name) is None,
            )

    def _check_words(self) -> None:
        """Refuse what has no sums in words of 32 bits; what the parameters decide is checked with these."""
        expect(
            "word_bits=32 is for trees that the sites grow: set engine='own', or word_bits to 64",
            self.engine != Engine.XGBOOST.value,
        )
        expect(
            f"word_bits=32 is for profiles {' and '.join(_SHORT_PROFILES)}, not {self.profile}, whose words are its "
            "own: choose one of these, or set word_bits to 64",
            self.profile in _SHORT_PROFILES,
        )
        expect(
            "word_bits=32 is refused with weight: weighted rows have no common bound. Set word_bits to 64",
            self.weight is None,
        )

    def _check_params(self) -> None:
        """Refuse what XGBoost would refuse in the middle of the job; the rest is checked with the columns at hand."""
        check_query(self.params, self.query)
        expect(
            "compare_queries is read only with query; leave it out", self.query is not None or not self.compare_queries
        )
        if self.query is not None:
            expect(
                "on_lost_site='continue' is refused with query: the number of queries would tell of the lost site's. "
                "Use 'wait'",
                self.on_lost_site != OnLostSite.CONTINUE.value,
            )
            expect(
                f"{self.params['objective']} is for trees that the sites grow: set engine='own', or leave it out",
                self.engine != Engine.XGBOOST.value,
            )
        if self.params.get("max_bin") == 2:
            raise ConfigurationError("max_bin=2 leaves no cut point inside the outermost two; give max_bin 3 or more")
        if self.params.get("multi_strategy") == "multi_output_tree" and self.categories:
            raise ConfigurationError(
                "multi_strategy=multi_output_tree takes no categories in XGBoost 3.2; leave multi_strategy out, or "
                "give the categorical columns as numbers"
            )


_OF_ROWS = (
    *("data_set", "label", "profile", "min_rows_per_cut"),
    *("categories", "unknown_category_is_missing", "label_classes"),
)


def never_run(
    job: JobDocument, params: dict[str, Any], features: list[str] | None, num_rounds: int, **other: Any
) -> HorizontalJob:
    """Return a training over the rows that a job of another kind names, for what both have checked and planned alike.

    It is never run.
    """
    of_rows = {name: getattr(job, name) for name in _OF_ROWS}
    return HorizontalJob(**of_rows, params=params, features=features, num_rounds=num_rounds, tracking=False, **other)


def check_horizontal_early(job: HorizontalJob, sites: object, n_sites: int) -> None:
    """Refuse parameters that every site would refuse. Raises: ConfigurationError."""
    if job.features is None:
        check_parameters(without_columns(job.params), ["any"], label=job.label)
    else:
        check_parameters(job.params, job.features, label=job.label)
