"""Rows on their way down finished trees, with each party deciding at its own nodes.

An owner is asked about a row only at nodes that the row really reaches. One question to each party serves a whole
level of all trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.vertical.model.private_table import are_others
from nvflare_plugins.vertical.protocol.links import Party, collect
from nvflare_plugins.vertical.protocol.messages import Bits, DecisionAnswer, DecisionRequest, PathQuery


@dataclass(frozen=True)
class TreeStructure:
    """A tree as the active party knows it: thresholds of its own splits alone.

    Shapes: all arrays have one item per node; children are -1 at leaves.

    Attributes:
        categories: by node of the active party's own splits by categories: those that go right, ascending.
    """

    left: NDArray[np.int32]
    right: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    default_left: NDArray[np.bool_]
    categories: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def n_nodes(self) -> int:
        """Return the number of nodes."""
        return self.left.size

    def decide(self, node: int, values: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Tell which values go left at one of the active party's own nodes. Shapes: values: float32[n]."""
        if node in self.categories:
            is_left = are_others(values, self.categories[node])
        else:
            is_left = values < self.threshold[node]
        result: NDArray[np.bool_] = np.where(np.isnan(values), self.default_left[node], is_left)
        return result


@dataclass(frozen=True, slots=True)
class _Decision:
    """Where the rows that reach a node go. Shapes: rows: int64[n], ascending; goes_left: bool[n]."""

    tree: int
    node: int
    rows: NDArray[np.int64]
    goes_left: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _OpenQuestion:
    tree: int
    node: int
    feature: int
    rows: NDArray[np.int64]


class PathWalker:
    """Sends the rows of one data set down trees."""

    def __init__(self, parties: Sequence[Party], n_own_columns: int, deadline_s: float):
        self._parties = parties
        self._n_own = n_own_columns
        self._deadline_s = deadline_s

    def walk(
        self, trees: Sequence[TreeStructure], first_tree: int, data_set: int, own: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        """Find the leaf of every row in every tree.

        Shapes: own: float32[n_rows, n_own_columns]; result: int32[n_trees, n_rows].

        Args:
            first_tree: number of the first of ``trees`` in the model.
            data_set: number of the data set at the passive parties.
        """
        position = np.zeros((len(trees), own.shape[0]), dtype=np.int32)
        moving = [np.arange(own.shape[0])] * len(trees)
        while True:
            decided: list[_Decision] = []
            questions: list[_OpenQuestion] = []
            for t, tree in enumerate(trees):
                moving[t] = moving[t][tree.left[position[t, moving[t]]] >= 0]
                for node, rows in _rows_by_node(moving[t], position[t]):
                    if tree.feature[node] < self._n_own:
                        decided.append(_Decision(t, node, rows, tree.decide(node, own[rows, tree.feature[node]])))
                    else:
                        questions.append(_OpenQuestion(t, node, int(tree.feature[node]), rows))
            if not decided and not questions:
                return position
            for d in decided + self._ask(questions, first_tree, data_set, own.shape[0]):
                tree = trees[d.tree]
                position[d.tree, d.rows] = np.where(d.goes_left, tree.left[d.node], tree.right[d.node])

    def _ask(self, questions: list[_OpenQuestion], first_tree: int, data_set: int, n_rows: int) -> list[_Decision]:
        asked = []
        for party in self._parties:
            columns = party.columns
            own = [q for q in questions if columns.start <= q.feature < columns.stop]
            if own:
                queries = tuple(PathQuery(first_tree + q.tree, q.node, _mask(q.rows, n_rows)) for q in own)
                asked.append((party, own, party.link.ask(DecisionRequest(data_set, queries))))
        answers = []
        for party, own, future in asked:
            answer = collect(party, future, DecisionAnswer, self._deadline_s)
            if [bits.n for bits in answer.goes_left] != [q.rows.size for q in own]:
                raise ProtocolError(f"{party.name} decided other rows than it was asked about")
            answers += [
                _Decision(q.tree, q.node, q.rows, bits.unpack()) for q, bits in zip(own, answer.goes_left, strict=True)
            ]
        return answers


def _rows_by_node(rows: NDArray[np.int64], position: NDArray[np.int32]) -> list[tuple[int, NDArray[np.int64]]]:
    """Group ascending rows by the node that they stand at."""
    if not rows.size:
        return []
    order = rows[np.argsort(position[rows], kind="stable")]
    nodes, starts = np.unique(position[order], return_index=True)
    return list(zip(nodes.tolist(), np.split(order, starts[1:]), strict=True))


def _mask(rows: NDArray[np.int64], n_rows: int) -> Bits:
    mask = np.zeros(n_rows, dtype=bool)
    mask[rows] = True
    return Bits.of(mask)
