"""What all rows predict before the first tree, from pooled sums, and leaves that are quantiles of residuals.

XGBoost estimates the base score in up to three exchanges; each adds a few numbers of the sites. Sums are of rows, so
that they are the same for any number of sites and shards, except medians and quantiles, which are means of the sites'.

Reference: XGBoost 3.2 to 3.4, src/objective/init_estimation.cc, src/common/stats.cc, src/tree/fit_stump.cc,
src/objective/adaptive.cc.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.growth import float32
from nvflare_plugins.growth.float32 import Floats
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.wire.catalogue import BaseScoreSource
from nvflare_plugins.wire.sums import Family
from nvflare_plugins.xgb.quantiles import leaf_quantiles, quantile

RESIDUAL_ROOTS = "residual roots"
"""The quantity of ``Objective.scale_rows``."""

Rounding = Callable[[str, NDArray[np.float64]], NDArray[Any]]
"""Puts rows' values on the grid of a quantity. Shapes: float64[n] to int64[n] or float64[n]."""

_F = np.float32


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
    """

    objective: Objective
    source: BaseScoreSource
    n_sites: int
    _pooled: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def due(self) -> tuple[str, ...]:
        """What each number of the next exchange is: quantities of the sums; empty after the last exchange."""
        weights, pairs = str(Family.WEIGHTS), (str(Family.GRADIENTS), str(Family.HESSIANS))
        exchanges: tuple[tuple[str, ...], ...]
        if self._is_smoothed:
            exchanges = ((str(Family.LABELS), weights), (RESIDUAL_ROOTS,), pairs)
        elif self.source is BaseScoreSource.STUMP:
            exchanges = (pairs,)
        elif self.source is BaseScoreSource.CLASSES:
            exchanges = ((weights,) * self.objective.n_outputs,)
        elif self.source is BaseScoreSource.QUANTILE:
            exchanges = ((str(Family.LABELS),),)
        else:
            exchanges = ((str(Family.LABELS), weights),)
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
            pairs = self.objective.gradients(self._start(labels.size), labels, weights, scale)[0]
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

    def base_score(self) -> Floats:
        """Return the base score as the model holds it: ``Objective.margins_of`` makes margins of it.

        Shapes: float32[n_outputs].

        Raises:
            ConfigurationError: no row has weight.
            ProtocolError: sums are still due.
        """
        if self.due:
            raise ProtocolError("the first estimate has not all sums yet")
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


def leaf_parts(
    objective: Objective, margins: Floats, labels: Floats, weights: Floats | None, leaf: NDArray[np.int32], n: int
) -> tuple[NDArray[np.int64], Floats]:
    """Return which leaves have rows here, and the quantile of residuals in each, 0 where it has none.

    Rows that were not drawn for the tree must be left out. The two are summed over the sites.

    Shapes: margins, labels, weights: float32[n_rows], before this round; leaf: int32[n_rows], from 0 to n - 1, in the
        order of the nodes' numbers; results: int64[n], float32[n].
    """
    found = leaf_quantiles(labels - margins.reshape(-1), weights, leaf, n, float(objective.leaf_quantile))
    is_valid = ~np.isnan(found)
    return is_valid.astype(np.int64), np.where(is_valid, found, _F(0))


def adaptive_leaves(n_valid: NDArray[np.int64], pooled: Floats, leaves: Floats, learning_rate: np.float32) -> Floats:
    """Return the values of adaptive leaves from the sums of ``leaf_parts``.

    A leaf that no site has rows in keeps its value, times the learning rate once more, as in XGBoost.

    Shapes: all [n_leaves]; leaves: float32, as grown.
    """
    means = pooled / np.maximum(n_valid, 1).astype(np.float32)
    return np.where(n_valid > 0, means, leaves) * learning_rate
