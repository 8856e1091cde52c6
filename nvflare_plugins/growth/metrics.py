"""The parts of every metric from margins that a site keeps, and the pooled value from the sites' summed parts.

A site sends what XGBoost would send: a numerator and a weight, or three numbers a class for curves of several classes.
Each row's loss is XGBoost's float32; rows are added as doubles in its order, so that one site's value is XGBoost's own.

Reference: XGBoost 3.2 to 3.4, src/metric/elementwise_metric.cu, multiclass_metric.cu, auc.cc.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth import float32, survival
from nvflare_plugins.growth.float32 import Floats
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.growth.ranking import Queries, rank_parts
from nvflare_plugins.wire.envelope import CURVE_METRICS, RANK_METRICS

_F = np.float32
_ROUNDING = _F(1e-6)  # XGBoost's kRtEps
_SMALLEST = _F(1e-16)
_LIST = 32  # places of a ranked list that count, where a metric does not say how many
_BLOCK = 2048  # rows that XGBoost adds before it adds them to the rest
_PER_CLASS = ("mlogloss", "merror")
_OF_TIMES = ("aft-nloglik",)  # whose losses are doubles
_IN_ONE_BLOCK = (*_PER_CLASS, *_OF_TIMES)
_COX = "cox-nloglik"  # of rows at risk: a pair for each bin of times

Parts = NDArray[np.float64]
Loss = Callable[["Metric", Floats, Floats], Floats | Parts]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a job.

    Attributes:
        name: as XGBoost prints it, argument included.
        objective: whose outputs it looks at, and whose parameters it reads.
    """

    name: str
    objective: Objective

    @property
    def n_parts(self) -> int:
        """How many numbers a site sends of it."""
        n_outputs = self.objective.n_outputs
        if self._kind == _COX:
            return 2 * self.objective.n_times + 2
        return 3 * n_outputs if self._kind in CURVE_METRICS and n_outputs > 1 else 2

    @property
    def _kind(self) -> str:
        return self.name.partition("@")[0]

    @property
    def argument(self) -> np.float32:
        """The number after '@', as XGBoost holds it; 0.5 where there is none, which is the threshold of error."""
        return _F(self.name.partition("@")[2] or 0.5)

    def parts(self, margins: Floats, labels: Floats, weights: Floats | None, queries: Queries | None = None) -> Parts:
        """Return what this site, or these rows of it, add to the sums of a metric.

        Parts of curves do not add up over the rows of one site: these must be there at once. A site without rows adds
        zeros; one with a single class adds neither area nor weight, so that the others' curves stand.

        Shapes: margins: float32[n_rows, n_outputs]; labels, weights: float32[n_rows], labels float32[n_rows, 2] of
            survival; result: float64[n_parts].
        """
        n_rows = len(labels)
        if not n_rows:
            return np.zeros(self.n_parts)
        if self._kind == _COX:
            return survival.likelihood_parts(margins.reshape(-1), labels, weights, self.objective.n_times)
        seen = self.objective.evaluated(margins.reshape(n_rows, self.objective.n_outputs))
        if queries is not None:
            exp_gain = self.objective.rules is None or self.objective.rules.exp_gain
            depth = int(self.name.partition("@")[2] or _LIST)
            return np.array(rank_parts(self._kind, depth, queries, seen[:, 0], labels, exp_gain=exp_gain))
        if self._kind in CURVE_METRICS:
            with np.errstate(all="ignore"):
                scores = seen if self.objective.n_outputs > 1 else seen[:, 0]
                return without_empty_curves(curve_parts(self._kind, scores, labels, weights))
        weight = np.ones(n_rows, np.float32) if weights is None else weights
        block = n_rows if self._kind in _IN_ONE_BLOCK else _BLOCK
        if self._kind in _OF_TIMES:
            weight = weight.astype(np.float64)
        with np.errstate(all="ignore"):
            losses = _LOSSES[self._kind](self, labels, seen if self._kind in _PER_CLASS else seen[:, 0]) * weight
        return np.array([_added(losses, block), _added(weight, block)])

    def value(self, pooled: Parts) -> float:
        """Return the metric from the sums of all sites' parts, as XGBoost would print it.

        Shapes: pooled: float64[n_parts].
        """
        if self._kind == _COX:
            return survival.negative_log_likelihood(pooled)
        with np.errstate(all="ignore"):
            if self._kind in CURVE_METRICS and pooled.size > 2:
                return _area(pooled.reshape(-1, 3))
            numerator, weight = pooled
            if self._kind in CURVE_METRICS:
                return float(min(numerator / weight, 1.0)) if weight > 0 else float("nan")
            if self._kind in RANK_METRICS:
                return float(min(numerator / weight if weight > 0 else numerator, 1.0))
            if self._kind == "gamma-deviance":
                return float(2 * numerator / (weight if weight > 0 else np.float64(_ROUNDING)))
            if weight == 0 and self._kind in (*_PER_CLASS, "quantile"):
                return float("nan")  # XGBoost divides by it, or refuses
            quotient = numerator / weight if weight != 0 else numerator
            return float(np.sqrt(quotient) if self._kind in ("rmse", "rmsle") else quotient)


