"""Mechanisms: exact coins, prices that match what is sampled, refusals. Distributions: tests/statistical."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest

from dp_components import accounting, integer_noise, mechanisms
from dp_components.accounting import compose
from dp_components.errors import PrivacyRefusal, SecondOpinionDiffers, UnusableNoise
from dp_components.events import (
    DiscreteGaussianEvent,
    IntegerNoiseEvent,
    LaplaceEvent,
    NeighbouringRelation,
    event_document,
    event_from_document,
)
from dp_components.integer_noise import (
    RESOLUTION,
    MassFunction,
    NoiseMechanism,
    NoiseOfOthers,
    check_prices,
    largest_shift,
    query_price,
    shift_prices,
    steps_of,
)
from dp_components.leaf_weights import UNIT, real_noise_std
from dp_components.mechanisms import (
    NoiseShares,
    TrustModel,
    _geometric,
    add_gaussian_noise,
    add_laplace_noise,
    add_noise_share,
    choose_exponentially,
    gaussian_event,
    grid_utilities,
    noise_event,
    randomise_buckets,
    sample_discrete_gaussian,
    sample_discrete_laplace,
    sample_laplace_share,
    toss,
    utility_sensitivity,
)
from dp_components.sensitivity import GRID_BITS, HESSIAN_WEIGHT, Norm, Sensitivity, clip_gradients, clip_logistic_rows
from tests.support.examples import quick
from tests.support.seeded_randomness import ListedRandomness, SeededRandomness

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
LOGISTIC = clip_logistic_rows([0.5], [0.25]).sensitivity
COUNT = Sensitivity(1.0, Norm.L1, ROW)


def exact_inverse_e(_: int, context: Context) -> Decimal:
    return context.exp(Decimal(-1))


def inverse_e_bits(n_bits: int) -> int:
    with mpmath.workdps(100):
        return int(mpmath.floor(mpmath.exp(-1) * 2**n_bits))


@pytest.mark.parametrize(("further", "expected"), [((0,), True), (((1 << 64) - 1,), False)])
def test_a_coin_on_the_edge_is_settled_by_further_bits(further: tuple[int, ...], expected: bool) -> None:
    source = ListedRandomness(inverse_e_bits(64), *further)
    assert toss(np.array([math.exp(-1)]), exact_inverse_e, source)[0] == expected


def test_a_coin_on_the_edge_of_the_edge_takes_more_bits_and_digits() -> None:
    bits = inverse_e_bits(256)
    words = [(bits >> shift) & ((1 << 64) - 1) for shift in (192, 128, 64, 0)]
    assert toss(np.array([math.exp(-1)]), exact_inverse_e, ListedRandomness(*words[:3], words[3] - 1))[0]
    assert not toss(np.array([math.exp(-1)]), exact_inverse_e, ListedRandomness(*words[:3], words[3] + 1))[0]


def test_neighbouring_words_decide_at_once() -> None:
    word = inverse_e_bits(64)
    assert toss(np.array([math.exp(-1)]), exact_inverse_e, ListedRandomness(word - 1))[0]
    assert not toss(np.array([math.exp(-1)]), exact_inverse_e, ListedRandomness(word + 1))[0]


@pytest.fixture
def always_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every coin through decimal arithmetic: the naive twin of the fast path."""
    monkeypatch.setattr(mechanisms, "RELATIVE_ERROR", 1e9)


SAMPLERS = {
    "gaussian, tiny": lambda source: sample_discrete_gaussian(0.3, 300, source),
    "gaussian, unit": lambda source: sample_discrete_gaussian(1.0, 300, source),
    "gaussian": lambda source: sample_discrete_gaussian(2.0**29 * 1.1, 300, source),
    "gaussian, largest": lambda source: sample_discrete_gaussian(2.0**44, 300, source),
    "laplace": lambda source: sample_discrete_laplace(12345.678, 300, source),
    "share, tiny": lambda source: sample_laplace_share(0.3, 2, 300, source),
    "share": lambda source: sample_laplace_share(12345.678, 3, 100, source),
    "share, largest": lambda source: sample_laplace_share(2.0**44, 2, 30, source),
    "exponential": lambda source: (
        choose_exponentially(np.arange(40), Sensitivity(3.0, Norm.UTILITY, ROW), 1.0, source).value
    ),
    "response": lambda source: randomise_buckets(np.full((200, 2), 1), [16, 3], 2.0, randomness=source).value,
}
FAST = {name: sample(SeededRandomness(7)) for name, sample in SAMPLERS.items()}


