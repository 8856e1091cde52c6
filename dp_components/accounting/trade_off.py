"""What an accounted cost means for one person: how well anybody can tell whether that person took part.

Two worlds differ in all rows of one person. Whoever sees everything that was released, and knows all else, guesses in
which one he is. For every epsilon >= 0 the accounted curve delta(epsilon) bounds his chances: of those who took part he
finds at most the share

    TPR <= min(e^epsilon FPR + delta, 1 - e^(-epsilon) (1 - delta - FPR))

at a share FPR of those who did not and are accused all the same. Each point of the curve gives a bound that holds, so
the least over any of them does; for Gaussians the least over all is the exact trade-off Phi(Phi^(-1)(FPR) + mu).

Reference: Wasserman and Zhou (2010), theorem 2.4; Kairouz, Oh and Viswanath, The Composition Theorem for Differential
Privacy, theorem 2.1; Dong, Roth and Su, Gaussian Differential Privacy, propositions 3 and 5 (arXiv 1905.02383).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting.composition import PrivacyCost

_POINTS = 600
_LEAST_DELTA = 1e-12
_STEPS = 4096
_LARGEST_EPSILON = 500.0


class TradeOff:
    """A bound on how well members are told from others.

    Args:
        curve: pairs (epsilon, delta) that all hold; epsilon >= 0 and 0 <= delta <= 1.

    Raises:
        ValueError: no pair, or one out of range.
    """

    def __init__(self, curve: Sequence[tuple[float, float]]) -> None:
        if not curve or not all(epsilon >= 0 and 0 <= delta <= 1 for epsilon, delta in curve):
            raise ValueError("a trade-off needs pairs of epsilon >= 0 and delta in [0, 1]")
        pairs = np.asarray([pair for pair in curve if pair[0] <= _LARGEST_EPSILON] or [(0.0, 1.0)], np.float64)
        self._epsilon, self._delta = pairs[:, 0], pairs[:, 1]

    @classmethod
    def of(cls, cost: PrivacyCost) -> Self:
        """Return the trade-off of an accounted cost, from many points of its curve."""
        first = cost.pure_epsilon
        last = min(cost.epsilon(_LEAST_DELTA), _LARGEST_EPSILON)
        between = first + (last - first) * np.linspace(0, 1, _POINTS) ** 2 if last > first else [first]
        return cls([(epsilon, cost.delta(epsilon)) for epsilon in map(float, between)])

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return the most members that can be found at a rate of false accusations. Raises: ValueError."""
        if not 0 <= false_positive_rate <= 1:
            raise ValueError("a rate is a number from 0 to 1")
        return float(self._rates(np.asarray([false_positive_rate]))[0])

    def area(self) -> float:
        """Return the most that the area under the ROC curve can be: 0.5 is guessing, 1 is certainty. Rounded up."""
        steps = np.linspace(0, 1, _STEPS + 1)[1:]
        return min(1.0, float(self._rates(steps).mean()))

    def guessed_right(self) -> float:
        """Return the most cases in which the guess is right, where both worlds are equally likely beforehand."""
        right = (1 + self._delta * np.exp(-self._epsilon)) / (1 + np.exp(-self._epsilon))
        return min(1.0, float(right.min()))

    def _rates(self, false_positive_rates: NDArray[np.float64]) -> NDArray[np.float64]:
        powers = np.exp(self._epsilon)[:, None]
        delta, false = self._delta[:, None], false_positive_rates[None, :]
        bounds = np.minimum(powers * false + delta, 1 - (1 - delta - false) / powers)
        result: NDArray[np.float64] = np.clip(bounds.min(axis=0), 0, 1)
        return result
