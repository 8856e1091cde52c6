"""Leaves of a regression: clipped residuals of the squared loss (C2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import OneOutput, Sums
from dp_components.leaf_weights.query import LeafQuery, PairBounds
from dp_components.leaf_weights.target import Number
from dp_components.sensitivity import ClippedRows, Sensitivity, clip_rows

RESIDUAL_CLIPPED_AT = 0.15
"""Where the clipped query clips residuals. Units: half of the distance of the label's bounds."""
COUNT_WEIGHT = 0.5
"""The weight of a row's 1 beside its residual, in the queries that weigh them."""


class SquaredWeights(OneOutput):
    """Leaf weight -G / (n + lambda), with the residuals' sum G and the rows' number n: Newton and gradient alike.

    The label is clipped to its public bounds, and the residual, score - label, to [-u, u]; g is the residual in units
    of u, and h = 1. u is half of the distance of the bounds, or for the clipped query a part of it.

    Privacy: (g, w h) of a row lies within B = |(1, w)|, whatever its label is. L2 sensitivity B for adding or removing
        a row, which brings or takes its own pair. Where a label changes h stays, and g moves by up to 2; 2 B, the bound
        for replaced rows, covers both (``clip_rows``).
    Reference: Maddock et al., section 4.4; their code clips residuals likewise.
    """

    bounds = PairBounds(gradient=1.0, hessian=1.0)

    def __init__(self, target: Number) -> None:
        self._target = target

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return clipped residuals and 1. Shapes: margin, label: float32[n_rows], units of the label."""
        bounds = self._target.bounds
        labels = np.clip(label.astype(np.float64), bounds.low, bounds.high)
        return _clip(query, (margin.astype(np.float64) - labels) / residual_unit(self._target, query))

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return what the clipping guarantees."""
        return _clip(query, np.zeros(0)).sensitivity

    def repaired(self, sums: Sums) -> Sums:
        """Return the sums as they are."""
        return sums


class MeanLabels(SquaredWeights):
    """Leaf weight: the mean of the labels, as in a random forest, between -1 and 1 in units of half the bounds.

    Privacy: one row moves (G, n) by at most (1, 1).
    Reference: Maddock et al., section 4.4.1.
    """

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return the label with its sign turned, and 1; the margin has no part in it."""
        return super().row_statistics(np.full(label.shape, self._target.start, dtype=np.float32), label, query)

    def repaired(self, sums: Sums) -> Sums:
        """Answer the middle of the bounds where noise left no rows, and never beyond the bounds."""
        rows = sums[:, 1]
        empty = rows <= 0
        room = np.maximum(rows, 0.0)
        return np.stack([np.clip(sums[:, 0], -room, room), np.where(empty, 1.0, rows)], axis=1)


def residual_unit(target: Number, query: LeafQuery) -> float:
    """Return u, where residuals are clipped, and the unit of gradients and leaves. Units: of the label."""
    return target.unit * (RESIDUAL_CLIPPED_AT if query is LeafQuery.CLIPPED else 1.0)


def _clip(query: LeafQuery, residuals: NDArray[np.float64]) -> ClippedRows:
    weights = {LeafQuery.VECTOR: None, LeafQuery.SCALAR: (1.0, 1.0)}.get(query, (1.0, COUNT_WEIGHT))
    pairs = np.stack([residuals, np.ones(residuals.size)], axis=1)
    return clip_rows(pairs, (1.0, 1.0), weights=weights)