@pytest.mark.parametrize("name", SAMPLERS)
def test_floating_point_decides_nothing_by_itself(name: str, always_exact: None) -> None:
    """Deciding every coin in decimal arithmetic gives the same values from the same bits."""
    np.testing.assert_array_equal(SAMPLERS[name](SeededRandomness(7)), FAST[name])


def test_the_operating_system_is_asked_by_default() -> None:
    draws = [tuple(sample_discrete_gaussian(1e6, 8)) for _ in range(20)]
    assert len(set(draws)) == 20


def test_block_numbers_go_on_into_further_words() -> None:
    """Runs of zeros longer than one word's field are one in 131,072: too rare for a statistical test to see."""
    fields = np.array([0, 1, 2, 0, 1 << 16, 3], dtype=np.uint64)
    source = ListedRandomness(0, 0b100, 0b1000)  # the fields 0 and 3 go on; field 0 finds zeros only, and goes on again
    assert _geometric(fields, source).tolist() == [17 + 17 + 3, 0, 1, 17 + 2, 16, 0]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 2.0**45])
def test_scales_that_cannot_be_sampled_are_refused(scale: float) -> None:
    for sample in (sample_discrete_gaussian, sample_discrete_laplace, partial(sample_laplace_share, n_shares=2)):
        with pytest.raises(ValueError, match="scale"):
            sample(scale, n=1)


def test_sizes() -> None:
    assert sample_discrete_gaussian(5.0, 0).shape == (0,)
    with pytest.raises(ValueError, match="negative"):
        sample_discrete_laplace(5.0, -1)
    with pytest.raises(ValueError, match="n_shares"):
        sample_laplace_share(5.0, 0, 1)


def test_the_gaussian_event_is_never_better_than_the_noise() -> None:
    """The multiplier accounted times the sensitivity is at most each coordinate's parameter, in exact arithmetic."""
    for multiplier in (0.37, 99.4, 434.9 / 7):
        event = gaussian_event(64, LOGISTIC, multiplier)
        for (scale, count), weight in zip(event.scales, LOGISTIC.weights, strict=True):
            assert Fraction(event.noise_multiplier) * Fraction(LOGISTIC.bound) <= Fraction(scale) * Fraction(weight)
            assert count == 32
        assert event.noise_multiplier == pytest.approx(multiplier, rel=1e-14)


def test_gaussian_noise_has_one_scale_per_coordinate() -> None:
    sums = np.zeros((20000, 2), dtype=np.int64)
    release = add_gaussian_noise(sums, LOGISTIC, 50.0, SeededRandomness(3))
    deviation = release.value.std(axis=0) / 2**GRID_BITS
    # 20,000 draws: the standard error of a standard deviation is 0.5 %, so 2.5 % is five of them.
    assert deviation == pytest.approx([50.0, 50.0 / HESSIAN_WEIGHT], rel=0.025)
    assert release.event == gaussian_event(sums.size, LOGISTIC, 50.0)
    assert compose(release.event).mu_squared == pytest.approx(1 / 2500)
    assert not sums.any()


@pytest.mark.parametrize(
    "sums", [np.zeros((3, 2)), np.zeros((0, 2), int), np.zeros((2, 3), int), np.full((1, 2), 1 << 61), np.int64(3)]
)
def test_queries_that_do_not_fit_are_refused(sums: np.ndarray) -> None:
    with pytest.raises(ValueError):
        add_gaussian_noise(sums, LOGISTIC, 1.0)


