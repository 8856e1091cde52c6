"""The price of events, and (epsilon, delta) of a total.

A cost has four parts, each additive, also over events that are chosen adaptively: mu^2 of the Gaussians (exact), the
sum of pure epsilons, rho of mechanisms known by their Renyi divergence only, and the total variation slack of discrete
noise. The parts are not converted into each other: Gaussian (0.1, 1/21000)-DP costs mu^2 = 0.0013, the pure epsilon
0.1 as a Gaussian guarantee eleven times that. A budget limits each part on its own.

Reference: dp_components/README.md, section 5; fully adaptive composition of Gaussians: arXiv 2210.17520.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dp_components.accounting.discrete_slack import discrete_distance, least_narrowed
from dp_components.accounting.gaussian_dp import delta_of_mu
from dp_components.accounting.renyi import delta_of_rho
from dp_components.errors import UnknownEvent
from dp_components.events import (
    ConcentratedEvent,
    DiscreteGaussianEvent,
    DisjointPartEvent,
    Event,
    ExponentialEvent,
    GaussianEvent,
    LaplaceEvent,
    LocalRandomisedResponseEvent,
    PricedEvent,
    simple_events,
)
from dp_components.neighbouring import NeighbouringRelation

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
        total_variation: distance between the noise sampled and the noise accounted (discrete_slack.py).
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
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high if high == self.pure_epsilon else high * (1 + 1e-12)


def compose(events: Event | Iterable[Event]) -> PrivacyCost:
    """Return the exact cost of events that use the same rows, or disjoint parts of them.

    Raises:
        UnknownEvent: an event is not known; it is never taken to be free.
        ValueError: two events have different neighbouring relations: their costs must not be added.
    """
    counts = count_events(events)
    relation_of(counts)
    whole: Counter[PricedEvent] = Counter()
    partitions: dict[str, dict[int, Counter[PricedEvent]]] = {}
    for event, count in counts.items():
        if isinstance(event, DisjointPartEvent):
            partitions.setdefault(event.partition, {}).setdefault(event.part, Counter())[event.event] += count
        else:
            whole[event] += count
    total = _sum(whole)
    for parts in partitions.values():
        total = total + _costliest([_sum(part) for part in parts.values()])
    return total


def _sum(counts: Counter[PricedEvent]) -> PrivacyCost:
    costs = [(cost_of(event), count) for event, count in counts.items()]
    sums = [math.fsum(cost.parts()[i] * count for cost, count in costs) for i in range(4)]
    return PrivacyCost(*sums)


def _costliest(costs: list[PrivacyCost]) -> PrivacyCost:
    """Return the largest of each part but the slack: the noise of every part may be off, so that adds up."""
    return PrivacyCost(
        max(cost.mu_squared for cost in costs),
        max(cost.pure_epsilon for cost in costs),
        max(cost.zcdp_rho for cost in costs),
        math.fsum(cost.total_variation for cost in costs),
    )


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
        case LaplaceEvent() | ExponentialEvent():
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
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if limit(middle).delta(epsilon) <= delta else (low, middle)
    return limit(low * (1 - 1e-12))
