"""What a cost means for one person: against closed forms, and against guesses that were really made."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from dp_components.accounting import PrivacyCost, TradeOff


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 4.0])
def test_gaussians_have_their_exact_trade_off(mu: float) -> None:
    bound = TradeOff.of(PrivacyCost(mu_squared=mu**2))
    for rate in (0.001, 0.01, 0.1, 0.5, 0.9):
        exact = norm.cdf(norm.ppf(rate) + mu)
        assert exact - 1e-9 <= bound.true_positive_rate(rate) <= exact + 2e-3
    assert norm.cdf(mu / math.sqrt(2)) - 1e-9 <= bound.area() <= norm.cdf(mu / math.sqrt(2)) + 2e-3
    assert bound.guessed_right() == pytest.approx(norm.cdf(mu / 2), abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_a_pure_guarantee_has_the_two_lines(epsilon: float) -> None:
    bound = TradeOff.of(PrivacyCost(pure_epsilon=epsilon))
    power = math.exp(epsilon)
    for rate in (0.0, 0.01, 0.3, 1.0):
        assert bound.true_positive_rate(rate) == pytest.approx(min(power * rate, 1 - (1 - rate) / power))
    assert bound.guessed_right() == pytest.approx(power / (1 + power))
    meets = 1 / (1 + power)  # where the lines cross
    area = meets * meets * power / 2 + (1 - meets) * (meets * power + 1) / 2
    assert area <= bound.area() <= area + 2e-4


def test_nothing_released_is_a_toss_of_a_coin_and_everything_is_certainty() -> None:
    nothing = TradeOff.of(PrivacyCost())
    assert nothing.guessed_right() == 0.5 and nothing.true_positive_rate(0.01) == 0.01
    assert nothing.area() == pytest.approx(0.5, abs=2e-4)
    for everything in (TradeOff([(0.0, 1.0)]), TradeOff.of(PrivacyCost(pure_epsilon=700.0))):
        assert everything.guessed_right() == everything.true_positive_rate(0.01) == everything.area() == 1


def test_a_promise_of_one_point_gives_less_than_the_curve_behind_it() -> None:
    cost = PrivacyCost(mu_squared=0.04)
    point = TradeOff([(cost.epsilon(1e-6), 1e-6)])
    assert TradeOff.of(cost).guessed_right() < point.guessed_right() - 0.1


@pytest.mark.parametrize("curve", [[], [(-1.0, 0.0)], [(1.0, 1.5)], [(math.nan, 0.0)]])
def test_what_is_no_curve_is_refused(curve: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError):
        TradeOff(curve)


def test_rates_outside_are_refused() -> None:
    with pytest.raises(ValueError):
        TradeOff([(1.0, 0.0)]).true_positive_rate(1.5)


def test_the_best_guess_at_a_noised_count_stays_below_the_bound_and_comes_near() -> None:
    """A control that can fail: half of the noise that is accounted would be found out."""
    random, mu = np.random.default_rng(5), 0.5
    bound = TradeOff.of(PrivacyCost(mu_squared=mu**2)).guessed_right()
    for scale, is_within in ((1 / mu, True), (0.5 / mu, False)):
        member = random.integers(0, 2, 200_000)
        noised = member + scale * random.normal(size=member.size)
        right = float(((noised > 0.5) == (member == 1)).mean())
        assert (right <= bound + 0.006) == is_within  # five standard errors
        assert not is_within or right >= bound - 0.006
