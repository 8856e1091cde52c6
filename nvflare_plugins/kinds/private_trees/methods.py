"""Methods: combinations of the framework's components, with presets under the papers' names.

A method fixes everything about a training that is public except the data's schema. Any combination may be composed;
the presets are those of Maddock et al. (section 5.3) with their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from dp_components import leaf_weights
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import is_number, is_whole, one_of


class SplitMethod(Enum):
    """C1."""

    HISTOGRAM = "histogram"
    PARTIALLY_RANDOM = "partially random"
    TOTALLY_RANDOM = "totally random"


class WeightUpdate(Enum):
    """C2."""

    AVERAGING = "averaging"
    GRADIENT = "gradient"
    NEWTON = "newton"

    def weights(self, target: leaf_weights.Target = leaf_weights.TWO_CLASSES) -> leaf_weights.LeafWeights:
        """Return the component for a kind of label."""
        if isinstance(target, leaf_weights.Number):
            return (
                leaf_weights.MeanLabels(target)
                if self is WeightUpdate.AVERAGING
                else leaf_weights.SquaredWeights(target)
            )
        if isinstance(target, leaf_weights.Times):
            return leaf_weights.TimesWeights(target, counts_rows=self is WeightUpdate.GRADIENT)
        if isinstance(target, leaf_weights.SeveralClasses):
            if self is WeightUpdate.AVERAGING:
                return leaf_weights.ClassShares(target.n_classes)
            return (
                leaf_weights.SoftmaxWeights if self is WeightUpdate.NEWTON else leaf_weights.SoftmaxGradientWeights
            )(target.n_classes)
        components: dict[WeightUpdate, Callable[[], leaf_weights.LeafWeights]] = {
            WeightUpdate.AVERAGING: leaf_weights.AveragingWeights,
            WeightUpdate.GRADIENT: leaf_weights.GradientWeights,
            WeightUpdate.NEWTON: leaf_weights.NewtonWeights,
        }
        return components[self]()


class CandidateSource(Enum):
    """C3."""

    UNIFORM = "uniform"
    LOGARITHMIC = "logarithmic"
    QUANTILE = "non-private quantile"
    ITERATIVE_HESSIAN = "iterative hessian"
    DP_QUANTILE = "dp quantile"
    MIXED = "half uniform, half dp quantile"
    SPREAD = "half uniform, half logarithmic"

    @property
    def is_paid(self) -> bool:
        """Whether a count histogram is released before training."""
        return self in (CandidateSource.DP_QUANTILE, CandidateSource.MIXED)


class Interactions(Enum):
    """A1."""

    CYCLICAL = "cyclical"
    RANDOM = "random"
    ALTERNATING = "alternating"
    INFORMED = "informed"


class Grower(Enum):
    """What the trees are; the sites grow them, all alike, whoever a job names.

    Attributes:
        SITES: those of the method.
        XGBOOST: the same, of a method whose trees XGBoost's refresh could set: jobs said so when it did.
    """

    SITES = "sites"
    XGBOOST = "xgboost"


@dataclass(frozen=True, slots=True)
class Method:
    """One private training, but for data and budget.

    Args:
        n_features_per_tree: k of A1; None for all. Without meaning for alternating and informed interactions.
        batch_size: B of A2; the last batch has the trees that are left.
        ridge: lambda.
        noise_ridge: kappa; the ridge grows by kappa times the standard deviation of the noise on a leaf's G.
        clip: beta, the largest weight before the learning rate.
        hessian_rounds: s of the iterative Hessian: so many trees refine candidates, histogram trees for nothing.
        candidate_share: part of mu^2, or of a pure epsilon, spent on the count histograms of paid candidates.
        grower: changes no model.
    """

    name: str
    split_method: SplitMethod
    weight_update: WeightUpdate
    candidates: CandidateSource = CandidateSource.UNIFORM
    interactions: Interactions = Interactions.CYCLICAL
    n_features_per_tree: int | None = None
    n_trees: int = 200
    depth: int = 4
    n_candidates: int = 32
    batch_size: int = 1
    learning_rate: float = 0.3
    ridge: float = 1.0
    noise_ridge: float = 0.0
    clip: float = 2.0
    query: leaf_weights.LeafQuery = leaf_weights.LeafQuery.VECTOR
    hessian_rounds: int = 5
    candidate_share: float = 0.1
    grower: Grower = Grower.SITES
    as_published: bool = False

    def features_per_tree(self, n_features: int) -> int:
        """Return k."""
        return n_features if self.n_features_per_tree is None else self.n_features_per_tree

    @property
    def is_pure(self) -> bool:
        """Whether all that it releases keeps a pure epsilon: Laplace noise for sensitivities in the L1 norm."""
        return self.query is leaf_weights.LeafQuery.PURE

    def training_share(self) -> float:
        """Return the part of mu^2, or of a pure epsilon, that is left for the trees."""
        return 1.0 - self.candidate_share if self.candidates.is_paid else 1.0


def _random_trees(name: str, update: WeightUpdate, **changes: object) -> Method:
    averaging = {"ridge": 0.0, "clip": 1.0, "learning_rate": 1.0} if update is WeightUpdate.AVERAGING else {}
    settings = {"n_trees": 200, **averaging, **changes}
    if update is WeightUpdate.AVERAGING:
        settings["batch_size"] = settings["n_trees"]
    return Method(name, SplitMethod.TOTALLY_RANDOM, update, **settings)  # type: ignore[arg-type]


def dp_rf(n_trees: int = 200) -> Method:
    """Return DP-RF: totally random trees, averaging."""
    return _random_trees("DP-RF", WeightUpdate.AVERAGING, n_trees=n_trees)


def dp_tr_newton(n_trees: int = 200) -> Method:
    """Return DP-TR Newton."""
    return _random_trees("DP-TR Newton", WeightUpdate.NEWTON, n_trees=n_trees)


def dp_ebm(n_features: int, n_trees_per_feature: int = 100) -> Method:
    """Return DP-EBM: gradient updates, one feature a tree, T trees for each feature."""
    return _random_trees(
        "DP-EBM", WeightUpdate.GRADIENT, n_trees=n_features * n_trees_per_feature, n_features_per_tree=1
    )


def dp_ebm_newton(n_trees: int = 100) -> Method:
    """Return DP-EBM Newton: one feature a tree, T trees in all."""
    return _random_trees("DP-EBM Newton", WeightUpdate.NEWTON, n_trees=n_trees, n_features_per_tree=1)


def dp_gbm(n_trees: int = 25) -> Method:
    """Return DP-GBM: histogram trees, gradient updates."""
    return Method("DP-GBM", SplitMethod.HISTOGRAM, WeightUpdate.GRADIENT, n_trees=n_trees)


def feverless(n_trees: int = 25) -> Method:
    """Return FEVERLESS, translated to horizontal data: histogram trees, Newton updates, uniform candidates."""
    return Method("FEVERLESS", SplitMethod.HISTOGRAM, WeightUpdate.NEWTON, n_trees=n_trees)


def batch_iterative_hessian_ebm(share: float, n_trees: int = 100) -> Method:
    """Return DP-TR Batch Newton IH EBM with batches of ``share`` of the trees."""
    return _random_trees(
        f"Batch IH EBM p={share:g}",
        WeightUpdate.NEWTON,
        n_trees=n_trees,
        n_features_per_tree=1,
        batch_size=math.ceil(share * n_trees),
        candidates=CandidateSource.ITERATIVE_HESSIAN,
    )


# The presets of private trees, and the defaults by month.


# The default method, frozen on 2026-11-21.
#
# Chosen on development sets only (credit2, adult, bank, nomao, higgs_20k); nothing in it depends on the data it will be
# trained on, and nothing of it may be changed: a better default gets a new date.
#
# * One leaf query of sensitivity 1 for (G, 3.330 H), exact Gaussian composition. * A ridge of three standard deviations
# of the noise on a leaf's gradient sum. * Half of the candidates uniform over public bounds, half at private quantiles,
# for a tenth of mu^2. * Trees of one feature and trees of all features by turns.


DEFAULT_2026_11 = Method(
    "default 2026-11",
    SplitMethod.TOTALLY_RANDOM,
    WeightUpdate.NEWTON,
    candidates=CandidateSource.MIXED,
    interactions=Interactions.ALTERNATING,
    n_trees=200,
    depth=4,
    n_candidates=32,
    batch_size=1,
    learning_rate=0.3,
    ridge=1.0,
    noise_ridge=3.0,
    clip=2.0,
    query=leaf_weights.LeafQuery.JOINT,
    candidate_share=0.1,
)

FEW_ROUNDS = replace(DEFAULT_2026_11, name="few rounds 2026-11", n_trees=240, batch_size=10, learning_rate=1.5)
"""240 trees in 24 boosting rounds: 25 messages with the one for private quantiles."""


# The default method, frozen on 2026-11-22 for December.
#
# Chosen on development sets only (credit2, adult, bank, nomao, higgs_20k, and generated ones); nothing in it depends on
# the data it will be trained on, but for what its own releases tell, and nothing may be changed in this file: a better
# default gets a new dated file.
#
# What differs from default_2026_11:
#
# * Gradients are clipped at 0.6, so that one leaf query has sensitivity 0.6 in place of 1. * Trees over all features
# draw them by the gains of earlier noised leaves; trees of one feature go round as before. * 300 trees, and a ridge of
# five standard deviations of the noise.


DEFAULT_2026_12 = replace(
    DEFAULT_2026_11,
    name="default 2026-12",
    interactions=Interactions.INFORMED,
    n_trees=300,
    noise_ridge=5.0,
    query=leaf_weights.LeafQuery.CLIPPED,
)


# The pure method, frozen on 2026-11-24: an epsilon without a delta.
#
# Chosen on splits 60 to 69 of credit2, adult, bank, higgs_20k and abalone; nothing in it depends on the data it will be
# trained on, but for what its own releases tell.
#
# What differs from default_2026_12: rows are clipped in the L1 norm, |g| + 2 h <= 0.6, and noise is Laplace's. Epsilons
# add up, so that T trees have T times the noise of one and not its root: 80 trees do with a ridge of two deviations.
# Candidates are public, since counts of m features, of which one row moves m, would take epsilon / m each: half of them
# lie evenly between the bounds, half evenly in the logarithm, for columns with long tails.


PURE_2026_11 = replace(
    DEFAULT_2026_12,
    name="pure 2026-11",
    candidates=CandidateSource.SPREAD,
    n_trees=80,
    noise_ridge=2.0,
    query=leaf_weights.LeafQuery.PURE,
)


# Methods by name, and how a job changes their components one by one.


MAX_DEPTH = 7  # a row's leaf is numbered in one byte
_MAX_TREES = 100_000
_MAX_CANDIDATES = 127  # half of what a byte numbers: refined and mixed candidates may double

_ITERATIVE = CandidateSource.ITERATIVE_HESSIAN

PRESETS: Mapping[str, Callable[[int], Method]] = {
    "default": lambda n_features: DEFAULT_2026_12,
    "default_2026_12": lambda n_features: DEFAULT_2026_12,
    "default_2026_11": lambda n_features: DEFAULT_2026_11,
    "pure": lambda n_features: PURE_2026_11,
    "pure_2026_11": lambda n_features: PURE_2026_11,
    "few_rounds": lambda n_features: FEW_ROUNDS,
    "dp_rf": lambda n_features: dp_rf(),
    "dp_tr_newton": lambda n_features: dp_tr_newton(),
    "dp_tr_newton_ih": lambda n_features: replace(dp_tr_newton(100), name="DP-TR Newton IH", candidates=_ITERATIVE),
    "dp_tr_newton_ih_ebm": lambda n_features: replace(
        dp_ebm_newton(), name="DP-TR Newton IH EBM", candidates=_ITERATIVE
    ),
    "dp_ebm": dp_ebm,
    "dp_ebm_newton": lambda n_features: dp_ebm_newton(),
    "dp_gbm": lambda n_features: dp_gbm(),
    "feverless": lambda n_features: feverless(),
    "batch_ih_ebm_25": lambda n_features: batch_iterative_hessian_ebm(0.25),
    "batch_ih_ebm_100": lambda n_features: batch_iterative_hessian_ebm(1.0),
}
"""Public number of features -> method. ``default`` and ``pure`` (the newest dated ones), the dated ones
and ``few_rounds`` are ours, the others those of Maddock et al.
"""

_CHOICES: Mapping[str, type[Enum]] = {
    "split_method": SplitMethod,
    "weight_update": WeightUpdate,
    "candidates": CandidateSource,
    "interactions": Interactions,
    "query": leaf_weights.LeafQuery,
    "grower": Grower,
}
_WHOLE = {
    "n_trees": (1, _MAX_TREES),
    "depth": (1, MAX_DEPTH),
    "n_candidates": (1, _MAX_CANDIDATES),
    "batch_size": (1, _MAX_TREES),
    "hessian_rounds": (2, _MAX_TREES),
    "n_features_per_tree": (1, 1 << 20),
}
_REAL = {
    "learning_rate": (1e-6, 10.0),
    "ridge": (0.0, 1e9),
    "noise_ridge": (0.0, 1e6),
    "clip": (0.0, 1e6),
    "candidate_share": (1e-6, 0.999999),
}
_NOT_CHOSEN = ("name", "as_published")  # a slip of the published code is for reproductions only


def resolve_method(preset: str, components: Mapping[str, Any], n_features: int) -> Method:
    """Return a preset with some of its components exchanged.

    Args:
        components: name of a field of ``Method`` -> value; choices by name, such as ``totally_random``.

    Raises:
        ConfigurationError: an unknown preset, component or choice, or a combination that makes no sense.
    """
    one_of("method", preset, list(PRESETS))
    method = PRESETS[preset](n_features)
    known = [f.name for f in fields(Method) if f.name not in _NOT_CHOSEN]
    unknown = sorted(set(components) - set(known))
    if unknown:
        raise ConfigurationError(f"unknown components: {', '.join(unknown)}; known are {', '.join(known)}")
    changes = {name: _value(name, value) for name, value in components.items()}
    if "n_trees" in changes and "batch_size" not in changes and method.batch_size == method.n_trees:
        changes["batch_size"] = changes["n_trees"]
    if changes:
        changes["name"] = f"{method.name} with {', '.join(sorted(components))} changed"
    changed = replace(method, **changes)
    _check(changed, n_features)
    return changed


def _value(name: str, value: Any) -> Any:
    if name in _CHOICES:
        names = {choice.name.lower(): choice for choice in _CHOICES[name]}
        one_of(name, value, list(names))
        return names[value]
    if name in _WHOLE:
        low, high = _WHOLE[name]
        if name == "n_features_per_tree" and value is None:
            return None
        if not is_whole(value, low, high):
            raise ConfigurationError(f"{name} must be a whole number from {low} to {high}")
        return value
    low_real, high_real = _REAL[name]
    if not is_number(value) or not low_real <= value <= high_real:
        raise ConfigurationError(f"{name} must be a number from {low_real:g} to {high_real:g}")
    return float(value)


def _check(method: Method, n_features: int) -> None:
    if method.candidates is CandidateSource.QUANTILE:
        raise ConfigurationError(
            "candidates at exact quantiles are data and no job sends them: choose dp_quantile, mixed, uniform or "
            "logarithmic (the non-private ones are for benchmarks in one process)"
        )
    if method.query.is_for_newton and method.weight_update is not WeightUpdate.NEWTON:
        raise ConfigurationError(
            f"query={method.query.name.lower()} is for weight_update=newton: it is made for the logistic loss"
        )
    if method.weight_update is WeightUpdate.AVERAGING and method.batch_size != method.n_trees:
        raise ConfigurationError("averaging takes all trees in one batch: leave batch_size away, or set it to n_trees")
    k = method.n_features_per_tree
    if k is not None and k > n_features:
        raise ConfigurationError(f"n_features_per_tree is {k}, but there are {n_features} features")
    is_greedy = method.split_method is not SplitMethod.TOTALLY_RANDOM
    if is_greedy and method.interactions in (Interactions.ALTERNATING, Interactions.INFORMED):
        raise ConfigurationError(
            f"{method.interactions.value} interactions are for totally random trees: others pay for each feature"
        )
    if method.grower is Grower.XGBOOST:
        _check_xgboost(method)


def _check_xgboost(method: Method) -> None:
    """Refuse a method whose trees XGBoost's refresh could not set: the job means another."""
    if method.interactions is Interactions.INFORMED:
        raise ConfigurationError(
            "grower=xgboost refreshes trees that are drawn before training, and informed interactions draw each tree "
            "from those before it: leave grower away, or set interactions to alternating"
        )
    is_random = method.split_method is SplitMethod.TOTALLY_RANDOM
    if not is_random or method.candidates is CandidateSource.ITERATIVE_HESSIAN:
        raise ConfigurationError(
            "grower=xgboost refreshes totally random trees whose candidates stay the same: leave grower away, and the "
            "sites grow the trees of this method"
        )
    if method.n_trees % method.batch_size:
        raise ConfigurationError(
            "grower=xgboost refreshes batches of one size: make n_trees a multiple of batch_size, or leave grower away"
        )


