"""The presets of private trees, and the defaults by month."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import Any

from dp_components.leaf_weights import LeafQuery
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import is_number, is_whole, one_of
from nvflare_plugins.kinds.private_trees import methods
from nvflare_plugins.kinds.private_trees.methods import (
    CandidateSource,
    Grower,
    Interactions,
    Method,
    SplitMethod,
    WeightUpdate,
)

# The default method, frozen on 2026-11-21.
#
# Chosen on development sets only (credit2, adult, bank, nomao, higgs_20k); nothing in it depends on the data it will be
# trained on, and nothing may be changed in this file: a better default gets a new dated file.
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
    query=LeafQuery.JOINT,
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
    query=LeafQuery.CLIPPED,
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
    "few_rounds": lambda n_features: FEW_ROUNDS,
    "dp_rf": lambda n_features: methods.dp_rf(),
    "dp_tr_newton": lambda n_features: methods.dp_tr_newton(),
    "dp_tr_newton_ih": lambda n_features: replace(
        methods.dp_tr_newton(100), name="DP-TR Newton IH", candidates=_ITERATIVE
    ),
    "dp_tr_newton_ih_ebm": lambda n_features: replace(
        methods.dp_ebm_newton(), name="DP-TR Newton IH EBM", candidates=_ITERATIVE
    ),
    "dp_ebm": methods.dp_ebm,
    "dp_ebm_newton": lambda n_features: methods.dp_ebm_newton(),
    "dp_gbm": lambda n_features: methods.dp_gbm(),
    "feverless": lambda n_features: methods.feverless(),
    "batch_ih_ebm_25": lambda n_features: methods.batch_iterative_hessian_ebm(0.25),
    "batch_ih_ebm_100": lambda n_features: methods.batch_iterative_hessian_ebm(1.0),
}
"""Public number of features -> method. ``default`` (the newest dated one), the dated ones and ``few_rounds`` are ours,
the others those of Maddock et al.
"""

_CHOICES: Mapping[str, type[Enum]] = {
    "split_method": SplitMethod,
    "weight_update": WeightUpdate,
    "candidates": CandidateSource,
    "interactions": Interactions,
    "query": LeafQuery,
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
    if method.query in (LeafQuery.JOINT, LeafQuery.CLIPPED) and method.weight_update is not WeightUpdate.NEWTON:
        raise ConfigurationError(
            f"query={method.query.name.lower()} is for weight_update=newton: it is made for the logistic loss"
        )
    if method.weight_update is WeightUpdate.AVERAGING and method.batch_size != method.n_trees:
        raise ConfigurationError("averaging takes all trees in one batch: leave batch_size away, or set it to n_trees")
    k = method.n_features_per_tree
    if k is not None and k > n_features:
        raise ConfigurationError(f"n_features_per_tree is {k}, but there are {n_features} features")
    if method.split_method is not SplitMethod.TOTALLY_RANDOM:
        _check_greedy(method)
    if method.grower is Grower.XGBOOST:
        _check_xgboost(method)


def _check_greedy(method: Method) -> None:
    if method.interactions in (Interactions.ALTERNATING, Interactions.INFORMED):
        raise ConfigurationError(
            f"{method.interactions.value} interactions are for totally random trees: others pay for each feature"
        )


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
