"""What a set of privacy events costs, in closed form where one exists, and what that means for one person."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dp_components.errors import SecondOpinionDiffers, UnknownEvent
from dp_components.events import (
    ConcentratedEvent,
    DiscreteGaussianEvent,
    DiscreteLaplaceEvent,
    DisjointPartEvent,
    Event,
    ExponentialEvent,
    GaussianEvent,
    IntegerNoiseEvent,
    LaplaceEvent,
    LocalRandomisedResponseEvent,
    NeighbouringRelation,
    PricedEvent,
    simple_events,
)

# What discrete Gaussian noise costs beyond the continuous Gaussian that is accounted.
#
# What is sampled is a discrete Gaussian of parameter s on the integers, P(k) proportional to exp(-k^2 / (2 s^2)). It
# is, but for a total variation distance t below 10^-76 a coordinate, a post-processing of a continuous Gaussian that is
# hardly narrower, so that the exact accounting of Gaussians holds for it at a multiplier smaller by sqrt(1 - r^2 /
# s^2), and (epsilon, delta) becomes (epsilon, delta + (1 + e^epsilon) t).
#
# The argument, with r = 3 and q the exact query. Draw x from N(q, s^2 - r^2) and round it at random to the integer k
# with probability exp(-(x - k)^2 / (2 r^2)) / Z(x). The rounding knows x alone, so it is post-processing. By Poisson
# summation Z(x) = r sqrt(2 pi) (1 + 2 sum_j e^(-2 pi^2 r^2 j^2) cos(2 pi j x)) is the same for all x within a factor 1
# +- theta, theta < 2.001 e^(-2 pi^2 r^2). Were it constant, k would have the density of N(q, s^2) at k: convolving adds
# variances. So its probability is that density within 1 / (1 +- theta), the sampled probability is the density within 1
# + theta, and the two distributions are within t = 1.01 theta < 3 e^(-2 pi^2 r^2) of each other. Coordinates are
# independent.


LEAST_SCALE = 4.0
"""Grid units; noise on a coarser grid is refused."""

_ROUNDING = 3.0  # r
_DISTANCE = 3 * math.exp(-2 * math.pi**2 * _ROUNDING**2)


def narrowed(scale: float) -> float:
    """Return (s^2 - r^2) / s^2: the variance of the Gaussian that is accounted over that of the noise.

    Raises:
        ValueError: ``scale`` is below 4 grid units.
    """
    if not scale >= LEAST_SCALE:
        raise ValueError(f"the noise must have a scale of at least {LEAST_SCALE:g} grid units: use a finer grid")
    return (1 - (_ROUNDING / scale) ** 2) * (1 - 2.0**-50)


def summed_shares_distance(share_scale: float, n_shares: int) -> float:
    """Bound the total variation distance of a sum of discrete Gaussians from one discrete Gaussian.

    Args:
        share_scale: parameter of each share, in grid units, at least 4.
        n_shares: number of independent shares.

    Reference: Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism (arXiv 2102.06387), Theorem 9:
        likelihood ratios within exp(+-t), t = 10 sum_{k < n} exp(-2 pi^2 s^2 k / (k + 1)); the distance is below t.
    """
    if not share_scale >= LEAST_SCALE:
        raise ValueError(f"each share must have a scale of at least {LEAST_SCALE:g} grid units: use a finer grid")
    # The term for k = 1 is the largest, so n - 1 times it bounds the sum.
    return 10 * (n_shares - 1) * math.exp(-(math.pi**2) * share_scale**2)


def discrete_distance(scales: tuple[tuple[float, int], ...], n_shares: int) -> float:
    """Return the total distance over all coordinates of one query.

    Args:
        scales: pairs (parameter of one share in grid units, number of coordinates).
        n_shares: independent shares per coordinate.
    """
    return math.fsum(
        n_coordinates * (_DISTANCE + summed_shares_distance(scale, n_shares)) for scale, n_coordinates in scales
    )


def least_narrowed(scales: tuple[tuple[float, int], ...], n_shares: int) -> float:
    """Return ``narrowed`` of the summed noise of the coordinate that has the least. Arguments as above."""
    return narrowed(min(scale for scale, _ in scales) * math.sqrt(n_shares))


# Gaussian differential privacy in closed form.
#
# k Gaussian queries with noise multipliers s_i are together exactly mu-GDP with mu^2 = sum 1 / s_i^2, also when they
# are chosen adaptively; mu^2 is therefore what a budget is counted in.
#
# Reference: Dong, Roth and Su, Gaussian Differential Privacy, Corollaries 1 and 3; Balle and Wang (2018), Theorem 8;
# fully adaptive composition: arXiv 2210.17520.


def delta_of_mu(mu: float, epsilon: float) -> float:
    """Return the exact delta(epsilon) of mu-GDP: Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

    Raises:
        ValueError: ``mu`` or ``epsilon`` is negative or not finite.
    """
    if not (math.isfinite(mu) and math.isfinite(epsilon) and mu >= 0 and epsilon >= 0):
        raise ValueError("mu and epsilon must be finite and not negative")
    if mu == 0:
        return 0.0
    from scipy.special import log_ndtr  # SciPy takes long to import, and most processes account nothing

    log_first = float(log_ndtr(mu / 2 - epsilon / mu))
    log_second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    # As a difference of logarithms the result keeps its digits where both terms are tiny.
    return max(0.0, -math.exp(log_first) * math.expm1(min(0.0, log_second - log_first)))


# Concentrated (Renyi) accounting, for mechanisms that have nothing tighter.
#
# Every order a > 1 gives a valid bound, so the search for the best one cannot make the result unsafe.
#
# Reference: Bun and Steinke, Concentrated Differential Privacy; the conversion is Canonne, Kamath and Steinke, The
# Discrete Gaussian for Differential Privacy, Proposition 12.


def delta_of_rho(rho: float, epsilon: float) -> float:
    """Return a delta(epsilon) that rho-zCDP implies.

    Raises:
        ValueError: ``rho`` or ``epsilon`` is negative or not finite.
    """
    if not (math.isfinite(rho) and math.isfinite(epsilon) and rho >= 0 and epsilon >= 0):
        raise ValueError("rho and epsilon must be finite and not negative")
    if rho == 0:
        return 0.0

    def log_delta(order: float) -> float:
        return (order - 1) * (rho * order - epsilon + math.log1p(-1 / order)) - math.log(order)

    # The least over the orders 1 + 10^-4 .. 1 + 10^8, on a logarithmic scale.
    orders = (math.log(1e-4), math.log(1e8))
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda x: log_delta(1 + math.exp(x)), bounds=orders, method="bounded", options={"xatol": 1e-10}
    )
    return math.exp(min(0.0, float(found.fun)))


# The price of events, and (epsilon, delta) of a total.
#
# A cost has four parts, each additive, also over events that are chosen adaptively: mu^2 of the Gaussians (exact), the
# sum of pure epsilons, rho of mechanisms known by their Renyi divergence only, and the total variation slack of
# discrete noise. The parts are not converted into each other: Gaussian (0.1, 1/21000)-DP costs mu^2 = 0.0013, the pure
# epsilon 0.1 as a Gaussian guarantee eleven times that. A budget limits each part on its own.
#
# Reference: dp_components/README.md, section 5; fully adaptive composition of Gaussians: arXiv 2210.17520.


_LARGEST_EPSILON = 600.0
_HALVINGS = 200
_SLACK_SHARE = 1e-4  # of delta; at epsilon 64 and delta 1e-12 still the slack of 10^31 coordinates


@dataclass(frozen=True, slots=True)
class PrivacyCost:
    """What events cost, or what a budget allows.

    Attributes:
        mu_squared: Gaussian part: mu^2 of the exact GDP guarantee.
        pure_epsilon: sum of the pure epsilons.
        zcdp_rho: part known by its Renyi divergence only.
        total_variation: distance between the noise sampled and the noise accounted.
    """

    mu_squared: float = 0.0
    pure_epsilon: float = 0.0
    zcdp_rho: float = 0.0
    total_variation: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(part) and part >= 0 for part in self.parts()):
            raise ValueError("the parts of a privacy cost must be finite and not negative")

    def parts(self) -> tuple[float, float, float, float]:
        """Return the four parts in the order of the attributes."""
        return self.mu_squared, self.pure_epsilon, self.zcdp_rho, self.total_variation

    def __add__(self, other: PrivacyCost) -> PrivacyCost:
        return PrivacyCost(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def for_person(self, n_rows: int) -> PrivacyCost:
        """Return the cost to a person with ``n_rows`` rows: that many times mu and epsilon. The slack is the noise's.

        Reference: Dong, Roth and Su, Theorem 6 (group privacy); Bun and Steinke, Proposition 27 for rho.
        """
        if n_rows < 1:
            raise ValueError("a person has at least one row")
        mu_squared, epsilon, rho, slack = self.parts()
        return PrivacyCost(n_rows**2 * mu_squared, n_rows * epsilon, n_rows**2 * rho, slack)

    def fits(self, limit: PrivacyCost) -> bool:
        """Say whether every part is within the limit's."""
        return all(a <= b for a, b in zip(self.parts(), limit.parts(), strict=True))

    def at_least(self, other: PrivacyCost) -> PrivacyCost:
        """Return the larger of each part."""
        return PrivacyCost(*(max(a, b) for a, b in zip(self.parts(), other.parts(), strict=True)))

    def delta(self, epsilon: float) -> float:
        """Return delta at ``epsilon``: that of the Gaussians at what the pure epsilons leave, plus the slack.

        Raises:
            ValueError: ``epsilon`` is negative.
        """
        if not epsilon >= 0:
            raise ValueError("epsilon must not be negative")
        left = epsilon - self.pure_epsilon
        if left < 0 or epsilon > _LARGEST_EPSILON:
            return 1.0
        if self.zcdp_rho == 0:
            delta = delta_of_mu(math.sqrt(self.mu_squared), left)
        else:  # A Gaussian with parameter mu has rho = mu^2 / 2.
            delta = delta_of_rho(self.mu_squared / 2 + self.zcdp_rho, left)
        return min(1.0, delta + (1 + math.exp(epsilon)) * self.total_variation)

    def epsilon(self, delta: float) -> float:
        """Return epsilon at ``delta``, rounded up; infinity if none below 600 will do.

        Raises:
            ValueError: ``delta`` is not in [0, 1); 0 asks for a pure guarantee.
        """
        if not 0 <= delta < 1:
            raise ValueError("delta must be in [0, 1)")
        low = high = self.pure_epsilon
        step = 1e-3
        while self.delta(high) > delta:
            low, high, step = high, high + step, 2 * step
            if high > _LARGEST_EPSILON:
                return math.inf
        _, high = _boundary(lambda epsilon: self.delta(epsilon) > delta, low, high)
        return high if high == self.pure_epsilon else high * (1 + 1e-12)


