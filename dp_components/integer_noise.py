"""Noise of others: a mass function on the integers, from which its price follows, and a way to draw from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.errors import SecondOpinionDiffers, UnusableNoise
from dp_components.events import IntegerNoiseEvent, Release
from dp_components.mechanisms import require_integers
from dp_components.sensitivity import Norm, Sensitivity
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# A mass function that is known on all integers: a finite head, and a tail that repeats in proportion.
#
# Nothing is cut off and nothing is taken from its author but these numbers. Its sum is exact in rational numbers. A
# largest ratio p(k) / p(k - d) over all integers k is one over finitely many of them, because ratios in the tail repeat
# (dp_components/README.md, section 6).


MOST_MASSES = 1 << 16
SUM_ERROR = Fraction(1, 1 << 40)
"""How far the masses may be from adding up to one: room for masses that were computed in doubles."""
_LEAST_LOG = -4000  # of a mass; differences of two logarithms in units of 2^-50 then fit into 63 bits
_LOG_BITS = 50
_CONTEXT = Context(prec=60)


@dataclass(frozen=True)
class MassFunction:
    """A symmetric mass function on the integers: p(-k) = p(k).

    Attributes:
        head: p(0) .. p(K - 1), exact. A double is a fraction: ``Fraction(0.25)``.
        period, ratio: p(k) = ratio p(k - period) for all k from K on; the period is at most K.

    Raises:
        UnusableNoise: it is none, or no epsilon follows from it; named.
    """

    head: tuple[Fraction, ...]
    period: int
    ratio: Fraction

    def __post_init__(self) -> None:
        if not 0 < len(self.head) <= MOST_MASSES or not all(isinstance(one, Fraction) for one in self.head):
            raise UnusableNoise(f"its head is not a tuple of 1 to {MOST_MASSES} fractions")
        if type(self.period) is not int or not 1 <= self.period <= len(self.head):
            raise UnusableNoise("its tail cannot be bounded: the period is not from 1 to the length of the head")
        if not isinstance(self.ratio, Fraction) or not 0 <= self.ratio < 1:
            raise UnusableNoise("its tail cannot be bounded: the ratio is no fraction from 0 to below 1")
        if self.ratio == 0:
            raise UnusableNoise("it is cut off: its tail has no mass, so that epsilon is infinite at every shift")
        for k, one in enumerate(self.head):
            if one <= 0:
                raise UnusableNoise(f"it has a gap: no mass at {k}, so that epsilon is infinite at a shift onto it")
        tail = sum(self.head[-self.period :]) * self.ratio / (1 - self.ratio)
        total = self.head[0] + 2 * (sum(self.head[1:]) + tail)
        if abs(total - 1) > SUM_ERROR:
            raise UnusableNoise(f"its masses do not add up to one within 2^-40: they miss it by {float(total - 1):.3g}")

    def logarithms(self, n: int) -> NDArray[np.int64]:
        """Return ln p(0) .. ln p(n - 1), rounded down by less than two units. Shapes: int64[n]. Units: 2^-50.

        Raises:
            UnusableNoise: a mass below e^-4000.
        """
        falls = _ln(self.ratio)
        found = [_ln(one) for one in self.head[:n]]
        for k in range(len(self.head), n):
            found.append(_CONTEXT.add(found[k - self.period], falls))
        if min(found) < _LEAST_LOG:
            raise UnusableNoise("it has masses below e^-4000, which no draw would ever show")
        units = Decimal(1 << _LOG_BITS)
        return np.array([math.floor(_CONTEXT.multiply(one, units)) for one in found], dtype=np.int64)

    def masses(self, n: int) -> NDArray[np.float64]:
        """Return p(0) .. p(n - 1) in doubles. Shapes: float64[n]."""
        head = np.array([float(one) for one in self.head])
        k = np.arange(n)
        beyond = np.maximum(0, -((len(head) - 1 - k) // self.period))  # whole periods back into the head
        result: NDArray[np.float64] = head[k - beyond * self.period] * float(self.ratio) ** beyond
        return result

    @cached_property
    def variance(self) -> float:
        """The variance. Units: integers, squared."""
        r, p, start = float(self.ratio), self.period, len(self.head) - self.period
        head = np.array([float(one) for one in self.head])
        k = np.arange(len(head), dtype=np.float64)
        last, place = head[start:], k[start:]
        ones, firsts, squares = r / (1 - r), r / (1 - r) ** 2, r * (1 + r) / (1 - r) ** 3  # sums of r^j, j r^j, j^2 r^j
        tail = float((last * (place**2 * ones + 2 * place * p * firsts + p**2 * squares)).sum())
        return 2 * (float((head * k**2).sum()) + tail)


def _ln(value: Fraction) -> Decimal:
    return _CONTEXT.subtract(_CONTEXT.ln(Decimal(value.numerator)), _CONTEXT.ln(Decimal(value.denominator)))


class IntegerNoise(Protocol):
    """Noise for one kind of query, made by a ``NoiseMechanism``."""

    @property
    def mass(self) -> MassFunction:
        """What it draws from."""
        ...

    def draw(self, n: int, randomness: RandomSource) -> NDArray[np.int64]:
        """Draw independent integers, exactly. Shapes: int64[n].

        Security: all bits come from ``randomness``, and none is kept.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoiseMechanism:
    """A family of noises: what an entry point of the group ``veilboost.noises`` is.

    Attributes:
        name: of the entry point.
        calibrate: (epsilon, shift, coordinates) -> noise for one query. Neighbours differ in so many coordinates at
            most, by integers whose absolute values add up to the shift at most. What its author takes for epsilon is
            not believed: the price is derived (``NoiseOfOthers.price``).
    """

    name: str
    calibrate: Callable[[float, int, int], IntegerNoise]


