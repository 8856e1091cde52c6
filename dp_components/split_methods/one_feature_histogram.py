"""Histogram trees of one feature (C1 with A1, k = 1): the root's histogram answers for the whole tree.

Every node of such a tree is an interval of the feature's bins, so that its histogram is a part of the root's: all
levels, and the leaves, are post-processing of one query. Only with one feature is this so; with two, a split by one
divides the bins of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.split_methods.greedy import Expand, Histograms, OpenNode, Split, as_pairs
from dp_components.split_methods.histogram import AddNoise, HistogramQuery
from dp_components.split_methods.split_score import Totals


class OneFeatureHistogramQuery(HistogramQuery):
    """The noisy histogram of a tree's one feature; see ``greedy.grow``.

    Privacy: one query a tree, whatever its depth; rows are not looked at again below the root.
    Reference: Maddock et al., section 5.1. Their code takes fresh histograms without noise below the root.

    Raises:
        ValueError: unless there is one feature.
    """

    def __init__(
        self,
        bins: NDArray[np.uint8],
        pairs: NDArray[np.int64],
        features: Sequence[int],
        candidate_counts: Sequence[int],
        ridge: float,
        clip: float,
        add_noise: AddNoise,
        expand: Expand = as_pairs,
        histograms: Histograms | None = None,
    ):
        if len(features) != 1:
            raise ValueError("the root's histogram answers for the whole tree only where the tree has one feature")
        super().__init__(bins, pairs, features, candidate_counts, ridge, clip, add_noise, expand, histograms)

    def best(self, nodes: Sequence[OpenNode]) -> list[tuple[Totals, Split | None]]:
        """Release the root's histogram at the first call; return each node's best split by its part of that."""
        of_root = self.root_histograms
        return super().best(nodes) if of_root is None else [self._best_of_node(of_root, node) for node in nodes]
