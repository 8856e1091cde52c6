"""The noise that is drawn is the noise that is accounted: not less, and not more.

Draws are seeded, so no test fails by chance from run to run. Each statistic has a false-alarm probability of at most
ALPHA = 1e-5 over random seeds, on both sides, and each is shown to reject 2/3 and 3/2 of the noise at the same n.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from dp_components.events import DiscreteLaplaceEvent, NeighbouringRelation
from dp_components.mechanisms import (
    NoiseShares,
    add_gaussian_noise,
    add_laplace_noise,
    add_noise_share,
    choose_exponentially,
    randomise_buckets,
    sample_discrete_gaussian,
    sample_discrete_laplace,
    sample_laplace_share,
)
from dp_components.sensitivity import GRID_BITS, Norm, Sensitivity, clip_logistic_rows
from tests.support.seeded_randomness import SeededRandomness

ALPHA = 1e-5
N = 40_000
WRONG = (2 / 3, 3 / 2)
ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
LOGISTIC = clip_logistic_rows([0.5], [0.25]).sensitivity
LARGE = 2.0**29 * 1.1


def is_plausible(p_value: float) -> bool:
    """Two-sided: neither too far from the expected counts nor suspiciously close to them."""
    return ALPHA / 2 < p_value < 1 - ALPHA / 2


def gaussian_energy(y: np.ndarray, scale: float) -> np.ndarray:
    return y**2 / (2 * scale**2)


def laplace_energy(y: np.ndarray, scale: float) -> np.ndarray:
    return np.abs(y) / scale


def fits_integers(drawn: np.ndarray, energy: Callable[[np.ndarray, float], np.ndarray], scale: float) -> bool:
    """Chi-square of the counts of every integer (tails pooled to at least ten expected) against exp(-energy)."""
    reach = np.arange(-int(40 * scale) - 20, int(40 * scale) + 21).astype(float)
    weight = np.exp(-energy(reach, scale))
    expected = drawn.size * weight / weight.sum()
    inner = np.flatnonzero(expected >= 10)
    first, last = inner[0], inner[-1]
    position = np.clip(np.searchsorted(reach, drawn), first, last)
    pooled = expected[first : last + 1].copy()
    pooled[0] += expected[:first].sum()
    pooled[-1] += expected[last + 1 :].sum()
    counts = np.bincount(position - first, minlength=pooled.size)
    return is_plausible(stats.chisquare(counts, pooled * (drawn.size / pooled.sum())).pvalue)


def fits_continuous(drawn: np.ndarray, law: stats.rv_continuous) -> bool:
    """Chi-square of the counts in 64 intervals of equal probability; on large scales the integers are dense."""
    counts = np.bincount((law.cdf(drawn) * 64).astype(int).clip(0, 63), minlength=64)
    return is_plausible(stats.chisquare(counts).pvalue)


def has_scale(drawn: np.ndarray, scale: float) -> bool:
    """The sum of squares over scale^2 is chi-square with n degrees: the sharpest test of a Gaussian's scale."""
    tail = stats.chi2(drawn.size).cdf(float(np.sum((drawn / scale) ** 2)))
    return is_plausible(float(tail))


@pytest.mark.parametrize("scale", [0.4, 1.0, 1.7, 4.0, 4.1, 23.0])
@pytest.mark.parametrize(
    ("sample", "energy"), [(sample_discrete_gaussian, gaussian_energy), (sample_discrete_laplace, laplace_energy)]
)
def test_every_integer_has_its_probability(sample: Callable, energy: Callable, scale: float) -> None:
    drawn = sample(scale, N, SeededRandomness(11))
    assert fits_integers(drawn, energy, scale)
    for wrong in WRONG:
        assert not fits_integers(drawn, energy, wrong * scale)


@pytest.mark.parametrize("scale", [1000.0, LARGE, 2.0**44])
def test_large_scales_gaussian(scale: float) -> None:
    drawn = sample_discrete_gaussian(scale, N, SeededRandomness(12))
    assert fits_continuous(drawn, stats.norm(scale=scale)) and has_scale(drawn, scale)
    for wrong in WRONG:
        assert not fits_continuous(drawn, stats.norm(scale=wrong * scale)) and not has_scale(drawn, wrong * scale)


@pytest.mark.parametrize("scale", [1000.0, LARGE, 2.0**44])
def test_large_scales_laplace(scale: float) -> None:
    drawn = sample_discrete_laplace(scale, N, SeededRandomness(13))
    assert fits_continuous(drawn, stats.laplace(scale=scale))
    for wrong in WRONG:
        assert not fits_continuous(drawn, stats.laplace(scale=wrong * scale))


