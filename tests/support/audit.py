"""Lower bounds on a privacy loss from runs in two worlds, and the chance that a bug of a given size is caught.

World 1 has a canary row that world 0 lacks. An adversary sees everything that leaves the sites in one run and says
which world it was. Counting his errors over many runs of both worlds bounds the privacy loss from below, at a stated
confidence, whatever the mechanism is; a bound above what is claimed refutes the claim. The statistic and its threshold
are fixed before any run.

Reference: Nasr et al., Tight Auditing of Differentially Private Machine Learning (2023), section 4 (GDP bounds);
Clopper and Pearson (1934).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.999
"""Correct code is accused with a probability of at most 1 - CONFIDENCE over random seeds, and seeds are fixed."""


def upper_bound(n_errors: int, n_runs: int, alpha: float) -> float:
    """Return Clopper and Pearson's upper bound of an error rate; it fails with probability ``alpha`` at most."""
    if n_errors >= n_runs:
        return 1.0
    return float(stats.beta.ppf(1 - alpha, n_errors + 1, n_runs - n_errors))


@dataclass(frozen=True, slots=True)
class Errors:
    """An adversary's errors.

    Args:
        false_alarms: runs of world 0 in which he said 1.
        misses: runs of world 1 in which he said 0.
        n_runs: of each world.
    """

    false_alarms: int
    misses: int
    n_runs: int

    @classmethod
    def of(cls, without: NDArray[np.float64], with_canary: NDArray[np.float64], threshold: float = 0.0) -> Errors:
        """Count. Shapes: float64[n_runs] each, the statistic of every run; larger speaks for world 1."""
        if without.size != with_canary.size:
            raise ValueError("as many runs of one world as of the other")
        return cls(int((without > threshold).sum()), int((with_canary <= threshold).sum()), without.size)

    def mu(self, n_statistics: int = 1) -> float:
        """Return the lower bound of mu, if the truth is a Gaussian trade-off; below 0 it says nothing.

        Every point of a mu-GDP trade-off curve obeys alpha >= Phi(-mu - Phi^-1(beta)), so the bound refutes a claim of
        mu-GDP without any assumption about what was run.

        Args:
            n_statistics: how many statistics share the confidence.
        """
        first, second = self._rates(n_statistics)
        return float(stats.norm.isf(first) - stats.norm.ppf(second))

    def epsilon(self, n_statistics: int = 1) -> float:
        """Return the lower bound of a pure epsilon."""
        first, second = self._rates(n_statistics)
        return max(_log_ratio(1 - first, second), _log_ratio(1 - second, first))

    def _rates(self, n_statistics: int) -> tuple[float, float]:
        alpha = (1 - CONFIDENCE) / 2 / n_statistics
        return upper_bound(self.false_alarms, self.n_runs, alpha), upper_bound(self.misses, self.n_runs, alpha)


def _log_ratio(a: float, b: float) -> float:
    return math.log(a / b) if a > 0 else -math.inf


def gaussian_power(claimed_mu: float, true_mu: float, n_runs: int, n_statistics: int = 1, n_draws: int = 4000) -> float:
    """Return the probability that ``true_mu`` is noticed, when the adversary's statistic is the likelihood ratio.

    Draws are seeded. The threshold lies in the middle between the worlds, where both error rates are Phi(-mu / 2).
    """
    rng = np.random.default_rng(0)
    errors = rng.binomial(n_runs, stats.norm.cdf(-true_mu / 2), size=(n_draws, 2))
    bounds = [Errors(int(a), int(b), n_runs).mu(n_statistics) for a, b in errors]
    return float(np.mean(np.array(bounds) > claimed_mu))


def noise_p_value(noise: NDArray[np.float64]) -> float:
    """Return how plausible it is that standardised noise has variance 1: chi-square, as a lower tail in [0, 1].

    Shapes: noise: float64[n], in units of the standard deviation that is accounted. Near 0 is too little noise, near 1
    too much.
    """
    return float(stats.chi2(noise.size).cdf(float(np.sum(noise**2))))
