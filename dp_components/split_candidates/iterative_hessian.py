"""Iterative Hessian split candidates (C3): merge light bins, divide heavy ones, over the first rounds of training.

The first ``rounds`` trees begin from uniform candidates and release one noisy histogram of Hessian sums per feature.
Where a bin holds more than its share, a candidate is added inside it; bins that are light are merged.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

# Iterative Hessian split candidates (C3): merge light bins, divide heavy ones, over the first rounds of training.
#
# The first ``rounds`` trees begin from uniform candidates and release one noisy histogram of Hessian sums per feature.
# Where a bin holds more than its share, a candidate is added inside it; bins that are light are merged.


def refine(
    cuts: NDArray[np.float32],
    hessians: NDArray[np.float64],
    target: float,
    n_candidates: int,
    *,
    as_published: bool = False,
) -> NDArray[np.float64]:
    """Return better candidates of one feature, given a noisy histogram over the present ones.

    Shapes: cuts: float32[n_cuts]; hessians: float64[n_cuts + 1], bin i lies below cuts[i]; result: at most about
        ``2 * n_candidates`` ascending candidates.
    Privacy: post-processing of the noisy histogram.

    Args:
        target: Hessian sum of a bin of ordinary weight.
        as_published: add the midpoint to the right of a heavy bin, as the paper's code does, and not inside it.

    Reference: Maddock et al., section 4.5.2, with a slip mended.
    """
    kept = _merge_and_divide(cuts, np.maximum(hessians, 0.0), target, n_candidates, as_published=as_published)
    return _fill(kept, n_candidates)


def _merge_and_divide(
    cuts: NDArray[np.float32], hessians: NDArray[np.float64], target: float, n_candidates: int, *, as_published: bool
) -> list[float]:
    kept: list[float] = []
    last, gathered = cuts.size - 1, 0.0
    for i, weight in enumerate(hessians[: cuts.size]):
        gathered += weight
        if gathered > target and i < last:
            gathered = 0.0
            kept.append(float(cuts[i]))
            if cuts.size < n_candidates and len(kept) < n_candidates:
                left, right = (i, i + 1) if as_published else (max(i - 1, 0), i)
                kept.append((float(cuts[left]) + float(cuts[right])) / 2)
        elif i == last:
            kept.append(float(cuts[i]))
    return sorted(set(kept))


def _fill(kept: list[float], n_candidates: int) -> NDArray[np.float64]:
    """Divide the gaps evenly where fewer candidates are left than wanted."""
    if len(kept) < 2 or len(kept) >= n_candidates:
        return np.array(kept)
    parts = -(-n_candidates // len(kept))
    gaps = [np.linspace(a, b, parts, endpoint=False) for a, b in itertools.pairwise(kept)]
    return np.concatenate([*gaps, [kept[-1]]])
