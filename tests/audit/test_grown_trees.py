"""The privacy that greedy trees grown by the sites claim, attacked: histogram trees, the default grower's.

The adversary knows all rows but the canary, every noisy sum and the model. Reference:
dp_components/README.md, section 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dp_components.leaf_weights.query import LeafQuery
from dp_components.mechanisms.gaussian import add_gaussian_noise, share_scales
from dp_components.split_candidates.candidates import FeatureBounds
from dp_components.split_methods.histogram import HistogramQuery
from nvflare_plugins.private_trees import forest_trainer as grown_forest
from nvflare_plugins.private_trees.forest_trainer import ForestGrower, OwnRows, ReleaseSums
from nvflare_plugins.private_trees.methods import Method, SplitMethod, feverless
from nvflare_plugins.private_trees.noise_plan import NoisePlan
from nvflare_plugins.wire.catalogue import Kind
from tests.support.audit import Errors, gaussian_power
from tests.support.calibration import mu_for
from tests.support.seeded_randomness import SeededRandomness

EPSILON, DELTA = 8.0, 1e-5
CLAIMED_MU = mu_for(EPSILON, DELTA)
BOUNDS = (FeatureBounds(0, 1),) * 2
HISTOGRAMS = replace(feverless(6), depth=2, n_candidates=7, query=LeafQuery.JOINT)
PARTIALLY = replace(HISTOGRAMS, split_method=SplitMethod.PARTIALLY_RANDOM)
CANARY = OwnRows(np.full((2, 1), 0.3, np.float32), np.zeros(1, np.float32))


def others(n_rows: int = 60) -> OwnRows:
    """Rows of which nearly all have the other label: training moves the canary's gradient towards 1."""
    rng = np.random.default_rng(0)
    return OwnRows(rng.random((2, n_rows)).astype(np.float32), (rng.random(n_rows) < 0.9).astype(np.float32))


def both(rows: OwnRows, canary: OwnRows) -> OwnRows:
    return OwnRows(np.concatenate([rows.columns, canary.columns], axis=1), np.append(rows.label, canary.label))


def grow(method: Method, rows: OwnRows, plan: NoisePlan, release: ReleaseSums) -> None:
    ForestGrower(method, rows, BOUNDS, plan, 1, release, 1.0).run(lambda *_: None, lambda _: None)


def log_ratio(method: Method, plan: NoisePlan, rows: OwnRows, has_canary: bool, seed: int, factor: float) -> float:
    """Train once; return the log-likelihood ratio of the canary.

    Its part of every sum is found as the adversary finds it: he plays the canary's site on the replies he has seen.
    """
    source, replies, noises = SeededRandomness(seed), [], []
    planned = plan.leaves
    std = np.array(share_scales(planned.sensitivity, planned.multiplier))

    def noisy(kind: Kind, exact: np.ndarray, what: str, sizes: Sequence[int]) -> np.ndarray:
        reply = add_gaussian_noise(exact, planned.sensitivity, factor * planned.multiplier, source).value
        replies.append(reply)
        noises.append((reply - exact) / std)
        return reply

    grow(method, both(rows, CANARY) if has_canary else rows, plan, noisy)
    moved, seen = [], iter(replies)

    def replayed(kind: Kind, exact: np.ndarray, what: str, sizes: Sequence[int]) -> np.ndarray:
        moved.append(exact / std)
        return next(seen)

    grow(method, CANARY, plan, replayed)
    sign = 0.5 if has_canary else -0.5
    return float(sum((c * (z + sign * c)).sum() for c, z in zip(moved, noises, strict=True)))


def measured_mu(method: Method, n_runs: int = 500, n_features_paid: int = 2, factor: float = 1.0) -> float:
    plan, rows = NoisePlan.for_budget(method, n_features_paid, EPSILON, DELTA), others()
    worlds = [
        np.array([log_ratio(method, plan, rows, bool(world), 2 * run + world, factor) for run in range(n_runs)])
        for world in (0, 1)
    ]
    return Errors.of(*worlds).mu()


class RootAgain(HistogramQuery):
    """Releases a node's own sums beside its histograms, although any feature's bins add up to them."""

    def best(self, nodes):
        for node in nodes:
            self._add_noise(self._pairs[node.rows].sum(axis=0).reshape(1, 1, 1, 2))
        return super().best(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("method", [HISTOGRAMS, PARTIALLY], ids=lambda method: method.split_method.name)
def test_trees_grown_by_the_sites_keep_their_promise(method: Method) -> None:
    assert CLAIMED_MU / 2 < measured_mu(method) <= CLAIMED_MU


@pytest.mark.slow
def test_half_the_noise_is_caught() -> None:
    assert measured_mu(HISTOGRAMS, factor=0.5) > CLAIMED_MU


@pytest.mark.slow
def test_all_features_as_one_query_are_caught() -> None:
    """A row enters one bin of every feature: two queries a level, not one."""
    assert gaussian_power(CLAIMED_MU, np.sqrt(2) * 0.95 * CLAIMED_MU, 700, 1, 1000) > 0.95
    assert measured_mu(HISTOGRAMS, n_runs=700, n_features_paid=1) > CLAIMED_MU


@pytest.mark.slow
def test_sums_released_beside_the_histograms_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one feature in each tree that is twice the queries that are paid for."""
    monkeypatch.setattr(grown_forest, "HistogramQuery", RootAgain)
    assert measured_mu(replace(HISTOGRAMS, n_features_per_tree=1), n_runs=700) > CLAIMED_MU