@pytest.mark.parametrize("shape", [gaussian_energy, laplace_energy])
def test_the_two_laws_are_told_apart(shape: Callable) -> None:
    """At equal variance: the test sees the form of a distribution and not its scale alone."""
    gaussian = sample_discrete_gaussian(10.0, N, SeededRandomness(1))
    laplace = sample_discrete_laplace(10.0 / math.sqrt(2), N, SeededRandomness(1))
    assert fits_integers(gaussian, gaussian_energy, 10.0)
    assert not fits_integers(laplace, gaussian_energy, 10.0)
    assert not fits_integers(gaussian, laplace_energy, 10.0 / math.sqrt(2))


def test_low_bits_are_uniform() -> None:
    """Floating-point noise has patterns here (Mironov 2012). 16 low bits' parities: n = 40,000, ALPHA / 16 each."""
    drawn = sample_discrete_gaussian(LARGE, N, SeededRandomness(2))
    rounded = np.rint(np.random.default_rng(2).normal(0, 1, N) * LARGE / 2**12).astype(np.int64) << 12
    for bit in range(16):
        ones = int((drawn >> bit & 1).sum())
        assert stats.binomtest(ones, N, 0.5).pvalue > ALPHA / 16
        if bit < 12:
            assert stats.binomtest(int((rounded >> bit & 1).sum()), N, 0.5).pvalue < ALPHA


@pytest.mark.parametrize("lag", [1, 2, 15, 16])
def test_draws_are_independent_of_each_other(lag: int) -> None:
    """Correlation times sqrt(n) is standard normal, for the values and for their squares."""
    drawn = sample_discrete_gaussian(LARGE, N, SeededRandomness(3)) / LARGE
    for values in (drawn, drawn**2 - 1):
        correlation = float(np.mean(values[lag:] * values[:-lag]) / np.var(values))
        assert 2 * stats.norm.sf(abs(correlation) * math.sqrt(N - lag)) > ALPHA / 2
    assert abs(np.corrcoef(drawn, np.roll(drawn, lag) + drawn)[0, 1]) > 0.5, "a dependence would be seen"


def test_gaussian_mechanism_on_zero_data() -> None:
    """Every coordinate of an empty query has the standard deviation that its event is charged for."""
    release = add_gaussian_noise(np.zeros((N, 2), int), LOGISTIC, 99.4, SeededRandomness(4))
    for column, weight in enumerate(LOGISTIC.weights):
        scale = release.event.noise_multiplier * LOGISTIC.bound / weight
        assert has_scale(release.value[:, column], scale)
        for wrong in WRONG:
            assert not has_scale(release.value[:, column], wrong * scale)


@pytest.mark.parametrize(("n_sites", "n_colluders"), [(2, 1), (3, 1), (5, 3)])
def test_shares_that_a_coalition_does_not_know(n_sites: int, n_colluders: int) -> None:
    shares = NoiseShares(n_sites, n_colluders)
    releases = [
        add_noise_share(np.zeros((N, 2), int), LOGISTIC, 20.0, shares, SeededRandomness(20 + site))
        for site in range(n_sites)
    ]
    honest = sum(release.value for release in releases[n_colluders:])
    scale = releases[0].event.noise_multiplier * LOGISTIC.bound
    assert has_scale(honest[:, 0], scale) and fits_continuous(honest[:, 0], stats.norm(scale=scale))
    for wrong in WRONG:
        assert not has_scale(honest[:, 0], wrong * scale)
    missing = honest[:, 0] - releases[-1].value[:, 0]
    assert not has_scale(missing, scale), "a missing share must be noticed"
    twice = sum(releases[0].value[:, 0] for _ in range(n_sites - n_colluders))
    assert n_sites - n_colluders == 1 or not has_scale(twice, scale), "the same share at two sites must be noticed"


SHARES = [(0.6, 2), (1.0, 3), (5.3, 2), (12.0, 4)]
"""Scale in grid units, and of how many shares; blocks of width 1, 1, 8 and 16."""


def fits_share(drawn: np.ndarray, scale: float, order: float) -> bool:
    """Chi-square against the difference of two negative binomials, convolved numerically."""
    reach = np.arange(int(40 * scale) + 40)
    one = stats.nbinom.pmf(reach, order, -math.expm1(-1 / scale))
    expected = drawn.size * np.convolve(one, one[::-1])
    inner = np.flatnonzero(expected >= 10)
    first, last = inner[0], inner[-1]
    pooled = expected[first : last + 1].copy()
    pooled[0] += expected[:first].sum()
    pooled[-1] += expected[last + 1 :].sum()
    counts = np.bincount(np.clip(drawn + reach[-1], first, last) - first, minlength=pooled.size)
    return is_plausible(stats.chisquare(counts, pooled * (drawn.size / pooled.sum())).pvalue)


