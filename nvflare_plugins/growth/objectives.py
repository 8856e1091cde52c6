"""Gradients and first estimates of the objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import default_threads, row_blocks, run_blocks
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.growth import float32, survival
from nvflare_plugins.growth.float32 import Floats
from nvflare_plugins.growth.ranking import RANK_OBJECTIVES, PairRules, Queries, rank_gradients
from nvflare_plugins.growth.survival import AftLoss
from nvflare_plugins.wire.envelope import BaseScoreSource
from nvflare_plugins.wire.sums import Family
from nvflare_plugins.xgb.cuts import quantile
from nvflare_plugins.xgb.objectives import COX, ObjectiveFacts
from nvflare_plugins.xgb.parameters import TrainingParameters

# The gradients of every row, to XGBoost's last bit, and what margins become; those of ranking are in ranking.py.
#
# A formula is XGBoost's in float32, operation by operation. Releases differ in absolute and quantile error alone: from
# 3.4 these are smooth, with a scale that is one more pooled sum a round (``Objective.is_smooth``).
#
# Reference: XGBoost 3.2 to 3.4, src/objective (regression_obj.cu, regression_loss.h, multiclass_obj.cu,
# quantile_obj.cu, hinge.cu), src/common/math.h.


ARITHMETICS = ("3.2", "3.3", "3.4")
"""Rows of formulas, each named after the release that has it first."""

NOT_FINITE = (
    "a gradient is no finite number: labels, weights or predictions are too large for float32. Scale the label, clip "
    "the weights, or lower the learning rate"
)

_F = np.float32
_ZERO = _F(0)
_SMALLEST_HESSIAN = _F(1e-16)
_LOGISTIC = ("binary:logistic", "reg:logistic", "binary:logitraw")
_SOFTMAX = ("multi:softprob", "multi:softmax")
_ADAPTIVE = ("reg:absoluteerror", "reg:quantileerror")
_LOG_LINK = ("count:poisson", "reg:gamma", "reg:tweedie", COX)
_LOG_OF_BASE = (*_LOG_LINK, "survival:aft")  # whose metrics look at margins
_ROWS_PER_THREAD = 1 << 14
_SMOOTHING = _F(0.04)
_LEAST_CURVATURE = _F(3.0e-4)

Scale = np.float32 | survival.Hazards
"""What a round's gradients need of the rows of all sites: the scale of a smooth loss, or hazards."""
Formula = Callable[["Objective", Floats, Floats, Floats | np.float32, np.float32], tuple[Floats, Floats]]


