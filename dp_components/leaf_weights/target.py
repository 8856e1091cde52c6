"""What a label is, in public facts: one of two classes, one of several, or a number within declared bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dp_components.split_candidates.candidates import FeatureBounds

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


Target = TwoClasses | SeveralClasses | Number
TWO_CLASSES = TwoClasses()
