"""Random k-way feature interactions (A1)."""

from __future__ import annotations

import random


def random_features(n_features: int, k: int, draws: random.Random) -> list[int]:
    """Draw the k features of one tree without replacement.

    Privacy: touches no data; ``draws`` is public, every site makes the same ones.

    Raises:
        ValueError: unless 1 <= k <= n_features.
    Reference: Maddock et al., section 5.1, item 2.
    """
    if not 1 <= k <= n_features:
        raise ValueError(f"k must lie between 1 and the number of features, {n_features}")
    return sorted(draws.sample(range(n_features), k))
