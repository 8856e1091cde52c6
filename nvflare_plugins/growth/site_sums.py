"""What a training asks of all sites: sums of integers under protection, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from nvflare_plugins.growth.metrics import curve_parts, without_empty_curves
from nvflare_plugins.wire.envelope import CURVE_METRICS, Kind
from nvflare_plugins.wire.profiles import SHORT_BITS
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.cuts import leaf_quantiles

# The grid of gradient pairs: each row is rounded to it once, and all sums of rows are exact integers.
#
# A step is 2^exponent. It follows from the largest row of all sites, the bound on the pooled number of rows and the
# bits of a word, never from how many sites, shards or threads share the rows. So sums are the same integers for each of
# them, and with them the models are the same bytes.
#
# Error. A row x is carried as the integer nearest to x / step, so that it is off by at most step / 2. A sum over n rows
# is off by at most n step / 2, and typically, where roundings are as good as independent, by sqrt(n / 12) steps. With
# words of 59 bits and N = 2^b rows a row of the largest magnitude has 59 - b bits: 39 for a million rows, where a
# float32 holds 24. Every gradient above 2^(b - 35) of the largest is then exact.
#
# Where a scheme has fewer bits, a row has them, too. Under `bfv` (50 bits) six times the typical error of a sum over
# all rows must stay below ``coarsest``; otherwise words are wide, at twice the bytes. That is so from 2^17 rows on, and
# wherever rows have no common bound. Under `ckks` (44 bits) rows are rounded to the grid of wide words and a site's
# sums to the coarser grid of the scheme, which must not be coarser than ``coarsest``: its models depend on who holds
# which rows.
#
# Words of 32 bits (`word_bits`) hold sums below 2^31: of N < 2^b rows each has 31 - b bits. No sum of rows can wrap,
# whoever holds them. Rows in steps above 2^-12 are refused: up to 524,287 rows fit where a gradient is at most 1.


WIDE_BITS = 59
"""Sums of at most 2^59 in magnitude are exact under every profile (he_processors/sum_tags.py)."""
NARROW_BITS = 50
"""What `bfv` carries in a narrow word with up to five sites; with more, sums on this grid travel wide."""


_SHORT_STEP = -12  # exponent of the coarsest step of such rows: 12 bits of a gradient of 1


@dataclass(frozen=True, slots=True)
class PairGrid:
    """Where gradient pairs lie.

    Attributes:
        g_bound, h_bound: no row's |gradient| or hessian is above 2^bound; one that is asks for another grid.
        g_exponent, h_exponent: a step is 2^exponent.
        wide: sums travel in words of ``WIDE_BITS``.
        shift: sums travel in steps that are 2^shift of these, rounded at each site; 0 where they travel as they are.
    """

    g_bound: int
    h_bound: int
    g_exponent: int
    h_exponent: int
    wide: bool
    shift: int = 0

    def coarse(self, sums: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Round pairs of sums to the steps in which they travel.

        Along a feature the sum of its first bins is rounded, whatever their number, so that it is off by at most half
        such a step, and all features that miss no value add up to the same.

        Shapes: sums: int64[n_nodes, n_bins, 2]; starts: int64[n_features + 1], each feature's first bin, and the number
            of bins; result: as sums.
        """
        if not self.shift:
            return sums
        running = np.concatenate([np.zeros_like(sums[:, :1]), np.cumsum(sums, axis=1)], axis=1)
        before = np.repeat(running[:, starts[:-1]], np.diff(starts), axis=1)
        return self.rounded(running[:, 1:] - before) - self.rounded(running[:, :-1] - before)

    def rounded(self, sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """Round sums to the nearest step in which they travel. Shapes: any."""
        return (sums + (1 << (self.shift - 1))) >> self.shift if self.shift else sums

    def fine(self, sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sums in steps of the grid. Shapes: any."""
        return sums << self.shift if self.shift else np.require(sums, requirements="A")


def pair_grid(
    g_bound: int,
    h_bound: int,
    n_rows: int,
    capacity_bits: int,
    *,
    rows_are_exact: bool,
    coarsest: float,
    finest: int | None = None,
) -> PairGrid:
    """Choose the finest grid on which the pairs of all rows can be added.

    Args:
        g_bound, h_bound: of ``PairGrid``.
        n_rows: no more rows than these, of all sites.
        capacity_bits: of the scheme's narrow words.
        rows_are_exact: sums travel on the grid of the rows under this scheme, at whatever price.
        coarsest: the largest step that will do; 0 for the finest.
        finest: no step below 2^finest, to compare profiles on one grid.

    Raises:
        ConfigurationError: words have 32 bits, and leave rows of these bounds too few.
    """
    row_bits = max(n_rows, 1).bit_length()
    if capacity_bits == SHORT_BITS:
        most = _SHORT_STEP + SHORT_BITS - max(g_bound, h_bound)
        if row_bits > most:
            raise ConfigurationError(
                f"word_bits=32 is for fewer than {1 << max(most, 0):,} pooled rows here: on a grid where no sum can "
                "wrap, more of them would lose digits that decide splits. Set word_bits to 64"
            )
        return _grid(g_bound, h_bound, row_bits, SHORT_BITS, wide=False, finest=finest)
    wide = _grid(g_bound, h_bound, row_bits, WIDE_BITS, wide=True, finest=finest)
    if capacity_bits >= WIDE_BITS:
        return wide
    if rows_are_exact:
        # The grid must not follow the number of sites, as the capacity does: sums on it may have to travel wide.
        narrow = _grid(g_bound, h_bound, row_bits, NARROW_BITS, wide=capacity_bits < NARROW_BITS, finest=finest)
        # 6 sqrt(N / 12) < 2^(b/2 + 1).
        error = 2.0 ** (max(narrow.g_exponent, narrow.h_exponent) + (row_bits + 1) // 2 + 1)
        return narrow if error <= coarsest else wide
    shift = WIDE_BITS - capacity_bits + 1  # one bit for what sites round up
    if 2.0 ** (max(wide.g_exponent, wide.h_exponent) + shift) > coarsest:
        return wide
    return PairGrid(g_bound, h_bound, wide.g_exponent, wide.h_exponent, wide=False, shift=shift)


def rows_on_grid(quantity: str, rows: NDArray[np.float64], exponent: int, n_rows: int) -> NDArray[np.int64]:
    """Return rows in steps of 2^exponent, rounded half to even.

    Shapes: rows: float64[any]; result: int64[any].

    Raises:
        CapacityExceeded: a row is so large, or no number, that the sum of ``n_rows`` like it does not fit a word.
    """
    if not np.abs(rows).max(initial=0.0) <= 2.0 ** (exponent + WIDE_BITS - max(n_rows, 1).bit_length()):
        raise CapacityExceeded(f"{quantity}: a row is larger than the sites have agreed on; check labels and weights")
    return np.rint(np.ldexp(rows, -exponent)).astype(np.int64)


def _grid(g_bound: int, h_bound: int, row_bits: int, word_bits: int, *, wide: bool, finest: int | None) -> PairGrid:
    g, h = (bound + row_bits - word_bits for bound in (g_bound, h_bound))
    if finest is not None:
        g, h = max(g, finest), max(h, finest)
    return PairGrid(g_bound, h_bound, g, h, wide)


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
        self, values: NDArray[np.int64], grid: PairGrid, *, fits: bool, parts: Sequence[tuple[str, Parts]] = ()
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

    def rows(self, kind: Kind, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add sums of rows that gradients need: RESIDUAL_SCALE or RISK_SUMS.

        Shapes: values, result: int64[n]. Units: grid steps.
        """

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
        self, values: NDArray[np.int64], grid: PairGrid, *, fits: bool, parts: Sequence[tuple[str, Parts]] = ()
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """See ``GrowthSums``."""
        own, n = self._own_parts(parts), values.size
        with self._timed():
            integers = self._coarse(values, grid) if fits else None
            if not own:
                return grid.fine(self._sums.add(Kind.HISTOGRAM, integers, n, wide=grid.wide)), []
            added, totals = self._sums.add_with_metrics(integers, n, wide=grid.wide, parts=own)
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

    def rows(self, kind: Kind, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """See ``GrowthSums``. Raises: ProtocolError: gradients need no such sum."""
        if kind not in (Kind.RESIDUAL_SCALE, Kind.RISK_SUMS):
            raise ProtocolError("a sum of rows was asked for that no gradient needs")
        with self._timed():
            return self._sums.add(kind, values, values.size, wide=True)

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
