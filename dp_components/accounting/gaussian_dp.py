"""Gaussian differential privacy in closed form.

k Gaussian queries with noise multipliers s_i are together exactly mu-GDP with mu^2 = sum 1 / s_i^2, also when they
are chosen adaptively; mu^2 is therefore what a budget is counted in.

Reference: Dong, Roth and Su, Gaussian Differential Privacy, Corollaries 1 and 3; Balle and Wang (2018), Theorem 8;
fully adaptive composition: arXiv 2210.17520.
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr

# Root finding ends on the safe side of the bracket and then steps this much further, relatively: the error of the
# closed form in double precision is below it by two orders of magnitude.
_SAFETY = 1e-12
_HALVINGS = 200
_LARGEST_EPSILON = 1e5


def delta_of_mu(mu: float, epsilon: float) -> float:
    """Return the exact delta(epsilon) of mu-GDP: Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

    Raises:
        ValueError: ``mu`` or ``epsilon`` is negative or not finite.
    """
    if not (math.isfinite(mu) and math.isfinite(epsilon) and mu >= 0 and epsilon >= 0):
        raise ValueError("mu and epsilon must be finite and not negative")
    if mu == 0:
        return 0.0
    log_first = float(log_ndtr(mu / 2 - epsilon / mu))
    log_second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    # As a difference of logarithms the result keeps its digits where both terms are tiny.
    return max(0.0, -math.exp(log_first) * math.expm1(min(0.0, log_second - log_first)))


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
