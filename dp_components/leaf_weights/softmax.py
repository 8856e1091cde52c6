"""Leaves of several classes: one query holds the sums of all classes (ours)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import Sums
from dp_components.leaf_weights.query import LeafQuery, PairBounds
from dp_components.sensitivity import GRID_BITS, ClippedRows, Sensitivity, clip_class_rows, grid_bound

CLASSES_CLIPPED_AT = 0.85
"""Where the clipped query clips the length of a row's vector."""
CLASS_HESSIAN_WEIGHT = 1.5
UNCLIPPED = math.sqrt(2.0)
"""|p - y| is below this at every score: (1 - p_y)^2 + the squares of the others, which add up to 1 - p_y at most."""


class SoftmaxWeights:
    """Leaf weights -G_k / (H_k + lambda), with g_k = p_k - y_k and h_k = p_k (1 - p_k) for each class k.

    All classes share one tree's structure, and a row lies in one of its leaves, so that its vector (g_1 .. g_K, c h_1
    .. c h_K) enters one sum. Clipped as a whole to length C it makes one query of sensitivity C, however many classes
    there are: one query for each class would have them each at |g_k| <= 1, and the root of K times the noise.

    The g_k of a row add up to 0, shortened or not. So the mean over classes of a leaf's noised G_k holds noise alone,
    and is taken away: what remains of the noise is sqrt((K - 1) / K) of it.

    Privacy: L2 sensitivity C for ADD_OR_REMOVE_ROW, 2 C for CHANGE_LABEL and REPLACE_ROW (``clip_class_rows``).
    """

    bounds = PairBounds(gradient=1.0, hessian=0.25)

    def __init__(self, n_classes: int) -> None:
        self.n_outputs = n_classes
        self.noise_kept = math.sqrt((n_classes - 1) / n_classes)
        self.largest_curvature = (n_classes - 1) / n_classes

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return each row's vector. Shapes: margin: float32[n_rows, K]; values: int64[n_rows, 2 K]."""
        p = class_probabilities(margin)
        grad = p.copy()
        grad[np.arange(label.size), label.astype(np.intp)] -= 1.0
        return clip_class_rows(grad, p * (1.0 - p), *_clipping(query))

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return what the clipping guarantees."""
        nothing = np.zeros((0, self.n_outputs))
        return clip_class_rows(nothing, nothing, *_clipping(query)).sensitivity

    def repaired(self, sums: Sums) -> Sums:
        """Take the mean over classes away from the gradients: it is noise. Sums on the grid add up exactly."""
        return self.expanded(sums)

    def expanded(self, sums: Sums) -> Sums:
        """Take the mean over classes away from the gradients, for gains too."""
        n = self.n_outputs
        gradients = sums[..., :n]
        return np.concatenate([gradients - gradients.sum(axis=-1, keepdims=True) / n, sums[..., n:]], axis=-1)

    def curvature(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum of a row's h over the classes (ours), 1 - |p|^2 for the softmax, and never more than that has.

        Of gradient updates it is the row's 1, cut to that bound.
        """
        return _cut(values[:, self.n_outputs :].sum(axis=1), self.largest_curvature)


class SoftmaxGradientWeights(SoftmaxWeights):
    """Leaf weights -G_k / (n + lambda): the gradient step of a leaf with n rows, whose number all classes share.

    Privacy: the vector (g_1 .. g_K, 1), clipped as a whole; see ``SoftmaxWeights``.
    Reference: Maddock et al., section 4.4.2, for each class.
    """

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return each row's vector. Shapes: margin: float32[n_rows, K]; values: int64[n_rows, K + 1]."""
        p = class_probabilities(margin)
        p[np.arange(label.size), label.astype(np.intp)] -= 1.0
        return clip_class_rows(p, np.ones((label.size, 1)), math.sqrt(3.0), 1.0)

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return what the clipping guarantees."""
        return clip_class_rows(np.zeros((0, self.n_outputs)), np.zeros((0, 1)), math.sqrt(3.0), 1.0).sensitivity

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.largest_curvature = 1.0

    def expanded(self, sums: Sums) -> Sums:
        """Give every class the number of rows."""
        n = self.n_outputs
        return super().expanded(np.concatenate([sums[..., :n], np.repeat(sums[..., n:], n, axis=-1)], axis=-1))


class ClassShares:
    """Leaf answers: the share of each class, as in a random forest.

    Maddock et al. average the share of one class, from (positive rows, rows). This is our extension to several: a row
    is the one 1 among K numbers, and a leaf's rows are the sum of its classes'. It costs less than the published pair:
    the vector has length 1, whatever K is, and the pair root 2.

    Written as a weight update: g_k = -1[y = k], h_k = 1 in all classes, so that -G_k / H is the share without a ridge.
    All trees form one batch with learning rate 1, so that their mean answers. An XGBoost model of several classes takes
    the softmax of its scores: they are K times the shares here (``score_unit``), of which the softmax keeps the order,
    and equals the shares to first order where these are near 1 / K; where one class is nearly alone it is not a share.

    Privacy: L2 sensitivity 1 for ADD_OR_REMOVE_ROW, 2 for CHANGE_LABEL and REPLACE_ROW (``clip_class_rows``).
    Reference: Maddock et al., section 4.4.1, for each class.
    """

    bounds = PairBounds(gradient=1.0, hessian=1.0)
    noise_kept = 1.0
    largest_curvature = 1.0

    def __init__(self, n_classes: int) -> None:
        self.n_outputs = n_classes

    @property
    def score_unit(self) -> float:
        """What shares are multiplied with to become scores."""
        return float(self.n_outputs)

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return -1 in the place of each row's class; the margin has no part. Shapes: values: int64[n_rows, K]."""
        counts = np.zeros((label.size, self.n_outputs))
        counts[np.arange(label.size), label.astype(np.intp)] = -1.0
        return clip_class_rows(counts, np.zeros((label.size, 0)), 1.0, 1.0)

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return what the clipping guarantees."""
        return clip_class_rows(np.zeros((0, self.n_outputs)), np.zeros((0, 0)), 1.0, 1.0).sensitivity

    def repaired(self, sums: Sums) -> Sums:
        """Leave out classes of which noise left no rows; answer the same for all where it left none of any."""
        counts = np.maximum(-sums, 0.0)
        counts = np.where(counts.sum(axis=1, keepdims=True) > 0, counts, 1.0 / self.n_outputs)
        rows = counts.sum(axis=1, keepdims=True)
        return np.concatenate([-counts, np.repeat(rows, self.n_outputs, axis=1)], axis=1)

    def expanded(self, sums: Sums) -> Sums:
        """Give every class the number of rows: minus the sum over classes."""
        rows = -sums.sum(axis=-1, keepdims=True)
        return np.concatenate([sums, np.repeat(rows, self.n_outputs, axis=-1)], axis=-1)

    def curvature(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each row's 1."""
        return _cut(-values.sum(axis=1), self.largest_curvature)


def class_probabilities(margin: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the softmax of each row's scores. Shapes: float32[n, K] -> float64[n, K]."""
    scores = margin.astype(np.float64)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-math.inf))
    result: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return result


def _cut(values: NDArray[np.int64], bound: float) -> NDArray[np.int64]:
    return np.clip(values, 0, grid_bound(bound, GRID_BITS))


def _clipping(query: LeafQuery) -> tuple[float, float]:
    """Return C and c."""
    if query is LeafQuery.VECTOR:
        return UNCLIPPED, 1.0
    return CLASSES_CLIPPED_AT if query is LeafQuery.CLIPPED else UNCLIPPED, CLASS_HESSIAN_WEIGHT
