"""Clipping of rows onto an integer grid, and the sensitivity that this very clipping guarantees.

A sensitivity is computed here, on the integers after rounding, and travels with the rows; no bare number from a
configuration is ever taken for one. Truncation toward zero makes every value smaller, so rounding inflates no bound.
On the grid sums in double precision are exact and independent of the order of addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.events import NeighbouringRelation

GRID_BITS = 20
HESSIAN_WEIGHT = ((1 + math.sqrt(5)) / 2) ** 2.5
"""c = phi^2.5 = 3.330, the largest weight for which the logistic loss has g^2 + (c h)^2 <= 1 at every score."""
CLIPPED_HESSIAN_WEIGHT = 2.0
"""The weight of h beside a gradient that is clipped (``clip_gradients``)."""

_TWO_SIDED = {
    NeighbouringRelation.ADD_OR_REMOVE_ROW: 1,
    NeighbouringRelation.CHANGE_LABEL: 2,
    NeighbouringRelation.REPLACE_ROW: 2,
}
"""How many rows, each within its bound, a change takes out or puts in."""

# Rounded up, so that the test below is never too lenient.
_HESSIAN_WEIGHT_SQUARED = HESSIAN_WEIGHT**2 * (1 + 2**-50)


class Norm(Enum):
    """How the change of a query is measured."""

    L1 = "l1"
    L2 = "l2"
    UTILITY = "utility"
    """The largest change of the utility of any one candidate."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The most by which a query can change between neighbouring data sets.

    A person with u rows changes it u times as much; the ledger prices that (``PrivacyCost.for_person``).

    Units: ``bound`` in grid units.

    Attributes:
        bound: the bound, in ``norm``, after coordinate i of the query's last axis is multiplied by ``weights[i]``.
        norm: the norm of the bound.
        relation: what neighbouring data sets differ in.
        weights: one positive weight per coordinate of the last axis; (1.0,) stands for equal weights.
    """

    bound: float
    norm: Norm
    relation: NeighbouringRelation
    weights: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not all(math.isfinite(x) and x > 0 for x in (self.bound, *self.weights)):
            raise ValueError("a sensitivity needs a finite bound and finite weights above 0")


@dataclass(frozen=True, slots=True, eq=False)
class ClippedRows:
    """Rows on the grid and the sensitivity of any sum in which each row is counted at most once.

    A sum is a query such as "(g, h) per leaf of one tree": every row falls into one leaf. A query in which a row is
    counted k times (k features' histograms, k nodes of a path) is k such queries.

    Shapes: values: int64[n_rows, n_coordinates], in units of 2^-GRID_BITS.
    """

    values: NDArray[np.int64]
    sensitivity: Sensitivity


def clip_logistic_rows(
    grad: ArrayLike,
    hess: ArrayLike,
    *,
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ROW,
) -> ClippedRows:
    """Clip gradient pairs of the logistic loss so that |(g, c h)| <= 1 holds exactly, in integers.

    The bound holds for the loss anyway; it is enforced because the inputs come from floating point. Where a row
    exceeds it, h gives way.

    Shapes:   grad, hess: float[n_rows].
    Privacy:  L2 sensitivity 1 for ADD_OR_REMOVE_ROW and CHANGE_LABEL (g moves by at most 1, h stays), 2 for
        REPLACE_ROW.

    Args:
        grad: p - y.
        hess: p (1 - p).
        relation: what neighbouring data sets differ in.

    Raises:
        ValueError: values that are not finite, shapes that differ, or the relation is one in which no row changes.
    Reference: dp_components/README.md, section 4: c^2 <= (1 + q) / (q^2 (1 - q)), least where q^2 + q = 1: phi^5.
    """
    bound = grid_bound(1.0)
    values = _pairs_within(grad, hess, bound, _HESSIAN_WEIGHT_SQUARED)
    factor = _factor({**_TWO_SIDED, NeighbouringRelation.CHANGE_LABEL: 1}, relation)
    return ClippedRows(values, Sensitivity(float(bound * factor), Norm.L2, relation, (1.0, HESSIAN_WEIGHT)))


def clip_gradients(
    grad: ArrayLike,
    hess: ArrayLike,
    max_gradient: float,
    *,
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ROW,
    norm: Norm = Norm.L2,
) -> ClippedRows:
    """Clip gradient pairs to |g| <= C first, then h to what C leaves: |(g, 2 h)| <= C holds exactly, in integers.

    With B = C in grid units, g' = min(max(g, -B), B) and h' = min(h, floor(sqrt(B^2 - g'^2) / 2)), so that
    g'^2 + (2 h')^2 <= g'^2 + B^2 - g'^2 = B^2 for every row, whatever came in. In the L1 norm h' = min(h,
    floor((B - |g'|) / 2)), so that |g'| + 2 h' <= B.

    Shapes:  grad, hess: float[n_rows].
    Privacy: sensitivity C for ADD_OR_REMOVE_ROW: one row's own pair. Twice that for CHANGE_LABEL and REPLACE_ROW:
        two pairs, each within C. (g of the clipped loss moves by up to 2 C where a label changes, not by 1.)

    Args:
        max_gradient: C, public.
        relation: what neighbouring data sets differ in.
        norm: L1 or L2.

    Raises:
        ValueError: values that are not finite, shapes that differ, C off the grid, or no row changes in the relation.
    Reference: dp_components/README.md, section 4.
    """
    bound = grid_bound(max_gradient)
    values = _pairs_within(grad, hess, bound, CLIPPED_HESSIAN_WEIGHT**2, norm)
    length = float(bound * _factor(_TWO_SIDED, relation))
    return ClippedRows(values, Sensitivity(length, norm, relation, (1.0, CLIPPED_HESSIAN_WEIGHT)))


def _pairs_within(
    grad: ArrayLike, hess: ArrayLike, bound: int, weight_squared: float, norm: Norm = Norm.L2
) -> NDArray[np.int64]:
    """Clip g to the bound, then h to what |(g, c h)| <= bound leaves of it. Units: grid units; weight_squared: c^2."""
    g, h = np.clip(_truncate(grad), -bound, bound), _truncate(hess)
    if g.shape != h.shape or g.ndim != 1:
        raise ValueError("grad and hess must be vectors of one length")
    # Both are exact in int64; the factor below 1 covers the rounding of the division and the root.
    room = (bound - np.abs(g)) * (bound - np.abs(g) if norm is Norm.L1 else bound + np.abs(g))
    largest = np.floor(np.sqrt(room / weight_squared) * (1 - 2.0**-40)).astype(np.int64)
    return np.stack([g, np.clip(h, 0, largest)], axis=1)


def clip_class_rows(
    grad: ArrayLike,
    hess: ArrayLike,
    max_length: float,
    hessian_weight: float,
    *,
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ROW,
    norm: Norm = Norm.L2,
) -> ClippedRows:
    """Clip rows of several classes as vectors v = (g_1 .. g_K, c h_1 .. c h_M): |v| <= C holds, in integers.

    A row that is too long is shortened as a whole, v' = v min(1, C / |v|), so that the classes keep their proportions.
    With B = C in grid units and v on the grid, a row of |v|^2 <= B^2 stays; any other is multiplied by a factor that is
    below B / |v| by more than floating point errs, and truncated toward zero, which shortens it further: |v'| <= B.
    Both norms, L1 and L2, scale with a row and fall with each of its numbers, so that the argument holds in both.

    Shapes:  grad: float[n_rows, K]; hess: float[n_rows, M], at least 0; values: int64[n_rows, K + M].
    Privacy: sensitivity C for ADD_OR_REMOVE_ROW: one row's own vector. Twice that for CHANGE_LABEL and REPLACE_ROW:
        two vectors, each within C. For the softmax alone |p - y| < sqrt(2), and two labels' gradients are sqrt(2) apart
        where nothing is shortened; the bound of twice C holds for every C.

    Args:
        max_length: C, public.
        hessian_weight: c, public.
        relation: what neighbouring data sets differ in.
        norm: L1 or L2.

    Raises:
        ValueError: values that are not finite, shapes that differ, C off the grid, or no row changes in the relation.
    Reference: dp_components/README.md, section 4.
    """
    bound = grid_bound(max_length)
    g, h = _truncate(grad), np.maximum(_truncate(hess), 0)
    if g.ndim != 2 or h.ndim != 2 or g.shape[0] != h.shape[0]:
        raise ValueError("grad and hess must be matrices with one row for each row")
    values = np.concatenate([g, h], axis=1)
    weights = np.concatenate([np.ones(g.shape[1]), np.full(h.shape[1], float(hessian_weight))])
    weighted = np.abs(values * weights)
    lengths = weighted.sum(axis=1) if norm is Norm.L1 else np.sqrt((weighted**2).sum(axis=1))
    # 2^-40 is far more than products, squares and the root of their sum err by, all of them positive.
    is_long = lengths * (1 + 2.0**-40) > bound
    factors = np.where(is_long, bound / np.maximum(lengths, 1.0) * (1 - 2.0**-40), 1.0)
    values = np.trunc(values * factors[:, None]).astype(np.int64)
    sensitivity = Sensitivity(float(bound * _factor(_TWO_SIDED, relation)), norm, relation, tuple(weights.tolist()))
    return ClippedRows(values, sensitivity)


def clip_rows(
    values: ArrayLike,
    bounds: Sequence[float],
    *,
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ROW,
    norm: Norm = Norm.L2,
    weights: Sequence[float] | None = None,
) -> ClippedRows:
    """Clip each coordinate of each row to its own bound.

    For gradient updates (g, 1), averaging (1[y = 1], 1), regression with |g| <= 20, hessians alone, counts.

    Shapes:  values: float[n_rows, n_coordinates]; bounds, weights: one per coordinate.
    Privacy: the norm of the weighted bounds for ADD_OR_REMOVE_ROW, twice that for REPLACE_ROW and CHANGE_LABEL.

    Args:
        values: the rows.
        bounds: public bounds of the absolute values.
        relation: what neighbouring data sets differ in.
        norm: L1 or L2.
        weights: weight of each coordinate in the norm; its noise is smaller by that factor. None for 1.

    Raises:
        ValueError: values that are not finite, a bound that is not on or above the grid, shapes that differ.
    """
    limits = np.array([grid_bound(bound) for bound in bounds], dtype=np.int64)
    scale = tuple(float(w) for w in weights) if weights is not None else (1.0,) * len(limits)
    grid_values = _truncate(values)
    if grid_values.ndim != 2 or grid_values.shape[1] != len(limits) or len(scale) != len(limits):
        raise ValueError("values must be a matrix with one bound and one weight per column")
    clipped = np.clip(grid_values, -limits, limits)
    parts = [float(limit) * w for limit, w in zip(limits, scale, strict=True)]
    length = {Norm.L1: math.fsum(parts), Norm.L2: math.hypot(*parts)}.get(norm)
    if length is None:
        raise ValueError("rows have an L1 or an L2 norm")
    # One part in 2^50 upwards covers the rounding of the products and the root; a single unit weight has none.
    exact = len(parts) == 1 and scale == (1.0,)
    bound = length * _factor(_TWO_SIDED, relation) * (1.0 if exact else 1 + 2.0**-50)
    return ClippedRows(clipped, Sensitivity(bound, norm, relation, scale))


def count_sensitivity(
    n_counted: int,
    *,
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ROW,
    norm: Norm = Norm.L2,
) -> Sensitivity:
    """Return the sensitivity of counts of which one row enters ``n_counted`` (one bin of each of that many features).

    A missing value must be one of the bins: it must not add a second count.

    Units:   2^-GRID_BITS, as for every other query: take the counts there with ``grid_integers``. On the grid of whole
        counts discrete Gaussian noise would be too far from the noise that is accounted.
    Privacy: replacing a row moves two counts of each group.

    Raises:
        ValueError: no count, no known relation, or not an L1 or L2 norm.
    """
    if n_counted < 1:
        raise ValueError("a row enters at least one count")
    if norm not in (Norm.L1, Norm.L2):
        raise ValueError("counts have an L1 or an L2 norm")
    factors = {NeighbouringRelation.ADD_OR_REMOVE_ROW: 1, NeighbouringRelation.REPLACE_ROW: 2}
    moved = n_counted * _factor(factors, relation)
    # The square root is rounded up where it is not a whole number.
    root = math.isqrt(moved)
    length = float(root) if root**2 == moved else math.nextafter(math.sqrt(moved), math.inf)
    bound = float(moved) if norm is Norm.L1 else length
    return Sensitivity(math.ldexp(bound, GRID_BITS), norm, relation)


def grid_integers(sums: ArrayLike) -> NDArray[np.int64]:
    """Take double sums of grid values back to integers.

    Shapes: sums: float64[...]; result: int64 of the same shape, in units of 2^-GRID_BITS.

    Raises:
        ValueError: a sum is not on the grid: then a value that was never clipped has entered it.
    """
    scaled = np.ldexp(np.asarray(sums, dtype=np.float64), GRID_BITS)
    if not np.all(np.isfinite(scaled)) or np.any(np.abs(scaled) > 2.0**53) or np.any(scaled != np.rint(scaled)):
        raise ValueError("sums that are not exact multiples of the grid")
    return scaled.astype(np.int64)


def grid_bound(bound: float) -> int:
    """Return a public bound in grid units, rounded down: values are truncated toward zero below it.

    Raises:
        ValueError: the bound is not finite, not above the grid, or above 2^(31 - GRID_BITS).
    """
    if not (math.isfinite(bound) and 1 <= math.ldexp(bound, GRID_BITS) <= 2**31):
        raise ValueError("a bound must be finite, at least one grid unit and at most 2^11")
    return math.floor(math.ldexp(bound, GRID_BITS))


def _truncate(rows: ArrayLike) -> NDArray[np.int64]:
    values = np.asarray(rows, dtype=np.float64)
    if not np.all(np.isfinite(values)):
        raise ValueError("rows must be finite")
    return np.clip(np.trunc(np.ldexp(values, GRID_BITS)), -(2.0**62), 2.0**62).astype(np.int64)


def _factor(factors: dict[NeighbouringRelation, int], relation: NeighbouringRelation) -> int:
    if relation not in factors:
        raise ValueError(f"no sensitivity is known here for {relation.value}")
    return factors[relation]
