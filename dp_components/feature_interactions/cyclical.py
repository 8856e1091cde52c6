"""Cyclical k-way feature interactions (A1)."""

from __future__ import annotations

import math


def cyclical_features(tree: int, n_features: int, k: int) -> list[int]:
    """Return the features of a tree when trees go through all subsets of size k in turn.

    k = 1 is the explainable boosting machine (tree t uses feature t mod m), k = m ordinary boosting.

    Privacy: touches no data.
    Raises: ValueError, unless 1 <= k <= n_features.
    Reference: Maddock et al., section 5.1, item 1.
    """
    if not 1 <= k <= n_features:
        raise ValueError(f"k must lie between 1 and the number of features, {n_features}")
    return _combination(tree % math.comb(n_features, k), n_features, k)


def _combination(index: int, n: int, k: int) -> list[int]:
    """Return the combination with this number in lexicographic order."""
    chosen: list[int] = []
    for feature in range(n):
        if len(chosen) == k:
            break
        with_feature = math.comb(n - feature - 1, k - len(chosen) - 1)
        if index < with_feature:
            chosen.append(feature)
        else:
            index -= with_feature
    return chosen