def test_each_mechanism_insists_on_its_norm() -> None:
    with pytest.raises(ValueError, match="L2"):
        add_gaussian_noise([1], COUNT, 1.0)
    with pytest.raises(ValueError, match="L1"):
        add_laplace_noise([1], LOGISTIC, 1.0)
    with pytest.raises(ValueError, match="utility"):
        choose_exponentially([1, 2], COUNT, 1.0)
    for bad in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError):
            add_gaussian_noise([[1, 1]], LOGISTIC, bad)
        with pytest.raises(ValueError):
            add_laplace_noise([1], COUNT, bad)


def test_laplace_keeps_exactly_its_epsilon() -> None:
    release = add_laplace_noise(np.arange(6).reshape(2, 3), COUNT, 0.7, SeededRandomness(1))
    assert release.event == LaplaceEvent(0.7, ROW) and release.value.shape == (2, 3)


def test_laplace_noise_of_weighted_sums_is_never_less_than_its_epsilon_asks_for() -> None:
    """In exact arithmetic sum |difference_i| / b_i is at most epsilon for every difference within the sensitivity."""
    for bound, epsilon, weights in ((629145.0, 1 / 133.7, (1.0, 2.0)), (3.0, 0.7, (0.1, 1.5, 3.3)), (1.0, 3.0, (1.0,))):
        of = Sensitivity(bound, Norm.L1, ROW, weights)
        event = noise_event(4 * len(weights), of, 1 / epsilon, 2)
        assert event.epsilon == 1 / (1 / epsilon) == pytest.approx(epsilon) and event.n_shares == 2
        for (scale, count), weight in zip(event.scales, weights, strict=True):
            assert Fraction(bound) <= Fraction(scale) * Fraction(weight) * Fraction(event.epsilon)
            assert scale == pytest.approx(bound / weight / epsilon, rel=1e-14) and count == 4
        assert compose([event] * 10).parts() == pytest.approx((0.0, 10 * epsilon, 0.0, 0.0))
    with pytest.raises(ValueError, match=r"at most 2\^44"):
        noise_event(1, of, 2.0**45)


def test_utilities_are_rounded_down_and_their_sensitivity_pays_for_it() -> None:
    grid = 2.0**-20
    sensitivity = utility_sensitivity(3.0, grid, LOGISTIC)
    assert sensitivity.norm is Norm.UTILITY and sensitivity.bound >= 3 * 2**20 + 1
    one, other = grid_utilities([0.1, 5.0], grid), grid_utilities([3.1, 2.0], grid)
    assert np.abs(one - other).max() <= sensitivity.bound
    with pytest.raises(ValueError, match="finite"):
        grid_utilities([math.nan], grid)


def test_exponential_mechanism_finds_the_best_where_there_is_no_doubt() -> None:
    utilities = np.array([0, 10**9, 0, -(10**9)])
    release = choose_exponentially(utilities, Sensitivity(1.0, Norm.UTILITY, ROW), 1.0)
    assert release.value.tolist() == [1]
    for bad in ([], [[1]], [0.5], [1 << 60]):
        with pytest.raises(ValueError):
            choose_exponentially(bad, Sensitivity(1.0, Norm.UTILITY, ROW), 1.0)


def test_randomised_response_limits() -> None:
    ids = np.random.default_rng(0).integers(0, 16, (500, 3))
    sizes = np.array([16, 16, 16])
    np.testing.assert_array_equal(randomise_buckets(ids, sizes, 100.0).value, ids)
    np.testing.assert_array_equal(randomise_buckets(np.zeros((5, 1), int), [1], 0.1).value, np.zeros((5, 1)))
    for bad_ids, bad_sizes in ((ids - 1, sizes), (ids + 1, sizes), (ids, sizes[:2]), (ids * 1.0, sizes)):
        with pytest.raises(ValueError):
            randomise_buckets(bad_ids, bad_sizes, 1.0)


