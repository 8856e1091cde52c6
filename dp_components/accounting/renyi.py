"""Concentrated (Renyi) accounting, for mechanisms that have nothing tighter.

Every order a > 1 gives a valid bound, so the search for the best one cannot make the result unsafe.

Reference: Bun and Steinke, Concentrated Differential Privacy; the conversion is Canonne, Kamath and Steinke, The
Discrete Gaussian for Differential Privacy, Proposition 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.optimize import minimize_scalar


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

    return math.exp(min(0.0, _least(log_delta)))


def _least(bound: Callable[[float], float]) -> float:
    """Minimise over the orders 1 + 10^-4 .. 1 + 10^8, on a logarithmic scale."""
    found = minimize_scalar(
        lambda x: bound(1 + math.exp(x)),
        bounds=(math.log(1e-4), math.log(1e8)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(found.fun)