# The price of a query, from the mass function alone.
#
# All arithmetic is on integers in units of 2^-50, rounded up, so that the epsilon stated is never below the true one.


def shift_prices(mass: MassFunction, largest: int) -> NDArray[np.int64]:
    """Return epsilon of one coordinate at each shift from 0 to the largest. Shapes: int64[largest + 1]. Units: 2^-50.

    It is the largest |ln p(k) - ln p(k - d)| over all integers k, rounded up. With the head's length K, k from 1 - K to
    K + d - 1 are enough: beyond, both masses lie in one tail, where the ratio repeats with the period.
    """
    n = len(mass.head) + largest
    half = mass.logarithms(n)
    both = np.concatenate([half[:0:-1], half])
    first, last = largest, 2 * n - 1  # of k = 1 - K, and one behind K + largest - 1
    prices = [0]
    for d in range(1, largest + 1):
        moved = both[first : last - largest + d] - both[first - d : last - largest]
        prices.append(int(moved.max()) + 2)  # of logarithms rounded down, either by less than two units
    return np.maximum.accumulate(np.array(prices, dtype=np.int64))


def query_price(prices: NDArray[np.int64], n_coordinates: int) -> float:
    """Return epsilon of a query: the largest sum of coordinates' prices whose shifts add up to the largest at most.

    Args:
        prices: ``shift_prices``.
        n_coordinates: in which neighbours may differ.
    """
    best = prices.copy()
    for _ in range(n_coordinates - 1):
        of_one_more = best.copy()
        for d in range(1, prices.size):
            np.maximum(of_one_more[d:], prices[d] + best[: prices.size - d], out=of_one_more[d:])
        best = of_one_more
    return math.nextafter(math.ldexp(int(best[-1]), -_LOG_BITS), math.inf)


# A query on the noise's own integers.
#
# A sum in grid units is rounded to steps, coarse enough that few shifts have to be priced: coordinate i of weight w has
# steps of at least bound / (w RESOLUTION) grid units. Rounded numbers differ by at most ceil(|difference| / step), and
# not at all where the sums do not. So over n coordinates shifts add up to less than RESOLUTION + n.


RESOLUTION = 64
"""Steps in the bound of a sensitivity; rounding makes the noise larger by (n - 1) / 64."""