@pytest.mark.parametrize(("scale", "rounding"), [(4.0, 0.5), (4.0, 0.7), (1.5, 0.7), (6.3, 0.6)])
def test_a_discrete_gaussian_is_a_rounding_of_a_narrower_gaussian(scale: float, rounding: float) -> None:
    """The argument of the slack (accounting.py), by integration, where its distance is large enough to be measured."""
    x = np.linspace(-12 * scale, 12 * scale, 20_001)  # steps far below both widths: more give the same sums
    narrower = np.exp(-(x**2) / (2 * (scale**2 - rounding**2)))
    narrower /= narrower.sum()
    reach = np.arange(int(-13 * scale), int(13 * scale) + 1)
    normaliser = sum(np.exp(-((x - k) ** 2) / (2 * rounding**2)) for k in reach)
    rounded = [(narrower * np.exp(-((x - k) ** 2) / (2 * rounding**2)) / normaliser).sum() for k in reach]
    sampled = np.exp(-(reach**2) / (2 * scale**2))
    distance = np.abs(sampled / sampled.sum() - rounded).sum() / 2
    assert 1e-9 < distance < 3 * math.exp(-2 * math.pi**2 * rounding**2)


@pytest.mark.parametrize(("scale", "n_shares"), [(0.6, 2), (0.6, 3), (0.8, 2), (0.8, 4)])
def test_distance_of_summed_shares(scale: float, n_shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The theorem's formula where its value can be measured: far below the least scale that is allowed."""
    monkeypatch.setattr(accounting, "LEAST_SCALE", 0.5)
    y = np.arange(-60, 61)
    share = np.exp(-(y**2) / (2 * scale**2))
    total = share = share / share.sum()
    for _ in range(n_shares - 1):
        total = np.convolve(total, share)
    reach = np.arange(total.size) - total.size // 2
    whole = np.exp(-(reach**2) / (2 * n_shares * scale**2))
    distance = np.abs(total - whole / whole.sum()).sum() / 2
    assert 1e-6 < distance < accounting.summed_shares_distance(scale, n_shares)


def test_coarse_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="finer grid"):
        compose(DiscreteGaussianEvent(1.0, ROW, ((3.9, 1),)))
    with pytest.raises(ValueError, match="finer grid"):
        compose(DiscreteGaussianEvent(1.0, ROW, ((3.0, 1),), n_shares=100))


def test_events_survive_being_written_down() -> None:
    for event in (gaussian_event(64, LOGISTIC, 99.4, 2), LaplaceEvent(0.1, ROW), noise_event(6, COUNT, 9.0, 2)):
        assert event_from_document(event_document(event)) == event


# -- noise of others: its price is that of a naive twin in fractions, and what has none is refused ---------------------


PAIR = Sensitivity(629145.0, Norm.L1, ROW, (1.0, 2.0))


def geometric(ratio: Fraction) -> MassFunction:
    return MassFunction(((1 - ratio) / (1 + ratio),), 1, ratio)


def drawn_at_random(seed: int) -> MassFunction:
    rng = np.random.default_rng(seed)
    head = [Fraction(int(one)) for one in rng.integers(1, 1000, rng.integers(1, 9))]
    period, ratio = int(rng.integers(1, len(head) + 1)), Fraction(int(rng.integers(1, 100)), 100)
    tail = sum(head[-period:]) * ratio / (1 - ratio)
    total = head[0] + 2 * (sum(head[1:]) + tail)
    return MassFunction(tuple(one / total for one in head), period, ratio)


def mass_at(mass: MassFunction, k: int) -> Fraction:
    k, factor = abs(k), Fraction(1)
    while k >= len(mass.head):
        k, factor = k - mass.period, factor * mass.ratio
    return mass.head[k] * factor


def naive(mass: MassFunction, largest: int) -> list[float]:
    """Epsilon of each shift and all below it, over far more integers than ratios differ at."""
    at = {k: mass_at(mass, k) for k in range(-60 - largest, 61 + largest)}
    worst = (max(at[k] / at[k - d] for k in range(-60, 61 + largest)) for d in range(largest + 1))
    return [math.log(one) for one in itertools.accumulate(worst, max)]


