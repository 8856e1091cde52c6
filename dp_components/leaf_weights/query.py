"""The query for leaf sums: how the pair (g, h) of a row is clipped, and which noise its two sums get.

Each form is one Gaussian query over the pair; they differ in the weights of its two coordinates, hence in how the noise
is divided between G and H. The sensitivity comes with the clipped rows (sensitivity.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dp_components.sensitivity import (
    GRID_BITS,
    ClippedRows,
    Sensitivity,
    clip_gradients,
    clip_logistic_rows,
    clip_rows,
)

UNIT = 1 << GRID_BITS
"""Grid steps in 1.0."""
CLIPPED_AT = 0.6
"""Where the clipped query clips g."""


class LeafQuery(Enum):
    """How (G, H) of disjoint leaves are asked for."""

    SCALAR = "each of G and H gets noise in proportion to its own bound, as two queries of half the budget would"
    VECTOR = "both get the noise of the pair's sensitivity"
    JOINT = "(G, 3.330 H) has sensitivity 1 for the logistic loss: H costs nothing beside G"
    CLIPPED = "g is clipped at 0.6 and h to what that leaves: (G, 2 H) has sensitivity 0.6"


@dataclass(frozen=True, slots=True)
class PairBounds:
    """What one row may contribute: |g| <= gradient, |h| <= hessian."""

    gradient: float
    hessian: float
    is_logistic: bool = False  # g = p - y and h = p (1 - p), which the joint query needs


def clip_pairs(query: LeafQuery, g: NDArray[np.float64], h: NDArray[np.float64], bounds: PairBounds) -> ClippedRows:
    """Truncate the rows' pairs to the grid and to their bounds.

    Shapes: g, h: float64[n_rows].
    Privacy: the bounds hold in integers afterwards, whatever came in.

    Raises:
        ValueError: a value is not finite, or for the joint and the clipped query of rows of another loss.
    Reference: Maddock et al., section 4.2; the joint and the clipped query are ours.
    """
    if query in (LeafQuery.JOINT, LeafQuery.CLIPPED):
        if not bounds.is_logistic:
            raise ValueError(f"the {query.name.lower()} query is for Newton updates of the logistic loss only")
        return clip_logistic_rows(g, h) if query is LeafQuery.JOINT else clip_gradients(g, h, CLIPPED_AT)
    weights = (1 / bounds.gradient, 1 / bounds.hessian) if query is LeafQuery.SCALAR else None
    return clip_rows(np.stack([g, h], axis=1), (bounds.gradient, bounds.hessian), weights=weights)


def pair_sensitivity(query: LeafQuery, bounds: PairBounds) -> Sensitivity:
    """Return the sensitivity that ``clip_pairs`` guarantees, before there are rows."""
    return clip_pairs(query, np.zeros(0), np.zeros(0), bounds).sensitivity


def real_noise_std(sensitivity: Sensitivity, noise_multiplier: float) -> tuple[float, ...]:
    """Return the standard deviation of the noise on each coordinate. Units: of g and h themselves."""
    return tuple(noise_multiplier * sensitivity.bound / weight / UNIT for weight in sensitivity.weights)
