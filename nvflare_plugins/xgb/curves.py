"""The parts of auc and aucpr that XGBoost sends for the rows of one site, to the order of its additions.

Where a site's rows are in shards, no XGBoost has all of them; areas of shards do not add up to the site's. Scores,
labels and weights go to the site's own process, and here they become what one XGBoost would have sent.

Reference: XGBoost 3.2, src/metric/auc.cc (BinaryAUC, BinaryPRAUC, MultiClassOVR) and auc.h (CalcDeltaPRAUC).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
