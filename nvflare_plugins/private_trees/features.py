"""Which features each tree of a method may use (A1), from the method's public description."""

from __future__ import annotations

import random

from dp_components.feature_interactions.alternating import alternating_features
from dp_components.feature_interactions.cyclical import cyclical_features
from dp_components.feature_interactions.random_k_way import random_features
from nvflare_plugins.private_trees.methods import Interactions, Method


def tree_features(method: Method, tree: int, n_features: int, draws: random.Random) -> list[int]:
    """Return the features that one tree may use. Privacy: touches no data; ``draws`` is public."""
    k = method.features_per_tree(n_features)
    if method.interactions in (Interactions.ALTERNATING, Interactions.INFORMED):
        return alternating_features(tree, n_features)
    if k == n_features:
        return list(range(n_features))
    if method.interactions is Interactions.CYCLICAL:
        return cyclical_features(tree, n_features, k)
    return random_features(n_features, k, draws)
