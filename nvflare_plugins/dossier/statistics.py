"""How well scores tell two groups apart, with intervals: area under the ROC curve, and hits at few false alarms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Scores = NDArray[np.float64]

FALSE_POSITIVE_RATE = 0.01
_RESAMPLINGS = 200
_Z = 1.959964  # of 95 %


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def to_list(self) -> list[float]:
        """Return value, low and high to three decimals: more would tell of single rows and nothing of the attack."""
        return [round(number, 3) for number in (self.value, self.low, self.high)]


def area_under_curve(members: Scores, others: Scores) -> Estimate:
    """Return the AUC with DeLong's interval.

    Shapes: members: float64[m]; others: float64[n]; higher means "member".

    Reference: DeLong, DeLong and Clarke-Pearson (1988); by ranks after Sun and Xu (2014).
    """
    m, n = members.size, others.size
    of_all = rankdata(np.concatenate([members, others]))
    above = (of_all[:m] - rankdata(members)) / n  # of each member: the share of others below it
    below = 1 - (of_all[m:] - rankdata(others)) / m
    area = float(above.mean())
    spread = math.sqrt(float(above.var(ddof=1)) / m + float(below.var(ddof=1)) / n)
    return Estimate(area, max(0.0, area - _Z * spread), min(1.0, area + _Z * spread))


def hits(members: Scores, others: Scores, rate: float = FALSE_POSITIVE_RATE) -> float:
    """Return the share of members above the score that a share ``rate`` of the others exceeds; ties by a coin."""
    place = others.size - 1 - min(int(rate * others.size), others.size - 1)
    limit = np.partition(others, place)[place]
    false, tied = float((others > limit).mean()), float((others == limit).mean())
    return float((members > limit).mean() + (rate - false) / tied * (members == limit).mean())


def hits_with_interval(members: Scores, others: Scores, rate: float = FALSE_POSITIVE_RATE) -> Estimate:
    """Return ``hits`` with the interval of 95 % of resamplings of both groups."""
    random = np.random.default_rng(0)  # the same dossier twice says the same
    drawn = [
        hits(random.choice(members, members.size), random.choice(others, others.size), rate)
        for _ in range(_RESAMPLINGS)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(hits(members, others, rate), float(low), float(high))


def share(n_hits: int, n: int) -> Estimate:
    """Return a share with Wilson's interval."""
    found, z = n_hits / n, _Z**2 / n
    middle, half = (found + z / 2) / (1 + z), _Z * math.sqrt(found * (1 - found) / n + z / (4 * n)) / (1 + z)
    return Estimate(found, max(0.0, middle - half), min(1.0, middle + half))


def difference(one: Estimate, other: Estimate) -> Estimate:
    """Return one share minus another with Newcombe's interval."""
    change = one.value - other.value
    low = change - math.hypot(one.value - one.low, other.high - other.value)
    high = change + math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(change, max(-1.0, low), min(1.0, high))
