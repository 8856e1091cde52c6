"""From a promise to the noise that keeps it.

The multiplier returned always satisfies the accountant: root finding keeps a bracket of which one end is known to be
safe, and returns that end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dp_components.accounting.composition import compose, gaussian_limit
from dp_components.events import Event

_SMALLEST, _LARGEST = 1e-6, 1e12


def noise_multiplier_for(
    n_queries: int,
    epsilon: float,
    delta: float,
    *,
    pure_epsilon: float = 0.0,
    rows_per_person: int = 1,
    slack_share: float = 1e-4,
) -> float:
    """Return the noise multiplier with which ``n_queries`` Gaussian queries together keep (epsilon, delta).

    Privacy: noise standard deviation / L2 sensitivity of each query; the composition is exact, n / s^2 = mu^2.

    Args:
        n_queries: number of queries over the same rows; disjoint bins or leaves of one query count once.
        epsilon: the whole epsilon.
        delta: the whole delta.
        pure_epsilon: the part of epsilon that pure mechanisms of the same job use.
        rows_per_person: rows of one person that are protected together; the noise grows in proportion.
        slack_share: the part of delta kept for the slack of discrete noise; 0 for continuous noise.

    Raises:
        ValueError: arguments out of range.
    """
    if n_queries < 1 or rows_per_person < 1:
        raise ValueError("n_queries and rows_per_person must be at least 1")
    limit = gaussian_limit(epsilon, delta, pure_epsilon=pure_epsilon, slack_share=slack_share)
    if limit.mu_squared == 0:
        raise ValueError("no epsilon is left for Gaussian queries")
    return rows_per_person * math.sqrt(n_queries / limit.mu_squared) * (1 + 1e-12)


def calibrate(plan: Callable[[float], Event], epsilon: float, delta: float, *, rounding: float = 1e-9) -> float:
    """Return the least noise scale with which a whole plan keeps (epsilon, delta), up to ``rounding``, rounded up.

    Args:
        plan: noise scale -> the events of the job; a larger scale must cost less.
        epsilon: to keep at ``delta``.
        delta: to keep.
        rounding: relative width of the bracket at which the search ends.

    Raises:
        ValueError: no scale from 1e-6 to 1e12 keeps it.
    """

    def is_kept(scale: float) -> bool:
        return compose(plan(scale)).delta(epsilon) <= delta

    low = high = 1.0
    while not is_kept(high):
        low, high = high, 2 * high
        if high > _LARGEST:
            raise ValueError("no amount of noise keeps this plan within its budget")
    while low == high or is_kept(low):
        low, high = low / 2, low
        if low < _SMALLEST:
            return high
    while high - low > rounding * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_kept(middle) else (middle, high)
    return high
