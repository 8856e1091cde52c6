"""Times until an event: the accelerated failure time model to XGBoost's last bit, and Cox regression on a grid.

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
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth.float32 import Floats

DISTRIBUTIONS = ("normal", "logistic", "extreme")
LARGEST_GRADIENT = LARGEST_HESSIAN = 15.0
_SMALLEST_HESSIAN = 1e-16
_EPSILON = 1e-12
_LARGEST_EXPONENT = math.log(np.finfo(np.float64).max)

# Cox regression on a grid of times: Breslow's ties, and weights in the denominators.
#
# Rows of one bin of times are tied. A row is at risk in its own bin and in all before it. Let E_k be the sum of
# weight * exp(margin) over the rows of bin k, D_k the weight of its events, and S_k = E_k + E_(k+1) + ... With the
# row's risk r = exp(margin), weight w and bin b:
#
#     A_b = sum of D_k / S_k, B_b = sum of D_k / S_k^2 over the bins k <= b
#     gradient = w (r A_b - 1 if the row has an event), hessian = w (r A_b - w r^2 B_b)
#
# These are the first derivative of the weighted partial likelihood and the diagonal of the second, which is never below
# 0. With weights of 1 they are XGBoost's, but where events are tied: XGBoost lets the first of them see one event, the
# second two, and so on, by the order of rows. It leaves weights out of S_k and D_k.
#
# The gradients of all rows add up to 0, w r A over all rows to the weight of all events. So sums of any rows are at
# most twice that weight, in every round.
#
# Labels here are signed places: k + 1 for an event in bin k, -(k + 1) for a row that was watched until then.
#
# Reference: Breslow, Biometrics 30 (1974); XGBoost 3.2 to 3.4, src/objective/regression_obj.cu (CoxRegression),
# src/metric/rank_metric.cc (EvalCox).

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


WORDS = 4
"""Words in which a bin's sum travels, the lowest first."""
FINEST = -70
"""A step of the lowest word is 2^FINEST. Each row's risk is rounded to it once."""
_WORD_BITS = 59  # a sum of one word's parts over all rows (wire/sums.py)
_KEPT_BITS = 24  # of every denominator: what a float32 holds
_LOG2_E = 1.4426950408889634

OUT_OF_RANGE = (
    "survival:cox: hazard ratios lie so far apart that sums over the rows at risk would lose digits. Lower "
    "learning_rate or num_rounds, or raise reg_lambda or min_child_weight; clip weights that differ much, and leave "
    "base_score out"
)
"""The same at all sites: it follows from trees and opened sums."""


@dataclass(frozen=True, slots=True, repr=False)
class Hazards:
    """What a round's gradients need of all sites: A and B. Shapes: float64[n_bins] each."""

    first: Doubles
    second: Doubles


def signed_places(times: Floats, is_event: NDArray[np.bool_], edges: Floats) -> Floats:
    """Return the labels of rows on a grid.

    Shapes: times: float32[n_rows]; is_event: bool[n_rows]; edges: float32[n_bins - 1], ascending, each the first time
        of the bin after it; result: float32[n_rows].
    """
    places = np.searchsorted(edges, times, side="right") + 1
    return np.where(is_event, places, -places).astype(np.float32)


def places_of(labels: Floats) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return each row's bin, and whether it has an event. Shapes: [n_rows] each."""
    return np.abs(labels).astype(np.int64) - 1, labels > 0


def hazards(at_bins: Doubles, events: Doubles) -> Hazards:
    """Return what follows from pooled sums. Shapes: at_bins, events: float64[n_bins], E and D above."""
    at_risk = at_or_after(at_bins)
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(events > 0, events / at_risk, 0.0)
        squares = np.where(events > 0, rates / at_risk, 0.0)
    return Hazards(np.cumsum(rates), np.cumsum(squares))


