"""The candidates that a method starts from without a look at the data (C3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.query import UNIT, real_noise_std
from dp_components.split_candidates import dp_quantiles
from dp_components.split_candidates.candidates import Candidates, FeatureBounds, by_rule
from dp_components.split_candidates.logarithmic import logarithmic_candidates
from dp_components.split_candidates.uniform import uniform_candidates
from nvflare_plugins.private_trees.methods import CandidateSource, Method
from nvflare_plugins.private_trees.noise_plan import NoisePlan


def public_candidates(method: Method, bounds: Sequence[FeatureBounds]) -> Candidates:
    """Return public candidates; for mixed ones only the uniform half."""
    if method.candidates is CandidateSource.LOGARITHMIC:
        return by_rule(logarithmic_candidates, bounds, method.n_candidates)
    n = method.n_candidates // 2 if method.candidates is CandidateSource.MIXED else method.n_candidates
    return by_rule(uniform_candidates, bounds, n)


def paid_candidates(
    method: Method,
    public: Candidates,
    noisy: NDArray[np.int64],
    grids: list[NDArray[np.float32]],
    plan: NoisePlan,
    noise_factor: float,
) -> Candidates:
    """Return candidates at the quantiles of noisy counts; mixed ones with the public half.

    Shapes: noisy: int64[cells of all features]. Units: grid steps.
    Privacy: post-processing.
    """
    if plan.cells is None:
        raise ValueError("the plan pays for no cell counts")
    [noise_std] = real_noise_std(plan.cells.sensitivity, plan.cells.multiplier * noise_factor)
    mixed = method.candidates is CandidateSource.MIXED
    n_quantiles = method.n_candidates // 2 if mixed else method.n_candidates
    paid = dp_quantiles.cut_at_quantiles(noisy / UNIT, grids, noise_std, n_quantiles)
    return dp_quantiles.union(public, paid) if mixed else paid