def compose(events: Event | Iterable[Event]) -> PrivacyCost:
    """Return the exact cost of events that use the same rows, or disjoint parts of them.

    Raises:
        UnknownEvent: an event is not known; it is never taken to be free.
        ValueError: two events have different neighbouring relations: their costs must not be added.
    """
    counts = count_events(events)
    relation_of(counts)
    whole, partitions = _divided(counts)
    return sum((_costliest([_sum(part) for part in parts]) for parts in partitions), _sum(whole))


def _divided(counts: Counter[PricedEvent]) -> tuple[Counter[PricedEvent], list[list[Counter[PricedEvent]]]]:
    """Return the events on all rows, and for each partition those on each of its parts."""
    whole: Counter[PricedEvent] = Counter()
    partitions: dict[str, dict[int, Counter[PricedEvent]]] = {}
    for event, count in counts.items():
        if isinstance(event, DisjointPartEvent):
            partitions.setdefault(event.partition, {}).setdefault(event.part, Counter())[event.event] += count
        else:
            whole[event] += count
    return whole, [list(parts.values()) for parts in partitions.values()]


def _sum(counts: Counter[PricedEvent]) -> PrivacyCost:
    costs = [(cost_of(event), count) for event, count in counts.items()]
    sums = [math.fsum(cost.parts()[i] * count for cost, count in costs) for i in range(4)]
    return PrivacyCost(*sums)


