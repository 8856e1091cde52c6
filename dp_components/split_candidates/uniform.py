"""Uniform split candidates (C3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import FeatureBounds


def uniform_candidates(bounds: FeatureBounds, n_candidates: int) -> NDArray[np.float64]:
    """Space candidates evenly over the public bounds; the left end is one of them, the right end is not.

    Shapes: result: float64[n_candidates].
    Privacy: touches no data.
    Reference: Maddock et al., section 4.5.1.
    """
    return bounds.low + np.arange(n_candidates, dtype=np.float64) * ((bounds.high - bounds.low) / n_candidates)