def steps_of(sensitivity: Sensitivity) -> tuple[int, ...]:
    """Return the step of each coordinate. Units: grid units. Raises: UnusableNoise: not an L1 sensitivity."""
    if sensitivity.norm is not Norm.L1:
        raise UnusableNoise("noise of others is for sensitivities in the L1 norm: those of pure methods")
    whole = Fraction(sensitivity.bound) / RESOLUTION
    return tuple(max(1, math.ceil(whole / Fraction(weight))) for weight in sensitivity.weights)


def largest_shift(n_coordinates: int) -> int:
    """Return how far neighbours' rounded sums are apart at most, over all coordinates."""
    return RESOLUTION + n_coordinates - 1


@dataclass(frozen=True, slots=True)
class PricedNoise:
    """Noise for the queries of one sensitivity, and what one costs.

    Privacy: neighbours differ in one coordinate for each weight of the sensitivity, and in no more: a row is in one
        cell of a query. That is the caller's word.
    """

    noise: IntegerNoise
    event: IntegerNoiseEvent

    def std(self) -> float:
        """Return the standard deviation. Units: steps."""
        return math.sqrt(self.noise.mass.variance)

    def add(self, sums: ArrayLike, sensitivity: Sensitivity, randomness: RandomSource = OS_RANDOMNESS) -> Release:
        """Round sums to steps and add fresh noise to each. Shapes: as ``add_noise``. Units: grid units.

        Raises:
            ValueError: as ``add_noise``; an ``UnusableNoise``: it drew something else than so many integers.
        """
        exact, steps = require_integers(sums, sensitivity), np.array(steps_of(sensitivity), dtype=np.int64)
        drawn = _draw(self.noise, exact.size, randomness)
        # Modulo 2^64, then within what a sum may be: both are functions of the noised number alone.
        noised = (exact + steps // 2) // steps + drawn.reshape(exact.shape)
        most = (1 << 60) // steps
        return Release(np.clip(noised, -most, most) * steps, self.event)


def _draw(noise: IntegerNoise, n: int, randomness: RandomSource) -> NDArray[np.int64]:
    try:
        drawn = noise.draw(n, randomness)
    except Exception as error:  # foreign code, of which anything may come; what it says may hold its noise
        raise UnusableNoise(f"it could not draw ({type(error).__name__})") from None
    if not isinstance(drawn, np.ndarray) or drawn.dtype != np.int64 or drawn.shape != (n,):
        raise UnusableNoise("it did not draw as many integers as it was asked for")
    return drawn


@dataclass(frozen=True, slots=True)
class NoiseOfOthers:
    """A mechanism that was loaded, and by what name its events go.

    Attributes:
        release: name, distribution, version and hash of its files.
    """

    mechanism: NoiseMechanism
    release: str

    def price(self, sensitivity: Sensitivity, epsilon: float) -> PricedNoise:
        """Ask for noise for a query, derive its price, and have a second accountant look at it.

        Args:
            epsilon: what the noise shall cost; what it does cost is in the event.

        Raises:
            UnusableNoise: no price follows from what it says of itself, or it fails; a ``SecondOpinionDiffers``.
        """
        n = len(sensitivity.weights)
        steps_of(sensitivity)
        try:
            noise = self.mechanism.calibrate(epsilon, largest_shift(n), n)
            mass = noise.mass
        except UnusableNoise:
            raise
        except Exception as error:  # foreign code, of which anything may come; its text may hold anything too
            raise UnusableNoise(f"it gave no noise ({type(error).__name__})") from error
        if not isinstance(mass, MassFunction):
            raise UnusableNoise("it has no MassFunction")
        prices = shift_prices(mass, largest_shift(n))
        check_prices(mass, prices)
        found = query_price(prices, n)
        return PricedNoise(noise, IntegerNoiseEvent(found, sensitivity.relation, self.release, largest_shift(n), n))


# A second opinion from Google's dp-accounting: privacy loss distributions of the mass function and of its shifts.
#
# Outcomes of one likelihood ratio can be taken together without changing what an observer learns. So each place of a
# tail stands for all that lie whole periods behind it, and the distributions are finite and whole.


_LOSS_STEPS = 1 << 12


def check_prices(mass: MassFunction, prices: NDArray[np.int64]) -> None:
    """Compare prices with dp-accounting's, at shifts that cost more than any before: a first, a middle and the last.

    Raises:
        SecondOpinionDiffers: they disagree, or dp-accounting is not installed or fails.
    """
    dearer = 1 + np.flatnonzero(np.diff(prices))
    for d in map(int, {dearer[0], dearer[dearer.size // 2], dearer[-1]}):
        ours = math.ldexp(int(prices[d]), -_LOG_BITS)
        theirs = _opinion(mass, d, ours / _LOSS_STEPS)
        if not -1e-9 * max(1.0, ours) <= theirs - ours <= 2 * ours / _LOSS_STEPS:
            raise SecondOpinionDiffers(
                f"Two accountants disagree on noise of others: epsilon {ours:.9g} (ours) and {theirs:.9g} "
                f"(dp-accounting) at a shift of {d}. The job does not start."
            )


def _opinion(mass: MassFunction, shift: int, interval: float) -> float:
    """Return the epsilon that dp-accounting finds at a shift, rounded up to a multiple of the interval."""
    n = len(mass.head) + shift
    lower, upper = _folded(mass, n, shift)
    try:
        from dp_accounting.pld.privacy_loss_distribution import from_two_probability_mass_functions

        found = from_two_probability_mass_functions(
            lower, upper, log_mass_truncation_bound=-math.inf, value_discretization_interval=interval
        )
        return float(found.get_epsilon_for_delta(0.0))
    except (ImportError, ArithmeticError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise SecondOpinionDiffers(
            f"The second accountant (dp-accounting) gave no figure ({type(error).__name__}). The job does not start: "
            "pip install 'dp-accounting==0.6.*'."
        ) from None


def _folded(mass: MassFunction, n: int, shift: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return logarithms of the masses of k and of k - shift, each place of the last period standing for all behind."""
    start = len(mass.head) - mass.period
    places = range(-(start + mass.period) + 1, start + shift + mass.period)
    logs = np.log(mass.masses(n + mass.period))
    behind = -math.log1p(-float(mass.ratio))  # of 1 + r + r^2 + ..
    lower, upper = {}, {}
    for k in places:
        more = behind if k <= -start or k - shift >= start else 0.0
        lower[k], upper[k] = float(logs[abs(k)]) + more, float(logs[abs(k - shift)]) + more
    return lower, upper


# Whether draws are of the mass function that is claimed.


RARE = 1e-9
"""A true mechanism is taken for a false one so often."""
_LEAST_EXPECTED = 20.0


def rareness_of_draws(noise: IntegerNoise, n: int, randomness: RandomSource = OS_RANDOMNESS) -> float:
    """Return how rarely draws of the claimed mass function are so far from it (two chi-square tests, coarse and fine).

    Raises:
        UnusableNoise: it did not draw so many integers.
    """
    drawn = _draw(noise, n, randomness)
    return min(1.0, 2 * min(_chi_square(noise.mass, drawn, least) for least in (_LEAST_EXPECTED, n / 64)))


def _chi_square(mass: MassFunction, drawn: NDArray[np.int64], least: float) -> float:
    from scipy.stats import chi2  # SciPy takes long to import

    reach = max(len(mass.head), math.ceil(12 * math.sqrt(mass.variance))) + 1
    half = mass.masses(min(reach, 1 << 22))
    expected = drawn.size * np.concatenate([half[:0:-1], half])
    edge = half.size - 1
    found = np.bincount(np.clip(drawn, -edge, edge) + edge, minlength=expected.size)
    # Neighbouring integers share a cell until enough draws are due in it; what lies beyond is in the outermost ones.
    cell = np.floor(np.cumsum(expected) / least).astype(np.int64)
    due, seen = np.bincount(cell, expected), np.bincount(cell, found)
    due[[0, -1]] += max(0.0, drawn.size - due.sum()) / 2
    keep = due >= least / 4
    due = np.append(due[keep], due[~keep].sum() + 1e-300)
    seen = np.append(seen[keep], seen[~keep].sum())
    if due[-1] < least / 4:
        due[-2], seen[-2] = due[-2] + due[-1], seen[-2] + seen[-1]
        due, seen = due[:-1], seen[:-1]
    return float(chi2.sf(float(((seen - due) ** 2 / due).sum()), max(1, due.size - 1)))