@pytest.mark.parametrize("seed", quick(range(20), *range(5)))
def test_prices_are_those_of_a_naive_twin_and_never_below(seed: int) -> None:
    mass = drawn_at_random(seed)
    prices = shift_prices(mass, 9)
    ours = [math.ldexp(int(one), -50) for one in prices]
    twins = naive(mass, 9)
    assert ours == pytest.approx(twins, abs=1e-13)
    assert all(one >= twin * (1 - 2e-16) for one, twin in zip(ours, twins, strict=True))
    for n in (1, 2, 3):
        whole = max(sum(twins[d] for d in ds) for ds in itertools.product(range(10), repeat=n) if sum(ds) <= 9)
        assert query_price(prices, n) == pytest.approx(whole, abs=1e-13)
    check_prices(mass, prices)


@pytest.mark.parametrize("ratio", [Fraction(1, 2), Fraction(9, 10), Fraction(999, 1000)])
def test_a_shift_of_two_costs_two_of_one(ratio: Fraction) -> None:
    prices = shift_prices(geometric(ratio), 70)
    one = -math.log(ratio)
    for d in (1, 2, 70):
        assert one * d <= math.ldexp(int(prices[d]), -50) < one * d + 1e-12
    assert query_price(prices, 3) == pytest.approx(70 * one, abs=1e-12)  # however it is divided


def test_mass_and_variance_go_on_behind_the_head() -> None:
    mass = drawn_at_random(5)
    assert mass.masses(60) == pytest.approx([float(mass_at(mass, k)) for k in range(60)], rel=1e-12)
    assert mass.variance == pytest.approx(2 * float((np.arange(9000.0) ** 2 * mass.masses(9000)).sum()), rel=1e-9)
    assert geometric(Fraction(1, 2)).variance == pytest.approx(4.0)


HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("head", "period", "ratio", "what"),
    [
        ((HALF, Fraction(0)), 1, HALF, "gap: no mass at 1"),
        ((HALF, Fraction(-1, 8)), 1, HALF, "gap"),
        ((HALF, Fraction(1, 4)), 1, Fraction(0), "cut off"),
        ((HALF, Fraction(1, 8)), 1, Fraction(1), "tail cannot be bounded"),
        ((HALF, Fraction(1, 8)), 1, 0.5, "tail cannot be bounded"),
        ((HALF, Fraction(1, 8)), 3, HALF, "tail cannot be bounded"),
        ((HALF, Fraction(1, 8)), 0, HALF, "tail cannot be bounded"),
        ((HALF, Fraction(1, 8)), 1, HALF + Fraction(1, 1 << 38), "miss it by [0-9]"),
        ((Fraction(1, 3),), 1, HALF - Fraction(1, 1 << 38), "miss it by -"),
        ((), 1, HALF, "no tuple|not a tuple"),
        ((0.5,), 1, HALF, "not a tuple"),
    ],
)
def test_a_mass_function_without_a_price_is_refused(
    head: tuple[Fraction, ...], period: int, ratio: Fraction, what: str
) -> None:
    MassFunction((HALF, Fraction(1, 8)), 1, HALF)  # adds up
    with pytest.raises(UnusableNoise, match=what):
        MassFunction(head, period, ratio)


def test_masses_that_no_draw_shows_are_refused() -> None:
    with pytest.raises(UnusableNoise, match="below e"):
        shift_prices(geometric(Fraction(1, 1 << 200)), 40)


@dataclass(frozen=True)
class Geometric:
    mass: MassFunction
    scale: float

    def draw(self, n: int, randomness: object) -> np.ndarray:
        return sample_discrete_laplace(self.scale, n, randomness)  # type: ignore[arg-type]


def calibrate(epsilon: float, shift: int, coordinates: int) -> Geometric:
    return Geometric(geometric(Fraction(math.exp(-epsilon / shift))), shift / epsilon)


OTHERS = NoiseOfOthers(NoiseMechanism("acme", calibrate), "acme acme-noise 1.0 sha256 00")


