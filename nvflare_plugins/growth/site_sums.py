"""What a training asks of all sites: sums of integers under protection, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.growth.grid import PairGrid
from nvflare_plugins.wire.envelope import CURVE_METRICS, Kind
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.curves import curve_parts, without_empty_curves
from nvflare_plugins.xgb.cuts import leaf_quantiles

Floats = NDArray[np.float32]
Parts = NDArray[np.float64] | tuple[Floats, Floats, Floats | None]
"""Of a metric: its parts, or scores, labels and weights where the parts of some rows do not add up to those of all."""
HEADROOM = 2  # bits by which a bound that was found exceeds the largest row: predictions overshoot labels


class GrowthSums(Protocol):
    """What a training asks of all sites.

    Attributes:
        seconds: that answers have taken so far, the network's included.
    """

    seconds: float

    def pairs(
        self, values: NDArray[np.int64], grid: PairGrid, fits: bool, parts: Sequence[tuple[str, Parts]] = ()
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """Add sums of gradient pairs, and parts of metrics in the same exchange.

        Shapes: values: int64[n]; result: likewise, and the parts as of ``metrics``, the same at all sites.

        Args:
            values: in steps of the grid: bins of nodes, one after the other, and for a root the sum of all rows.
            fits: whether all of this site's rows lie on the grid.

        Raises:
            RescaleRequested: those of some site do not, or its metrics do not fit theirs; nothing was summed.
        """

    def widened(self, grid: PairGrid, largest: Floats) -> tuple[int, int]:
        """Return wider bounds of a grid. Args: largest: |gradient| and hessian of this site's rows. Shapes: [2]."""

    def check_leaves(self, counts: NDArray[np.int64]) -> None:
        """Check the number of rows in each leaf of a round. Shapes: counts: int64[n_leaves], of this site."""

    def rows(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add sums of rows behind the scale of a smooth loss. Shapes: values, result: int64[n]. Units: grid steps."""

    def leaf_quantiles(
        self, leaf: NDArray[np.int32], residuals: Floats, weight: Floats | None, n_leaves: int
    ) -> tuple[NDArray[np.int64], Floats]:
        """Return in how many sites each leaf has rows, and the sum of the sites' residual quantiles.

        Shapes: leaf, residuals, weight: [n_rows]; result: int64[n_leaves], float32[n_leaves].
        """

    def metrics(self, parts: Sequence[tuple[str, Parts]]) -> list[NDArray[np.float64]]:
        """Return the parts of metrics over the rows of all sites."""


class SiteSums:
    """The sums of the site's own process; see ``GrowthSums``."""

    def __init__(
        self,
        sums: ProtectedSums,
        starts: NDArray[np.int64],
        alpha: float,
        check_leaves: Callable[[NDArray[np.int64]], None],
    ) -> None:
        """Prepare for a training.

        Args:
            starts: each feature's first bin, and the number of bins. Shapes: int64[n_features + 1].
            alpha: the quantile of leaves that are one.
            check_leaves: raises what ends the job where a leaf has too few rows.
        """
        self._sums, self._starts, self._alpha, self._check_leaves = sums, starts, alpha, check_leaves
        self.seconds = 0.0

    def pairs(
        self, values: NDArray[np.int64], grid: PairGrid, fits: bool, parts: Sequence[tuple[str, Parts]] = ()
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """See ``GrowthSums``."""
        own, n = self._own_parts(parts), values.size
        with self._timed():
            integers = self._coarse(values, grid) if fits else None
            if not own:
                return grid.fine(self._sums.add(Kind.HISTOGRAM, integers, n, grid.wide)), []
            added, totals = self._sums.add_with_metrics(integers, n, grid.wide, own)
            return grid.fine(added), totals

    def _coarse(self, values: NDArray[np.int64], grid: PairGrid) -> NDArray[np.int64]:
        if not grid.shift:
            return values
        n_bins = int(self._starts[-1])
        bins = values[: values.size - values.size % (2 * n_bins)]
        total = grid.rounded(values[bins.size :])
        return np.concatenate([grid.coarse(bins.reshape(-1, n_bins, 2), self._starts).ravel(), total])

    def widened(self, grid: PairGrid, largest: Floats) -> tuple[int, int]:
        """See ``GrowthSums``. Raises: ProtocolError: no site needs another grid."""
        old = (grid.g_bound, grid.h_bound)
        with self._timed():
            found = self._sums.largest_exponents([max(float(x), 2.0**b) for x, b in zip(largest, old, strict=True)])
        if all(new <= bound for new, bound in zip(found, old, strict=True)):
            raise ProtocolError("another grid of gradients was asked for, but no site needs one")
        g, h = (bound if new <= bound else new + HEADROOM for new, bound in zip(found, old, strict=True))
        return g, h

    def check_leaves(self, counts: NDArray[np.int64]) -> None:
        """See ``GrowthSums``."""
        with self._timed():
            self._check_leaves(counts)

    def rows(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """See ``GrowthSums``."""
        with self._timed():
            return self._sums.add(Kind.RESIDUAL_SCALE, values, values.size, wide=True)

    def leaf_quantiles(
        self, leaf: NDArray[np.int32], residuals: Floats, weight: Floats | None, n_leaves: int
    ) -> tuple[NDArray[np.int64], Floats]:
        """See ``GrowthSums``."""
        own = leaf_quantiles(residuals, weight, leaf, n_leaves, self._alpha)
        has_rows = ~np.isnan(own)
        with self._timed():
            n_valid = self._sums.sum_counts(Kind.LEAF_VALID, has_rows.astype(np.int64))
            total = self._sums.sum(Kind.LEAF_QUANTILE, np.where(has_rows, own, 0.0).astype(np.float64))
        return n_valid, total.astype(np.float32)

    def metrics(self, parts: Sequence[tuple[str, Parts]]) -> list[NDArray[np.float64]]:
        """See ``GrowthSums``."""
        own = self._own_parts(parts)
        with self._timed():
            return self._sums.sum_metrics(own)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def _own_parts(self, parts: Sequence[tuple[str, Parts]]) -> list[tuple[str, NDArray[np.float64]]]:
        with np.errstate(all="ignore"):
            return [
                (name, without_empty_curves(curve_parts(name, *part)) if isinstance(part, tuple) else part)
                for name, part in parts
            ]


def is_of_all_rows(metric: str) -> bool:
    """Return whether a metric's parts follow from all rows of a site together: areas under curves."""
    return metric.partition("@")[0] in CURVE_METRICS
