"""A column of which nothing is kept but how its values compare with some numbers: one or two bytes each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ComparedColumn:
    """A column's values up to what comparisons with known numbers tell of them.

    Shapes: stand_ins: float32[n_numbers + 2], for each place among the numbers a value that lies there, the last for
        missing values; places: unsigned integers[n_rows].
    """

    stand_ins: NDArray[np.float32]
    places: NDArray[Any]

    @classmethod
    def compare(cls, values: NDArray[np.float32], numbers: NDArray[np.float32]) -> Self:
        """Compare a column. Shapes: values: float32[n_rows], NaN is missing; numbers: float32[any], ascending."""
        stand_ins = np.concatenate([[-np.inf], numbers, [np.nan]]).astype(np.float32)
        places = np.searchsorted(numbers, values, side="right")
        places[np.isnan(values)] = numbers.size + 1
        return cls(stand_ins, places.astype(np.min_scalar_type(numbers.size + 1)))

    def of(self, rows: NDArray[np.bool_] | NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Return values that are below the same numbers as those of some rows; missing ones are missing.

        So v < t holds for one where it holds for the other, for each of the numbers t. Values that are among the
        numbers are returned as they are.

        Shapes: float32[some rows].
        """
        result: NDArray[np.float32] = self.stand_ins[self.places[rows]]
        return result
