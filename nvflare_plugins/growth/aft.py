"""The accelerated failure time model: gradients, hessians and losses of times with bounds, to XGBoost's last bit.

The logarithm of a row's time is its margin plus ``scale`` times noise of one of three distributions. A row says that
its time lies between two bounds; the loss is minus the logarithm of that event's probability, or of the density where
both bounds are one.

XGBoost computes in doubles with ``exp``, ``log`` and ``erf`` of the machine's C library, and rounds results to float32.
So does this, with the same library. Machines with unlike libraries may differ in the last bit, as XGBoost does there;
sums of gradients are exchanged, never recomputed, so that all sites grow one model.

Reference: Barnwal, Cho, Hocking, Survival regression with accelerated failure time model in XGBoost (arXiv:2006.04920);
XGBoost 3.2 to 3.4, src/common/survival_util.h, src/common/probability_distribution.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth.float32 import Floats

DISTRIBUTIONS = ("normal", "logistic", "extreme")
LARGEST_GRADIENT = LARGEST_HESSIAN = 15.0
_SMALLEST_HESSIAN = 1e-16
_EPSILON = 1e-12
_LARGEST_EXPONENT = math.log(np.finfo(np.float64).max)

Doubles = NDArray[np.float64]


def _exactly(function: Callable[[float], float], values: Doubles) -> Doubles:
    return np.fromiter(map(function, values.ravel().tolist()), np.float64, values.size).reshape(values.shape)


def _exp(values: Doubles) -> Doubles:
    is_beyond = values > _LARGEST_EXPONENT
    return np.where(is_beyond, np.inf, _exactly(math.exp, np.where(is_beyond, 0.0, values)))


def _log(values: Doubles) -> Doubles:
    is_plain = (values > 0) & np.isfinite(values)
    return np.where(
        is_plain, _exactly(math.log, np.where(is_plain, values, 1.0)), np.where(values == 0, -np.inf, values)
    )


def _erf(values: Doubles) -> Doubles:
    return _exactly(math.erf, values)


@dataclass(frozen=True, slots=True)
class _At:
    """The noise's distribution at some places. Shapes: float64[n_rows] each: CDF, density, its first derivatives."""

    cdf: Doubles
    pdf: Doubles
    slope: Doubles
    bend: Doubles


def _normal(z: Doubles) -> _At:
    pdf = _exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
    return _At(0.5 * (1 + _erf(z / math.sqrt(2.0))), pdf, -z * pdf, (z * z - 1.0) * pdf)


def _logistic(z: Doubles) -> _At:
    w = _exp(z)
    is_far, is_farther = np.isinf(w * w), np.isinf(w)
    above = 1 + w
    pdf = np.where(is_far, 0.0, w / (above * above))
    slope = np.where(is_farther, 0.0, pdf * (1 - w) / (1 + w))
    bend = np.where(is_far, 0.0, pdf * (w * w - 4 * w + 1) / (above * above))
    return _At(np.where(is_farther, 1.0, w / (1 + w)), pdf, slope, bend)


def _extreme(z: Doubles) -> _At:
    w = _exp(z)
    survival = _exp(-w)
    pdf = np.where(np.isinf(w), 0.0, w * survival)
    slope = np.where(np.isinf(w), 0.0, (1 - w) * pdf)
    return _At(1 - survival, pdf, slope, np.where(np.isinf(w * w), 0.0, (w * w - 3 * w + 1) * pdf))


_AT: dict[str, Callable[[Doubles], _At]] = {"normal": _normal, "logistic": _logistic, "extreme": _extreme}


@dataclass(frozen=True, slots=True)
class AftLoss:
    """The loss of a job. Attributes: distribution: one of ``DISTRIBUTIONS``; scale: of the noise, a float32 above 0."""

    distribution: str = "normal"
    scale: float = 1.0

    def section(self) -> dict[str, dict[str, str]]:
        """Return what a model says of the loss, as XGBoost writes it."""
        scale = f"{self.scale:.9g}"
        return {"aft_loss_param": {"aft_loss_distribution": self.distribution, "aft_loss_distribution_scale": scale}}

    def pairs(self, margins: Floats, bounds: Floats) -> tuple[Floats, Floats]:
        """Return gradients, from -15 to 15, and hessians, from 1e-16 to 15.

        Shapes: margins: float32[n_rows]; bounds: float32[n_rows, 2], lower and upper; result: float32[n_rows] each.
        """
        rows = _Rows(self, margins, bounds)
        with np.errstate(all="ignore"):
            found = rows.gradients(), rows.hessians()
        gradients, hessians = (values.astype(np.float32) for values in found)
        return gradients, hessians

    def losses(self, margins: Floats, bounds: Floats) -> Doubles:
        """Return each row's loss. Shapes: as of ``pairs``; result: float64[n_rows]."""
        with np.errstate(all="ignore"):
            return _Rows(self, margins, bounds).losses()