@dataclass(frozen=True, slots=True)
class Objective:
    """A job's objective, with the float32 parameters that XGBoost computes with.

    Attributes:
        arithmetic: the row of formulas, one of ``ARITHMETICS``.
        n_outputs: classes of a multiclass objective, else 1.
        n_times: bins of times of survival:cox, whose labels are places in them (survival.py).
        rules: how rows of a query are paired, of ranking alone.
    """

    name: str
    arithmetic: str
    n_outputs: int
    scale_pos_weight: np.float32
    huber_slope: np.float32
    quantile_alpha: np.float32
    tweedie_variance_power: np.float32
    max_delta_step: np.float32
    aft: AftLoss = field(default_factory=AftLoss)
    n_times: int = 0
    rules: PairRules | None = None

    @classmethod
    def of_job(cls, parameters: TrainingParameters, arithmetic: str) -> Objective:
        """Return the objective of checked parameters, with the numbers that XGBoost reads from their text.

        Its reader of decimals is not exact: every tenth number is one unit of the last place away.
        """
        rules = PairRules.of(parameters.agreed) if parameters.objective.name in RANK_OBJECTIVES else None
        return replace(cls.from_effective(parameters.objective, parameters.effective, arithmetic), rules=rules)

    @classmethod
    def from_effective(cls, facts: ObjectiveFacts, effective: Mapping[str, str], arithmetic: str) -> Objective:
        """Return the objective with the settings that a probe Booster reported.

        Raises:
            ConfigurationError: no such arithmetic.
        """
        if arithmetic not in ARITHMETICS:
            raise ConfigurationError(f"arithmetic {arithmetic!r} is not known; known are {', '.join(ARITHMETICS)}")

        def real(name: str, default: str) -> np.float32:
            return _F(effective.get(name, default).strip("[]"))

        return cls(
            facts.name,
            arithmetic,
            facts.n_outputs,
            real("scale_pos_weight", "1"),
            real("huber_slope", "1"),
            real("quantile_alpha", "0.5"),
            real("tweedie_variance_power", "1.5"),
            real("max_delta_step", "0.7"),
            AftLoss(effective.get("aft_loss_distribution", "normal"), float(real("aft_loss_distribution_scale", "1"))),
        )

    @property
    def is_smooth(self) -> bool:
        """Whether the loss is the smooth one that stands for absolute or quantile error from 3.4 on.

        Its gradients need the pooled size of residuals: one more sum before every round (``scale_rows``).
        """
        return self.name in _ADAPTIVE and self.arithmetic == "3.4"

    @property
    def adaptive_leaf(self) -> bool:
        """Whether leaves are replaced by means of the sites' residual quantiles (``first_estimate``)."""
        return self.name in _ADAPTIVE and not self.is_smooth

    @property
    def leaf_quantile(self) -> np.float32:
        """The quantile of residuals that adaptive leaves take."""
        return self.quantile_alpha if self.name == "reg:quantileerror" else _F(0.5)

    def row_bounds(self, facts: ObjectiveFacts) -> tuple[float | None, float | None]:
        """Return the public bounds of |gradient| and hessian of a row of weight 1, None where labels drive them.

        A positive label multiplies weights by ``scale_pos_weight``; the facts' bounds hold that already.
        """
        if not self.is_smooth:
            return facts.gradient_bound, facts.hessian_bound
        return None, 1.0 if self.name == "reg:absoluteerror" else 0.5 / float(_SMOOTHING)

    def gradients(
        self,
        margins: Floats,
        labels: Floats,
        weights: Floats | None,
        scale: Scale = _ZERO,
        queries: Queries | None = None,
        pair_seed: int = 0,
    ) -> Floats:
        """Return the gradient and the hessian of every row and output.

        Args:
            margins: before the objective's transform, as trees add up.
            weights: of rows; None for 1 each. Where rows are ranked, ``queries`` has the weights.
            scale: what ``scale`` made of the pooled sums of ``scale_rows``, where ``is_smooth``; of survival:cox
                the hazards (survival.py).
            queries: which rows are ranked together.
            pair_seed: of ``rank_gradients``.

        Shapes: margins: float32[n_rows, n_outputs] or, for one output, float32[n_rows]; labels, weights:
            float32[n_rows], labels float32[n_rows, 2] of survival; result: float32[n_outputs, n_rows, 2], so that a
            tree's rows lie together.

        Raises:
            ConfigurationError: a gradient or a hessian is not finite.
        """
        margins, labels = (np.ascontiguousarray(values, dtype=np.float32) for values in (margins, labels))
        weights = None if weights is None else np.ascontiguousarray(weights, dtype=np.float32)
        out = np.empty((self.n_outputs, len(labels), 2), np.float32)
        if self.rules is not None and queries is not None:
            out[0] = rank_gradients(self.name, self.rules, queries, margins.reshape(-1), labels, pair_seed)
            return out
        given = np.empty(0, np.float32) if weights is None else weights
        if float32.native is not None and self.name in _LOGISTIC:
            flat, factor = margins.reshape(-1), self.scale_pos_weight

            def run(rows: slice) -> None:
                float32.native.logistic_pairs(flat[rows], labels[rows], given[rows], factor, out[0][rows])

            run_blocks(run, row_blocks(labels.size, default_threads(), _ROWS_PER_THREAD), default_threads())
        elif float32.native is not None and self.name in _SOFTMAX:
            float32.native.softmax_pairs(margins.data, labels.data, given.data, out.data)
        else:
            self.gradients_in_numpy(margins, labels, weights, scale, out)
        if not np.isfinite(out).all():
            raise ConfigurationError(NOT_FINITE)
        return out

    def gradients_in_numpy(
        self, margins: Floats, labels: Floats, weights: Floats | None, scale: Scale, out: Floats
    ) -> None:
        """Fill in what ``gradients`` returns, without C. Shapes: as there."""
        with np.errstate(all="ignore"):
            if isinstance(scale, survival.Hazards):
                out[0, :, 0], out[0, :, 1] = survival.pairs(margins.reshape(-1), labels, weights, scale)
                return
            if self.name in _SOFTMAX:
                _softmax(margins.reshape(labels.size, self.n_outputs), labels, weights, out)
                return
            weight: Floats | np.float32 = _F(1) if weights is None else weights
            out[0, :, 0], out[0, :, 1] = _FORMULAS[self.name](self, margins.reshape(-1), labels, weight, scale)

    def scale_rows(self, margins: Floats, labels: Floats, weights: Floats | None) -> Floats:
        """Return each row's part of the scale's numerator; its denominator is the rows' weights.

        Shapes: margins: float32[n_rows] or float32[n_rows, 1]; labels, weights: float32[n_rows]; result:
            float32[n_rows].
        """
        root: Floats = np.sqrt(np.abs(margins.reshape(-1) - labels))
        return root if weights is None else weights * root

    def scale(self, numerator: float, total_weight: float) -> np.float32:
        """Return the scale of the smooth losses from pooled sums; 0 where there is no weight."""
        if abs(total_weight) < 1e-6:
            return _F(0)
        root = numerator / total_weight
        return _F(root * root)

    def evaluated(self, margins: Floats) -> Floats:
        """Return what metrics are computed from. Shapes: margins, result: float32[n_rows, n_outputs]."""
        if self.name in ("binary:logistic", "reg:logistic"):
            return float32.logistic(margins)
        if self.name in _LOG_LINK:
            return float32.exp(margins)
        if self.name == "binary:hinge":
            return (margins > 0).astype(np.float32)
        if self.name in _SOFTMAX:
            exps = float32.exp(margins - margins.max(axis=1, keepdims=True, initial=-np.inf))
            shares: Floats = np.divide(exps, _running_total(exps).astype(np.float32), dtype=np.float32)
            return shares
        return margins

    def margins_of(self, base_score: Floats) -> Floats:
        """Return the margins that the first predictions have. Shapes: float32[n_outputs] each.

        Raises:
            ConfigurationError: there is none, because labels are all of one kind.
        """
        base_score = np.asarray(base_score, np.float32)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            if self.name in ("binary:logistic", "reg:logistic"):
                inside = np.minimum(np.maximum(base_score, _F(1e-6)), _F(1) - _F(1e-6))
                margins = -float32.log(np.divide(_F(1), inside, dtype=np.float32) - _F(1))
            else:
                margins = float32.log(base_score) if self.name in _LOG_OF_BASE else base_score
        if not np.isfinite(margins).all():
            raise ConfigurationError(
                f"{self.name}: the first prediction is no finite number, because the labels of all sites are of one "
                "kind; give base_score, or look at the label"
            )
        return margins