def _costliest(costs: list[PrivacyCost]) -> PrivacyCost:
    """Return the largest of each part but the slack: the noise of every part may be off, so that adds up."""
    *others, slacks = zip(*(cost.parts() for cost in costs), strict=True)
    mu_squared, epsilon, rho = map(max, others)
    return PrivacyCost(mu_squared, epsilon, rho, math.fsum(slacks))


def count_events(events: Event | Iterable[Event]) -> Counter[PricedEvent]:
    """Return how often each simple event occurs. Equal events are counted before they are priced, against rounding."""
    parts = events if isinstance(events, list | tuple) else [events] if not isinstance(events, Iterable) else events
    counts: Counter[PricedEvent] = Counter()
    for part in parts:
        for event, count in simple_events(part):
            counts[event] += count
    return counts


def relation_of(events: Iterable[PricedEvent]) -> NeighbouringRelation | None:
    """Return the one neighbouring relation of simple events; None for no events.

    Raises:
        ValueError: there are several.
    """
    relations = {event.relation for event in events}
    if len(relations) > 1:
        names = ", ".join(sorted(relation.value for relation in relations))
        raise ValueError(f"events with different neighbouring relations cannot be composed: {names}")
    return relations.pop() if relations else None


def cost_of(event: PricedEvent) -> PrivacyCost:
    """Return the cost of one simple event.

    Raises:
        UnknownEvent: the event is not known.
        ValueError: discrete noise on a grid too coarse for the exact bound.
    """
    match event:
        case GaussianEvent():
            return PrivacyCost(mu_squared=1 / event.noise_multiplier**2)
        case DiscreteGaussianEvent():
            slack = discrete_distance(event.scales, event.n_shares)
            narrowed = least_narrowed(event.scales, event.n_shares)
            return PrivacyCost(mu_squared=1 / event.noise_multiplier**2 / narrowed, total_variation=slack)
        case LaplaceEvent() | DiscreteLaplaceEvent() | IntegerNoiseEvent() | ExponentialEvent():
            return PrivacyCost(pure_epsilon=event.epsilon)
        case LocalRandomisedResponseEvent():
            is_element = event.relation is NeighbouringRelation.CHANGE_VALUE
            return PrivacyCost(pure_epsilon=event.epsilon * (1 if is_element else event.n_values))
        case ConcentratedEvent():
            return PrivacyCost(zcdp_rho=event.rho)
        case _:
            raise UnknownEvent(f"{type(event).__name__} is not a known privacy event.")


