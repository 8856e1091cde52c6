"""The one message of a refresh training, and how its reply is formed.

XGBoost's refresh updater sends one vector per round with the sums of every node of the round's trees. It is labelled
MAX, an upstream slip (updater_refresh.cc, 3.2.0): it must be summed. A row counts at every node of its path, so that
only the leaves are asked for; inner nodes are rebuilt from noisy leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.sensitivity import grid_integers
from dp_components.split_methods.tree import LEAF, Tree
from he_processors.errors import ProtocolError
from nvflare_plugins.private_trees.forest import Forest, node_sums
from nvflare_plugins.wire.catalogue import Answer, Dtype, Kind, Message, Op, Phase, TrainingStep

_BYTES_PER_NODE = 16


class RefreshGrammar:
    """Allows exactly one message in each round, of the size that the public forest fixes."""

    def __init__(self, forest: Forest):
        self._forest = forest
        self._moment = TrainingStep(Phase.SETUP)
        self._due = False

    @property
    def largest_message_bytes(self) -> int:
        """No message is longer than the statistics of all trees."""
        return _BYTES_PER_NODE * sum(tree.feature.size for tree in self._forest.trees)

    def enter(self, moment: TrainingStep) -> None:
        """Announce the next phase. Raises: ProtocolError, if the last round's message has not come."""
        if self._due:
            raise ProtocolError(f"XGBoost left phase {self._moment} without its node statistics")
        self._moment = moment
        self._due = moment.phase is Phase.UPDATE

    def classify(self, call: str, dtype: int, op: int, size: int) -> Message:
        """Name the message. Raises: ProtocolError, for any other than the one that is due."""
        n_nodes = sum(tree.feature.size for tree in self._forest.of_round(self._moment.round)) if self._due else 0
        if (call, dtype, op, size) != ("Allreduce", Dtype.FLOAT64, Op.MAX, _BYTES_PER_NODE * n_nodes) or not n_nodes:
            raise ProtocolError(
                f"unknown message in phase {self._moment}: {call} (dtype {dtype}, op {op}) of {size} bytes; a refresh "
                f"sends {n_nodes} node statistics once a round and nothing else"
            )
        self._due = False
        return Message(Kind.NODE_STATS, Answer.SUM, Dtype.FLOAT64, 2 * n_nodes, self._moment, size)


def leaf_integers(buffer: bytes, trees: Sequence[Tree]) -> NDArray[np.int64]:
    """Read the leaves' exact sums out of XGBoost's buffer and leave the inner nodes behind.

    Shapes: result: int64[2 * n_leaves], (G, H) by turns. Units: 2^-20.

    Raises:
        ProtocolError: a sum is off the grid: then the rows were not bounded by this project's objective.
    """
    nodes = np.frombuffer(buffer, dtype="<f8").reshape(-1, 2)
    leaves = nodes[np.concatenate([tree.feature == LEAF for tree in trees])]
    try:
        return grid_integers(leaves).ravel()
    except ValueError:
        raise ProtocolError("a leaf sum is not on the grid of the row statistics") from None


def node_statistics(leaf_sums: NDArray[np.float64], trees: Sequence[Tree]) -> bytes:
    """Form XGBoost's reply: noisy leaves, and inner nodes as the sums of their noisy leaves.

    Shapes: leaf_sums: float64[n_leaves, 2].
    """
    ends = np.cumsum([tree.leaves.size for tree in trees])
    nodes = [node_sums(*of_tree) for of_tree in zip(trees, np.split(leaf_sums, ends[:-1]), strict=True)]
    return np.concatenate(nodes).astype("<f8").tobytes()