def largest_pairs(gradients: Floats) -> Floats:
    """Return the largest |gradient| and hessian of this site's rows.

    Shapes: gradients: float32[n_outputs, n_rows, 2]; result: float32[n_outputs, 2].
    """
    return np.array([[np.abs(side).max(initial=0) for side in pairs.T] for pairs in gradients], np.float32)


def _running_total(exps: Floats) -> NDArray[np.float64]:
    """Add classes one after the other. Shapes: float32[n_rows, n_classes]; result: float64[n_rows, 1]."""
    total = np.zeros(exps.shape[0])
    for column in exps.T:
        total += column
    return total[:, np.newaxis]


def _softmax(margins: Floats, labels: Floats, weights: Floats | None, out: Floats) -> None:
    # XGBoost starts from the smallest positive float32: margins that are all negative are not shifted.
    largest = margins.max(axis=1, keepdims=True, initial=np.finfo(np.float32).tiny)
    exps = float32.exp(margins - largest)
    total = _running_total(exps).astype(np.float32)[:, 0]
    weight = _F(1) if weights is None else weights
    for number in range(margins.shape[1]):
        p = exps[:, number] / total
        out[number, :, 0] = np.where(labels == number, p - _F(1), p) * weight
        out[number, :, 1] = np.fmax(_F(2) * p * (_F(1) - p) * weight, _SMALLEST_HESSIAN)