def gaussian_limit(
    epsilon: float,
    delta: float,
    *,
    pure_epsilon: float = 0.0,
    zcdp_rho: float = 0.0,
    slack_share: float = _SLACK_SHARE,
) -> PrivacyCost:
    """Return the limit that gives Gaussians all that the other parts leave of (epsilon, delta).

    Args:
        epsilon: the whole epsilon.
        delta: the whole delta; public, never computed from the data. 0 leaves nothing for Gaussians.
        pure_epsilon: the part of epsilon kept for pure mechanisms.
        zcdp_rho: what is kept for mechanisms known by their Renyi divergence only. Anything above 0 costs the
            Gaussians their exact bound, because the sum is then accounted by its divergence.
        slack_share: the part of delta kept for the slack of discrete noise.

    Raises:
        ValueError: arguments out of range, or the other parts alone are too much.
    """
    in_range = 0 <= pure_epsilon <= epsilon <= _LARGEST_EPSILON and 0 <= delta < 1 and 0 <= slack_share < 1
    if not in_range or not 0 <= zcdp_rho < math.inf:
        raise ValueError("needs 0 <= pure_epsilon <= epsilon <= 600, and delta and slack_share in [0, 1)")
    if delta == 0:
        # Tested apart: in double precision a tiny mu would seem to have delta 0.
        if zcdp_rho:
            raise ValueError("a pure budget has no room for zcdp_rho")
        return PrivacyCost(pure_epsilon=pure_epsilon)
    slack = slack_share * delta / (1 + math.exp(epsilon))

    def limit(mu_squared: float) -> PrivacyCost:
        return PrivacyCost(mu_squared, pure_epsilon, zcdp_rho, slack)

    low, high = 0.0, 1.0
    if limit(low).delta(epsilon) > delta:
        raise ValueError("zcdp_rho alone is more than epsilon and delta allow")
    while limit(high).delta(epsilon) <= delta:
        low, high = high, 2 * high
    low, _ = _boundary(lambda mu_squared: limit(mu_squared).delta(epsilon) <= delta, low, high)
    return limit(low * (1 - 1e-12))