def _added(values: Floats | Parts, block: int) -> float:
    """Add rows one after the other in blocks, and the blocks' sums. Shapes: values: [n_rows]."""
    n_whole = values.size // block * block
    sums = np.cumsum(values[:n_whole].reshape(-1, block), axis=1, dtype=np.float64)[:, -1]
    rest = np.cumsum(values[n_whole:], dtype=np.float64)[-1:]
    return float(np.cumsum(np.concatenate([sums, rest]))[-1])


def _area(by_class: Parts) -> float:
    """Return the mean of classes' areas by their positives. Shapes: float64[n_classes, 3]."""
    total = positives = 0.0
    for weight, positive, area in by_class:
        if weight == 0:
            return float("nan")
        total += area / weight * positive
        positives += positive
    return float(total / positives) if positives else float("nan")


def _rmsle(metric: Metric, y: Floats, p: Floats) -> Floats:
    difference = float32.log1p(y) - float32.log1p(p)
    return difference * difference


def _logloss(metric: Metric, y: Floats, p: Floats) -> Floats:
    def part(x: Floats, probability: Floats) -> Floats:
        return np.where(x == 0, _F(0), x * float32.log(np.maximum(probability, _SMALLEST)))

    return part(-y, p) + part(-(_F(1) - y), _F(1) - p)


def _huber(metric: Metric, y: Floats, p: Floats) -> Floats:
    slope = metric.objective.huber_slope
    ratio = (y - p) / slope
    return slope * slope * (np.sqrt(_F(1) + ratio * ratio) - _F(1))


def _quantile(metric: Metric, y: Floats, p: Floats) -> Floats:
    alpha, d = metric.objective.quantile_alpha, y - p
    sign = (d >= 0).astype(np.float32)
    return (alpha * sign * d) - (_F(1) - alpha) * (_F(1) - sign) * d


def _poisson(metric: Metric, y: Floats, p: Floats) -> Floats:
    p = np.where(p < _SMALLEST, _SMALLEST, p)
    return float32.lgamma(y + _F(1)) + p - float32.log(p) * y


def _gamma_deviance(metric: Metric, y: Floats, p: Floats) -> Floats:
    p, y = p + _ROUNDING, y + _ROUNDING
    return float32.log(p / y) + y / p - _F(1)


def _gamma_likelihood(metric: Metric, y: Floats, p: Floats) -> Floats:
    theta = (-1.0 / np.maximum(p, _ROUNDING).astype(np.float64)).astype(np.float32)
    return -(y * theta + float32.log(-theta))


def _tweedie(metric: Metric, y: Floats, p: Floats) -> Floats:
    one, two, of_p = _F(1) - metric.argument, _F(2) - metric.argument, float32.log(p)
    return -(y * float32.exp(one * of_p) / one) + float32.exp(two * of_p) / two


def _mlogloss(metric: Metric, y: Floats, p: Floats) -> Floats:
    own = p[np.arange(y.size), y.astype(np.int64)]
    return -float32.log(np.where(own > _SMALLEST, own, _SMALLEST))


_LOSSES: dict[str, Loss] = {
    "rmse": lambda metric, y, p: (y - p) * (y - p),
    "rmsle": _rmsle,
    "mae": lambda metric, y, p: np.asarray(np.abs(y - p)),
    "mape": lambda metric, y, p: np.asarray(np.abs((y - p) / y)),
    "logloss": _logloss,
    "error": lambda metric, y, p: np.where(p > metric.argument, _F(1) - y, y),
    "mphe": _huber,
    "quantile": _quantile,
    "poisson-nloglik": _poisson,
    "gamma-deviance": _gamma_deviance,
    "gamma-nloglik": _gamma_likelihood,
    "tweedie-nloglik": _tweedie,
    "mlogloss": _mlogloss,
    "merror": lambda metric, y, p: np.asarray(np.argmax(p, axis=1) != y, np.float32),
    "aft-nloglik": lambda metric, bounds, margins: metric.objective.aft.losses(margins, bounds),
}