def _logistic(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    p = float32.logistic(x)
    w = np.where(y == 1, w * job.scale_pos_weight, w)
    return (p - y) * w, np.fmax(p * (_F(1) - p), _SMALLEST_HESSIAN) * w


def _squared(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    return (x - y) * w, np.ones_like(x) * w


def _squared_log(
    job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32
) -> tuple[Floats, Floats]:
    p = np.fmax(x, _F(-1 + 1e-6))
    of_p, of_y, above = float32.log1p(p), float32.log1p(y), p + _F(1)
    square = above.astype(np.float64) ** 2
    h = ((-of_p + of_y + _F(1)).astype(np.float64) / square).astype(np.float32)
    return (of_p - of_y) / above * w, np.fmax(h, _F(1e-6)) * w


def _pseudo_huber(
    job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32
) -> tuple[Floats, Floats]:
    z, slope = x - y, job.huber_slope * job.huber_slope
    root: Floats = np.sqrt(_F(1) + z * z / slope)
    return z / root * w, slope / ((slope + z * z) * root) * w


def _hinge(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    sign = y.astype(np.float64) * 2.0 - 1.0
    is_wrong = x * sign < 1.0
    g = np.where(is_wrong, (-sign * w).astype(np.float32), _F(0))
    return g, np.where(is_wrong, w, np.finfo(np.float32).tiny).astype(np.float32)


def _poisson(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    return (float32.exp(x) - y) * w, float32.exp(x + job.max_delta_step) * w


def _gamma(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    ratio = y / float32.exp(x)
    return (_F(1) - ratio) * w, ratio * w


def _aft(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    g, h = job.aft.pairs(x, y)
    return g * w, h * w


def _tweedie(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    one, two = _F(1) - job.tweedie_variance_power, _F(2) - job.tweedie_variance_power
    first, second = float32.exp(one * x), float32.exp(two * x)
    return (-y * first + second) * w, (-y * one * first + two * second) * w


def _absolute(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    residual = x - y
    if not job.is_smooth:
        return np.sign(residual) * w, np.ones_like(x) * w
    norm = float32.hypot(np.full_like(residual, scale), residual)
    curvature = np.where(norm > 0, scale / norm, _F(1))
    return w * residual * curvature, w * curvature


def _quantile(job: Objective, x: Floats, y: Floats, w: Floats | np.float32, scale: np.float32) -> tuple[Floats, Floats]:
    residual, alpha = x - y, job.quantile_alpha
    if not job.is_smooth:
        return np.where(residual >= 0, (_F(1) - alpha) * w, -alpha * w), np.ones_like(x) * w
    z = residual / (_SMOOTHING * scale)
    of_z = float32.tanh(z)
    ratio = np.fmax(np.where(z == 0, _F(1), of_z / z), _LEAST_CURVATURE)
    g = _F(0.5) * scale * (of_z + _F(1) - _F(2) * alpha)
    counts = (scale > 0) & (np.ones_like(x) * w != 0)
    return np.where(counts, w * g, _F(0)), np.where(counts, w * (_F(0.5) / _SMOOTHING * ratio), _F(0))


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_LOGISTIC, _logistic),
    "binary:hinge": _hinge,
    "reg:squarederror": _squared,
    "reg:squaredlogerror": _squared_log,
    "reg:pseudohubererror": _pseudo_huber,
    "reg:absoluteerror": _absolute,
    "reg:quantileerror": _quantile,
    "count:poisson": _poisson,
    "reg:gamma": _gamma,
    "reg:tweedie": _tweedie,
    "survival:aft": _aft,
}


# What all rows predict before the first tree, from pooled sums, and leaves that are quantiles of residuals.
#
# XGBoost estimates the base score in up to three exchanges; each adds a few numbers of the sites. Sums are of rows, so
# that they are the same for any number of sites and shards, except medians and quantiles, which are means of the
# sites'.
#
# Reference: XGBoost 3.2 to 3.4, src/objective/init_estimation.cc, src/common/stats.cc, src/tree/fit_stump.cc,
# src/objective/adaptive.cc.


RESIDUAL_ROOTS = "residual roots"
"""The quantity of ``Objective.scale_rows``."""

Rounding = Callable[[str, NDArray[np.float64]], NDArray[Any]]
"""Puts rows' values on the grid of a quantity. Shapes: float64[n] to int64[n] or float64[n]."""


def _as_they_are(quantity: str, values: NDArray[np.float64]) -> NDArray[Any]:
    return values


@dataclass
class FirstEstimate:
    """One estimate of the base score: asks for sums until ``due`` is empty, then has ``base_score``.

    Every worker of a site may hold one: the site adds what their ``local`` return, exactly, and each takes the pooled
    sums. Where ``needs_whole_site``, ``local`` must be given all rows of the site instead.

    Attributes:
        source: how the base score comes about; not GIVEN or CONTINUED.
        n_sites: sites that add to the sums.
        queries, pair_seed: of ranking, see ``Objective.gradients``.
    """

    objective: Objective
    source: BaseScoreSource
    n_sites: int
    queries: Queries | None = None
    pair_seed: int = 0
    _pooled: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def due(self) -> tuple[str, ...]:
        """What each number of the next exchange is: quantities of the sums; empty after the last exchange."""
        labels, weights, pairs = str(Family.LABELS), str(Family.WEIGHTS), (str(Family.GRADIENTS), str(Family.HESSIANS))
        exchanges: tuple[tuple[str, ...], ...] = {
            BaseScoreSource.CONSTANT: (),
            BaseScoreSource.STUMP: (pairs,),
            BaseScoreSource.CLASSES: ((weights,) * self.objective.n_outputs,),
            BaseScoreSource.QUANTILE: ((labels,),),
        }.get(self.source, ((labels, weights),))
        if self._is_smoothed:
            exchanges = ((labels, weights), (RESIDUAL_ROOTS,), pairs)
        return exchanges[len(self._pooled)] if len(self._pooled) < len(exchanges) else ()

    @property
    def needs_whole_site(self) -> bool:
        """Whether ``local`` takes a quantile of all labels of the site."""
        return self.source in (BaseScoreSource.MEDIAN, BaseScoreSource.QUANTILE) and not self._is_smoothed

    @property
    def _is_smoothed(self) -> bool:
        return self.objective.is_smooth and self.source is BaseScoreSource.MEDIAN

    def local(self, labels: Floats, weights: Floats | None, rounded: Rounding = _as_they_are) -> NDArray[Any]:
        """Return these rows' part of what is due.

        Shapes: labels, weights: float32[n_rows]; result: as many numbers as are due, of ``rounded``'s dtype.
        Privacy: sums over rows; a median or quantile of the site's labels, times their weight.
        """
        names = self.due
        weight = np.ones(labels.size) if weights is None else weights.astype(np.float64)
        if self.needs_whole_site:
            return self._local_quantile(labels, weights, rounded)
        if self.source is BaseScoreSource.CLASSES:
            steps = rounded(names[0], weight)
            counted = np.zeros(self.objective.n_outputs, steps.dtype)
            np.add.at(counted, labels.astype(np.int64), steps)
            return counted
        columns: tuple[NDArray[np.float64], ...]
        if names[0] == Family.LABELS:
            columns = (weight * labels.astype(np.float64), weight)
        elif names[0] == RESIDUAL_ROOTS:
            columns = (self.objective.scale_rows(self._start(labels.size), labels, weights).astype(np.float64),)
        else:
            scale = self.objective.scale(float(self._pooled[1][0]), self._total) if self._is_smoothed else _F(0)
            start, ranked = self._start(labels.size), (self.queries, self.pair_seed)
            pairs = self.objective.gradients(start, labels, weights, scale, *ranked)[0]
            columns = (pairs[:, 0].astype(np.float64), pairs[:, 1].astype(np.float64))
        return np.array([rounded(name, column).sum() for name, column in zip(names, columns, strict=True)])

    def take(self, pooled: NDArray[np.float64]) -> None:
        """Take the sums over all sites of what was due. Shapes: float64[number of due].

        Raises:
            ProtocolError: so many were not due.
        """
        if len(pooled) != len(self.due):
            raise ProtocolError("the first estimate was given other sums than it asked for")
        self._pooled.append(np.asarray(pooled, np.float64))

    def base_score(self) -> Floats:  # noqa: C901 - a formula for each source
        """Return the base score as the model holds it: ``Objective.margins_of`` makes margins of it.

        Shapes: float32[n_outputs].

        Raises:
            ConfigurationError: no row has weight.
            ProtocolError: sums are still due.
        """
        if self.due:
            raise ProtocolError("the first estimate has not all sums yet")
        if self.source is BaseScoreSource.CONSTANT:
            return np.full(1, 1.0 if self.objective.name == COX else 0.5, np.float32)
        last = self._pooled[-1]
        if self.source is BaseScoreSource.CLASSES:
            return self._class_margins(last)
        if self.source is BaseScoreSource.QUANTILE:
            return np.array([_F(float(_F(last[0])) * (1.0 / self.n_sites))])
        if self.source is BaseScoreSource.STUMP or self._is_smoothed:
            if self._is_smoothed and abs(self._total) < 1e-6:
                return np.zeros(1, np.float32)
            step = _F(-last[0] / max(last[1], float(_F(1e-6))))
            if self._is_smoothed:
                return np.array([step + self._mean])
            return self.objective.evaluated(np.array([[step]], np.float32)).reshape(-1)
        if self.source is BaseScoreSource.MEDIAN:
            if abs(last[1]) < 1e-6:
                return np.zeros(1, np.float32)
            return np.array([_F(float(_F(last[0])) * (1.0 / last[1]))])
        return np.array([self._mean])

    @property
    def _total(self) -> float:
        return float(self._pooled[0][1])

    @property
    def _mean(self) -> np.float32:
        numerator, weight = self._pooled[0]
        if not weight > 0:
            raise ConfigurationError("no row has a weight above 0: the first prediction has nothing to follow")
        return _F(numerator / weight)

    def _start(self, n_rows: int) -> Floats:
        return np.full(n_rows, self._mean if self._is_smoothed else 0.0, np.float32)

    def _local_quantile(self, labels: Floats, weights: Floats | None, rounded: Rounding) -> NDArray[Any]:
        found = quantile(labels, weights, float(self.objective.leaf_quantile))
        if self.source is BaseScoreSource.QUANTILE:
            return rounded(Family.LABELS, np.array([float(found) if labels.size else 0.0]))
        total = float(labels.size) if weights is None else float(weights.sum(dtype=np.float64))
        weighed = float(_F(float(found) * total)) if labels.size else 0.0
        return np.concatenate([rounded(Family.LABELS, np.array([weighed])), rounded(Family.WEIGHTS, np.array([total]))])

    def _class_margins(self, counts: NDArray[np.float64]) -> Floats:
        total = float(counts.sum())
        if not total >= float(_F(1e-6)):
            raise ConfigurationError("no row has a weight above 0: the first prediction has nothing to follow")
        shares = (counts.astype(np.float32).astype(np.float64) * (1.0 / total)).astype(np.float32)
        logs = float32.log(shares + _F(1e-6))
        mean = _F(0)
        for value in logs:
            mean = mean + value / _F(logs.size)
        return logs - mean


def adaptive_leaves(n_valid: NDArray[np.int64], pooled: Floats, leaves: Floats, learning_rate: np.float32) -> Floats:
    """Return the values of adaptive leaves from sums over the sites.

    Args:
        n_valid: sites that have rows in each leaf.
        pooled: sum of these sites' residual quantiles.

    A leaf that no site has rows in keeps its value, times the learning rate once more, as in XGBoost.

    Shapes: all [n_leaves]; leaves: float32, as grown.
    """
    means = pooled / np.maximum(n_valid, 1).astype(np.float32)
    return np.where(n_valid > 0, means, leaves) * learning_rate
