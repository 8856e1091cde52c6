"""The published methods as they were run: their combinations, their accounting, their noise.

The methods run in the numpy twin. The accounting is theirs (Renyi orders with a hole between 63 and 128), so that the
cells are those of the paper and not better ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from dp_components.events import GaussianEvent, Release
from dp_components.leaf_weights.query import LeafQuery
from dp_components.neighbouring import NeighbouringRelation
from dp_components.sensitivity import Sensitivity
from nvflare_plugins.private_trees.methods import (
    Method, batch_iterative_hessian_ebm, dp_ebm_newton, dp_rf, dp_tr_newton,
)  # fmt: skip
from nvflare_plugins.private_trees.noise_plan import Mechanism, NoisePlan
from nvflare_plugins.private_trees.simulation import Simulation
from tests.bench.dp_data import Split

_ORDERS = np.array([1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, *range(5, 64), 128, 256, 512])
_EVENT = GaussianEvent(1.0, NeighbouringRelation.ADD_OR_REMOVE_ROW)


@cache
def published_multiplier(n_queries: int, epsilon: float, delta: float) -> float:
    """Return their noise multiplier: Renyi accounting on their grid of orders."""

    def excess(multiplier: float) -> float:
        renyi = n_queries * _ORDERS / (2 * multiplier**2)
        return float(np.min(renyi + np.log(1 - 1 / _ORDERS) - np.log(delta * _ORDERS) / (_ORDERS - 1)) - epsilon)

    return float(brentq(excess, 0.1, 1e6))


def published_methods() -> Iterator[Method]:
    """Yield the random-tree methods of Tables 3 to 6 that come out best on some data set and epsilon."""
    yield dp_rf(200)
    yield dp_rf(100)
    yield dp_tr_newton(200)
    yield replace(dp_tr_newton(200), name="DP-TR Newton B=10", batch_size=10)
    for n_trees in (100, 200):
        yield replace(dp_ebm_newton(n_trees), name=f"DP-EBM Newton T={n_trees}")
    for share in (0.25, 1.0):
        # With cyclical features their accountant falls back to scalar queries.
        yield replace(batch_iterative_hessian_ebm(share), query=LeafQuery.SCALAR, as_published=True)


def float_gaussian(*seed: int) -> Mechanism:
    """Return a fast mechanism with reproducible noise, for experiments on public data only."""
    rng = np.random.default_rng(seed)

    def mechanism(sums: NDArray[np.int64], sensitivity: Sensitivity, multiplier: float) -> Release:
        std = multiplier * sensitivity.bound / np.array(sensitivity.weights)
        return Release(sums + np.rint(rng.normal(size=sums.shape) * std).astype(np.int64), _EVENT)

    return mechanism


def run_published(method: Method, data: Split, epsilon: float, seed: int, repeat: int) -> NDArray[np.float32]:
    """Train as published and return the raw scores of the test rows."""
    multiplier = published_multiplier(method.n_queries(data.n_features), epsilon, data.delta)
    plan = NoisePlan.of(method, data.n_features, mu=1.0, noise_multiplier=multiplier)
    mechanism = float_gaussian(seed, repeat, round(1000 * epsilon))
    structure = 1000 * seed + repeat
    return Simulation(method, data.train, data.test, data.bounds, plan, structure, mechanism).run()
