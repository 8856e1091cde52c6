"""What counts of two classes by bins of a score tell of a model: bounds for the metrics, as scores within a bin tie.

Whatever the scores within the bins are, the metric on the rows lies between the bounds, and both are reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Between:
    """A metric that lies between two numbers."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


def auc(negative: Counts, positive: Counts) -> Between:
    """Bound the area under the ROC curve: the share of pairs in which the positive row scores higher.

    Shapes: negative, positive: int64[n_bins], by ascending score; both have rows.
    """
    of_negative, of_positive = _floats(negative), _floats(positive)
    below = np.concatenate([[0.0], np.cumsum(of_negative)[:-1]])
    pairs = of_positive.sum() * of_negative.sum()
    decided, tied = (of_positive * below).sum(), (of_positive * of_negative).sum()
    return Between(float(decided / pairs), float((decided + tied) / pairs))


def average_precision(negative: Counts, positive: Counts) -> Between:
    """Bound average precision (AUCPR as scikit-learn sums it): the mean precision at the positive rows.

    In a bin all positive rows may come first, or last; p positive rows after T of them and F negative ones add
    the sum of (T + i) / (T + i + F) for i = 1 to p, which is p - F (psi(T + F + p + 1) - psi(T + F + 1)).

    Shapes: as ``auc``.
    """
    of_negative, of_positive = _floats(negative)[::-1], _floats(positive)[::-1]
    true = np.concatenate([[0.0], np.cumsum(of_positive)[:-1]])
    false = np.concatenate([[0.0], np.cumsum(of_negative)[:-1]])

    def added(before: NDArray[np.float64]) -> float:
        steps = digamma(true + before + of_positive + 1) - digamma(true + before + 1)
        return float((of_positive - before * steps).sum() / of_positive.sum())

    return Between(added(false + of_negative), added(false))


def kolmogorov_smirnov(negative: Counts, positive: Counts) -> Between:
    """Bound the largest difference between the classes' distributions of the score.

    Shapes: as ``auc``.
    """
    of_negative, of_positive = (np.concatenate([[0.0], np.cumsum(_floats(one))]) for one in (negative, positive))
    of_negative, of_positive = of_negative / of_negative[-1], of_positive / of_positive[-1]
    low = float(np.abs(of_negative - of_positive).max())
    inside = np.maximum(of_negative[1:] - of_positive[:-1], of_positive[1:] - of_negative[:-1])
    return Between(low, float(max(low, inside.max())))


def _floats(counts: Counts) -> NDArray[np.float64]:
    return counts.astype(np.float64)
