"""Presets and the number of queries they release, against a table worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dp_components.leaf_weights.query import LeafQuery
from nvflare_plugins.private_trees.default_2026_11 import DEFAULT, FEW_ROUNDS
from nvflare_plugins.private_trees.methods import (
    CandidateSource,
    SplitMethod,
    batch_iterative_hessian_ebm,
    dp_ebm,
    dp_ebm_newton,
    dp_gbm,
    dp_rf,
    dp_tr_newton,
    feverless,
)

M = 23
IH = replace(dp_tr_newton(200), candidates=CandidateSource.ITERATIVE_HESSIAN)


@pytest.mark.parametrize(
    ("method", "queries"),
    [
        (dp_tr_newton(200), 200),
        (dp_rf(100), 100),
        (dp_ebm_newton(100), 100),
        (dp_ebm(M, 100), 2300),
        (dp_gbm(25), 25 * 4 * M),
        (feverless(25), 25 * 4 * M),
        (replace(feverless(25), split_method=SplitMethod.PARTIALLY_RANDOM), 25 * (4 * M + 1)),  # with the root sums
        (replace(feverless(25), n_features_per_tree=3), 25 * 4 * 3),
        (replace(dp_tr_newton(200), query=LeafQuery.SCALAR), 400),
        (IH, 200 + 5 * M),
        (replace(IH, n_features_per_tree=1), 200 + 5 * M),
        (replace(IH, n_features_per_tree=1, n_trees=50), 50 + 50),
        (replace(batch_iterative_hessian_ebm(1.0), query=LeafQuery.SCALAR), 300),  # their run: sigma of 300 queries
        (replace(feverless(25), candidates=CandidateSource.ITERATIVE_HESSIAN), 25 * 4 * M),  # nothing extra
        (DEFAULT, 200),
        (FEW_ROUNDS, 240),  # a batch saves rounds, not queries
    ],
    ids=lambda value: value if isinstance(value, int) else value.name,
)
def test_queries(method, queries: int) -> None:
    assert method.n_queries(M) == queries


def test_noise_multiplier_spends_mu_exactly() -> None:
    for method in (dp_tr_newton(200), DEFAULT):
        multiplier = method.noise_multiplier(0.3, M)
        cells = method.candidate_share * 0.3**2 if method.candidates.is_paid else 0.0
        assert method.n_queries(M) / multiplier**2 + cells == pytest.approx(0.3**2)


def test_a_forest_of_averages_is_one_batch_without_boosting() -> None:
    forest = dp_rf(50)
    assert (forest.batch_size, forest.learning_rate, forest.ridge, forest.clip) == (50, 1.0, 0.0, 1.0)


def test_the_frozen_defaults_stay_as_they_were_frozen() -> None:
    assert (DEFAULT.n_trees, DEFAULT.depth, DEFAULT.n_candidates, DEFAULT.batch_size) == (200, 4, 32, 1)
    assert (DEFAULT.learning_rate, DEFAULT.ridge, DEFAULT.noise_ridge, DEFAULT.clip) == (0.3, 1.0, 3.0, 2.0)
    assert (FEW_ROUNDS.n_trees, FEW_ROUNDS.batch_size, FEW_ROUNDS.learning_rate) == (240, 10, 1.5)
    assert FEW_ROUNDS.n_trees // FEW_ROUNDS.batch_size + 1 <= 25  # with the message for private quantiles