def test_a_query_is_priced_from_its_mass_function() -> None:
    priced = OTHERS.price(PAIR, 0.25)
    assert priced.event == IntegerNoiseEvent(priced.event.epsilon, ROW, OTHERS.release, 65, 2)
    assert 0.25 * (1 - 1e-12) <= priced.event.epsilon <= 0.25 * (1 + 1e-12)
    assert compose([priced.event] * 4).pure_epsilon == 4 * priced.event.epsilon
    assert priced.std() == pytest.approx(math.sqrt(2) * 65 / 0.25, rel=1e-4)


def test_rounded_sums_of_neighbours_are_no_further_apart_than_is_priced() -> None:
    """Whatever a row adds within the sensitivity, wherever the sums stand."""
    rng = np.random.default_rng(3)
    for weights in ((1.0,), (1.0, 2.0), (1.0, 1.0, 0.5, 0.5)):
        sensitivity = Sensitivity(1000.5, Norm.L1, ROW, weights)
        steps, n = np.array(steps_of(sensitivity)), len(weights)
        share = rng.dirichlet(np.full(n, 0.3), 4000)
        row = np.trunc(share * sensitivity.bound / np.array(weights) * rng.choice([-1, 1], (4000, n))).astype(np.int64)
        sums = rng.integers(-(10**6), 10**6, (4000, n))
        rounded = [(one + steps // 2) // steps for one in (sums, sums + row)]
        apart = np.abs(rounded[1] - rounded[0]).sum(axis=1)
        assert RESOLUTION // 2 < apart.max() <= largest_shift(n)


def test_noise_is_added_in_steps() -> None:
    priced = OTHERS.price(PAIR, 1.0)
    sums = np.array([[629145, -629145], [0, 1 << 60]])
    noisy = priced.add(sums, PAIR, SeededRandomness(1)).value
    steps = np.array(steps_of(PAIR))
    assert steps.tolist() == [9831, 4916] and not (noisy % steps).any() and np.abs(noisy).max() <= 1 << 60
    drawn = sample_discrete_laplace(65.0, 4, SeededRandomness(1)).reshape(2, 2)
    assert np.array_equal(noisy[0], ((sums[0] + steps // 2) // steps + drawn[0]) * steps)


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda *shape: 1 / 0, "gave no noise .ZeroDivisionError"),
        (lambda *shape: Geometric("p", 1.0), "no MassFunction"),  # type: ignore[arg-type]
        (lambda *shape: geometric(HALF), "gave no noise .AttributeError"),
    ],
)
def test_a_mechanism_that_fails_is_refused(made: object, what: str) -> None:
    with pytest.raises(UnusableNoise, match=what):
        NoiseOfOthers(NoiseMechanism("acme", made), "acme").price(PAIR, 1.0)  # type: ignore[arg-type]


def test_draws_of_another_form_and_other_norms_are_refused() -> None:
    class Short(Geometric):
        def draw(self, n: int, randomness: object) -> np.ndarray:
            return np.zeros(n - 1, dtype=np.int64)

    short = NoiseMechanism("acme", lambda *shape: Short(geometric(HALF), 1.0))
    with pytest.raises(UnusableNoise, match="as many integers"):
        NoiseOfOthers(short, "acme").price(PAIR, 1.0).add(np.zeros((2, 2), dtype=np.int64), PAIR)
    with pytest.raises(UnusableNoise, match="L1 norm"):
        OTHERS.price(Sensitivity(1000.0, Norm.L2, ROW), 1.0)


@pytest.mark.parametrize("off", [-(1 << 40), 1 << 40])
def test_no_price_stands_on_one_accountant(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mass = geometric(Fraction(9, 10))
    prices = shift_prices(mass, 10)
    check_prices(mass, prices)
    with pytest.raises(SecondOpinionDiffers, match="disagree"):
        check_prices(mass, prices + off * (np.arange(11) > 0))
    monkeypatch.setattr(integer_noise, "_opinion", lambda mass, d, step: 0.0)
    with pytest.raises(SecondOpinionDiffers, match="disagree"):
        OTHERS.price(PAIR, 1.0)


# -- shares of noise ---------------------------------------------------------------------------------------------------


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
