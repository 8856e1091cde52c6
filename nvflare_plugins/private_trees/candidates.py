"""The candidates that a method starts from without a look at the data (C3)."""

from __future__ import annotations

from collections.abc import Sequence

from dp_components.split_candidates.candidates import Candidates, FeatureBounds, by_rule
from dp_components.split_candidates.logarithmic import logarithmic_candidates
from dp_components.split_candidates.uniform import uniform_candidates
from nvflare_plugins.private_trees.methods import CandidateSource, Method


def public_candidates(method: Method, bounds: Sequence[FeatureBounds]) -> Candidates:
    """Return public candidates; for mixed ones only the uniform half."""
    if method.candidates is CandidateSource.LOGARITHMIC:
        return by_rule(logarithmic_candidates, bounds, method.n_candidates)
    n = method.n_candidates // 2 if method.candidates is CandidateSource.MIXED else method.n_candidates
    return by_rule(uniform_candidates, bounds, n)
