"""Logarithmic split candidates (C3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import FeatureBounds
from dp_components.split_candidates.uniform import uniform_candidates


def logarithmic_candidates(bounds: FeatureBounds, n_candidates: int, skewed_left: bool = False) -> NDArray[np.float64]:
    """Space candidates evenly in log(1 + x - low), so that they are dense near the lower bound.

    Shapes: result: float64[n_candidates], ascending.
    Privacy: touches no data; ``skewed_left`` must be public. The paper's code reads it from the private data.

    Args:
        skewed_left: the feature has its long tail at the lower end; the list is mirrored then.

    Reference: Maddock et al., section 4.5.1.
    """
    width = bounds.high - bounds.low
    distances = np.expm1(uniform_candidates(FeatureBounds(0.0, float(np.log1p(width))), n_candidates))
    return bounds.high - distances[::-1] if skewed_left else bounds.low + distances
