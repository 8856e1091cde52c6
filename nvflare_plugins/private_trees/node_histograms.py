"""Histograms of a tree's nodes by the kernels that grow XGBoost's trees: the integers that numpy finds, sooner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.split_methods.greedy import Histograms, in_numpy
from nvflare_plugins.growth._native import growth
from nvflare_plugins.growth.bins import BinLayout, BinnedTable
from nvflare_plugins.growth.rows import BinnedRows

_COORDINATES = 2
"""The kernels add pairs (g, h)."""


def node_histograms(
    bins: NDArray[np.uint8], pairs: NDArray[np.int64], features: Sequence[int], n_bins: int
) -> Histograms:
    """Return what sums the nodes of one tree.

    A row without a value is in its feature's last bin, as everywhere in private trees.

    Shapes: bins: uint8[n_features, n_rows]; pairs: int64[n_rows, n_coordinates].

    Args:
        features: that the tree may use.
        n_bins: of each.
    """
    n_features = len(features)
    if growth is None or pairs.shape[1] != _COORDINATES or n_features == 1:
        return in_numpy(bins, pairs, features, n_bins)
    starts = n_bins * np.arange(n_features + 1, dtype=np.int64)
    nothing = np.zeros(n_features, dtype=np.float32)
    layout = BinLayout(np.zeros(starts[-1], dtype=np.float32), starts, nothing.astype(bool), nothing)
    no_code = np.full(n_features, n_bins, dtype=np.uint32)
    rows = BinnedRows(layout, BinnedTable(np.ascontiguousarray(bins[list(features)].T), no_code, is_dense=True))
    rows.begin_tree(pairs)

    def of_nodes(nodes: Sequence[NDArray[np.intp]]) -> NDArray[np.int64]:
        rows.put(nodes)
        return rows.histograms(range(1, len(nodes) + 1)).reshape(len(nodes), n_features, n_bins, _COORDINATES)

    return of_nodes
