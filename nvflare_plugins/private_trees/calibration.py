"""Exact Gaussian calibration (GDP). A stand-in until dp_components.accounting takes over."""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr


def delta_of(mu: float, epsilon: float) -> float:
    """Return delta(epsilon) of mu-GDP."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def mu_for(epsilon: float, delta: float) -> float:
    """Return the largest mu with delta_of(mu, epsilon) <= delta."""
    return float(brentq(lambda mu: math.log(max(delta_of(mu, epsilon), 1e-300)) - math.log(delta), 1e-3, 20.0, xtol=1e-12))