def local_hazards(margins: Floats, labels: Floats, weights: Floats | None, n_bins: int) -> Hazards:
    """Return the hazards of rows that are all here. Shapes: margins, labels, weights: float32[n_rows]."""
    at_bins = sums_at_bins(weighted_risks(margins, weights), labels, n_bins)
    return hazards(at_bins, sums_at_bins(event_weights(labels, weights), labels, n_bins))


def at_or_after(at_bins: Doubles) -> Doubles:
    """Return the sums over the rows at risk in each bin. Shapes: float64[n_bins] each."""
    return np.cumsum(at_bins[::-1])[::-1]


def pairs(margins: Floats, labels: Floats, weights: Floats | None, known: Hazards) -> tuple[Floats, Floats]:
    """Return gradients and hessians. Shapes: margins, labels, weights, results: float32[n_rows]."""
    bins, is_event = places_of(labels)
    risk, weight = exp(margins), _weights(labels, weights)
    first = risk * known.first[bins]
    hessian = (first - weight * risk * risk * known.second[bins]) * weight
    return ((first - is_event) * weight).astype(np.float32), np.maximum(hessian, 0.0).astype(np.float32)


def sums_at_bins(values: Doubles, labels: Floats, n_bins: int) -> Doubles:
    """Add rows bin by bin. Shapes: values: float64[n_rows]; labels: float32[n_rows]; result: float64[n_bins]."""
    return np.bincount(places_of(labels)[0], values, minlength=n_bins).astype(np.float64)


def event_weights(labels: Floats, weights: Floats | None) -> Doubles:
    """Return the weight of each row that has an event, else 0. Shapes: float32[n_rows]; result: float64[n_rows]."""
    return np.where(labels > 0, _weights(labels, weights), 0.0)


def weighted_risks(margins: Floats, weights: Floats | None) -> Doubles:
    """Return weight * exp(margin) of rows. Shapes: float32[n_rows]; result: float64[n_rows]."""
    return exp(margins) * _weights(margins, weights)


def likelihood_parts(margins: Floats, labels: Floats, weights: Floats | None, n_bins: int) -> Doubles:
    """Return what rows add to the sums behind cox-nloglik: E_k and D_k by turns, then of the events' margins and D.

    Shapes: margins, labels, weights: float32[n_rows]; result: float64[2 n_bins + 2].
    """
    of_events = event_weights(labels, weights)
    parts = np.empty((n_bins + 1, 2))
    parts[:n_bins, 0] = sums_at_bins(weighted_risks(margins, weights), labels, n_bins)
    parts[:n_bins, 1] = sums_at_bins(of_events, labels, n_bins)
    parts[n_bins] = float(np.dot(of_events, margins.astype(np.float64))), of_events.sum()
    return parts.reshape(-1)


def negative_log_likelihood(pooled: Doubles) -> float:
    """Return cox-nloglik: minus the log of Breslow's partial likelihood on the grid, divided by the events' weight.

    With weights of 1 that is XGBoost's own of times that are rounded to the grid. XGBoost ignores weights here.

    Shapes: pooled: float64[2 n_bins + 2], sums of ``likelihood_parts``.
    """
    (at_bins, events), (margins, total) = pooled[:-2].reshape(-1, 2).T, pooled[-2:]
    with np.errstate(all="ignore"):
        logs = np.where(events > 0, events * np.log(at_or_after(at_bins)), 0.0)
        return float((logs.sum() - margins) / total)


# Sums over the rows at risk, as integers of one fixed grid.
#
# A row's w exp(margin) is cut into words, whose sums over all rows each fit one protected integer. The grid depends on
# the pooled number of rows alone: it is the same in every round, and after a training was resumed.


def word_bits(n_rows: int) -> int:
    """Return the bits of a row's part in each word. Args: n_rows: no fewer than all sites have together."""
    return _WORD_BITS - max(n_rows, 1).bit_length()


