"""What a job of private trees says, and what follows from it before any row is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le, Len
from numpy.typing import NDArray
from pydantic import Field

from dp_components.accounting import PrivacyCost, compose, gaussian_limit
from dp_components.errors import PrivacyError
from dp_components.integer_noise import NoiseOfOthers
from dp_components.leaf_weights import TWO_CLASSES, Number, SeveralClasses, Target, Times
from dp_components.mechanisms import NoiseShares, TrustModel
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument, MostAttempts, OnLostParty
from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.declared import (
    STRICT,
    Bounds,
    BoundsOfColumns,
    EntriesOfColumns,
    Entry,
    Name,
    Names,
    OneOf,
    Positive,
    Rounds,
    Seconds,
    Words,
    document,
)
from nvflare_plugins.data.declaration import Delta, Epsilon
from nvflare_plugins.data.labels import LabelColumns, check_classes, is_labelled
from nvflare_plugins.growth.survival import DISTRIBUTIONS, AftLoss
from nvflare_plugins.kinds.private_trees.methods import MOST_CLASSES, Method, check_target, resolve_method
from nvflare_plugins.kinds.private_trees.plan import PrivateTreesPlan, ReleasePlan, Trust
from nvflare_plugins.wire.profiles import PLUGIN

# What a job of differentially private trees says. Everything in it is public: nothing may be looked up in the rows.


NOISE = "^$|" + PLUGIN.pattern
PROFILES = {
    TrustModel.DISTRIBUTED: "dp_distributed",
    TrustModel.TRUSTED_AGGREGATOR: "dp_trusted",
    TrustModel.LOCAL: "dp_local",
}
_ASSUMED_FEATURES = 1000  # where the job does not name them

_NOT_PAID_FOR = "nothing pays for it: score the finished model on data of your own"


Classes = Annotated[list[Entry], Len(2, MOST_CLASSES), Words(f"a list of 2 to {MOST_CLASSES} texts or whole numbers")]
_COLLUDERS = Words("at least 1: every site sees the model and knows its own share of the noise")


@document
class PrivateTreesJob(JobDocument):
    """One private training: same columns at every site, other rows; labels of two or more classes, or numbers.

    Privacy: (epsilon, delta), or epsilon alone of a pure method, towards adding or removing the rows of one person, up
        to ``rows_per_person`` of them in the union of the sites. Sites as a whole are not protected.
    """

    KIND: ClassVar[str] = "private_trees"
    REFUSED: ClassVar[dict[str, str]] = {
        "eval_data_set": f"a metric is a sum over rows, and {_NOT_PAID_FOR}",
        "evaluate_training": f"a metric is a sum over rows, and {_NOT_PAID_FOR}",
        "eval_metric": f"a metric is a sum over rows, and {_NOT_PAID_FOR}",
        "evals": f"a metric is a sum over rows, and {_NOT_PAID_FOR}",
        "early_stopping_rounds": "it looks at a metric after each round, which nothing pays for: choose n_trees"
        " beforehand",
        "num_rounds": "the number of rounds follows from the method: set n_trees and batch_size in components",
        "params": "XGBoost's parameters follow from the method: set its components",
        "base_score": "the label mean is a sum over rows: training starts from the public 1/2, or from the middle of"
        " label_bounds",
        "base_margin": "margins from elsewhere may depend on the rows",
        "scale_pos_weight": "use a weight column with max_weight",
        "cuts": "exact cuts are data: choose the method's candidates",
        "initial_model": "a model from elsewhere may have been trained on the same rows without the ledger's knowledge",
        "checkpoint_every": "the ledger keeps what was released: resume_from replays it",
    }
    REFUSED_IN: ClassVar[str] = "private training"
    CANNOT_CONTINUE: ClassVar[str] = (
        "the sites' shares of noise were planned for all of them, and a release without one has too little"
    )

    data_set: Name
    """Name of the training set in every site's policy, which must give it a privacy budget."""
    label: LabelColumns
    """Label column: 0 and 1, ``label_classes``, or numbers within ``label_bounds``; or columns of times within
    ``label_bounds``, as in horizontal jobs.
    """
    epsilon: Epsilon
    """What this job may spend."""
    delta: Delta | None = None
    """What this job may spend; delta is given, never computed from the data. Left out with ``pure``: there is none."""
    feature_bounds: BoundsOfColumns = field(default_factory=dict)
    """Public (low, high) of every numeric feature; values outside are clipped to it."""
    categories: EntriesOfColumns = field(default_factory=dict)
    """Public category list of each categorical column; unknown categories count as missing."""
    features: Names | None = None
    """Columns to train on, in this order; None means all columns of the file but label and weight. Each needs bounds or
    categories.
    """
    label_classes: Classes | None = None
    """Public list of the label's values. Of two, the second one is the positive one; of more, each has a probability.
    A class that no row has is learnt to be rare.
    """
    label_bounds: Bounds | None = None
    """Public (low, high) of the label of a regression, in its own units; a label outside counts as the bound. Training
    starts from their middle, and half of their distance is the unit of the noise. None for classes. For times they are
    above 0, training starts from their geometric middle, and the noise is in units of `aft_loss_distribution_scale`.
    """
    aft_loss_distribution: Annotated[str, OneOf(*DISTRIBUTIONS)] = DISTRIBUTIONS[0]
    """For times: XGBoost's parameter, the noise of their logarithms."""
    aft_loss_distribution_scale: Positive = 1.0
    """For times: XGBoost's parameter, the scale of that noise."""
    method: Annotated[str, STRICT] = "default"
    """A preset: ``default`` (now ``default_2026_12``), ``default_2026_11``, ``few_rounds``, ``pure`` (epsilon without a
    delta), or a paper's name such as ``dp_rf`` (methods.py)."""
    components: Annotated[dict[Name, Any], Words("a dictionary with names for keys")] = field(default_factory=dict)
    """Components of the method to exchange one by one: ``split_method`` (C1), ``weight_update`` (C2), ``candidates``
    (C3), ``interactions`` and ``n_features_per_tree`` (A1), ``batch_size`` (A2), ``query``, ``n_trees``, ``depth``,
    ``n_candidates``, ``learning_rate``, ``ridge``, ``noise_ridge``, ``clip``, ``hessian_rounds``, ``candidate_share``,
    and ``grower``: ``sites`` (the default) or, for totally random trees of two classes, ``xgboost`` (the same: the
    sites grow what XGBoost's refresh would set).
    """
    trust: Annotated[str, OneOf(TrustModel)] = TrustModel.DISTRIBUTED.value
    """``distributed`` (each site adds a share of the noise under masks), ``trusted_aggregator`` (the server sees exact
    sums and adds the noise once) or ``local`` (a baseline: every row is noised by itself).
    """
    colluders: Annotated[Rounds, _COLLUDERS] = 1
    """Sites that may pool what they know, the observer included; distributed noise holds against so many."""
    n_sites: Rounds | None = None
    """Number of sites that the noise is meant for; None means those that take part."""
    n_rows: Rounds | None = None
    """Number of all sites' rows, declared public; only ``local`` needs it, for the ridge."""
    noise: Annotated[str, STRICT, Field(pattern=NOISE), Words("empty, or plugin.NAME")] = ""
    """Whose noise it is: empty for ours, or ``plugin.NAME``, a mechanism of others that the server and every site's
    policy pin by the hash of its files. Its price is derived from its mass function. For pure methods without paid
    candidates under ``trusted_aggregator`` alone.
    """
    rows_per_person: Rounds = 1
    """Most rows of one person; the noise grows with it."""
    structure_seed: Annotated[int, STRICT, Ge(0), Le(1 << 63)] = 0
    """Public seed of the random trees. The guarantee holds for every seed, so that nothing is gained by agreeing on it
    in secret, and a resumed job must draw the same trees. Noise never comes from it.
    """
    weight: Name | None = None
    """Column of row weights; needs ``max_weight``, the public largest one, to which they are clipped."""
    max_weight: Positive | None = None
    """The public bound of row weights, to which they are clipped."""
    resume_from: Name | None = None
    """Id of an interrupted job of the same terms under distributed noise, on the same rows: what it has released is
    replayed from the sites' ledgers at no charge, by all of them or by none.
    """
    tracking: Annotated[bool, OneOf(False), Words("off: metrics are not paid for")] = False
    """Must be False: metrics are not paid for."""
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it from the job's size."""
    on_lost_site: Annotated[str, OneOf(OnLostParty)] = OnLostParty.STOP.value
    """When a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s`` and, when the site
    is back, goes on under fresh keys and without a new submission: what was released is replayed from the sites'
    ledgers at no charge, noise included. Not with a trusted aggregator, whose noise is gone.
    """
    lost_site_deadline_s: Seconds = 600.0
    """How long ``on_lost_site="wait"`` waits for a lost site, each time."""
    most_attempts: MostAttempts = 20
    """Attempts of a job that waits; each try after a loss, or after what time mends, is one."""

    def __post_init__(self) -> None:
        self._check_trust()
        self._check_columns()
        one_kind = self.label_classes is None or self.label_bounds is None
        expect("label_bounds are for a regression, label_classes for classes: give one of them", one_kind)
        check_classes(self.label, self.label_classes)
        if self._has_times:
            expect(
                "times need label_bounds, public ones above 0, which no row has decided", self.label_bounds is not None
            )
        else:
            is_default = (self.aft_loss_distribution, self.aft_loss_distribution_scale) == (DISTRIBUTIONS[0], 1.0)
            expect("aft_loss_distribution and its scale are for times: leave them out, or name times", is_default)
        method = self.resolve(self.n_features or _ASSUMED_FEATURES)
        self._check_delta(method)
        self._check_noise(method)

    def _check_noise(self, method: Method) -> None:
        if not self.noise:
            return
        expect(
            "noise of others is refused but with trust=trusted_aggregator: what shares of it would protect is not "
            "proven. Leave noise out",
            self.trust_model is TrustModel.TRUSTED_AGGREGATOR,
        )
        expect(
            "noise of others is refused for methods with a delta: a pure epsilon is all that is derived of it. Choose "
            "method=pure",
            method.is_pure,
        )
        expect(
            "noise of others is refused with paid candidates: a row counts there in a cell of each feature, and its "
            "price is of one cell. Choose public candidates",
            not method.candidates.is_paid,
        )

    def _check_delta(self, method: Method) -> None:
        if not method.is_pure:
            expect(
                "delta is missing: method pure alone does without one. Give a number far below one over the number of "
                "rows, never computed from them",
                self.delta is not None,
            )
            return
        expect(
            "delta is given, and a pure method has none: its promise is epsilon alone. Leave delta out",
            self.delta is None,
        )
        expect(
            "trust=local is refused for a pure method: the noise of each row has no share of a pure sum. Choose "
            "distributed or trusted_aggregator",
            self.trust_model is not TrustModel.LOCAL,
        )

    def _check_trust(self) -> None:
        if (self.trust == TrustModel.LOCAL.value) != (self.n_rows is not None):
            raise ConfigurationError(
                "trust=local needs n_rows, the number of all sites' rows, declared public; no other trust model uses it"
            )
        if self.n_sites is not None and self.trust == TrustModel.DISTRIBUTED.value and self.colluders >= self.n_sites:
            raise ConfigurationError(
                f"{self.colluders} colluder(s) among {self.n_sites} site(s) would know all of the noise: add sites or "
                "tolerate fewer"
            )
        if self.resume_from is not None and self.trust == TrustModel.TRUSTED_AGGREGATOR.value:
            raise ConfigurationError(
                "a job with a trusted aggregator cannot be resumed: the server's noise is gone, and fresh noise on the "
                "same sums would be a further release. Submit it anew; it is charged anew"
            )

        if self.on_lost_site != OnLostParty.STOP.value and self.trust == TrustModel.TRUSTED_AGGREGATOR.value:
            raise ConfigurationError(
                "on_lost_site='wait' is refused with a trusted aggregator: the server's noise is gone with the "
                "attempt, and fresh noise on the same sums would be a further release. Leave it out, or choose "
                "trust='distributed'"
            )

    def _check_columns(self) -> None:
        both = sorted(set(self.feature_bounds) & set(self.categories))
        expect(f"bounds and categories are both given for {', '.join(both)}", not both)
        if self.features is not None:
            self.check_features(self.features)
        if (self.weight is None) != (self.max_weight is None):
            raise ConfigurationError(
                "row weights need max_weight, their public bound: an unbounded row would have no bounded influence"
            )

    def check_features(self, names: list[str] | tuple[str, ...]) -> None:
        """Refuse features without public bounds or categories, and bounds of columns that are no features.

        Raises:
            ConfigurationError: it names them.
        """
        missing = [name for name in names if name not in self.feature_bounds and name not in self.categories]
        if missing:
            raise ConfigurationError(
                f"feature_bounds lacks public bounds of {', '.join(missing)}. Give each numeric feature (low, high) "
                "from public knowledge, never from the rows, and each categorical one its list in categories"
            )
        extra = sorted((set(self.feature_bounds) | set(self.categories)) - set(names))
        if extra:
            raise ConfigurationError(f"bounds or categories are given for what is no feature: {', '.join(extra)}")

    @property
    def trust_model(self) -> TrustModel:
        """Who may see what before the noise is on it."""
        return TrustModel(self.trust)

    @property
    def profile(self) -> str:
        """The profile in the words of site policies."""
        return PROFILES[self.trust_model]

    @property
    def at_delta(self) -> float:
        """The delta of what it spends: 0 for a pure method."""
        return 0.0 if self.delta is None else self.delta

    @property
    def n_features(self) -> int:
        """Number of features, which the job fixes: each has bounds or categories."""
        return len(self.feature_bounds) + len(self.categories)

    def bounds_of(self, name: str) -> FeatureBounds:
        """Return the public interval of a feature; a categorical one holds positions in its list."""
        if name in self.categories:
            return FeatureBounds(0.0, float(len(self.categories[name]) - 1))
        return FeatureBounds(*map(float, self.feature_bounds[name]))

    @property
    def _has_times(self) -> bool:
        return not isinstance(self.label, str)

    @property
    def target(self) -> Target:
        """What the label is. Raises: ConfigurationError: bounds that no label of float32 keeps to."""
        if self.label_bounds is not None:
            bounds = FeatureBounds(*map(float, self.label_bounds))
            try:
                return Times(bounds, self._loss) if self._has_times else Number(bounds)
            except ValueError as error:
                raise ConfigurationError(f"label_bounds: {error}") from None
        n_classes = 2 if self.label_classes is None else len(self.label_classes)
        return TWO_CLASSES if n_classes == 2 else SeveralClasses(n_classes)

    @property
    def _loss(self) -> AftLoss:
        return AftLoss(self.aft_loss_distribution, float(np.float32(self.aft_loss_distribution_scale)))

    def accepts(self, label: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Tell which rows have a label that the job can use, each by itself. Shapes: float32[n] or [n, 2], bool[n]."""
        if label.ndim == 2:
            return is_labelled(label)
        if self.label_bounds is not None:
            return np.isfinite(label)
        n_classes = 2 if self.label_classes is None else len(self.label_classes)
        return np.isin(label, np.arange(n_classes, dtype=np.float32))

    def resolve(self, n_features: int) -> Method:
        """Return the method for so many features. Raises: ConfigurationError: there is none for this label."""
        method = resolve_method(self.method, self.components, n_features)
        check_target(method, self.target)
        return method


# What a private job will release and what it costs, from the job alone, before anything is released.


# So that a budget equal to the job's promise is enough for it, whatever the last digits and the grid of the noise do.
_BELOW = 1 - 1e-8


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job's releases over its sites, and what they cost.

    Attributes:
        training: what all sites train by; equal at all of them.
    """

    job: PrivateTreesJob
    training: PrivateTreesPlan

    @classmethod
    def of(
        cls,
        job: PrivateTreesJob,
        n_sites: int,
        feature_names: Sequence[str] = (),
        others: NoiseOfOthers | None = None,
    ) -> JobPlan:
        """Plan a job.

        Args:
            feature_names: the features in order; empty takes the job's own, whose order does not change the cost.
            others: the mechanism that the job names.

        Raises:
            ConfigurationError: bounds are missing, there are too few sites for the noise, or the releases of the plan,
                added up, do not keep the job's epsilon and delta.
        """
        names = tuple(feature_names or job.features or (*job.feature_bounds, *job.categories))
        if not names:
            raise ConfigurationError("feature_bounds is empty: give public bounds of every numeric feature")
        job.check_features(names)
        if (others is None) != (not job.noise):
            raise ConfigurationError(
                f"the price of noise {job.noise!r} follows from its files, which are not loaded here"
            )
        method, bounds, trust = job.resolve(len(names)), tuple(map(job.bounds_of, names)), _trust(job, n_sites)
        target = job.target
        whole = job.epsilon if job.delta is None else math.sqrt(gaussian_limit(job.epsilon, job.delta).mu_squared)
        total = whole / job.rows_per_person * _BELOW
        try:
            releases = ReleasePlan.of(method, bounds, total, trust.n_honest, target=target, others=others)
        except PrivacyError as error:
            raise ConfigurationError(f"noise {job.noise!r} is not usable: {error}") from None
        except ValueError:  # of an event's scale; bounds far apart and many rows of a person lead there
            raise ConfigurationError(
                "the noise would be beyond all bounds: ask for more epsilon, or for fewer rows_per_person"
            ) from None
        training = PrivateTreesPlan(method, bounds, releases, trust, job.structure_seed, names, target)
        plan = cls(job, training)
        plan._check_promise()
        return plan

    @property
    def releases(self) -> ReleasePlan:
        """All that is released, in order, for full trees; training may release less."""
        return self.training.releases

    def _check_promise(self) -> None:
        """Add up what will really be drawn, discrete noise included: no plan rests on the formula it came from."""
        job = self.job
        try:
            delta = compose(self.releases.events).for_person(job.rows_per_person).delta(job.epsilon)
        except ValueError as error:
            raise ConfigurationError(f"epsilon {job.epsilon:g} with this method: {error}") from None
        if not delta <= job.at_delta:
            raise ConfigurationError(
                f"the noise of this plan keeps epsilon {job.epsilon:g} at delta {delta:.3g} only, and the job promises "
                f"{job.at_delta:g}: ask for a larger delta or a smaller epsilon"
            )

    def epsilon_after_rounds(self) -> list[float]:
        """Return epsilon at the job's delta after each boosting round, for a person with ``rows_per_person`` rows.

        What is paid before the first round is in the first figure.
        """
        cost = cache(compose)  # thousands of releases cost alike
        total, after = PrivacyCost(), {}
        for release in self.releases.releases:
            total = total + cost(release.event)
            after[max(release.round, 0)] = total
        return [after[n].for_person(self.job.rows_per_person).epsilon(self.job.at_delta) for n in sorted(after)]


def _trust(job: PrivateTreesJob, n_sites: int) -> Trust:
    if job.n_sites is not None and job.n_sites != n_sites:
        raise ConfigurationError(f"the job's noise is meant for {job.n_sites} sites; {n_sites} take part")
    if job.trust_model is TrustModel.LOCAL:
        return Trust(local_rows=job.n_rows)
    if job.trust_model is TrustModel.TRUSTED_AGGREGATOR:
        return Trust()
    try:
        return Trust(NoiseShares(n_sites, job.colluders))
    except PrivacyError as error:
        raise ConfigurationError(str(error)) from None
