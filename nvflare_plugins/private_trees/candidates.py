"""The candidates that a method starts from (C3): public ones, and those that a first release pays for."""

from __future__ import annotations

from collections.abc import Sequence

from dp_components.leaf_weights.query import UNIT
from dp_components.split_candidates import dp_quantiles
from dp_components.split_candidates.candidates import Candidates, Columns, FeatureBounds, as_candidates, by_rule
from dp_components.split_candidates.logarithmic import logarithmic_candidates
from dp_components.split_candidates.quantile import non_private_quantile_candidates
from dp_components.split_candidates.uniform import uniform_candidates
from nvflare_plugins.private_trees.methods import CandidateSource, Method
from nvflare_plugins.private_trees.training import PrivateTreesPlan, SumsOverSites
from nvflare_plugins.wire.catalogue import Kind


def agree_candidates(plan: PrivateTreesPlan, columns: Columns, sums: SumsOverSites) -> Candidates:
    """Return the split candidates that training starts from; paid ones cost one release.

    Shapes: columns: float32[n_features, n_rows].
    """
    method = plan.method
    if method.candidates is CandidateSource.QUANTILE:  # of the own rows, for benchmarks: no job may choose them
        lists = [non_private_quantile_candidates(c, method.n_candidates) for c in columns]
        return Candidates(tuple(as_candidates(points) for points in lists))
    public = public_candidates(method, plan.bounds)
    if not method.candidates.is_paid:
        return public
    grids = [dp_quantiles.public_grid(b) for b in plan.bounds]
    noisy = sums.release(Kind.CELL_COUNTS, -1, dp_quantiles.count_cells(columns, grids))
    [noise_std] = plan.releases.cell_noise.scaled(plan.trust.noise_factor).std
    mixed = method.candidates is CandidateSource.MIXED
    n_quantiles = method.n_candidates // 2 if mixed else method.n_candidates
    paid = dp_quantiles.cut_at_quantiles(noisy / UNIT, grids, noise_std, n_quantiles)
    return dp_quantiles.union(public, paid) if mixed else paid


def public_candidates(method: Method, bounds: Sequence[FeatureBounds]) -> Candidates:
    """Return public candidates; for mixed ones only the uniform half."""
    if method.candidates is CandidateSource.LOGARITHMIC:
        return by_rule(logarithmic_candidates, bounds, method.n_candidates)
    n = method.n_candidates // 2 if method.candidates is CandidateSource.MIXED else method.n_candidates
    return by_rule(uniform_candidates, bounds, n)