# Which methods train which kinds of label.


MOST_CLASSES = 64
"""Every leaf of a tree sends so many sums twice."""


def check_target(method: Method, target: leaf_weights.Target) -> None:
    """Refuse a method that is not made for a kind of label.

    Scalar queries would ask for each class apart, at the root of their number in noise, and XGBoost's refresh is of two
    classes. What the papers define for two classes alone is extended to several: gains and Hessians of the classes are
    added (``split_scores``), and averaging counts every class.

    Raises:
        ConfigurationError: it names the component.
    """
    if isinstance(target, (leaf_weights.Number, leaf_weights.Times)) and method.grower is Grower.XGBOOST:
        raise ConfigurationError(
            "grower=xgboost refreshes the logistic loss of two classes: leave grower away to train on label_bounds"
        )
    if isinstance(target, leaf_weights.Times) and method.weight_update is WeightUpdate.AVERAGING:
        raise ConfigurationError(
            f"method {method.name!r} answers with means of labels, and a row without an event has no time to average: "
            "choose a method with newton or gradient updates, such as 'default'"
        )
    if not isinstance(target, leaf_weights.SeveralClasses):
        return
    wrong = {
        "query": method.query is leaf_weights.LeafQuery.SCALAR,
        "grower": method.grower is Grower.XGBOOST,
    }
    names = [name for name, is_wrong in wrong.items() if is_wrong]
    if names:
        raise ConfigurationError(
            f"method {method.name!r} trains two classes, and label_classes lists {target.n_classes} "
            f"({', '.join(names)}): leave query and grower as the method has them, for one query of all classes' sums "
            "and trees that the sites grow"
        )
