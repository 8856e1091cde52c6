"""Results over splits, and when a difference between two methods is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tests.bench.dp_data import TEST_SHARE

SIGNIFICANCE = 0.05
_TEST_OVER_TRAIN = TEST_SHARE / (1 - TEST_SHARE)
Reliability = tuple[tuple[float, float], ...]
"""Mean probability and share of positive rows of each tenth of the rows, lowest probabilities first."""


@dataclass(frozen=True)
class Scored:
    """One model on its test rows. Units: seconds of CPU time of the whole process."""

    auc: float
    log_loss: float
    seconds: float = 0.0
    epsilon: float = 0.0
    messages: int = 0
    calibration: float = 0.0
    reliability: Reliability = ()


@dataclass(frozen=True)
class Series:
    """Results of one method on one data set and epsilon. Shapes: float64[n_splits], means over repeats."""

    auc: NDArray[np.float64]
    log_loss: NDArray[np.float64]
    seconds: float = 0.0
    epsilon_spent: float = 0.0
    messages: int = 0
    calibration: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    reliability: Reliability = ()

    @classmethod
    def of(cls, runs: Sequence[Sequence[Scored]]) -> Series:
        """Average over the repeats of each split."""
        flat = [run for of_split in runs for run in of_split]
        return cls(
            np.array([np.mean([r.auc for r in of_split]) for of_split in runs]),
            np.array([np.mean([r.log_loss for r in of_split]) for of_split in runs]),
            float(np.mean([r.seconds for r in flat])),
            max(r.epsilon for r in flat),
            max(r.messages for r in flat),
            np.array([np.mean([r.calibration for r in of_split]) for of_split in runs]),
            tuple(map(tuple, np.mean([r.reliability for r in flat], axis=0).round(4).tolist())),
        )


def calibration_error(label: NDArray[np.float32], p: NDArray[np.float64]) -> float:
    """Return how far probabilities and shares of positive rows are apart, over ten even bins, weighed by their rows.

    Shapes: float[n_rows] each. Reference: Naeini, Cooper, Hauskrecht (2015), the expected calibration error.
    """
    bins = np.minimum((10 * p).astype(np.intp), 9)
    return float(np.abs(np.bincount(bins, weights=p - label, minlength=10)).sum() / label.size)


def reliability(label: NDArray[np.float32], p: NDArray[np.float64]) -> Reliability:
    """Return a model's reliability table. Shapes: float[n_rows] each, at least ten rows."""
    tenths = np.array_split(np.argsort(p, kind="stable"), 10)
    return tuple((float(p[rows].mean()), float(label[rows].mean())) for rows in tenths)


def mean_and_sd(values: NDArray[np.float64]) -> dict[str, float]:
    """Return both, for the report. The standard deviation is that of splits."""
    return {"mean": round(float(values.mean()), 4), "sd": round(float(values.std(ddof=1)), 4)}


def verdict(ours: Series, theirs: Series) -> tuple[str, float]:
    """Compare AUC split by split: ("wins", "ties" or "losses", two-sided p).

    The same rows are used in many splits, so that the differences are not independent: their variance is corrected for
    the overlap.

    Reference: Nadeau and Bengio, Inference for the Generalization Error (2003), the corrected resampled t-test.
    """
    difference = ours.auc - theirs.auc
    n = difference.size
    error = difference.std(ddof=1) * np.sqrt(1 / n + _TEST_OVER_TRAIN)
    p = 2 * float(stats.t.sf(abs(difference.mean()) / max(error, 1e-12), n - 1))
    return ("ties" if p >= SIGNIFICANCE else "wins" if difference.mean() > 0 else "losses"), p