def _boundary(is_low: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Halve the distance of two numbers until no double lies between; ``is_low`` holds of the first alone."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high


# What an accounted cost means for one person: how well anybody can tell whether that person took part.
#
# Two worlds differ in all rows of one person. Whoever sees everything that was released, and knows all else, guesses in
# which one he is. For every epsilon >= 0 the accounted curve delta(epsilon) bounds his chances: of those who took part
# he finds at most the share
#
# TPR <= min(e^epsilon FPR + delta, 1 - e^(-epsilon) (1 - delta - FPR))
#
# at a share FPR of those who did not and are accused all the same. Each point of the curve gives a bound that holds, so
# the least over any of them does; for Gaussians the least over all is the exact trade-off Phi(Phi^(-1)(FPR) + mu).
#
# Reference: Wasserman and Zhou (2010), theorem 2.4; Kairouz, Oh and Viswanath, The Composition Theorem for Differential
# Privacy, theorem 2.1; Dong, Roth and Su, Gaussian Differential Privacy, propositions 3 and 5 (arXiv 1905.02383).


_POINTS = 600
_LEAST_DELTA = 1e-12
_STEPS = 4096
_LARGEST_EXPLAINED_EPSILON = 500.0


class TradeOff:
    """A bound on how well members are told from others.

    Args:
        curve: pairs (epsilon, delta) that all hold; epsilon >= 0 and 0 <= delta <= 1.

    Raises:
        ValueError: no pair, or one out of range.
    """

    def __init__(self, curve: Sequence[tuple[float, float]]) -> None:
        if not curve or not all(epsilon >= 0 and 0 <= delta <= 1 for epsilon, delta in curve):
            raise ValueError("a trade-off needs pairs of epsilon >= 0 and delta in [0, 1]")
        pairs = np.asarray(
            [pair for pair in curve if pair[0] <= _LARGEST_EXPLAINED_EPSILON] or [(0.0, 1.0)], np.float64
        )
        self._epsilon, self._delta = pairs[:, 0], pairs[:, 1]

    @classmethod
    def of(cls, cost: PrivacyCost) -> Self:
        """Return the trade-off of an accounted cost, from many points of its curve."""
        first = cost.pure_epsilon
        last = min(cost.epsilon(_LEAST_DELTA), _LARGEST_EXPLAINED_EPSILON)
        between = first + (last - first) * np.linspace(0, 1, _POINTS) ** 2 if last > first else [first]
        return cls([(epsilon, cost.delta(epsilon)) for epsilon in map(float, between)])

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return the most members that can be found at a rate of false accusations. Raises: ValueError."""
        if not 0 <= false_positive_rate <= 1:
            raise ValueError("a rate is a number from 0 to 1")
        return float(self._rates(np.asarray([false_positive_rate]))[0])

    def area(self) -> float:
        """Return the most that the area under the ROC curve can be: 0.5 is guessing, 1 is certainty. Rounded up."""
        steps = np.linspace(0, 1, _STEPS + 1)[1:]
        return min(1.0, float(self._rates(steps).mean()))

    def guessed_right(self) -> float:
        """Return the most cases in which the guess is right, where both worlds are equally likely beforehand."""
        right = (1 + self._delta * np.exp(-self._epsilon)) / (1 + np.exp(-self._epsilon))
        return min(1.0, float(right.min()))

    def _rates(self, false_positive_rates: NDArray[np.float64]) -> NDArray[np.float64]:
        powers = np.exp(self._epsilon)[:, None]
        delta, false = self._delta[:, None], false_positive_rates[None, :]
        bounds = np.minimum(powers * false + delta, 1 - (1 - delta - false) / powers)
        result: NDArray[np.float64] = np.clip(bounds.min(axis=0), 0, 1)
        return result


# A second opinion on a plan from an independent accountant, Google's dp-accounting, before a job starts.
#
# It is asked twice. Its closed form says what one Gaussian with the plan's whole mu costs, which must be our figure to
# rounding. Its accountant of privacy loss distributions composes the plan's Gaussians by itself, numerically and from
# above, so that its figure must lie in a narrow band over ours. Pure epsilons need no library. Its word can stop a job;
# it never enlarges a budget, because what is charged is always our own figure.
#
# The library takes about a second to import, so it is imported when asked.


TOLERANCE = 1e-9
"""Relative, of the two closed forms: at most 3e-11 was seen, for mu from 0.001 to 20 and delta from 1e-12 to 0.01."""
ABOVE = 1e-2
"""Relative, by how much the composed figure may be above ours: at most 5e-4 was seen, for 30 different queries."""
_LOSS_STEPS = 1000


@dataclass(frozen=True, slots=True)
class SecondOpinion:
    """Two accountants on the Gaussian part of a plan; ``ours`` is what counts.

    Attributes:
        theirs: by the closed form.
        composed: by the numerical composition, an upper bound.
    """

    delta: float
    ours: float
    theirs: float
    composed: float


def check_second_opinion(events: Event | Iterable[Event], delta: float) -> SecondOpinion | None:
    """Compare our epsilon of a plan's Gaussian part with that of dp-accounting.

    Args:
        events: the plan.
        delta: at which epsilon is compared.

    Returns:
        The figures; None if the plan has no Gaussian part, of which there are no two opinions.

    Raises:
        SecondOpinionDiffers: they disagree beyond rounding, or dp-accounting is not installed or fails.
        UnknownEvent: the plan cannot be priced.
    """
    counts = count_events(events)
    mu_squared = compose(events).mu_squared
    if mu_squared == 0:
        return None
    relation = next(iter(counts)).relation
    # Without the slack, which is ours alone: dp-accounting does not know discrete noise.
    ours = compose(GaussianEvent(1 / math.sqrt(mu_squared), relation)).epsilon(delta)
    theirs, composed = _opinions(_gaussians(counts), delta)
    scale = max(ours, 1e-3)
    if not (abs(theirs - ours) <= TOLERANCE * scale and -TOLERANCE * scale <= composed - ours <= ABOVE * scale):
        raise SecondOpinionDiffers(
            f"Two accountants disagree on this plan: epsilon {ours:.9g} (ours), {theirs:.9g} and {composed:.9g} "
            f"(dp-accounting, in closed form and composed) at delta {delta:g}. The job does not start."
        )
    return SecondOpinion(delta, ours, theirs, composed)


def _gaussians(counts: Counter[PricedEvent]) -> list[tuple[float, int]]:
    """Return the multipliers and counts that a row meets; of a partition, those of its costliest part."""

    def gaussians(part: Counter[PricedEvent]) -> list[tuple[float, int]]:
        found = [(e, n) for e, n in part.items() if isinstance(e, GaussianEvent | DiscreteGaussianEvent)]
        # The multiplier of the continuous noise that stands for discrete noise.
        return [(1 / math.sqrt(cost_of(event).mu_squared), count) for event, count in found]

    whole, partitions = _divided(counts)
    costliest = [max(parts, key=lambda part: _sum(part).mu_squared) for parts in partitions]
    return [pair for part in (whole, *costliest) for pair in gaussians(part)]


def _opinions(gaussians: list[tuple[float, int]], delta: float) -> tuple[float, float]:
    """Return dp-accounting's two figures for Gaussians, given by noise multiplier and count."""
    try:
        import dp_accounting
        from dp_accounting import pld

        sigma = 1 / math.sqrt(math.fsum(count / multiplier**2 for multiplier, count in gaussians))
        closed = float(dp_accounting.get_epsilon_gaussian(sigma, delta))
        step = min(
            max(closed, 1 / sigma) / _LOSS_STEPS, 1e-2
        )  # of privacy losses, which spread over some multiples of mu
        accountant = pld.PLDAccountant(value_discretization_interval=step)
        for multiplier, count in gaussians:
            accountant.compose(dp_accounting.GaussianDpEvent(multiplier), count)
        return closed, float(accountant.get_epsilon(delta))
    except (ImportError, ArithmeticError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise SecondOpinionDiffers(
            f"The second accountant (dp-accounting) gave no figure ({type(error).__name__}). The job does not start: "
            "pip install 'dp-accounting==0.6.*'."
        ) from None
