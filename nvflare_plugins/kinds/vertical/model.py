"""The parts of a vertical model, and what can be done with them.

The active party keeps an ordinary XGBoost model in which the thresholds of other parties are zero. Each passive party
keeps a private table. Rows are predicted by asking the owners along each row's path; with every owner's consent the
parts merge into one ordinary XGBoost model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical.messages import Bits, DecisionAnswer, DecisionRequest, Party, PathQuery, collect
from nvflare_plugins.xgb.model_json import (
    CATEGORY_FIELDS,
    NO_LISTS,
    Lists,
    category_sets,
    model_bytes,
    set_categories,
    with_lists,
)

# What a passive party keeps of a model: its own splits, with the thresholds that nobody else has.


NOTHING_ABOVE = (-1, False)
NO_THRESHOLD = np.finfo(np.float32).smallest_subnormal
"""What XGBoost writes in the place of the threshold where a node is split by categories."""
_MOST_CATEGORIES = 1 << 16


def goes_left(
    values: NDArray[np.float32],
    threshold: np.float32,
    default_left: np.bool_ | bool,
    categories: Sequence[int] | None,
) -> NDArray[np.bool_]:
    """Decide rows as XGBoost does. Where a split is by categories, all others go left, also one never seen in training.

    Shapes: values: float32[n], NaN is missing; of categories, positions in the public list; result: bool[n].

    Reference: XGBoost 3.2, src/common/categorical.h (Decision).
    """
    others = () if categories is None else np.array(categories, dtype=np.float32)
    is_left = values < threshold if categories is None else ~np.isin(values, others)
    return np.where(np.isnan(values), default_left, is_left)


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
        return goes_left(values, self.threshold, self.default_left, self.categories)


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
        return goes_left(values, self.threshold[node], self.default_left[node], self.categories.get(node))


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


# The parts of a vertical model, and what can be done with them.
#
# The active party keeps an ordinary XGBoost model in which the thresholds of other parties are zero. Each passive party
# keeps a private table. Rows are predicted by asking the owners along each row's path; with every owner's consent the
# parts merge into one ordinary XGBoost model.

_MASKED = np.float32(0)
Labels = Sequence[str | int] | None
NO_CATEGORIES: Lists = {}


def structures(model: bytes) -> list[TreeStructure]:
    """Read the trees of a model in XGBoost's JSON form."""
    return [structure_of(tree) for tree in _trees(json.loads(model))]


def mask_columns(
    model: bytes,
    n_own_columns: int,
    names: Sequence[str],
    categories: Lists = NO_CATEGORIES,
    label_classes: Labels = None,
) -> bytes:
    """Name the columns, and check that no threshold or set of categories of another party is in the model.

    Args:
        categories: public list of each categorical column, of all parties, by the name it has in the model.
        label_classes: the label's public list.

    Raises:
        ProtocolError: a threshold of another party is not masked.
    """
    document = json.loads(model)
    for structure in map(structure_of, _trees(document)):
        foreign = (structure.left >= 0) & (structure.feature >= n_own_columns)
        if (structure.threshold[foreign] != _MASKED).any():
            raise ProtocolError("the model holds a threshold of another party")
        if any(structure.feature[node] >= n_own_columns for node in structure.categories):
            raise ProtocolError("the model holds a set of categories of another party")
    document["learner"]["feature_names"] = list(names)
    document["learner"]["feature_types"] = ["c" if name in categories else "float" for name in names]
    return with_lists(model_bytes(document), names, categories, label_classes)


def merge(model: bytes, n_own_columns: int, tables: Sequence[tuple[int, PrivateTable]]) -> bytes:
    """Put the passive parties' thresholds and sets of categories into the active party's model.

    Privacy: the result reveals every party's thresholds and sets to whoever gets it; every owner must have consented.

    Args:
        tables: for each passive party its first column among all, and its table.

    Raises:
        ConfigurationError: a split has no owner, two owners, or an owner that says something else about it.
    """
    document = json.loads(model)
    trees = _trees(document)
    types = document["learner"].get("feature_types", [])
    categorical = {feature for feature, kind in enumerate(types) if kind == "c"}
    left = {
        (t, int(node)): int(s.feature[node])
        for t, s in enumerate(map(structure_of, trees))
        for node in np.flatnonzero((s.left >= 0) & (s.feature >= n_own_columns))
    }
    for first_column, table in tables:
        for (t, node), split in table.items():
            if t >= len(trees):
                continue  # a tree that was not kept
            if left.pop((t, node), None) != first_column + split.feature:
                raise ConfigurationError("a private table does not belong to this model")
            if (split.categories is not None) != (first_column + split.feature in categorical):
                raise ConfigurationError("a private table does not belong to this model")
            if split.categories is not None:
                set_categories(trees[t], node, split.categories)
                trees[t]["default_left"][node] = int(split.default_left)  # a guard may have changed it
            elif bool(trees[t]["default_left"][node]) != split.default_left:
                raise ConfigurationError("a private table does not belong to this model")
            # The shortest decimal of the float32: XGBoost reads the same number back.
            trees[t]["split_conditions"][node] = float(str(split.threshold))
    if left:
        raise ConfigurationError(f"{len(left)} splits of the model are in no party's table")
    return model_bytes(document)


