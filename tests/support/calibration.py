"""From a promise of (epsilon, delta) to the noise that keeps it, and back, for tests and benchmarks.

Root finding keeps a bracket of which one end is known to be safe, and returns that end.
"""

from __future__ import annotations

import math

from dp_components.accounting import delta_of_mu, gaussian_limit

# Root finding ends on the safe side of the bracket and then steps this much further, relatively: the error of the
# closed form in double precision is below it by two orders of magnitude.
_SAFETY = 1e-12
_HALVINGS = 200
_LARGEST_EPSILON = 1e5


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


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return the least epsilon of mu-GDP at ``delta``, rounded up.

    Raises:
        ValueError: ``delta`` is not in (0, 1).
    """
    _require_delta(delta)
    if delta_of_mu(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of_mu(mu, high) > delta:
        low, high = high, 2 * high
        if high > _LARGEST_EPSILON:
            return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if delta_of_mu(mu, middle) <= delta else (middle, high)
    return high * (1 + _SAFETY)


def mu_for(epsilon: float, delta: float) -> float:
    """Return the largest mu whose GDP guarantee implies (epsilon, delta), rounded down.

    Raises:
        ValueError: ``epsilon`` is negative or not finite, or ``delta`` is not in (0, 1).
    """
    _require_delta(delta)
    low, high = 0.0, 1.0
    while delta_of_mu(high, epsilon) <= delta:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if delta_of_mu(middle, epsilon) <= delta else (low, middle)
    return low * (1 - _SAFETY)


def _require_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError("delta must be in (0, 1)")
