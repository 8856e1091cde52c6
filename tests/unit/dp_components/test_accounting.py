"""Accounting against known answers, high-precision arithmetic and dp-accounting's privacy loss distributions."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import Any

import dp_accounting
import mpmath
import pytest
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution

from dp_components import accounting
from dp_components.accounting import (
    PrivacyCost,
    check_second_opinion,
    compose,
    delta_of_mu,
    delta_of_rho,
    gaussian_limit,
)
from dp_components.errors import SecondOpinionDiffers, UnknownEvent
from dp_components.events import (
    ComposedEvent,
    ConcentratedEvent,
    DiscreteGaussianEvent,
    DisjointPartEvent,
    ExponentialEvent,
    GaussianEvent,
    LaplaceEvent,
    LocalRandomisedResponseEvent,
    NeighbouringRelation,
    RepeatedEvent,
    event_document,
    event_from_document,
)
from dp_components.mechanisms import gaussian_event
from dp_components.sensitivity import clip_logistic_rows
from tests.support.calibration import epsilon_of_mu, mu_for, noise_multiplier_for

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
PUBLISHED = [  # queries, multipliers at epsilon .1, .5, 1 and delta 1e-5, as measured before this code existed
    (100, (307.5, 70.3, 37.3)),
    (200, (434.9, 99.4, 52.8)),
    (250, (486.2, 111.2, 59.0)),
    (350, (575.3, 131.6, 69.8)),
    (1000, (972.4, 222.4, 118.0)),
    (12000, (3368, 770, 409)),
]


def gaussians(multiplier: float, count: int) -> RepeatedEvent:
    return RepeatedEvent(GaussianEvent(multiplier, ROW), count)


def precise_delta(mu: float, epsilon: float) -> float:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))


@pytest.mark.parametrize(("n_queries", "expected"), PUBLISHED)
def test_multipliers_of_the_published_plans(n_queries: int, expected: tuple[float, ...]) -> None:
    for epsilon, multiplier in zip((0.1, 0.5, 1.0), expected, strict=True):
        # The table gives one digit after the point, and none for 12,000 queries.
        unit = 1.0 if n_queries == 12000 else 0.1
        assert noise_multiplier_for(n_queries, epsilon, 1e-5, slack_share=0) == pytest.approx(multiplier, abs=unit)


@pytest.mark.parametrize("mu", [1e-3, 0.02, 0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.1, 1.0, 8.0, 100.0])
def test_delta_against_sixty_digits(mu: float, epsilon: float) -> None:
    """The difference of logarithms loses a few digits where delta is far in the tail; 1e-9 relative is ample."""
    expected = precise_delta(mu, epsilon)
    assert delta_of_mu(mu, epsilon) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 8.0, 30.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-3, 0.4])
def test_both_calibrations_end_on_the_safe_side_and_near(epsilon: float, delta: float) -> None:
    mu = mu_for(epsilon, delta)
    assert precise_delta(mu, epsilon) <= delta < precise_delta(mu * (1 + 1e-10), epsilon)
    assert epsilon <= epsilon_of_mu(mu_for(epsilon, delta) * (1 + 2e-12), delta) * (1 + 1e-10)
    assert precise_delta(mu, epsilon_of_mu(mu, delta)) <= delta


@pytest.mark.parametrize(("multiplier", "count"), [(99.0, 200), (1.5, 1), (40.0, 5), (700.0, 12000)])
@pytest.mark.parametrize("delta", [1e-9, 1e-6, 1e-4])
def test_gaussians_against_privacy_loss_distributions(multiplier: float, count: int, delta: float) -> None:
    oracle = PLDAccountant()
    oracle.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(multiplier), count))
    # The oracle's own root finding ends within about 1e-8.
    assert compose(gaussians(multiplier, count)).epsilon(delta) == pytest.approx(oracle.get_epsilon(delta), rel=1e-6)


def test_gaussians_and_pure_parts_are_never_below_the_oracle() -> None:
    """Exact composition of both kinds by the oracle is a lower limit for our simpler sum, and not far below it."""
    oracle = PLDAccountant()
    oracle.compose(dp_accounting.GaussianDpEvent(2.0), 3)
    oracle.compose(dp_accounting.LaplaceDpEvent(1 / 0.2))
    cost = compose([gaussians(2.0, 3), LaplaceEvent(0.2, ROW)])
    assert oracle.get_epsilon(1e-6) <= cost.epsilon(1e-6) <= oracle.get_epsilon(1e-6) + 0.2


@pytest.mark.parametrize(("scale", "count"), [(400.0, 1), (2000.0, 1), (40.0, 20), (8.0, 3)])
def test_discrete_noise_costs_what_the_oracle_finds_and_no_less(scale: float, count: int) -> None:
    sensitivity = max(1, round(scale / math.sqrt(count) / 2))
    oracle = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        scale, sensitivity=sensitivity, value_discretization_interval=1e-4
    ).self_compose(count)
    event = DiscreteGaussianEvent(scale / sensitivity, ROW, ((scale, 1),))
    cost = compose(RepeatedEvent(event, count))
    # Discretisation makes the oracle pessimistic by up to 1e-4 in epsilon for each query.
    assert cost.epsilon(1e-6) >= oracle.get_epsilon_for_delta(1e-6) - 1e-4 * count
    exact = compose(RepeatedEvent(GaussianEvent(scale / sensitivity, ROW), count))
    assert (
        exact.delta(3.0)
        < cost.delta(3.0)
        <= compose(RepeatedEvent(GaussianEvent(scale / sensitivity * math.sqrt(1 - 10 / scale**2), ROW), count)).delta(
            3.0
        )
    )


@pytest.mark.parametrize("scale", [4.0, 5.5, 11.0])
@pytest.mark.parametrize("sensitivity", [1, 3])
def test_the_price_of_coarse_discrete_noise_covers_its_exact_delta(scale: float, sensitivity: int) -> None:
    """delta(epsilon) of one discrete Gaussian by adding up the probabilities, with fifty digits."""
    cost = compose(DiscreteGaussianEvent(scale / sensitivity, ROW, ((scale, 1),)))
    with mpmath.workdps(50):
        weight = [mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * mpmath.mpf(scale) ** 2)) for k in range(400)]
        total = weight[0] + 2 * sum(weight[1:])
        for epsilon in (0.0, 0.1, 1.0, 4.0):
            parts = (weight[abs(k)] - mpmath.exp(epsilon) * weight[abs(k + sensitivity)] for k in range(-390, 390))
            exact = float(sum((part for part in parts if part > 0), mpmath.mpf(0)) / total)
            assert exact <= cost.delta(epsilon)


def test_concentrated_accounting_is_valid_and_only_a_few_percent_loose() -> None:
    for mu in (0.05, 0.5, 3.0):
        exact, loose = epsilon_of_mu(mu, 1e-6), compose(ConcentratedEvent(mu**2 / 2, ROW)).epsilon(1e-6)
        assert exact < loose < 1.13 * exact
        assert delta_of_rho(mu**2 / 2, loose) == pytest.approx(1e-6, rel=1e-4)
    mixed = compose([GaussianEvent(2.0, ROW), ConcentratedEvent(0.1, ROW)])
    assert mixed.epsilon(1e-6) == pytest.approx(compose(ConcentratedEvent(0.125 + 0.1, ROW)).epsilon(1e-6), rel=1e-6)


def test_prices() -> None:
    whole_row = LocalRandomisedResponseEvent(4.0, 10, ROW)
    one_value = LocalRandomisedResponseEvent(4.0, 10, NeighbouringRelation.CHANGE_VALUE)
    assert compose(whole_row) == PrivacyCost(pure_epsilon=40.0)
    assert compose(one_value) == PrivacyCost(pure_epsilon=4.0)
    events = ComposedEvent((RepeatedEvent(ExponentialEvent(0.25, ROW), 3), LaplaceEvent(0.5, ROW), gaussians(2.0, 4)))
    assert compose(events) == PrivacyCost(mu_squared=1.0, pure_epsilon=1.25)
    assert compose([]) == PrivacyCost() and compose(ComposedEvent(())).epsilon(0.0) == 0.0


def test_a_person_with_many_rows_costs_as_the_adjacency_table_says() -> None:
    """Claimed .1, .5, 1 at delta 1/21000 become .22, 1.08, 2.19 for two rows."""
    for epsilon, doubled in ((0.1, 0.22), (0.5, 1.08), (1.0, 2.19)):
        cost = PrivacyCost(mu_squared=mu_for(epsilon, 1 / 21000) ** 2).for_person(2)
        assert cost.epsilon(1 / 21000) == pytest.approx(doubled, abs=0.005)
    assert PrivacyCost(1.0, 2.0, 3.0, 1e-9).for_person(3) == PrivacyCost(9.0, 6.0, 27.0, 1e-9)


def test_disjoint_parts_cost_as_much_as_the_costliest() -> None:
    def part(event: object, number: int, partition: str = "ensemble 1") -> DisjointPartEvent:
        return DisjointPartEvent(event, partition, number)  # type: ignore[arg-type]

    tree = LaplaceEvent(0.5, ROW), ExponentialEvent(0.25, ROW)
    forest = [part(event, number) for number in range(50) for event in tree]
    assert compose(forest) == PrivacyCost(pure_epsilon=0.75)
    second = [part(event, number, "ensemble 2") for number in range(50) for event in tree]
    assert compose([*forest, *second, LaplaceEvent(1.0, ROW)]) == PrivacyCost(pure_epsilon=2.5)
    mixed = [part(GaussianEvent(2.0, ROW), 0), part(GaussianEvent(1.0, ROW), 1), part(LaplaceEvent(0.1, ROW), 0)]
    assert compose(mixed) == PrivacyCost(mu_squared=1.0, pure_epsilon=0.1)
    discrete = DiscreteGaussianEvent(1.0, ROW, ((100.0, 1),))
    slack = compose(discrete).total_variation
    assert compose([part(discrete, 0), part(discrete, 1)]).total_variation == 2 * slack
    replaced = LaplaceEvent(0.5, NeighbouringRelation.REPLACE_ROW)
    for wrong in (replaced, part(LaplaceEvent(0.5, ROW), 0), gaussians(1, 2)):
        with pytest.raises(ValueError, match="part"):
            part(wrong, 0)
    for event in (*forest[:2], *mixed):
        assert event_from_document(event_document(event)) == event


def test_an_unknown_event_is_never_free() -> None:
    class Free:
        relation = ROW

    for event in (Free(), None, RepeatedEvent(Free(), 2), ComposedEvent((GaussianEvent(1.0, ROW), Free()))):
        with pytest.raises(UnknownEvent):
            compose(event)


def test_relations_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="neighbouring"):
        compose([GaussianEvent(1.0, ROW), LaplaceEvent(1.0, NeighbouringRelation.REPLACE_ROW)])


def test_epsilon_of_what_cannot_be_kept_is_infinite_and_delta_is_one() -> None:
    assert PrivacyCost(mu_squared=1e6).epsilon(1e-6) == math.inf
    assert PrivacyCost(pure_epsilon=1.0).delta(0.99) == 1.0
    assert PrivacyCost(total_variation=1e-3).epsilon(1e-6) == math.inf


@pytest.mark.parametrize(("epsilon", "pure", "rho"), [(1.0, 0.0, 0.0), (1.0, 0.4, 0.0), (2.0, 0.1, 0.01)])
def test_the_whole_limit_keeps_the_promise(epsilon: float, pure: float, rho: float) -> None:
    limit = gaussian_limit(epsilon, 1e-6, pure_epsilon=pure, zcdp_rho=rho)
    assert limit.delta(epsilon) <= 1e-6
    larger = PrivacyCost(limit.mu_squared * (1 + 1e-6), *limit.parts()[1:])
    assert larger.delta(epsilon) > 1e-6


def test_a_pure_budget_has_no_room_for_gaussians() -> None:
    assert gaussian_limit(1.0, 0.0, pure_epsilon=1.0) == PrivacyCost(pure_epsilon=1.0)
    with pytest.raises(ValueError, match="zcdp_rho"):
        gaussian_limit(1.0, 0.0, zcdp_rho=0.1)
    with pytest.raises(ValueError, match="pure_epsilon"):
        gaussian_limit(1.0, 1e-6, pure_epsilon=2.0)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_events_refuse_impossible_parameters(bad: object) -> None:
    for make in (GaussianEvent, LaplaceEvent, ExponentialEvent, ConcentratedEvent):
        with pytest.raises(ValueError, match="number"):
            make(bad, ROW)


# -- a second accountant -----------------------------------------------------------------------------------------------


def autodp_epsilon(gaussians: list[tuple[float, int]], delta: float) -> float:
    """Return what a third accountant says, which adds a folder to the path of modules when it is imported."""
    before = list(sys.path)
    zoo, transformers = import_module("autodp.mechanism_zoo"), import_module("autodp.transformer_zoo")
    sys.path[:] = before
    parts = [zoo.ExactGaussianMechanism(sigma=s, name=f"query{i}") for i, (s, _) in enumerate(gaussians)]
    return float(transformers.ComposeGaussian()(parts, [count for _, count in gaussians]).get_approxDP(delta))


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 8.0])
@pytest.mark.parametrize("n_queries", [1, 200, 12000])
def test_agreement(epsilon: float, n_queries: int) -> None:
    sensitivity = clip_logistic_rows([0.5], [0.25]).sensitivity
    multiplier = noise_multiplier_for(n_queries, epsilon, 1e-6)
    plan = [RepeatedEvent(gaussian_event(32, sensitivity, multiplier), n_queries), LaplaceEvent(0.1, ROW)]
    opinion = check_second_opinion(plan, 1e-6)
    assert opinion is not None
    assert opinion.ours == pytest.approx(epsilon, rel=1e-4)
    assert opinion.theirs == pytest.approx(opinion.ours, rel=1e-10)
    assert opinion.composed == pytest.approx(opinion.ours, rel=1e-3) and opinion.composed > opinion.ours * (1 - 1e-10)
    assert autodp_epsilon(accounting._gaussians(accounting.count_events(plan)), 1e-6) == pytest.approx(
        opinion.ours, rel=1e-10
    )


def test_agreement_on_disjoint_parts() -> None:
    """Of each partition the costliest part counts, for both accountants."""
    noises = {("a", 0): 9.0, ("a", 1): 5.0, ("b", 0): 7.0}
    plan = [DisjointPartEvent(GaussianEvent(noise, ROW), *part) for part, noise in noises.items()]
    opinion = check_second_opinion([*plan, GaussianEvent(6.0, ROW)], 1e-6)
    assert opinion is not None and opinion.ours > 0


@pytest.mark.parametrize(
    ("closed", "composed"),
    [
        (1 + 3e-9, 1),
        (1 - 3e-9, 1),
        (0.5, 0.5),
        (1.1, 1.1),
        (1, 1.02),
        (1, 1 - 3e-9),
        (float("nan"), 1),
        (1, float("inf")),
    ],
)
def test_disagreement_in_either_direction_stops_the_job(
    closed: float, composed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = accounting._opinions

    def other(*arguments: Any) -> tuple[float, float]:
        return closed * honest(*arguments)[0], composed * honest(*arguments)[0]

    monkeypatch.setattr(accounting, "_opinions", other)
    with pytest.raises(SecondOpinionDiffers, match="disagree"):
        check_second_opinion(GaussianEvent(3.0, ROW), 1e-6)


def test_a_sum_that_is_composed_wrongly_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library composes by itself: what counts a query once too few shows, also where both closed forms agree."""
    plan = [RepeatedEvent(GaussianEvent(30.0, ROW), 200), GaussianEvent(9.0, ROW)]
    right = accounting._gaussians
    assert check_second_opinion(plan, 1e-6) is not None
    monkeypatch.setattr(accounting, "_gaussians", lambda counts: [(s, n - (n > 1) * 10) for s, n in right(counts)])
    with pytest.raises(SecondOpinionDiffers, match="disagree"):
        check_second_opinion(plan, 1e-6)


def test_no_second_accountant_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(SecondOpinionDiffers, match="install 'dp-accounting"):
        check_second_opinion(GaussianEvent(3.0, ROW), 1e-6)


def test_plans_without_gaussians_need_none_but_must_be_priced() -> None:
    assert check_second_opinion([LaplaceEvent(1.0, ROW)], 1e-6) is None
    with pytest.raises(UnknownEvent):
        check_second_opinion([object()], 1e-6)  # type: ignore[list-item]
