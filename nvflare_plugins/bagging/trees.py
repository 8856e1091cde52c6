"""Trees as they travel between sites: what scores a row, and nothing of the statistics that XGBoost keeps beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError

_NODE = np.dtype(
    [("left", "<i4"), ("right", "<i4"), ("feature", "<u4"), ("condition", "<f4"), ("default_left", "u1")], align=False
)
_COUNT_BYTES = 4
_NO_PARENT = 2**31 - 1  # XGBoost's


def most_nodes(depth: int) -> int:
    """Return how many nodes a tree of this depth may have."""
    return int(2 ** (depth + 1) - 1)


@dataclass(frozen=True, slots=True)
class SharedTree:
    """One regression tree over columns of numbers.

    Privacy: thresholds lie between values of the rows it was grown on, leaves are statistics of them. Sums of hessians,
        gains and weights of inner nodes are not in it.
    Shapes:  nodes: one record a node, the root first. ``condition`` is the threshold, or the value of a leaf.
    """

    nodes: NDArray[np.void]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> SharedTree:
        """Take the tree out of XGBoost's document of it."""
        nodes = np.zeros(len(document["left_children"]), _NODE)
        nodes["left"], nodes["right"] = document["left_children"], document["right_children"]
        is_leaf = nodes["left"] < 0
        nodes["feature"] = np.where(is_leaf, 0, document["split_indices"])
        nodes["condition"] = document["split_conditions"]
        nodes["default_left"] = np.where(is_leaf, 0, document["default_left"])
        return cls(nodes)

    def to_bytes(self, depth: int) -> bytes:
        """Return the tree in a message as long as that of any tree of this depth: its length tells nothing."""
        count = len(self.nodes).to_bytes(_COUNT_BYTES, "little")
        return (count + self.nodes.tobytes()).ljust(_COUNT_BYTES + most_nodes(depth) * _NODE.itemsize, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes, depth: int, n_features: int) -> SharedTree:
        """Read a peer's tree strictly.

        Raises:
            ProtocolError: it is not one tree of at most this depth over these columns.
        """
        if len(data) != _COUNT_BYTES + most_nodes(depth) * _NODE.itemsize:
            raise ProtocolError(f"a shared tree has {len(data)} bytes, which is no tree of depth {depth}")
        n_nodes = int.from_bytes(data[:_COUNT_BYTES], "little")
        end = _COUNT_BYTES + n_nodes * _NODE.itemsize
        if not 1 <= n_nodes <= most_nodes(depth) or any(data[end:]):
            raise ProtocolError("a shared tree has another number of nodes than it says")
        tree = cls(np.frombuffer(data[_COUNT_BYTES:end], _NODE).copy())
        tree._check(depth, n_features)
        return tree

    def _check(self, depth: int, n_features: int) -> None:
        nodes, n_nodes = self.nodes, len(self.nodes)
        inner = nodes["left"] >= 0
        children = np.concatenate([nodes["left"][inner], nodes["right"][inner]])
        of = np.concatenate([np.flatnonzero(inner)] * 2)
        # Each node but the root is the child of one earlier node: then it is a tree, and no path goes in a circle.
        if not np.array_equal(np.sort(children), np.arange(1, n_nodes)) or (children <= of).any():
            raise ProtocolError("a shared tree is not a tree")
        if (nodes["right"][~inner] != -1).any() or (nodes["left"][~inner] != -1).any():
            raise ProtocolError("a shared tree has a node with one child")
        if nodes["feature"][~inner].any() or nodes["default_left"][~inner].any():
            raise ProtocolError("a shared tree has a leaf that asks for a column")
        level = np.zeros(n_nodes, dtype=np.int64)
        for node in np.flatnonzero(inner):
            level[nodes["left"][node]] = level[nodes["right"][node]] = level[node] + 1
        if level.max() > depth or (nodes["feature"] >= n_features).any() or (nodes["default_left"] > 1).any():
            raise ProtocolError("a shared tree is deeper than the job's, or asks for a column that is not there")
        if not np.isfinite(nodes["condition"]).all():
            raise ProtocolError("a shared tree has a threshold or leaf that is no number")

    def document(self, number: int, n_features: int) -> dict[str, Any]:
        """Return XGBoost's document of the tree; the statistics that were not shared are zero."""
        nodes, n_nodes = self.nodes, len(self.nodes)
        inner = nodes["left"] >= 0
        parents = np.full(n_nodes, _NO_PARENT, dtype=np.int64)
        parents[nodes["left"][inner]] = parents[nodes["right"][inner]] = np.flatnonzero(inner)
        zeros = [0.0] * n_nodes
        return {
            "base_weights": np.where(inner, np.float32(0), nodes["condition"]).tolist(),
            "categories": [],
            "categories_nodes": [],
            "categories_segments": [],
            "categories_sizes": [],
            "default_left": nodes["default_left"].tolist(),
            "id": number,
            "left_children": nodes["left"].tolist(),
            "loss_changes": zeros,
            "parents": parents.tolist(),
            "right_children": nodes["right"].tolist(),
            "split_conditions": nodes["condition"].tolist(),
            "split_indices": nodes["feature"].tolist(),
            "split_type": [0] * n_nodes,
            "sum_hessian": zeros,
            "tree_param": {
                "num_deleted": "0",
                "num_feature": str(n_features),
                "num_nodes": str(n_nodes),
                "size_leaf_vector": "1",
            },
        }
