"""Columns of private training: clipped values, candidates of splits, features of a tree, targets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.feature_interactions import alternating_features, cyclical_features, random_features
from dp_components.leaf_weights import UNIT, LeafQuery, Number, SeveralClasses, Target
from dp_components.split_candidates import (
    Candidates,
    Columns,
    FeatureBounds,
    as_candidates,
    by_rule,
    count_cells,
    cut_at_quantiles,
    logarithmic_candidates,
    non_private_quantile_candidates,
    public_grid,
    uniform_candidates,
    union,
)
from he_processors.errors import ConfigurationError
from nvflare_plugins.data.table import Table
from nvflare_plugins.kinds.private_trees.methods import CandidateSource, Grower, Interactions, Method
from nvflare_plugins.kinds.private_trees.training import PrivateTreesPlan, SumsOverSites
from nvflare_plugins.wire.envelope import Kind

# The candidates that a method starts from (C3): public ones, and those that a first release pays for.


def agree_candidates(plan: PrivateTreesPlan, columns: Columns, sums: SumsOverSites) -> Candidates:
    """Return the split candidates that training starts from; paid ones cost one release.

    Shapes: columns: float32[n_features, n_rows].
    """
    method = plan.method
    if method.candidates is CandidateSource.QUANTILE:  # of the own rows, for benchmarks: no job may choose them
        lists = [non_private_quantile_candidates(c, method.n_candidates) for c in columns]
        return Candidates(tuple(as_candidates(points) for points in lists))
    public = public_candidates(method, plan.bounds)
    if not method.candidates.is_paid:
        return public
    grids = [public_grid(b) for b in plan.bounds]
    noisy = sums.release(Kind.CELL_COUNTS, -1, count_cells(columns, grids))
    [noise_std] = plan.releases.cell_noise.scaled(plan.trust.noise_factor).std
    mixed = method.candidates is CandidateSource.MIXED
    n_quantiles = method.n_candidates // 2 if mixed else method.n_candidates
    paid = cut_at_quantiles(noisy / UNIT, grids, noise_std, n_quantiles)
    return union(public, paid) if mixed else paid


def public_candidates(method: Method, bounds: Sequence[FeatureBounds]) -> Candidates:
    """Return public candidates; for mixed ones only the uniform half."""
    if method.candidates is CandidateSource.LOGARITHMIC:
        return by_rule(logarithmic_candidates, bounds, method.n_candidates)
    n = method.n_candidates // 2 if method.candidates is CandidateSource.MIXED else method.n_candidates
    return by_rule(uniform_candidates, bounds, n)


# A site's values, clipped to their public bounds: held, or read whenever a feature is asked for.
#
# What is read again is clipped again, each value by itself, so that a training sees the same numbers either way. Bins,
# of one byte a value, are held in both.


def clipped(table: Table, bounds: Sequence[FeatureBounds]) -> Columns:
    """Clip every value to its public bounds, by itself; a missing value stays missing."""
    low, high = (np.array([getattr(b, end) for b in bounds], dtype=np.float32) for end in ("low", "high"))
    if table.passes is not None:
        return PassedColumns(table, low, high)
    return np.clip(np.ascontiguousarray(table.features.T), low[:, None], high[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class PassedColumns:
    """Clipped features of a table that is read in passes; see ``Columns``. Shapes: low, high: float32[n_features].

    Raises:
        DataRefusal: whatever reads: a file has changed since the data set was loaded.
    """

    table: Table
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the numbers of features and rows."""
        return self.low.size, self.table.n_rows

    def __getitem__(self, feature: int, /) -> NDArray[np.float32]:
        """Return one feature's values. Shapes: float32[n_rows]."""
        return np.clip(self.table.by_feature[feature], self.low[feature], self.high[feature])

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield each feature's values."""
        for column, low, high in zip(self.table.columns(), self.low, self.high, strict=True):
            yield np.clip(column, low, high)


# Which features each tree of a method may use (A1), from the method's public description.


def tree_features(method: Method, tree: int, n_features: int, draws: random.Random) -> list[int]:
    """Return the features that one tree may use. Privacy: touches no data; ``draws`` is public."""
    k = method.features_per_tree(n_features)
    if method.interactions in (Interactions.ALTERNATING, Interactions.INFORMED):
        return alternating_features(tree, n_features)
    if k == n_features:
        return list(range(n_features))
    if method.interactions is Interactions.CYCLICAL:
        return cyclical_features(tree, n_features, k)
    return random_features(n_features, k, draws)


# Which methods train which kinds of label, and how a kind of label is put into words.


MOST_CLASSES = 64
"""Every leaf of a tree sends so many sums twice."""


def check_target(method: Method, target: Target) -> None:
    """Refuse a method that is not made for a kind of label.

    Scalar queries would ask for each class apart, at the root of their number in noise, and XGBoost's refresh is of two
    classes. What the papers define for two classes alone is extended to several: gains and Hessians of the classes are
    added (``split_score.py``, ``softmax.py``), and averaging counts every class.

    Raises:
        ConfigurationError: it names the component.
    """
    if isinstance(target, Number) and method.grower is Grower.XGBOOST:
        raise ConfigurationError(
            "grower=xgboost refreshes the logistic loss of two classes: leave grower away to train on label_bounds"
        )
    if not isinstance(target, SeveralClasses):
        return
    wrong = {
        "query": method.query is LeafQuery.SCALAR,
        "grower": method.grower is Grower.XGBOOST,
    }
    names = [name for name, is_wrong in wrong.items() if is_wrong]
    if names:
        raise ConfigurationError(
            f"method {method.name!r} trains two classes, and label_classes lists {target.n_classes} "
            f"({', '.join(names)}): leave query and grower as the method has them, for one query of all classes' sums "
            "and trees that the sites grow"
        )


def label_words(target: Target) -> str:
    """Say what the label is."""
    if isinstance(target, Number):
        return f"a number from {target.bounds.low:g} to {target.bounds.high:g}; what lies outside counts as the bound"
    return f"one of {target.n_classes} classes" if isinstance(target, SeveralClasses) else "one of two classes"
