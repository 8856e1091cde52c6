"""Alternate trees of one feature with trees of all features (ours).

One-feature trees learn each feature's own effect with the least noise, trees over all features learn what features do
together. Which of them helps depends on the data; taking turns makes no choice that would have to look.
"""

from __future__ import annotations

from dp_components.feature_interactions.cyclical import cyclical_features


def alternating_features(tree: int, n_features: int) -> list[int]:
    """Return one feature for even trees (cyclical) and all features for odd ones. Privacy: touches no data."""
    if tree % 2:
        return list(range(n_features))
    return cyclical_features(tree // 2, n_features, 1)