def to_words(values: Doubles, labels: Floats, n_bins: int, n_rows: int) -> NDArray[np.int64]:
    """Return this site's part of the bins' sums.

    Shapes: values: float64[rows of this site], 0 or larger; labels: float32[likewise]; result: int64[WORDS * n_bins].

    Raises:
        ConfigurationError: a row lies above the grid; ``RiskRange`` tells so before, at all sites alike.
    """
    bins, bits = places_of(labels)[0], word_bits(n_rows)
    if not values.max(initial=0.0) < 2.0 ** (FINEST + WORDS * bits):
        raise ConfigurationError(OUT_OF_RANGE)
    found, rest = np.zeros((WORDS, n_bins), dtype=np.int64), values
    for word in reversed(range(WORDS)):
        unit = 2.0 ** (FINEST + word * bits)
        part = np.floor(rest / unit) if word else np.rint(rest / unit)  # exact: a unit is a power of two
        np.add.at(found[word], bins, part.astype(np.int64))
        rest = rest - part * unit
    return found.reshape(-1)


def from_words(pooled: NDArray[np.int64], n_rows: int) -> Doubles:
    """Return the bins' sums. Shapes: pooled: int64[WORDS * n_bins]; result: float64[n_bins]."""
    bits = word_bits(n_rows)
    wholes = [reduce(lambda high, low: (high << bits) + low, column) for column in _columns(pooled)]
    return np.array([np.ldexp(float(whole), FINEST) for whole in wholes])


def _columns(pooled: NDArray[np.int64]) -> list[list[int]]:
    """Return the words of each bin as whole numbers of any size, the highest first."""
    found: list[list[int]] = pooled.reshape(WORDS, -1)[::-1].T.tolist()
    return found


class RiskRange:
    """Tells at all sites alike, from trees and opened sums, whether the next sums keep their digits."""

    def __init__(self, n_rows: int, largest_weight: float, margin: float) -> None:
        """Begin. Args: largest_weight: no row's is larger; margin: no row's is larger (``largest_margin``)."""
        self._n_rows, self._highest = n_rows, FINEST + WORDS * word_bits(n_rows)
        self._log2 = np.log2(largest_weight) + margin * _LOG2_E

    def check(self) -> None:
        """Refuse to add rows that might lie above the grid. Raises: ConfigurationError."""
        if not self._log2 < self._highest - 1:
            raise ConfigurationError(OUT_OF_RANGE)

    def opened(self, at_bins: Doubles, events: Doubles) -> None:
        """Take opened sums: no row is above its bin's.

        Raises:
            ConfigurationError: rows at risk weigh so little that rounding shows in their sum.
        """
        with np.errstate(divide="ignore"):
            self._log2 = min(self._log2, float(np.log2(at_bins.max())) + 2.0**-10)
        least = at_or_after(at_bins)[events > 0].min(initial=np.inf)
        if not least >= self._n_rows * 2.0 ** (FINEST + _KEPT_BITS):
            raise ConfigurationError(OUT_OF_RANGE)

    def grown(self, leaves: Floats) -> None:
        """Take a tree that was added to all margins. Shapes: leaves: float32[n_leaves]."""
        self._log2 += float(leaves.max()) * _LOG2_E


# exp in doubles, the same to the bit on every machine: numpy's differs between processors.


_LN2 = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
_TERMS = 14


def exp(x: Floats) -> Doubles:
    """Return exp in doubles, off by at most two units of the last place. Shapes: float32[n]; result: float64[n]."""
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        k = np.rint(wide * _LOG2_E)
        rest = (wide - k * _LN2[0]) - k * _LN2[1]
        found = np.ones_like(rest)
        for n in range(_TERMS, 0, -1):
            found = found * (rest / n) + 1.0
        return np.ldexp(found, np.nan_to_num(k, posinf=0, neginf=0).astype(np.int32))


def _weights(like: Floats, weights: Floats | None) -> Doubles:
    return np.ones(like.shape) if weights is None else weights.astype(np.float64)
