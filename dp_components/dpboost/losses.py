"""The two losses whose gradients at score 0 are at most g* = 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import FeatureBounds

Vector = NDArray[np.float64]


class Loss(Protocol):
    """A loss whose second derivative is taken for 1, as in the paper."""

    def target(self, label: Vector) -> Vector:
        """Return the labels as the gradient wants them. Shapes: float64[n_rows]."""

    def gradient(self, score: Vector, target: Vector) -> Vector:
        """Return the gradient at the score."""

    def prediction(self, score: Vector) -> Vector:
        """Return what is predicted: post-processing."""


@dataclass(frozen=True, slots=True)
class SquaredLoss:
    """Regression. The public bounds of the label are mapped onto [-1, 1]; labels outside are clamped.

    There is no base score: the labels' mean would be a release of its own.
    """

    label_bounds: FeatureBounds

    def __post_init__(self) -> None:
        if not self.label_bounds.low < self.label_bounds.high:
            raise ValueError("regression needs public bounds of the label, the lower one below the upper one")

    def target(self, label: Vector) -> Vector:
        """Scale and clamp."""
        if not np.isfinite(label).all():
            raise ValueError("labels must be finite")
        low, high = self.label_bounds.low, self.label_bounds.high
        return np.clip(2 * (label - low) / (high - low) - 1, -1.0, 1.0)

    def gradient(self, score: Vector, target: Vector) -> Vector:
        """Return score - target."""
        return score - target

    def prediction(self, score: Vector) -> Vector:
        """Scale back; a label lies within its public bounds, so a prediction does too."""
        low, high = self.label_bounds.low, self.label_bounds.high
        return low + (np.clip(score, -1.0, 1.0) + 1) / 2 * (high - low)


@dataclass(frozen=True, slots=True)
class LogisticLoss:
    """Binary classification with labels 0 and 1; filtering drops no row."""

    def target(self, label: Vector) -> Vector:
        """Check."""
        if not np.isin(label, (0.0, 1.0)).all():
            raise ValueError("binary labels must be 0 or 1")
        return label

    def gradient(self, score: Vector, target: Vector) -> Vector:
        """Return p - y."""
        return self.prediction(score) - target

    def prediction(self, score: Vector) -> Vector:
        """Return the probability of 1."""
        return 0.5 * (1 + np.tanh(score / 2))