class _Rows:
    """Rows at their margins. A bound at infinity, or at 0, has a probability of 1 or 0 before it and no density."""

    def __init__(self, loss: AftLoss, margins: Floats, bounds: Floats) -> None:
        self.loss, self.sigma = loss, loss.scale
        self.lower, self.upper = bounds.astype(np.float64).T
        self.is_exact = self.lower == self.upper
        self.is_right, self.is_left = np.isinf(self.upper) & ~self.is_exact, (self.lower <= 0) & ~self.is_exact
        with np.errstate(all="ignore"):
            z_lower, self.at_lower = self._at(self.lower, margins, ~self.is_left)
            z_upper, self.at_upper = self._at(self.upper, margins, ~(self.is_exact | self.is_right))
        self.is_later = np.where(self.is_exact, z_lower > 0, (z_upper > 0) | (z_lower > 0))

    def _at(self, bound: Doubles, margins: Floats, is_asked: NDArray[np.bool_]) -> tuple[Doubles, _At]:
        """Return how far a bound is from the margin, and the distribution there; zeros for rows that need neither."""
        rows, z = np.flatnonzero(is_asked), np.zeros(bound.size)
        z[rows] = (_log(bound[rows]) - margins[rows]) / self.sigma
        found = _AT[self.loss.distribution](z[rows])
        parts = np.zeros((4, bound.size))
        parts[:, rows] = found.cdf, found.pdf, found.slope, found.bend
        return z, _At(*parts)

    def _between(self, name: str, beyond: float) -> Doubles:
        """Return a function's rise from the lower to the upper bound. Args: beyond: its value at infinity."""
        upper = np.where(self.is_right, beyond, getattr(self.at_upper, name))
        return upper - np.where(self.is_left, 0.0, getattr(self.at_lower, name))

    def losses(self) -> Doubles:
        density = self.at_lower.pdf / (self.sigma * self.lower)
        chance = np.where(self.is_exact, density, self._between("cdf", 1.0))
        return -_log(np.fmax(chance, _EPSILON))

    def gradients(self) -> Doubles:
        numerator = np.where(self.is_exact, self.at_lower.slope, self._between("pdf", 0.0))
        denominator = self.sigma * np.where(self.is_exact, self.at_lower.pdf, self._between("cdf", 1.0))
        found = self._limited(numerator / denominator, denominator, *self._gradients_far_away())
        return np.clip(found, -LARGEST_GRADIENT, LARGEST_GRADIENT)

    def hessians(self) -> Doubles:
        at, chance, rise = self.at_lower, self._between("cdf", 1.0), self._between("pdf", 0.0)
        exact = -(at.pdf * at.bend - at.slope * at.slope), self.sigma * self.sigma * at.pdf * at.pdf
        root = self.sigma * chance
        between = -(chance * self._between("slope", 0.0) - rise * rise), root * root
        numerator, denominator = (
            np.where(self.is_exact, one, other) for one, other in zip(exact, between, strict=True)
        )
        found = self._limited(numerator / denominator, denominator, *self._hessians_far_away())
        return np.clip(found, _SMALLEST_HESSIAN, LARGEST_HESSIAN)

    def _limited(self, values: Doubles, denominator: Doubles, later: float, sooner: float) -> Doubles:
        """Put limits in the place of what is none: of an infinite distance, whose side is that of the bounds.

        A row that is only known to be later than a bound long past has nothing to say, nor has its mirror image.
        """
        silent = 0.0 if later < 0 else _SMALLEST_HESSIAN
        limit = np.where(self.is_later, np.where(self.is_left, silent, later), sooner)
        # A row without any bound counts as left-censored, as its lower one is looked at last.
        limit = np.where(self.is_right & ~self.is_left & ~self.is_later, silent, limit)
        return np.where((denominator < _EPSILON) & ~np.isfinite(values), limit, values)

    def _gradients_far_away(self) -> tuple[float, float]:
        inverse = 1.0 / self.sigma
        limits = {"normal": (LARGEST_GRADIENT, LARGEST_GRADIENT), "logistic": (inverse, inverse)}
        later, sooner = limits.get(self.loss.distribution, (LARGEST_GRADIENT, inverse))
        return -later, sooner

    def _hessians_far_away(self) -> tuple[float, float]:
        square = 1.0 / (self.sigma * self.sigma)
        limits = {"normal": (square, square), "logistic": (_SMALLEST_HESSIAN, _SMALLEST_HESSIAN)}
        return limits.get(self.loss.distribution, (LARGEST_HESSIAN, _SMALLEST_HESSIAN))
