"""Cyclical k-way feature interactions (A1)."""

from __future__ import annotations


def cyclical_features(tree: int, n_features: int, k: int) -> list[int]:
    """Return the features of a tree when each takes the next k after those of the one before, round and round.

    k = 1 is the explainable boosting machine (tree t uses feature t mod m), k = m ordinary boosting. After any number
    of trees every feature has been used equally often, or once more than another: the order of the columns decides
    which features meet in a tree, but favours none.

    Privacy: touches no data.

    Raises:
        ValueError: unless 1 <= k <= n_features.
    Reference: Maddock et al., section 5.1, item 1.
    """
    if not 1 <= k <= n_features:
        raise ValueError(f"k must lie between 1 and the number of features, {n_features}")
    return sorted((tree * k + place) % n_features for place in range(k))
