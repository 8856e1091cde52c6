"""C2: what a leaf answers, and the row statistics it is computed from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dp_components.sensitivity import (
    GRID_BITS,
    ClippedRows,
    Norm,
    Sensitivity,
    clip_class_rows,
    clip_gradients,
    clip_logistic_rows,
    clip_rows,
    grid_bound,
)
from dp_components.split_candidates.candidates import FeatureBounds

# The query for leaf sums: how the pair (g, h) of a row is clipped, and which noise its two sums get.
#
# Each form is one query over the pair; they differ in the weights of its two coordinates, hence in how the noise is
# divided between G and H. Noise is Laplace's for the pure form, whose rows are clipped in the L1 norm, and Gaussian for
# all others. The sensitivity comes with the clipped rows (sensitivity.py).


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
    PURE = "g is clipped at 0.6 and h to what that leaves: (G, 2 H) has sensitivity 0.6 in the L1 norm"

    @property
    def is_clipped(self) -> bool:
        """Whether gradients are clipped below what the loss gives."""
        return self in (LeafQuery.CLIPPED, LeafQuery.PURE)

    @property
    def is_for_newton(self) -> bool:
        """Whether it is made for the logistic loss's pairs, and what stands for them with other labels."""
        return self is LeafQuery.JOINT or self.is_clipped

    @property
    def norm(self) -> Norm:
        """Norm in which rows are clipped."""
        return Norm.L1 if self is LeafQuery.PURE else Norm.L2


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
        ValueError: a value is not finite, or for the joint and the clipped queries of rows of another loss.
    Reference: Maddock et al., section 4.2; the joint and the clipped queries are ours.
    """
    if query.is_for_newton:
        if not bounds.is_logistic:
            raise ValueError(f"the {query.name.lower()} query is for Newton updates of the logistic loss only")
        if query is LeafQuery.JOINT:
            return clip_logistic_rows(g, h)
        return clip_gradients(g, h, CLIPPED_AT, norm=query.norm)
    weights = (1 / bounds.gradient, 1 / bounds.hessian) if query is LeafQuery.SCALAR else None
    return clip_rows(np.stack([g, h], axis=1), (bounds.gradient, bounds.hessian), weights=weights)


def real_noise_std(sensitivity: Sensitivity, noise_multiplier: float) -> tuple[float, ...]:
    """Return the standard deviation of the noise on each coordinate, root 2 of the parameter of Laplace noise.

    Units: of g and h themselves.
    """
    of_parameter = math.sqrt(2) if sensitivity.norm is Norm.L1 else 1.0
    return tuple(of_parameter * noise_multiplier * sensitivity.bound / weight / UNIT for weight in sensitivity.weights)


# What every weight update offers.


Sums = NDArray[np.float64]


class LeafWeights:
    """Row statistics, and the leaf sums as XGBoost's weight formula shall see them; by default of pairs (g, h).

    Attributes:
        bounds: of one output's g and h.
        n_outputs: scores of a row.
        noise_kept: the part of the noise on a G that is left after ``repaired``.
        largest_curvature: what ``curvature`` gives for a row at most, in real units.
        score_unit: what leaf weights are multiplied with to become scores.
    """

    bounds: PairBounds
    n_outputs = 1
    noise_kept = 1.0
    largest_curvature = 1.0
    score_unit = 1.0

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return what each row adds to its leaf.

        Shapes: margin: float32[n_rows], or float32[n_rows, n_outputs] for several; label: float32[n_rows]; values:
            int64[n_rows, 2], or one column for each coordinate of the sensitivity.
        """
        raise NotImplementedError

    def sensitivity(self, query: LeafQuery) -> Sensitivity:
        """Return the sensitivity that ``row_statistics`` guarantees, before there are rows."""
        margin = np.zeros((0, self.n_outputs) if self.n_outputs > 1 else 0, dtype=np.float32)
        return self.row_statistics(margin, np.zeros(0, dtype=np.float32), query).sensitivity

    def repaired(self, sums: Sums) -> Sums:
        """Return noisy sums in which impossible values are mended: G of each output, then H of each. Post-processing.

        Shapes: float64[n_leaves, n_coordinates] -> float64[n_leaves, 2 n_outputs].
        """
        return sums

    def expanded(self, sums: Sums) -> Sums:
        """Return noisy sums as gains of splits take them: G of each output, then H of each. Post-processing.

        Linear: sums of bins may be expanded before or after they are added up.

        Shapes: float64[..., n_coordinates] -> float64[..., 2 n_outputs].
        """
        return sums

    def curvature(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what each row adds to the Hessian histograms by which candidates are refined (iterative Hessian).

        Privacy: between 0 and ``largest_curvature``, whatever the values are.

        Shapes: values: as ``row_statistics`` gives them; result: int64[n_rows]. Units: grid steps.
        """
        return values[:, 1]


def leaf_outputs(sums: Sums, ridge: float, clip: float, scale: float) -> NDArray[np.float32]:
    """Return what the leaves answer: -scale * clip(G / (H + ridge)), and 0 where H is not positive.

    The same formula as XGBoost's ``CalcWeight`` with ``lambda``, ``max_delta_step`` and ``learning_rate``, including
    its float32 roundings.

    Shapes: sums: float64[n_leaves, 2] of (G, H), or float64[n_leaves, 2 K], all G before all H; result:
        float32[n_leaves], or float32[n_leaves, K].
    Privacy: post-processing of noisy sums.
    Reference: Maddock et al., equations (3) and (4).
    """
    if sums.shape[1] > 2:
        n = sums.shape[1] // 2
        return np.stack([leaf_outputs(sums[:, [k, n + k]], ridge, clip, scale) for k in range(n)], axis=1)
    gradient, hessian = sums[:, 0] + 0.0, sums[:, 1]  # XGBoost knows no negative zero
    positive = hessian > 0
    weight = -gradient / np.where(positive, hessian + np.float64(np.float32(ridge)), 1.0)
    if clip:
        weight = np.clip(weight, -np.float64(np.float32(clip)), np.float64(np.float32(clip)))
    return np.where(positive, weight, 0.0).astype(np.float32) * np.float32(scale)


# Averaging weight updates (C2): each leaf answers with its share of positive rows, as in a random forest.


class AveragingWeights(LeafWeights):
    """Leaf weight: positive rows over rows, between 0 and 1.

    Written as a weight update: g = -y and h = 1 give -G / H without a ridge. All trees form one batch with learning
    rate 1, so the model answers with the mean over trees.

    Privacy: one row moves (G, n) by at most (1, 1).
    Reference: Maddock et al., section 4.4.1.
    """

    bounds = PairBounds(gradient=1.0, hessian=1.0)

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return -y and 1; the margin has no part in it."""
        return clip_pairs(query, -label.astype(np.float64), np.ones(label.size), self.bounds)

    def repaired(self, sums: Sums) -> Sums:
        """Answer 1/2 where noise left no rows, 0 where it left no positive ones, at most 1 elsewhere."""
        rows = sums[:, 1]
        positives = np.clip(-sums[:, 0], 0.0, np.maximum(rows, 0.0))
        empty = rows <= 0
        return np.stack([np.where(empty, -0.5, -positives), np.where(empty, 1.0, rows)], axis=1)


# Newton weight updates (C2).


def probability(margin: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the logistic function. Shapes: float32[n] -> float64[n]."""
    return 1.0 / (1.0 + np.exp(-np.clip(margin.astype(np.float64), -80.0, 80.0)))


class NewtonWeights(LeafWeights):
    """Leaf weight -G / (H + lambda) with the Hessian of the logistic loss.

    Privacy: one row moves (G, H) by at most (1, 1/4), and (G, 3.330 H) by at most 1 in L2 norm.
    Reference: Maddock et al., section 4.4.3, equation (4).
    """

    bounds = PairBounds(gradient=1.0, hessian=0.25, is_logistic=True)
    largest_curvature = 0.25

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return g = p - y and h = p (1 - p)."""
        p = probability(margin)
        return clip_pairs(query, p - label, p * (1.0 - p), self.bounds)


# Gradient weight updates (C2).


class GradientWeights(LeafWeights):
    """Leaf weight -G / (n + lambda): the gradient step of a leaf with n rows.

    Privacy: one row moves (G, n) by at most (1, 1).
    Reference: Maddock et al., section 4.4.2, equation (3).
    """

    bounds = PairBounds(gradient=1.0, hessian=1.0)

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return g = p - y and 1."""
        return clip_pairs(query, probability(margin) - label, np.ones(margin.size), self.bounds)


# A ridge in proportion to the noise (ours).


def noise_proportional_ridge(ridge: float, factor: float, gradient_noise_std: float) -> float:
    """Return lambda + factor * standard deviation of the noise on a leaf's gradient sum.

    With an ordinary ridge of 1, a leaf whose Hessian sum is smaller than the noise answers with a random weight of any
    size. A ridge as large as the noise shrinks exactly those leaves.

    Privacy: post-processing; the noise's standard deviation is public.
    """
    return ridge + factor * gradient_noise_std


# Leaves of several classes: one query holds the sums of all classes (ours).


CLASSES_CLIPPED_AT = 0.85
"""Where the clipped query clips the length of a row's vector."""
CLASS_HESSIAN_WEIGHT = 1.5
PURE_CLASSES_CLIPPED_AT, PURE_CLASS_HESSIAN_WEIGHT = 1.2, 0.5
"""The same in the L1 norm."""
UNCLIPPED = math.sqrt(2.0)
"""|p - y| is below this at every score: (1 - p_y)^2 + the squares of the others, which add up to 1 - p_y at most."""


class SoftmaxWeights(LeafWeights):
    """Leaf weights -G_k / (H_k + lambda), with g_k = p_k - y_k and h_k = p_k (1 - p_k) for each class k.

    All classes share one tree's structure, and a row lies in one of its leaves, so that its vector (g_1 .. g_K, c h_1
    .. c h_K) enters one sum. Clipped as a whole to length C it makes one query of sensitivity C, however many classes
    there are: one query for each class would have them each at |g_k| <= 1, and the root of K times the noise.

    The g_k of a row add up to 0, shortened or not. So the mean over classes of a leaf's noised G_k holds noise alone,
    and is taken away: what remains of the noise is sqrt((K - 1) / K) of it.

    Privacy: sensitivity C for ADD_OR_REMOVE_ROW, 2 C for CHANGE_LABEL and REPLACE_ROW (``clip_class_rows``).
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
        return clip_class_rows(grad, p * (1.0 - p), *_clipping(query), norm=query.norm)

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

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.largest_curvature = 1.0

    def expanded(self, sums: Sums) -> Sums:
        """Give every class the number of rows."""
        n = self.n_outputs
        return super().expanded(np.concatenate([sums[..., :n], np.repeat(sums[..., n:], n, axis=-1)], axis=-1))


class ClassShares(LeafWeights):
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

    def __init__(self, n_classes: int) -> None:
        self.n_outputs, self.score_unit = n_classes, float(n_classes)

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return -1 in the place of each row's class; the margin has no part. Shapes: values: int64[n_rows, K]."""
        counts = np.zeros((label.size, self.n_outputs))
        counts[np.arange(label.size), label.astype(np.intp)] = -1.0
        return clip_class_rows(counts, np.zeros((label.size, 0)), 1.0, 1.0)

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
    return np.clip(values, 0, grid_bound(bound))


def _clipping(query: LeafQuery) -> tuple[float, float]:
    """Return C and c."""
    if query is LeafQuery.PURE:
        return PURE_CLASSES_CLIPPED_AT, PURE_CLASS_HESSIAN_WEIGHT
    if query is LeafQuery.VECTOR:
        return UNCLIPPED, 1.0
    return CLASSES_CLIPPED_AT if query is LeafQuery.CLIPPED else UNCLIPPED, CLASS_HESSIAN_WEIGHT


# What a label is, in public facts: one of two classes, one of several, or a number within declared bounds.


_FINEST = 2.0**-20  # of the larger bound: float32, in which scores are added up, has 24 bits
_SMALLEST = 1e-30  # well above float32's subnormal numbers


@dataclass(frozen=True, slots=True)
class TwoClasses:
    """Labels 0 and 1. Scores are log-odds."""

    n_outputs: ClassVar[int] = 1
    start: ClassVar[float] = 0.0


@dataclass(frozen=True, slots=True)
class SeveralClasses:
    """Labels 0 to ``n_classes`` - 1, a public number of at least three. A row has one score for each class."""

    n_classes: int
    start: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.n_classes < 3:
            raise ValueError("several classes are three at least")

    @property
    def n_outputs(self) -> int:
        """Scores of a row."""
        return self.n_classes


@dataclass(frozen=True, slots=True)
class Number:
    """A number within public bounds, to which it is clipped.

    Attributes:
        bounds: public; units of the label.
        start: middle of the bounds, from which training starts; units of the label.
        unit: half of their distance.
    """

    bounds: FeatureBounds
    n_outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        low, high = self.bounds.low, self.bounds.high
        largest = max(abs(low), abs(high))
        if not (low < high and largest <= float(np.finfo(np.float32).max)):
            raise ValueError("the label's bounds must be numbers of float32, the lower one first")
        if self.unit < max(_SMALLEST, _FINEST * largest):
            raise ValueError(
                "the label's bounds lie too close together for float32: give the model labels from which a constant is "
                "taken away, or in smaller units"
            )

    @property
    def start(self) -> float:
        """Middle of the bounds, as float32 has it."""
        return float(np.float32(self.bounds.low / 2 + self.bounds.high / 2))

    @property
    def unit(self) -> float:
        """Half of the distance of the bounds."""
        return self.bounds.high / 2 - self.bounds.low / 2


class TimesLoss(Protocol):
    """The loss of a model of times. Attributes: scale: of the noise of a time's logarithm."""

    @property
    def scale(self) -> float: ...

    def pairs(
        self, margins: NDArray[np.float32], bounds: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return g and h. Shapes: margins, results: float32[n_rows]; bounds: float32[n_rows, 2]."""


@dataclass(frozen=True, slots=True)
class Times:
    """A time of which each row tells a lower and an upper bound; scores are logarithms of times.

    Attributes:
        bounds: public, above 0: times outside count as the bound they lie beyond. 0 and infinity stay: of a lower and
            an upper bound they say that there is none.
        middle: the geometric middle of the bounds, from which training starts.
    """

    bounds: FeatureBounds
    loss: TimesLoss
    n_outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.bounds.low < self.bounds.high < float(np.finfo(np.float32).max):
            raise ValueError("the bounds of times must be numbers of float32 above 0, the lower one first")

    @property
    def middle(self) -> float:
        """Units: of the times."""
        return float(np.float32(math.sqrt(self.bounds.low) * math.sqrt(self.bounds.high)))

    @property
    def start(self) -> float:
        """The logarithm of the middle."""
        return math.log(self.middle)


Target = TwoClasses | SeveralClasses | Number | Times
TWO_CLASSES = TwoClasses()


# Leaves of a regression: clipped residuals of the squared loss (C2).


RESIDUAL_CLIPPED_AT = 0.15
"""Where the clipped query clips residuals. Units: half of the distance of the label's bounds."""
COUNT_WEIGHT = 0.5
"""The weight of a row's 1 beside its residual, in the queries that weigh them."""


class SquaredWeights(LeafWeights):
    """Leaf weight -G / (n + lambda), with the residuals' sum G and the rows' number n: Newton and gradient alike.

    The label is clipped to its public bounds, and the residual, score - label, to [-u, u]; g is the residual in units
    of u, and h = 1. u is half of the distance of the bounds, or for the clipped query a part of it.

    Privacy: (g, w h) of a row lies within B = |(1, w)|, whatever its label is; in the L1 norm of the pure query that is
        1 + w. Sensitivity B for adding or removing a row, which brings or takes its own pair. Where a label changes h
        stays, and g moves by up to 2; 2 B, the bound for replaced rows, covers both (``clip_rows``).
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
    return target.unit * (RESIDUAL_CLIPPED_AT if query.is_clipped else 1.0)


def _clip(query: LeafQuery, residuals: NDArray[np.float64], h: NDArray[np.float64] | float = 1.0) -> ClippedRows:
    weights = {LeafQuery.VECTOR: None, LeafQuery.SCALAR: (1.0, 1.0)}.get(query, (1.0, COUNT_WEIGHT))
    pairs = np.stack([residuals, np.broadcast_to(h, residuals.shape)], axis=1)
    return clip_rows(pairs, (1.0, 1.0), weights=weights, norm=query.norm)


# Leaves of an accelerated failure time model: clipped gradients of censored times (C2).


TIMES_CLIPPED_AT = 1.0
"""Where the clipped query clips gradients. Units: of the loss's noise, so that of an event it is one deviation."""


class TimesWeights(LeafWeights):
    """Leaf weight -G / (H + lambda) of a loss of times, or -G / (n + lambda) for gradient updates.

    With s the noise's scale, s g is a row's surprise: of an event and normal noise its residual in deviations, of a row
    without one its hazard. It is clipped to [-u, u], and g' = s g / u; h' is s^2 h cut to [0, 1], or 1. A Newton step
    is then s u times -G' / H' (``leaf_unit``). Normal noise has s^2 h <= 1 at every score, so that nothing is cut.

    Privacy: (g', w h') of a row lies within B = |(1, w)|, whatever its times and its margin are, in the query's norm:
        sensitivity B for adding or removing a row, 2 B where its times or all of it are replaced (``clip_rows``). No
        bound of the loss is relied on.
    Reference: Barnwal, Cho, Hocking, arXiv:2006.04920; the clipping is ours, dp_components/README.md, section 4.
    """

    bounds = PairBounds(gradient=1.0, hessian=1.0)

    def __init__(self, target: Times, *, counts_rows: bool) -> None:
        """Args: counts_rows: h' is 1."""
        self._target, self._counts_rows = target, counts_rows

    def row_statistics(self, margin: NDArray[np.float32], label: NDArray[np.float32], query: LeafQuery) -> ClippedRows:
        """Return clipped gradients and hessians. Shapes: margin: float32[n_rows]; label: float32[n_rows, 2]."""
        target, times = self._target, label.reshape(-1, 2)
        has_bound = (times > 0) & np.isfinite(times)
        is_event = times[:, :1] == times[:, 1:]
        clipped = np.clip(times, np.float32(target.bounds.low), np.float32(target.bounds.high))
        g, h = target.loss.pairs(margin, np.where(has_bound | is_event, clipped, times))
        scale = target.loss.scale
        pulled = scale * g.astype(np.float64) / surprise_unit(target, query)
        return _clip(query, pulled, 1.0 if self._counts_rows else scale**2 * h.astype(np.float64))


def surprise_unit(target: Times, query: LeafQuery) -> float:
    """Return u, where a row's surprise is clipped; but for the clipped query it is that of a time at a bound."""
    if query.is_clipped:
        return TIMES_CLIPPED_AT
    return max(math.log(target.bounds.high / target.bounds.low) / (2 * target.loss.scale), TIMES_CLIPPED_AT)
