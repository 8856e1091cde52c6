"""Releases are paid for before they leave, in both trust models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dp_components.accounting.composition import compose
from dp_components.distributed_noise import NoiseShares
from dp_components.errors import PrivacyRefusal
from dp_components.events import Release
from dp_components.split_candidates.candidates import FeatureBounds
from dp_components.split_candidates.dp_quantiles import public_grid
from nvflare_plugins.private_trees.default_2026_11 import FEW_ROUNDS
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust, planned_events
from nvflare_plugins.private_trees.training import NoisySums, PrivateTreesPlan
from nvflare_plugins.wire.catalogue import Kind

BOUNDS = (FeatureBounds(0.0, 1.0),) * 3
EPSILON, DELTA = 1.0, 1e-5


class Sums:
    """Stands in for the protected sum; remembers what left."""

    def __init__(self) -> None:
        self.left: list[np.ndarray] = []

    def sum_counts(self, kind: Kind, counts: np.ndarray) -> np.ndarray:
        self.left.append(counts)
        return counts


def plan_with(trust: Trust) -> PrivateTreesPlan:
    return PrivateTreesPlan(FEW_ROUNDS, BOUNDS, NoisePlan.for_budget(FEW_ROUNDS, 3, EPSILON, DELTA), trust, 1)


@pytest.mark.parametrize("trust", [Trust(), Trust(NoiseShares(3, 1))], ids=["trusted", "distributed"])
def test_what_is_paid_adds_up_to_the_plan(trust: Trust) -> None:
    plan, events = plan_with(trust), []

    def pay(query: str, make: Callable[[], Release]) -> np.ndarray:
        release = make()
        events.append(release.event)
        return release.value

    sums = NoisySums(Sums(), plan, pay)
    n_cells = sum(public_grid(b).size + 1 for b in BOUNDS)
    sums.release(Kind.CELL_COUNTS, np.zeros(n_cells, dtype=np.int64), "cells", [n_cells])
    for number in range(24):
        sums.release(Kind.NODE_STATS, np.zeros(320, dtype=np.int64), f"round {number}", [32] * 10)
    planned = planned_events(plan.noise, [16] * 240, n_cells, trust.n_honest)
    assert compose(events).mu_squared == pytest.approx(compose(planned).mu_squared)
    assert compose(events).epsilon(DELTA) <= EPSILON


def test_sites_send_noise_in_the_distributed_model_and_exact_sums_under_masks_otherwise() -> None:
    exact = np.zeros(32, dtype=np.int64)
    for trust, is_noised in ((Trust(), False), (Trust(NoiseShares(3, 1)), True)):
        sums = Sums()
        NoisySums(sums, plan_with(trust)).release(Kind.NODE_STATS, exact, "round 0", [32])
        assert sums.left[0].any() == is_noised


def test_nothing_leaves_when_the_ledger_refuses() -> None:
    sums = Sums()

    def refuse(query: str, make: Callable[[], Release]) -> np.ndarray:
        raise PrivacyRefusal("overdrawn")

    with pytest.raises(PrivacyRefusal):
        NoisySums(sums, plan_with(Trust()), refuse).release(Kind.NODE_STATS, np.zeros(32, dtype=np.int64), "q", [32])
    assert not sums.left
