"""Quantile split candidates (C3): NOT PRIVATE, a reference to compare with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def non_private_quantile_candidates(values: NDArray[np.float32], n_candidates: int) -> NDArray[np.float64]:
    """Return the exact quantiles 0, 1/Q, ..., (Q-1)/Q of the data.

    Shapes: values: float32[n_rows]; result: float64[n_candidates].
    Privacy: none. The candidates are values of single rows; no mechanism of this project releases them.
    Reference: Maddock et al., section 4.5.1, where they serve as the non-private reference too.
    """
    result: NDArray[np.float64] = np.quantile(values, np.arange(n_candidates) / n_candidates)
    return result
