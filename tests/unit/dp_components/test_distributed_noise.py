"""Noise in shares: what coalitions do not know is at least what is accounted; unsafe numbers are refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from dp_components.accounting import compose
from dp_components.distributed_noise import NoiseShares, TrustModel, add_noise_share
from dp_components.errors import PrivacyRefusal
from dp_components.mechanisms import add_gaussian_noise
from dp_components.sensitivity import clip_logistic_rows
from tests.support.seeded_randomness import SeededRandomness

SENSITIVITY = clip_logistic_rows([0.5], [0.25]).sensitivity


@pytest.mark.parametrize(("n_sites", "n_colluders"), [(3, 0), (3, -1), (3, 3), (2, 2), (1, 1), (3, 4)])
def test_no_colluder_or_too_many_are_refused(n_sites: int, n_colluders: int) -> None:
    with pytest.raises(PrivacyRefusal, match="collu"):
        NoiseShares(n_sites, n_colluders)


def test_missing_sites_are_refused() -> None:
    shares = NoiseShares(5, 2)
    shares.check_live(5)
    for n_live in (4, 3, 0):
        with pytest.raises(PrivacyRefusal, match="alive"):
            shares.check_live(n_live)


@pytest.mark.parametrize(("n_sites", "n_colluders", "factor"), [(3, 1, 1.2247), (2, 1, 1.4142), (10, 2, 1.1180)])
def test_the_price_of_not_trusting_the_server(n_sites: int, n_colluders: int, factor: float) -> None:
    assert NoiseShares(n_sites, n_colluders).total_noise_factor == pytest.approx(factor, abs=1e-4)


@pytest.mark.parametrize(("n_sites", "n_colluders"), [(2, 1), (3, 1), (7, 3)])
def test_honest_shares_hold_the_variance_that_is_accounted(n_sites: int, n_colluders: int) -> None:
    shares = NoiseShares(n_sites, n_colluders)
    event = add_noise_share(np.zeros((16, 2), int), SENSITIVITY, 99.4, shares).event
    assert event.n_shares == n_sites - n_colluders
    for (scale, count), weight in zip(event.scales, SENSITIVITY.weights, strict=True):
        honest = event.n_shares * Fraction(scale) ** 2 * Fraction(weight) ** 2
        assert (Fraction(event.noise_multiplier) * Fraction(SENSITIVITY.bound)) ** 2 <= honest
        assert count == 16
    assert compose(event).mu_squared == pytest.approx(1 / 99.4**2, rel=1e-12)


def test_the_sum_over_the_sites_is_the_exact_sum_plus_the_noise_of_all_shares() -> None:
    shares = NoiseShares(3, 1)
    rng = np.random.default_rng(5)
    sums = rng.integers(-1000, 1000, (3, 20000, 2))
    total = sum(add_noise_share(sums[k], SENSITIVITY, 10.0, shares, SeededRandomness(k)).value for k in range(3))
    deviation = (total - sums.sum(axis=0)).std(axis=0)
    expected = [10.0 * SENSITIVITY.bound / weight * math.sqrt(1.5) for weight in SENSITIVITY.weights]
    # 20,000 draws: five standard errors of the standard deviation.
    assert deviation == pytest.approx(expected, rel=0.025)


def test_one_honest_share_of_two_sites_is_the_whole_noise() -> None:
    distributed = add_noise_share(np.zeros((4, 2), int), SENSITIVITY, 5.0, NoiseShares(2, 1), SeededRandomness(1))
    trusted = add_gaussian_noise(np.zeros((4, 2), int), SENSITIVITY, 5.0, SeededRandomness(1))
    np.testing.assert_array_equal(distributed.value, trusted.value)
    assert distributed.event == trusted.event


def test_trust_models_say_what_they_protect() -> None:
    assert all("guarantee holds towards" in model.description for model in TrustModel)