# The parts of auc and aucpr that XGBoost sends for the rows of one site, to the order of its additions.
#
# Where a site's rows are in shards, no XGBoost has all of them; areas of shards do not add up to the site's. Scores,
# labels and weights go to the site's own process, and here they become what one XGBoost would have sent.
#
# Reference: XGBoost 3.2, src/metric/auc.cc (BinaryAUC, BinaryPRAUC, MultiClassOVR) and auc.h (CalcDeltaPRAUC).


Column = NDArray[np.float32]
Sums = NDArray[np.float64]
Area = Callable[[Sums, Sums, Sums, Sums], Sums]


def curve_parts(metric: str, scores: Column, label: Column, weight: Column | None) -> NDArray[np.float64]:
    """Return what a site sends of a metric.

    Args:
        metric: auc or aucpr.

    Shapes: scores: float32[n_rows] or float32[n_rows, n_classes], after the objective's transform; label, weight:
        float32[n_rows]; result: float64[2], area and the area that there could be, or float64[3 n_classes], weight,
        positives and area of each class. Areas are no numbers where aucpr has none.
    """
    of_curve = _area_under_precision if metric == "aucpr" else _area_under_rates
    weight = np.ones(label.size, np.float32) if weight is None else weight
    n_classes = scores.shape[1] if scores.ndim == 2 else 1
    if not label.size:
        return np.zeros(2 if n_classes == 1 else 3 * n_classes)
    if n_classes == 1:
        negatives, positives, area = of_curve(scores.reshape(-1), label, weight)
        return np.array([area, negatives * positives])
    parts = np.zeros((n_classes, 3))
    for number in range(n_classes):
        own = (label == number).astype(np.float32)
        negatives, positives, area = of_curve(np.ascontiguousarray(scores[:, number]), own, weight)
        parts[number] = negatives * positives, positives, area
    return parts.reshape(-1)


def without_empty_curves(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Let a site without positive or without negative rows contribute nothing to the pooled aucpr.

    XGBoost sends no number for such a site's area under precision and recall, which would make the pooled metric no
    number for all. To auc it contributes neither area nor weight; so it does here.

    Shapes: parts: float64[2], area and weight, or float64[3 n_classes], weight, positives and area of each class.
    """
    by_class = parts.reshape(-1, 2 if parts.size == 2 else 3)
    return np.where(np.isnan(by_class).any(axis=1, keepdims=True), 0.0, by_class).reshape(-1)


def _area_under_rates(scores: Column, label: Column, weight: Column) -> tuple[float, float, float]:
    def area(x0: Sums, x1: Sums, y0: Sums, y1: Sums) -> Sums:
        return np.abs(x0 - x1) * (y0 + y1) * 0.5

    return _integrated(scores, label, weight, area)


def _area_under_precision(scores: Column, label: Column, weight: Column) -> tuple[float, float, float]:
    total = float(np.cumsum(weight * label, dtype=np.float64)[-1])
    if total <= 0 or float(np.cumsum(weight * (np.float32(1) - label), dtype=np.float64)[-1]) <= 0:
        return 1.0, 1.0, np.nan

    def area(x0: Sums, x1: Sums, y0: Sums, y1: Sums) -> Sums:
        grows = y1 != y0
        slope = np.divide(x1 - x0, y1 - y0, out=np.zeros_like(x1), where=grows)
        a = 1.0 + slope
        b = np.where(grows, (x0 - slope * y0) / total, 0.0)
        r0, r1 = y0 / total, y1 / total
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = b / a * (np.log(a * r1 + b) - np.log(a * r0 + b))
        return np.where(b != 0.0, (r1 - r0 - logs) / a, (r1 - r0) / a)

    return 1.0, 1.0, _integrated(scores, label, weight, area)[2]


def _integrated(scores: Column, label: Column, weight: Column, area: Area) -> tuple[float, float, float]:
    """Return weights of negatives and of positives, and the area; zeros if either is missing."""
    order = np.argsort(-scores, kind="stable")
    scores, label, weight = scores[order], label[order], weight[order]
    negatives = ((np.float32(1) - label) * weight).astype(np.float64)
    negatives[0] = (1.0 - float(label[0])) * float(weight[0])  # XGBoost takes the first row's in float64
    x, y = np.cumsum(negatives), np.cumsum(label * weight, dtype=np.float64)
    last = np.append(np.flatnonzero(scores[1:] != scores[:-1]), scores.size - 1)  # of each run of equal scores
    before = np.concatenate([[0], last[:-1]])
    x0, y0 = x[before], y[before]
    x0[0] = y0[0] = 0.0
    if x[-1] <= 0 or y[-1] <= 0:
        return 0.0, 0.0, 0.0
    return float(x[-1]), float(y[-1]), float(np.cumsum(area(x0, x[last], y0, y[last]))[-1])
