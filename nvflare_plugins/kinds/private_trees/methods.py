"""Methods: combinations of the framework's components, with presets under the papers' names.

A method fixes everything about a training that is public except the data's schema. Any combination may be composed;
the presets are those of Maddock et al. (section 5.3) with their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dp_components.leaf_weights import (
    TWO_CLASSES,
    AveragingWeights,
    ClassShares,
    GradientWeights,
    LeafQuery,
    LeafWeights,
    MeanLabels,
    NewtonWeights,
    Number,
    SeveralClasses,
    SoftmaxGradientWeights,
    SoftmaxWeights,
    SquaredWeights,
    Target,
)


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

    def weights(self, target: Target = TWO_CLASSES) -> LeafWeights:
        """Return the component for a kind of label."""
        if isinstance(target, Number):
            return MeanLabels(target) if self is WeightUpdate.AVERAGING else SquaredWeights(target)
        if isinstance(target, SeveralClasses):
            if self is WeightUpdate.AVERAGING:
                return ClassShares(target.n_classes)
            return (SoftmaxWeights if self is WeightUpdate.NEWTON else SoftmaxGradientWeights)(target.n_classes)
        components: dict[WeightUpdate, Callable[[], LeafWeights]] = {
            WeightUpdate.AVERAGING: AveragingWeights,
            WeightUpdate.GRADIENT: GradientWeights,
            WeightUpdate.NEWTON: NewtonWeights,
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
        candidate_share: part of mu^2 spent on the count histograms of paid candidates.
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
    query: LeafQuery = LeafQuery.VECTOR
    hessian_rounds: int = 5
    candidate_share: float = 0.1
    grower: Grower = Grower.SITES
    as_published: bool = False

    def features_per_tree(self, n_features: int) -> int:
        """Return k."""
        return n_features if self.n_features_per_tree is None else self.n_features_per_tree

    def training_share(self) -> float:
        """Return the part of mu^2 that is left for the trees."""
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
