"""Gaussian differential privacy in closed form.

k Gaussian queries with noise multipliers s_i are together exactly mu-GDP with mu^2 = sum 1 / s_i^2, also when they
are chosen adaptively; mu^2 is therefore what a budget is counted in.

Reference: Dong, Roth and Su, Gaussian Differential Privacy, Corollaries 1 and 3; Balle and Wang (2018), Theorem 8;
fully adaptive composition: arXiv 2210.17520.
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr


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