class FederatedModel:
    """Predicts aligned rows with every owner deciding at its own splits.

    Privacy: an owner learns which rows reach its nodes; the active party learns their decisions there. Nothing is
        asked off a row's path.
    """

    def __init__(self, model: bytes, parties: Sequence[Party], n_own_columns: int, deadline_s: float = 600.0):
        document = json.loads(model)
        self._trees = structures(model)
        booster = document["learner"]["gradient_booster"]
        self._groups = [int(group) for group in booster["model"]["tree_info"]]
        self._leaves = [np.array(tree["split_conditions"], dtype=np.float32) for tree in _trees(document)]
        self._per_round = int(booster["model"]["iteration_indptr"][1]) if self._trees else 1
        self._walker = PathWalker(parties, n_own_columns, deadline_s)
        self._n_own = n_own_columns
        self._empty = _without_trees(document)

    def predict(
        self,
        own: NDArray[np.float32],
        data_set: int,
        n_rounds: int | None = None,
        output_margin: bool = False,
        first_round: int = 0,
    ) -> NDArray[np.float32]:
        """Predict rows as XGBoost does with the merged model, bit for bit.

        Shapes: own: float32[n_rows, n_own_columns], aligned with the passive parties' rows; result as from XGBoost.

        Args:
            data_set: number of the set at the passive parties.
            n_rounds: use the rounds before this one; None uses all.
            first_round: leave out the rounds before this one.
        """
        margin = self.margin(own, data_set, n_rounds, first_round)
        return margin if output_margin else self.output(margin)

    def margin(
        self, own: NDArray[np.float32], data_set: int, n_rounds: int | None = None, first_round: int = 0
    ) -> NDArray[np.float32]:
        """Add the leaves that rows reach, as ``predict`` with ``output_margin``."""
        n_trees = len(self._trees) if n_rounds is None else min(n_rounds * self._per_round, len(self._trees))
        used = slice(first_round * self._per_round, n_trees)
        leaves = self._walker.walk(self._trees[used], used.start, data_set, own)
        start = self._empty.predict(xgb.DMatrix(_blank(own.shape[0])), output_margin=True)
        margin = start.reshape(own.shape[0], -1).copy()
        for leaf, values, group in zip(leaves, self._leaves[used], self._groups[used], strict=True):
            margin[:, group] += values[leaf]  # float32, tree after tree, as XGBoost adds them
        return margin.reshape(start.shape)

    def output(self, margin: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn margins into what XGBoost's ``predict`` returns. Shapes: as from XGBoost."""
        return self._empty.predict(xgb.DMatrix(_blank(margin.shape[0]), base_margin=margin))

    @property
    def n_rounds(self) -> int:
        """Return the number of boosting rounds."""
        return len(self._trees) // self._per_round


def _blank(n_rows: int) -> NDArray[np.float32]:
    return np.zeros((n_rows, 1), dtype=np.float32)


def _without_trees(document: dict[str, Any]) -> xgb.Booster:
    """Return a model whose trees are leaves of value 0: it only turns margins into predictions."""
    copy = json.loads(json.dumps(document))
    learner = copy["learner"]
    learner["feature_names"], learner["feature_types"] = [], []
    learner["learner_model_param"]["num_feature"] = "1"
    model = learner["gradient_booster"]["model"]
    model["cats"] = NO_LISTS
    n_groups = max(model["tree_info"], default=0) + 1
    model["trees"] = [_single_leaf(tree, number) for number, tree in enumerate(model["trees"][:n_groups])]
    model["tree_info"], model["iteration_indptr"] = list(range(n_groups)), [0, n_groups]
    model["gbtree_model_param"] |= {"num_trees": str(n_groups), "num_parallel_tree": "1"}
    return xgb.Booster(model_file=bytearray(model_bytes(copy)))


def _single_leaf(tree: dict[str, Any], number: int) -> dict[str, Any]:
    leaf = {name: value[:1] if isinstance(value, list) else value for name, value in tree.items()}
    leaf |= {name: [] for name in CATEGORY_FIELDS} | {"split_type": [0]}
    leaf |= {"left_children": [-1], "right_children": [-1], "split_conditions": [0.0], "split_indices": [0]}
    shape = {"num_nodes": "1", "num_feature": "1", "num_deleted": "0"}
    return leaf | {"id": number, "tree_param": {**tree["tree_param"], **shape}}


def _trees(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        result: list[dict[str, Any]] = document["learner"]["gradient_booster"]["model"]["trees"]
        return result
    except (KeyError, TypeError):
        raise ConfigurationError("not a model of tree boosting in XGBoost's JSON form") from None


def structure_of(tree: Mapping[str, Any]) -> TreeStructure:
    """Read one tree of a model document."""
    left = np.array(tree["left_children"], dtype=np.int32)
    threshold = np.array(tree["split_conditions"], dtype=np.float32)
    is_leaf = left < 0
    sets = category_sets(tree)
    if any(is_leaf[node] for node in sets):
        raise ValueError("categories of a leaf")
    # At leaves XGBoost keeps the leaf's value in the place of the threshold.
    return TreeStructure(
        left,
        np.array(tree["right_children"], dtype=np.int32),
        np.where(is_leaf, 0, np.array(tree["split_indices"], dtype=np.int32)),
        np.where(is_leaf, np.float32(0), threshold),
        np.array(tree["default_left"], dtype=bool) & ~is_leaf,
        sets,
    )
