"""The query for leaf sums: how much noise each coordinate gets, and how many queries that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from dp_components.leaf_weights.row_bounds import JOINT_HESSIAN_FACTOR, RowBounds


class LeafQuery(Enum):
    """How (G, H) of disjoint leaves are asked for."""

    SCALAR = "G and H are two queries, each with its own sensitivity"
    VECTOR = "(G, H) is one query; both get the noise of the pair's sensitivity"
    JOINT = "(G, 3.330 H) is one query of sensitivity 1: H costs nothing beside G"


@dataclass(frozen=True, slots=True)
class NoiseStd:
    """Standard deviation of the noise on each coordinate of a leaf. Units: of g and h themselves."""

    gradient: float
    hessian: float


def queries_per_tree(form: LeafQuery) -> int:
    """Return how many Gaussian queries one tree's leaves (or one histogram) are."""
    return 2 if form is LeafQuery.SCALAR else 1


def noise_std(form: LeafQuery, bounds: RowBounds, noise_multiplier: float) -> NoiseStd:
    """Return the noise on G and H for a noise multiplier (noise over L2 sensitivity, per query).

    Privacy: adding or removing one row; the rows' bounds are enforced by ``row_bounds.enforce``.
    Raises: ValueError, if the joint query is asked of rows without the joint bound.
    Reference: Maddock et al., section 4.2; the joint query is ours (ALGORITHMS.md 6.2).
    """
    if form is LeafQuery.SCALAR:
        return NoiseStd(noise_multiplier * bounds.gradient, noise_multiplier * bounds.hessian)
    if form is LeafQuery.VECTOR:
        both = noise_multiplier * math.hypot(bounds.gradient, bounds.hessian)
        return NoiseStd(both, both)
    if not bounds.is_joint:
        raise ValueError("the joint query needs rows whose (g, 3.330 h) has norm at most 1: Newton updates only")
    return NoiseStd(noise_multiplier, noise_multiplier / JOINT_HESSIAN_FACTOR)
