"""Noise in shares: what coalitions do not know is at least what is accounted; unsafe numbers are refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from dp_components.accounting import compose
from dp_components.errors import PrivacyRefusal
from dp_components.leaf_weights import UNIT, real_noise_std
from dp_components.mechanisms import NoiseShares, TrustModel, add_gaussian_noise, add_noise_share
from dp_components.sensitivity import Norm, Sensitivity, clip_gradients, clip_logistic_rows
from tests.support.seeded_randomness import SeededRandomness

SENSITIVITY = clip_logistic_rows([0.5], [0.25]).sensitivity
PURE_SENSITIVITY = clip_gradients([0.5], [0.25], 0.6, norm=Norm.L1).sensitivity


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


@pytest.mark.parametrize("sensitivity", [SENSITIVITY, PURE_SENSITIVITY], ids=lambda s: s.norm.name)
@pytest.mark.parametrize(
    ("n_sites", "n_colluders"),
    [(3, 1), pytest.param(5, 1, marks=pytest.mark.slow), pytest.param(10, 1, marks=pytest.mark.slow), (10, 4)],
)
def test_the_sum_is_exact_but_for_the_noise_that_colluders_cost(
    sensitivity: Sensitivity, n_sites: int, n_colluders: int
) -> None:
    """Beside a trusted server the variance is W / (W - t) times as large, and rounding takes nothing more."""
    shares = NoiseShares(n_sites, n_colluders)
    sums = np.random.default_rng(5).integers(-1000, 1000, (n_sites, 20000, 2))
    sites = enumerate(sums)
    total = sum(add_noise_share(own, sensitivity, 10.0, shares, SeededRandomness(k)).value for k, own in sites)
    deviation = (total - sums.sum(axis=0)).std(axis=0)
    trusted = np.multiply(real_noise_std(sensitivity, 10.0), UNIT)
    # 20,000 draws: five standard errors of the standard deviation, twice those for the long tails of Laplace noise.
    within = 0.025 if sensitivity.norm is Norm.L2 else 0.05
    assert deviation == pytest.approx(trusted * math.sqrt(n_sites / (n_sites - n_colluders)), rel=within)


def test_one_honest_share_of_two_sites_is_the_whole_noise() -> None:
    distributed = add_noise_share(np.zeros((4, 2), int), SENSITIVITY, 5.0, NoiseShares(2, 1), SeededRandomness(1))
    trusted = add_gaussian_noise(np.zeros((4, 2), int), SENSITIVITY, 5.0, SeededRandomness(1))
    np.testing.assert_array_equal(distributed.value, trusted.value)
    assert distributed.event == trusted.event


def test_trust_models_say_what_they_protect() -> None:
    assert all("guarantee holds towards" in model.description for model in TrustModel)
