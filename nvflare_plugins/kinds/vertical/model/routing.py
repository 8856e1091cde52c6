"""Rows on their way down finished trees: private tables of splits, and what their owners have answered."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical.protocol.conversation import Party, collect
from nvflare_plugins.kinds.vertical.protocol.messages import Bits, DecisionAnswer, DecisionRequest, PathQuery

# What a passive party keeps of a model: its own splits, with the thresholds that nobody else has.


NOTHING_ABOVE = (-1, False)
NO_THRESHOLD = np.finfo(np.float32).smallest_subnormal
"""What XGBoost writes in the place of the threshold where a node is split by categories."""
_MOST_CATEGORIES = 1 << 16


def are_others(values: NDArray[np.float32], categories: Sequence[int]) -> NDArray[np.bool_]:
    """Tell which values are none of a split's categories and go left, also one that training never saw.

    Shapes: values: float32[n], positions in the public list.

    Reference: XGBoost 3.2, src/common/categorical.h (Decision).
    """
    return ~np.isin(values, np.array(categories, dtype=np.float32))


@dataclass(frozen=True, slots=True, repr=False)
class PrivateSplit:
    """One split of a passive party.

    Units: threshold in the feature's own unit; values below it go left. ``NO_THRESHOLD`` of a split by categories.

    Attributes:
        above: node of the party's nearest split above this one in the tree, and whether this one lies to its left;
            ``NOTHING_ABOVE`` if it has none there, None if the party does not know the tree.
        categories: of a categorical feature, the places in its public list that go right, ascending; else None.
    """

    feature: int
    threshold: np.float32
    default_left: bool
    above: tuple[int, bool] | None = None
    categories: tuple[int, ...] | None = None

    def goes_left(self, values: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Decide rows as XGBoost does. Shapes: values: float32[n], NaN is missing; result: bool[n]."""
        is_left = values < self.threshold if self.categories is None else are_others(values, self.categories)
        return np.where(np.isnan(values), self.default_left, is_left)


PrivateTable = dict[tuple[int, int], PrivateSplit]
"""(tree, node) -> the party's split there."""


def table_to_json(table: Mapping[tuple[int, int], PrivateSplit], aliases: tuple[str, ...]) -> str:
    """Write a table for the party's own disk.

    Privacy: holds thresholds and sets of categories; must not leave the party unasked.
    """
    # The shortest decimal form of a float32 reads back as the same number.
    splits = [
        [tree, node, s.feature, str(s.threshold), int(s.default_left), s.above and [s.above[0], int(s.above[1])]]
        + ([] if s.categories is None else [list(s.categories)])
        for (tree, node), s in sorted(table.items())
    ]
    return json.dumps({"aliases": list(aliases), "splits": splits})


def table_from_json(text: str) -> tuple[PrivateTable, tuple[str, ...]]:
    """Read what ``table_to_json`` wrote.

    Raises:
        ConfigurationError: the text is not such a table.
    """
    try:
        document = json.loads(text)
        aliases = tuple(map(str, document["aliases"]))
        table = {
            (int(tree), int(node)): PrivateSplit(
                int(feature),
                _threshold(threshold),
                bool(default_left),
                None if above is None else _above(*above),
                _categories(*sets),
            )
            for tree, node, feature, threshold, default_left, above, *sets in document["splits"]
        }
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise ConfigurationError("the file does not hold a private table of a vertical model") from None
    if any(not 0 <= split.feature < len(aliases) for split in table.values()):
        raise ConfigurationError("a private table names a feature that it does not list")
    for (tree, _), split in table.items():
        if split.above not in (None, NOTHING_ABOVE) and (tree, split.above[0]) not in table:
            raise ConfigurationError("a private table names a split above another that it does not list")
    return table, aliases


def _threshold(text: str) -> np.float32:
    """Read a threshold; the bound above the largest floats is infinite. Raises: ValueError, TypeError."""
    number = float(text)
    if math.isnan(number):
        raise ValueError("a threshold that is no number")
    with np.errstate(over="ignore"):
        return np.float32(number)


def _categories(categories: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Read the categories of a split. Raises: ValueError, TypeError."""
    if categories is None:
        return None
    places = np.array([int(place) for place in categories])
    if not places.size or places[0] < 0 or places[-1] >= _MOST_CATEGORIES or (np.diff(places) <= 0).any():
        raise ValueError("categories that are no places in a list")
    return tuple(places.tolist())


def _above(node: int, is_left: int) -> tuple[int, bool]:
    return int(node), bool(is_left)


# Rows on their way down finished trees, with each party deciding at its own nodes.
#
# An owner is asked about a row only at nodes that the row really reaches. One question to each party serves a whole
# level of all trees.


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


# What an owner of splits has answered for the rows of one data set: each node once, and each row along one path.


REFUSED = "a question that this party does not answer"


class AnsweredPaths:
    """Follows rows through a party's own splits.

    Privacy: a row is answered for at a node only if this party's answer at its nearest split above led there. Which
        way the row went at nodes of other parties cannot be checked.
    """

    def __init__(self, n_rows: int):
        self._n_rows = n_rows
        self._answered: set[tuple[int, int]] = set()
        self._reached: dict[int, NDArray[np.int32]] = {}  # by tree: the last answer for each row

    def follow(
        self, tree: int, node: int, split: PrivateSplit, rows: NDArray[np.bool_], goes_left: NDArray[np.bool_]
    ) -> None:
        """Note the answer for a node before it is given.

        Shapes: rows: bool[n_rows]; goes_left: bool[n], one for each of the chosen rows.

        Raises:
            ProtocolError: the node was asked for before, or is not on the path of one of the rows.
        """
        if (tree, node) in self._answered:
            raise ProtocolError(REFUSED)
        self._answered.add((tree, node))
        if split.above is None:  # the party does not know the tree
            return
        reached = self._reached.setdefault(tree, np.full(self._n_rows, _side(*NOTHING_ABOVE), dtype=np.int32))
        if (reached[rows] != _side(*split.above)).any():
            raise ProtocolError(REFUSED)
        reached[rows] = _side(node, goes_left)

    def end_trees(self) -> None:
        """Forget where rows are in the trees so far: only nodes below none of this party's can still be asked for."""
        self._reached.clear()


def _side(node: int, is_left: bool | NDArray[np.bool_]) -> int | NDArray[np.int64]:
    """Number the two sides of every node."""
    return 2 * node + is_left
