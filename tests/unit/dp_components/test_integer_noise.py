"""Noise of others: its price is that of a naive twin in fractions, and what has none is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from dp_components import integer_noise
from dp_components.accounting import compose
from dp_components.errors import SecondOpinionDiffers, UnusableNoise
from dp_components.events import IntegerNoiseEvent, NeighbouringRelation
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
from dp_components.mechanisms import sample_discrete_laplace
from dp_components.sensitivity import Norm, Sensitivity
from tests.support.examples import quick
from tests.support.seeded_randomness import SeededRandomness

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
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
