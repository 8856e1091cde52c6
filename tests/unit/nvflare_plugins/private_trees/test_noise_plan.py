"""What is paid for, by whom it is noised, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dp_components.accounting.composition import compose
from dp_components.distributed_noise import NoiseShares
from dp_components.errors import PrivacyRefusal
from dp_components.events import GaussianEvent, Release
from dp_components.neighbouring import NeighbouringRelation
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.private_trees.default_2026_11 import DEFAULT
from nvflare_plugins.private_trees.methods import dp_rf, dp_tr_newton
from nvflare_plugins.private_trees.noise_plan import NoisePlan, ServerNoise, Trust, planned_events
from nvflare_plugins.wire.catalogue import Kind, Phase, TrainingStep
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Operation

M, DELTA = 23, 1 / 21_000


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("method", [DEFAULT, dp_tr_newton(200), dp_rf(200)], ids=lambda m: m.name)
@pytest.mark.parametrize("trust", [Trust(), Trust(NoiseShares(3, 1))], ids=["trusted", "distributed"])
def test_a_plan_spends_its_budget_and_not_more(epsilon: float, method, trust: Trust) -> None:
    plan = NoisePlan.for_budget(method, M, epsilon, DELTA)
    events = planned_events(plan, [16] * method.n_trees, M * 300, trust.n_honest)
    assert 0.999 * epsilon < compose(events).epsilon(DELTA) <= epsilon


def test_half_the_noise_would_overspend() -> None:
    plan = NoisePlan.of(dp_tr_newton(200), M, mu=0.3)
    half = NoisePlan.of(dp_tr_newton(200), M, mu=0.6)
    costs = [compose(planned_events(p, [16] * 200, 0)).mu_squared for p in (plan, half)]
    assert costs == pytest.approx([0.09, 0.36])


def test_what_the_plan_does_not_pay_for_is_not_released() -> None:
    plan = NoisePlan.of(dp_tr_newton(200), M, mu=0.3)
    for kind in (Kind.CELL_COUNTS, Kind.HISTOGRAM, Kind.ROOT_SUM, Kind.METRIC, Kind.LABEL_MEAN):
        with pytest.raises(ProtocolError, match="not paid for"):
            plan.of_kind(kind)


def test_shares_of_three_sites_and_one_colluder() -> None:
    trust = Trust(NoiseShares(3, 1))
    assert trust.noise_factor == pytest.approx(math.sqrt(1.5)) and trust.n_honest == 2
    assert Trust().noise_factor == 1.0


@pytest.mark.parametrize(("n_sites", "n_colluders"), [(3, 0), (3, 3), (2, 2)])
def test_impossible_collusion_is_refused(n_sites: int, n_colluders: int) -> None:
    with pytest.raises(PrivacyRefusal):
        Trust(NoiseShares(n_sites, n_colluders))


def test_fewer_or_more_sites_than_calibrated_are_refused() -> None:
    with pytest.raises(PrivacyRefusal):
        Trust(NoiseShares(3, 1)).check_sites(2)
    with pytest.raises(ConfigurationError):
        Trust(NoiseShares(3, 1)).check_sites(4)
    Trust(NoiseShares(3, 1)).check_sites(3)


def frame(kind: Kind, n_values: int) -> Frame:
    return Frame(
        FrameType.CONTRIBUTION,
        Operation.SUM,
        kind,
        TrainingStep(Phase.UPDATE),
        Codec.MASKED,
        0,
        0,
        b"a" * 16,
        n_values,
        b"",
    )


def test_the_server_noises_pairs_and_refuses_the_rest() -> None:
    plan = NoisePlan.of(dp_tr_newton(200), M, mu=0.3)
    asked = []

    def mechanism(sums, sensitivity, multiplier) -> Release:
        asked.append((sums.shape, sensitivity, multiplier))
        return Release(sums + 1, GaussianEvent(1.0, NeighbouringRelation.ADD_OR_REMOVE_ROW))

    server = ServerNoise(plan, mechanism)
    reply = server.release(frame(Kind.NODE_STATS, 4), np.array([1, -2, 3, -4], dtype="<i8").tobytes())
    assert np.frombuffer(reply, dtype="<i8").tolist() == [2, -1, 4, -3]
    assert asked == [((2, 2), plan.leaves.sensitivity, plan.leaves.multiplier)]
    with pytest.raises(ProtocolError, match="not paid for"):
        server.release(frame(Kind.HISTOGRAM, 4), bytes(32))
