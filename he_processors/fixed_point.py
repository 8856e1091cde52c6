"""Numbers on power-of-two grids: what masks, BFV and CKKS add exactly.

A float64 x is carried as an integer near x / 2^exponent. Sums of such integers are exact, so every profile that
uses the same exponents gives the same model, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from he_processors._native import extension
from he_processors.errors import CapacityExceeded

_grids = extension("_grids")  # in one pass what numpy does in ten

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Grid:
    """A fixed-point grid with spacing 2^exponent.

    Capacity: ``encode`` accepts |x| <= 2^bound_exponent; the sum of ``n_summands`` such values stays below
    2^capacity_bits grid steps, the most the processor in use can carry.
    """

    exponent: int
    bound_exponent: int

    @classmethod
    def for_sum(cls, bound_exponent: int, n_summands: int, capacity_bits: int, finest: int | None = None) -> Grid:
        """Choose the finest grid on which ``n_summands`` values of at most 2^bound_exponent can be added.

        Args:
            bound_exponent: every summand is at most 2^bound_exponent in magnitude.
            n_summands: number of sites.
            capacity_bits: a sum of integers must stay at most 2^capacity_bits in magnitude.
            finest: do not go below this exponent (to compare profiles on one grid).
        """
        exponent = bound_exponent + (n_summands - 1).bit_length() - capacity_bits
        return cls(exponent if finest is None else max(exponent, finest), bound_exponent)

    def encode(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round to the grid, half to even.

        Shapes: values: float64[n]; result: int64[n].

        Raises:
            CapacityExceeded: a value is not finite or larger than the bound; nothing was encoded then.
        """
        return Grids((self,)).encode(values)

    def decode(self, integers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the grid values. Shapes: integers: int64[n]; result: float64[n]."""
        return Grids((self,)).decode(integers)


@dataclass(frozen=True, slots=True)
class Grids:
    """Grids by position: value i of a message lies on grid i modulo their number.

    Gradients and hessians, or a metric's numerator and its count of rows, travel in turn and differ in size by many
    orders of magnitude: on one grid the smaller of the two would lose its digits.
    """

    of: tuple[Grid, ...]

    def exceeded(self, values: NDArray[np.float64]) -> list[bool]:
        """Say of each grid whether some value on it is not finite or larger than its bound.

        Shapes: values: float64[n], n a multiple of the number of grids.
        """
        columns = self._columns(values)
        # NaN propagates through both and fails the comparison.
        largest = np.maximum(columns.max(axis=0, initial=0.0), -columns.min(axis=0, initial=0.0))
        return [not x <= 2.0**grid.bound_exponent for x, grid in zip(largest, self.of, strict=True)]

    def encode(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round to the grids, half to even.

        Shapes: values: float64[n], n a multiple of the number of grids; result: int64[n].

        Raises:
            CapacityExceeded: a value is not finite or larger than its bound; nothing was encoded then.
        """
        return self._rounded(values, running=False)

    def encode_running(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round so that sums over neighbours stay on the grid's resolution: each error is carried to the next value.

        A sum over any run of values on one grid is off by less than one step, however long the run; with ``encode``
        the error would grow with the root of its length. A split's left side is such a run of bins.

        Shapes: values: float64[n], n a multiple of the number of grids; result: int64[n].

        Raises:
            CapacityExceeded: as ``encode``.
        """
        return self._rounded(values, running=True)

    def decode(self, integers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the grid values. Shapes: integers: int64[n]; result: float64[n]."""
        if _grids is None:
            return (self._columns(integers) * self._steps()).reshape(-1)
        values = np.empty(integers.size, dtype=np.float64)
        _grids.scale(np.ascontiguousarray(integers), self._steps(), values)
        return values

    def _rounded(self, values: NDArray[np.float64], running: bool) -> NDArray[np.int64]:
        if _grids is None:
            return self.rounded_by_numpy(values, running)
        integers = np.empty(values.size, dtype=np.int64)
        bounds = np.ldexp(1.0, [grid.bound_exponent for grid in self.of])
        self._refuse(_grids.round(np.ascontiguousarray(values), 1.0 / self._steps(), bounds, running, integers))
        return integers

    def rounded_by_numpy(self, values: NDArray[np.float64], running: bool) -> NDArray[np.int64]:
        """Do what the extension does, to the bit, where there is none."""
        self._refuse(sum(1 << i for i, is_exceeded in enumerate(self.exceeded(values)) if is_exceeded))
        scaled = self._columns(values) * (1.0 / self._steps())  # powers of two: exact
        rounded = np.rint(scaled)
        if running:
            # Rounding errors are exact in float64 and at most 1/2, so their running sums keep full precision.
            carried = np.rint(np.cumsum(scaled - rounded, axis=0))
            rounded += np.diff(carried, axis=0, prepend=0.0)
        return rounded.astype(np.int64).reshape(-1)

    def _refuse(self, exceeded: int) -> None:
        """Args: exceeded: a bit for each grid. Raises: CapacityExceeded."""
        for number, grid in enumerate(self.of):
            if exceeded >> number & 1:
                raise CapacityExceeded(f"a value is not finite or larger than 2^{grid.bound_exponent}")

    def _steps(self) -> NDArray[np.float64]:
        return np.ldexp(1.0, [grid.exponent for grid in self.of])

    def _columns(self, values: NDArray[_Number]) -> NDArray[_Number]:
        return values.reshape(-1, len(self.of))


def exponent_of(bound: float) -> int:
    """Return the smallest e with bound <= 2^e; -1022 for a bound of zero.

    Raises:
        CapacityExceeded: the bound is not finite.
    """
    if not np.isfinite(bound):
        raise CapacityExceeded("a bound is not finite")
    mantissa, exponent = np.frexp(abs(bound))
    if mantissa == 0:
        return -1022
    return int(exponent) - 1 if mantissa == 0.5 else int(exponent)