@pytest.mark.parametrize(("scale", "n_shares"), SHARES)
def test_a_share_is_a_difference_of_negative_binomials(scale: float, n_shares: int) -> None:
    drawn = sample_laplace_share(scale, n_shares, N, SeededRandomness(14))
    assert fits_share(drawn, scale, 1 / n_shares)
    for wrong in WRONG:
        assert not fits_share(drawn, wrong * scale, 1 / n_shares)
        assert not fits_share(drawn, scale, wrong / n_shares)


@pytest.mark.parametrize(("scale", "n_shares"), [*SHARES, (23.0, 2)])
def test_honest_shares_sum_to_exactly_laplace_noise(scale: float, n_shares: int) -> None:
    """As many shares as are counted on; one less, or shares of one order less (1/W, say), is noticed."""
    shares = [sample_laplace_share(scale, n_shares, N, SeededRandomness(30 + k)) for k in range(n_shares)]
    assert fits_integers(sum(shares), laplace_energy, scale)
    assert not fits_integers(sum(shares[1:]), laplace_energy, scale)
    for wrong in WRONG:
        assert not fits_integers(sum(shares), laplace_energy, wrong * scale)
    smaller = sum(sample_laplace_share(scale, n_shares + 1, N, SeededRandomness(40 + k)) for k in range(n_shares))
    assert not fits_integers(smaller, laplace_energy, scale)


@pytest.mark.parametrize("scale", [1000.0, LARGE, 2.0**44])
def test_large_scales_of_shares(scale: float) -> None:
    drawn = sum(sample_laplace_share(scale, 3, N, SeededRandomness(50 + k)) for k in range(3))
    assert fits_continuous(drawn, stats.laplace(scale=scale))
    for wrong in WRONG:
        assert not fits_continuous(drawn, stats.laplace(scale=wrong * scale))


def test_laplace_noise_by_coordinate() -> None:
    """Coordinates of weights 1 and 2 have scales of bound / epsilon and half of that, as the event says."""
    sensitivity = Sensitivity(3.0, Norm.L1, ROW, (1.0, 2.0))
    shares = [
        add_noise_share(np.zeros((N, 2), int), sensitivity, 4.0, NoiseShares(3, 1), SeededRandomness(60 + k))
        for k in range(2)
    ]
    assert shares[0].event == DiscreteLaplaceEvent(0.25, ROW, ((12.0, N), (6.0, N)), GRID_BITS, 2)
    total = sum(share.value for share in shares)
    for column, scale in enumerate((12.0, 6.0)):
        assert fits_integers(total[:, column], laplace_energy, scale)
        for wrong in WRONG:
            assert not fits_integers(total[:, column], laplace_energy, wrong * scale)


def test_laplace_mechanism_on_zero_data() -> None:
    epsilon = 0.25
    release = add_laplace_noise(np.zeros(N, int), Sensitivity(3.0, Norm.L1, ROW), epsilon, SeededRandomness(5))
    assert fits_integers(release.value, laplace_energy, 3.0 / epsilon)
    for wrong in WRONG:
        assert not fits_integers(release.value, laplace_energy, wrong * 3.0 / epsilon)


def test_exponential_mechanism() -> None:
    utilities, sensitivity = np.array([0, 3, 4, 9, 10, 10]), Sensitivity(2.0, Norm.UTILITY, ROW)
    source = SeededRandomness(6)
    chosen = [int(choose_exponentially(utilities, sensitivity, 1.0, source).value[0]) for _ in range(8000)]
    counts = np.bincount(chosen, minlength=6)

    def p_value(epsilon: float) -> float:
        weight = np.exp(epsilon * utilities / (2 * sensitivity.bound))
        return float(stats.chisquare(counts, counts.sum() * weight / weight.sum()).pvalue)

    assert is_plausible(p_value(1.0))
    for wrong in WRONG:
        assert not is_plausible(p_value(wrong))


def test_randomised_response() -> None:
    """The wrong-bucket rate of the paper (21.55 % at epsilon 4, 16 buckets); the wrong buckets evenly."""
    ids = np.full((N, 2), 5)
    sent = randomise_buckets(ids, [16, 7], 4.0, randomness=SeededRandomness(8)).value
    for column, q in enumerate((16, 7)):
        counts = np.bincount(sent[:, column], minlength=q)
        n_kept = int(counts[5])

        def p_value(epsilon: float, q: int = q, n_kept: int = n_kept) -> float:
            return float(stats.binomtest(n_kept, N, math.exp(epsilon) / (math.exp(epsilon) + q - 1)).pvalue)

        assert p_value(4.0) > ALPHA
        assert all(p_value(4.0 * wrong) < ALPHA for wrong in WRONG)
        assert is_plausible(stats.chisquare(np.delete(counts, 5)).pvalue)
        assert counts.size == q
    assert np.mean(sent[:, 0] != 5) == pytest.approx(0.2155, abs=0.01)
