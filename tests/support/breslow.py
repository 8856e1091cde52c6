"""Cox regression by definition, in float64 and one row at a time: the oracle of survival:cox on a grid of times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def partial_likelihood(margins: Doubles, times: Doubles, events: NDArray[np.bool_], weights: Doubles) -> float:
    """Return minus the log of Breslow's weighted partial likelihood. Shapes: all [n_rows]."""
    total = 0.0
    for i in np.flatnonzero(events):
        at_risk = times >= times[i]
        total -= weights[i] * (margins[i] - np.log(np.sum(weights[at_risk] * np.exp(margins[at_risk]))))
    return total


def derivatives(
    margins: Doubles, times: Doubles, events: NDArray[np.bool_], weights: Doubles
) -> tuple[Doubles, Doubles]:
    """Return the gradient of ``partial_likelihood``, and the diagonal of its second derivative. Shapes: as there."""
    risk = weights * np.exp(margins)
    gradient, hessian = -weights * events, np.zeros(margins.size)
    for i in np.flatnonzero(events):
        at_risk = times >= times[i]
        share = np.where(at_risk, risk / risk[at_risk].sum(), 0.0)
        gradient = gradient + weights[i] * share
        hessian = hessian + weights[i] * share * (1 - share)
    return gradient, hessian


def of_xgboost(
    margins: Doubles, times: Doubles, events: NDArray[np.bool_], weights: Doubles
) -> tuple[Doubles, Doubles]:
    """Return what XGBoost takes in their place: of tied events the order decides, and weights only scale rows."""
    order = np.argsort(times, kind="stable")
    risk, first, second = np.exp(margins), 0.0, 0.0
    gradient, hessian = np.empty(margins.size), np.empty(margins.size)
    for i in order:
        if events[i]:
            at_risk = risk[times >= times[i]].sum()
            first, second = first + 1 / at_risk, second + 1 / at_risk**2
        gradient[i] = weights[i] * (risk[i] * first - events[i])
        hessian[i] = weights[i] * (risk[i] * first - risk[i] ** 2 * second)
    return gradient, hessian
