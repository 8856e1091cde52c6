"""Totally random trees (C1): feature and candidate of every split are drawn, no data is asked.

Only the leaves cost privacy: one query per tree, since a row lies in one leaf.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from dp_components.split_methods.tree import Tree, TreeBuilder

# Totally random trees (C1): feature and candidate of every split are drawn, no data is asked.
#
# Only the leaves cost privacy: one query per tree, since a row lies in one leaf.


def grow_totally_random(
    candidate_counts: Sequence[int],
    features: Sequence[int],
    depth: int,
    draws: random.Random,
    weights: Sequence[float] | None = None,
) -> Tree:
    """Draw a tree's structure.

    At each node a feature is drawn among those that can still be split there, then one of its candidates that lie
    inside the node. A branch ends at ``depth``, or where no feature has a candidate left.

    Privacy: touches no data. ``draws`` and ``weights`` are public: every site draws the same trees.

    Args:
        candidate_counts: number of candidates of each feature.
        features: the features this tree may use.
        weights: how often each feature is drawn, all above 0; None for all alike.

    Reference: Maddock et al., section 4.3.2.
    """
    builder = TreeBuilder()
    open_nodes = [(0, {f: (0, candidate_counts[f]) for f in features})]
    for _ in range(depth):
        below = []
        for node, ranges in open_nodes:
            splittable = [f for f, (low, high) in ranges.items() if low < high]
            if not splittable:
                continue
            feature = (
                splittable[draws.randrange(len(splittable))]
                if weights is None
                else weighted_choice(splittable, weights, draws)
            )
            low, high = ranges[feature]
            candidate = draws.randrange(low, high)
            left, right = builder.split(node, feature, candidate)
            below.append((left, {**ranges, feature: (low, candidate)}))
            below.append((right, {**ranges, feature: (candidate + 1, high)}))
        open_nodes = below
    return builder.build()


def weighted_choice(items: Sequence[int], weights: Sequence[float], draws: random.Random) -> int:
    """Draw one of the items in proportion to ``weights[item]``, which are above 0: alike on every machine."""
    left = draws.random() * math.fsum(weights[item] for item in items)
    for item in items:
        left -= weights[item]
        if left < 0:
            return item
    return items[-1]
