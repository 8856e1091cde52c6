"""The parts of a vertical model: splits, rows on their way down, merging, files with commitments, importance.

The active party keeps an ordinary XGBoost model in which the thresholds of other parties are zero. Each passive party
keeps a private table. Rows are predicted by asking the owners along each row's path; with every owner's consent the
parts merge into one ordinary XGBoost model.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.key_agreement import DOMAIN, encode_fields
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.files import inert_csv, write_atomically, write_durably
from nvflare_plugins.kinds.vertical.messages import Bits, DecisionAnswer, DecisionRequest, Party, PathQuery, collect
from nvflare_plugins.xgb import model_json
from nvflare_plugins.xgb import stock as xgb

# What a passive party keeps of a model: its own splits, with the thresholds that nobody else has.


NOTHING_ABOVE = (-1, False)
NO_THRESHOLD = np.finfo(np.float32).smallest_subnormal
"""What XGBoost writes in the place of the threshold where a node is split by categories."""
_MOST_CATEGORIES = 1 << 16


def goes_left(
    values: NDArray[np.float32],
    threshold: np.float32,
    *,
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
        return goes_left(values, self.threshold, default_left=self.default_left, categories=self.categories)


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
        return goes_left(
            values, self.threshold[node], default_left=self.default_left[node], categories=self.categories.get(node)
        )


@dataclass(frozen=True, slots=True)
class _AtNode:
    """Rows that reach a node. Shapes: rows: int64[n], ascending."""

    tree: int
    node: int
    rows: NDArray[np.int64]


_Decided = tuple[_AtNode, NDArray[np.bool_]]
"""Which of the rows go left. Shapes: bool[n]."""


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
            decided: list[_Decided] = []
            questions: list[_AtNode] = []
            for t, tree in enumerate(trees):
                moving[t] = moving[t][tree.left[position[t, moving[t]]] >= 0]
                for node, rows in _rows_by_node(moving[t], position[t]):
                    here = _AtNode(t, node, rows)
                    if tree.feature[node] < self._n_own:
                        decided.append((here, tree.decide(node, own[rows, tree.feature[node]])))
                    else:
                        questions.append(here)
            if not decided and not questions:
                return position
            for at, goes_left in decided + self._ask(trees, questions, first_tree, data_set, own.shape[0]):
                tree = trees[at.tree]
                position[at.tree, at.rows] = np.where(goes_left, tree.left[at.node], tree.right[at.node])

    def _ask(
        self, trees: Sequence[TreeStructure], questions: list[_AtNode], first_tree: int, data_set: int, n_rows: int
    ) -> list[_Decided]:
        asked = []
        for party in self._parties:
            columns = party.columns
            own = [q for q in questions if columns.start <= trees[q.tree].feature[q.node] < columns.stop]
            if own:
                queries = tuple(PathQuery(first_tree + q.tree, q.node, _mask(q.rows, n_rows)) for q in own)
                asked.append((party, own, party.link.ask(DecisionRequest(data_set, queries))))
        answers: list[_Decided] = []
        for party, own, future in asked:
            answer = collect(party.name, future, DecisionAnswer, self._deadline_s)
            if [bits.n for bits in answer.goes_left] != [q.rows.size for q in own]:
                raise ProtocolError(f"{party.name} decided other rows than it was asked about")
            answers += zip(own, (bits.unpack() for bits in answer.goes_left), strict=True)
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


def _side(node: int, is_left: bool | NDArray[np.bool_]) -> int | NDArray[np.int64]:  # noqa: FBT001 - a side it is
    """Number the two sides of every node."""
    return 2 * node + is_left


# The parts of a vertical model, and what can be done with them.
#
# The active party keeps an ordinary XGBoost model in which the thresholds of other parties are zero. Each passive party
# keeps a private table. Rows are predicted by asking the owners along each row's path; with every owner's consent the
# parts merge into one ordinary XGBoost model.

SEALED_ATTRIBUTE = "veilboost_sealed_splits"
"""Of a model that was trained, in part at least, in the preset sealed."""
_MASKED = np.float32(0)
Labels = Sequence[str | int] | None
NO_CATEGORIES: model_json.Lists = {}


def structures(model: bytes) -> list[TreeStructure]:
    """Read the trees of a model in XGBoost's JSON form."""
    return [structure_of(tree) for tree in _trees(json.loads(model))]


def mask_columns(
    model: bytes,
    n_own_columns: int,
    names: Sequence[str],
    categories: model_json.Lists = NO_CATEGORIES,
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
        if held := _held_of_others(structure, n_own_columns):
            raise ProtocolError(f"the model holds {held} of another party")
    document["learner"]["feature_names"] = list(names)
    document["learner"]["feature_types"] = ["c" if name in categories else "float" for name in names]
    return model_json.with_lists(model_json.model_bytes(document), names, categories, label_classes)


def _held_of_others(tree: TreeStructure, n_own_columns: int) -> str:
    """Say what a tree has of the splits of other parties that only these may know; nothing where it has nothing."""
    foreign = (tree.left >= 0) & (tree.feature >= n_own_columns)
    if (tree.threshold[foreign] != _MASKED).any():
        return "a threshold"
    is_foreign_set = any(tree.feature[node] >= n_own_columns for node in tree.categories)
    return "a set of categories" if is_foreign_set else ""


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
            column = first_column + split.feature
            named = left.pop((t, node), None)
            if has_sealed_splits(document) and named == first_column:
                named = column
                trees[t]["split_indices"][node], trees[t]["default_left"][node] = column, int(split.default_left)
            if named != column or (split.categories is not None) != (column in categorical):
                raise ConfigurationError("a private table does not belong to this model")
            _put_split(trees[t], node, split)
    if left:
        raise ConfigurationError(f"{len(left)} splits of the model are in no party's table")
    return model_json.model_bytes(document)


def has_sealed_splits(document: dict[str, Any]) -> bool:
    """Tell whether a model may name a party's first column in splits of any of its columns (preset sealed)."""
    return SEALED_ATTRIBUTE in document["learner"].get("attributes", {})


def _put_split(tree: dict[str, Any], node: int, split: PrivateSplit) -> None:
    if split.categories is not None:
        model_json.set_categories(tree, node, split.categories)
        tree["default_left"][node] = int(split.default_left)  # a guard may have changed it
    elif bool(tree["default_left"][node]) != split.default_left:
        raise ConfigurationError("a private table does not belong to this model")
    # The shortest decimal of the float32: XGBoost reads the same number back.
    tree["split_conditions"][node] = float(str(split.threshold))


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
        self._empty = _without_trees(document)

    def margin(
        self, own: NDArray[np.float32], data_set: int, n_rounds: int | None = None, first_round: int = 0
    ) -> NDArray[np.float32]:
        """Add the leaves that rows reach, as XGBoost does with the merged model, bit for bit.

        Shapes: own: float32[n_rows, n_own_columns], aligned with the passive parties' rows; result as from XGBoost.

        Args:
            data_set: number of the set at the passive parties.
            n_rounds: use the rounds before this one; None uses all.
            first_round: leave out the rounds before this one.
        """
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


def _blank(n_rows: int) -> NDArray[np.float32]:
    return np.zeros((n_rows, 1), dtype=np.float32)


def _without_trees(document: dict[str, Any]) -> xgb.Booster:
    """Return a model whose trees are leaves of value 0: it only turns margins into predictions."""
    copy = json.loads(json.dumps(document))
    learner = copy["learner"]
    learner["feature_names"], learner["feature_types"] = [], []
    learner["learner_model_param"]["num_feature"] = "1"
    model = learner["gradient_booster"]["model"]
    model["cats"] = model_json.NO_LISTS
    n_groups = max(model["tree_info"], default=0) + 1
    model["trees"] = [_single_leaf(tree, number) for number, tree in enumerate(model["trees"][:n_groups])]
    model["tree_info"], model["iteration_indptr"] = list(range(n_groups)), [0, n_groups]
    model["gbtree_model_param"] |= {"num_trees": str(n_groups), "num_parallel_tree": "1"}
    return xgb.Booster(model_file=bytearray(model_json.model_bytes(copy)))


def _single_leaf(tree: dict[str, Any], number: int) -> dict[str, Any]:
    leaf = {name: value[:1] if isinstance(value, list) else value for name, value in tree.items()}
    leaf |= {name: [] for name in model_json.CATEGORY_FIELDS} | {"split_type": [0]}
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
    sets = model_json.category_sets(tree)
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


# The parts of a vertical model on disk: the active party's model, and each passive party's private table.
#
# A model is one thing in several hands, and a part of another training must not slip in. When training ends, every
# party commits to its part: it publishes a hash of the part and of a random nonce that it keeps. The list of
# commitments gives the model its id. Every file holds the whole list and the party's own nonce, so that a party can
# check by itself that its file is the one it committed to, and parties that name the same model id hold parts that
# belong together.
#
# Reading checks format, commitment and structure; anything else in the place of a part is refused.


ACTIVE_FILE = "vertical_model.json"
PASSIVE_FILE = "private_table.json"
COMMITMENT_BYTES = 32
_FORMAT = "veilboost-vertical-part-1"
_UNREADABLE = "this is not a part of a vertical model, or not one that this release wrote"


@dataclass(frozen=True, slots=True)
class PartyColumns:
    """A passive party as the model knows it. Attributes: aliases: of its features, in the order of its columns."""

    site: str
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class ActivePart:
    """The active party's part.

    Attributes:
        booster: the model in XGBoost's JSON form, thresholds of other parties masked (``VerticalResult.model``).
        columns: names of the active party's own columns, in the order of training.
        parties: the passive parties in the order of their columns, which follow the active party's.
        best_round: of early stopping; None without.
    """

    booster: bytes
    columns: tuple[str, ...]
    parties: tuple[PartyColumns, ...]
    best_round: int | None = None

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """Return the public list of each of the active party's categorical columns."""
        lists = model_json.categories_of(self.booster)
        return {column: lists[column] for column in self.columns if column in lists}


@dataclass(frozen=True, slots=True, repr=False)
class PassivePart:
    """A passive party's part.

    Attributes:
        columns, aliases: its own and its public name of each feature, in order.
        categories: public list of each categorical column.
    """

    table: PrivateTable
    columns: tuple[str, ...]
    aliases: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


Part = ActivePart | PassivePart
P = TypeVar("P", bound=Part)


@dataclass(frozen=True, slots=True, repr=False)
class Commitment:
    """A commitment to a part.

    Security: the digest may be published: without the nonce it does not let anyone test guesses of thresholds or
        leaves, and it fits one part only.
    """

    digest: bytes
    nonce: bytes


def commit(part: Part, randomness: RandomSource = OS_RANDOMNESS) -> Commitment:
    """Commit to a part."""
    nonce = randomness.bytes(COMMITMENT_BYTES)
    return Commitment(_digest(_content(part), nonce), nonce)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What all parties know of a model: who made it in which job, and what each committed to. Public.

    Attributes:
        job_id: of the training.
        active: name of the active party.
        sites: all parties, in the job's order.
        commitments: digests in the order of ``sites``.
    """

    job_id: str
    active: str
    sites: tuple[str, ...]
    commitments: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if self.active not in self.sites or len(set(self.sites)) != len(self.sites):
            raise ValueError("a model belongs to different sites, of which one is the active party")
        if len(self.commitments) != len(self.sites) or any(len(c) != COMMITMENT_BYTES for c in self.commitments):
            raise ValueError(f"one commitment of {COMMITMENT_BYTES} bytes for each site")

    @property
    def model_id(self) -> str:
        """Return the model's id: equal at all parties exactly if they mean the same parts."""
        fields = encode_fields(f"{DOMAIN}/vertical model", self.job_id, self.active, *self.sites, *self.commitments)
        return hashlib.sha256(fields).hexdigest()


@dataclass(frozen=True, slots=True, repr=False)
class StoredPart(Generic[P]):
    """A part that was read and checked, and the model that it belongs to."""

    part: P
    identity: ModelIdentity


def write_part(folder: Path, site: str, part: Part, identity: ModelIdentity, commitment: Commitment) -> Path:
    """Write a site's part into the run's folder, whole or not at all, readable by the owner of the process alone.

    Privacy: stays at the site. A passive party's file holds its thresholds, the active party's the leaves.

    Args:
        commitment: what ``commit`` returned for this part; its digest is the site's in ``identity``.

    Raises:
        ValueError: the identity does not hold this commitment.
    """
    content = _content(part)
    if _own_commitment(identity, site) != commitment.digest or _digest(content, commitment.nonce) != commitment.digest:
        raise ValueError("the part is not what the site committed to")
    document = {
        "format": _FORMAT,
        "model_id": identity.model_id,
        "job_id": identity.job_id,
        "active": identity.active,
        "commitments": {s: c.hex() for s, c in zip(identity.sites, identity.commitments, strict=True)},
        "nonce": commitment.nonce.hex(),
        "part": content,
    }
    name = ACTIVE_FILE if isinstance(part, ActivePart) else PASSIVE_FILE
    return write_durably(folder / name, json.dumps(document).encode(), mode=0o600)


def read_part(path: Path, site: str, expected: type[P]) -> StoredPart[P]:
    """Read a site's part.

    Args:
        expected: ``ActivePart`` or ``PassivePart``; ``Part`` where the file decides which of them the site is.

    Raises:
        ConfigurationError: no such file, damaged, of another site or another kind, or changed since the training.
    """
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != _FORMAT:
            raise ConfigurationError(_UNREADABLE)
        identity = _identity(document)
        part = _part(document["part"])
        nonce = bytes.fromhex(document["nonce"])
    except FileNotFoundError:
        raise ConfigurationError(f"{site} holds no part of this model") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        # The reason could quote values of the file.
        raise ConfigurationError(_UNREADABLE) from None
    if not isinstance(part, expected) or isinstance(part, ActivePart) != (identity.active == site):
        raise ConfigurationError(f"{site} holds another part of this model than its role in the job needs")
    if site not in identity.sites or not hmac.compare_digest(
        _own_commitment(identity, site), _digest(document["part"], nonce)
    ):
        raise ConfigurationError(f"the part of the model at {site} was changed, or is another site's")
    return StoredPart(part, identity)


def find_part(folders: Path, inputs: Path, job_id: str, site: str, expected: type[P]) -> StoredPart[P]:
    """Read a site's part of the model that a training job made.

    Args:
        folders: where the site keeps its runs.
        inputs: the site's input folder: ``<job id>.<site>.json`` there stands in for a run folder that is gone.

    Raises:
        ConfigurationError: as ``read_part``.
    """
    if not job_id or Path(job_id).name != job_id or job_id in (".", "..") or "\0" in job_id or "\\" in job_id:
        raise ConfigurationError("the model is named by the id of the job that trained it")
    names = {ActivePart: [ACTIVE_FILE], PassivePart: [PASSIVE_FILE]}.get(expected, [ACTIVE_FILE, PASSIVE_FILE])
    for path in (*(folders / job_id / name for name in names), inputs / f"{job_id}.{site}.json"):
        if path.is_file() and not path.is_symlink():
            return read_part(path, site, expected)
    simulated = ""
    if job_id == "simulate_job":
        simulated = (
            " (so FLARE's simulator calls every job, and empties its sites' folders before each: there run `veilboost "
            "site-setup DIR --example` again after the training, which keeps the model)"
        )
    raise ConfigurationError(
        f"{site} holds no part of the model of job {job_id}{simulated}: neither in its runs nor as "
        f"{job_id}.{site}.json in its input folder. Remedy: let the job name the id of the vertical training job whose "
        "model is meant, as `nvflare job list` shows it."
    )


def _content(part: Part) -> dict[str, Any]:
    """Return a part as JSON values, the form that commitments cover."""
    if isinstance(part, PassivePart):
        lists = {"categories": {name: list(words) for name, words in part.categories.items()}}
        table = json.loads(table_to_json(part.table, part.aliases))
        return {"columns": list(part.columns), **table, **(lists if part.categories else {})}
    return {
        "columns": list(part.columns),
        "parties": [[party.site, list(party.aliases)] for party in part.parties],
        "best_round": part.best_round,
        "booster": json.loads(part.booster),
    }


def _part(content: Mapping[str, Any]) -> Part:
    """Read what ``_content`` made. Raises: ValueError, TypeError, KeyError, ConfigurationError."""
    columns = list_of_names(content["columns"])
    if "splits" in content:
        table, aliases = table_from_json(json.dumps({name: content[name] for name in ("aliases", "splits")}))
        if len(columns) != len(aliases):
            raise ValueError("one alias for each column")
        categories = {str(name): list_of_names(words) for name, words in content.get("categories", {}).items()}
        _check_sets(table, columns, categories)
        return PassivePart(table, columns, aliases, categories)
    parties = tuple(PartyColumns(str(site), list_of_names(aliases)) for site, aliases in content["parties"])
    best_round = content["best_round"]
    if best_round is not None and type(best_round) is not int:
        raise TypeError("best_round")
    part = ActivePart(model_json.model_bytes(content["booster"]), columns, parties, best_round)
    _check_booster(part)
    return part


def _check_sets(table: PrivateTable, columns: tuple[str, ...], categories: Mapping[str, tuple[str, ...]]) -> None:
    if not set(categories) <= set(columns) or not all(categories.values()):
        raise ValueError("categories of an unknown column")
    for split in table.values():
        words = categories.get(columns[split.feature])
        if (split.categories is None) != (words is None) or (words and max(split.categories or (0,)) >= len(words)):
            raise ValueError("a split by categories that the column does not have")


def _check_booster(part: ActivePart) -> None:
    n_columns = len(part.columns) + sum(len(party.aliases) for party in part.parties)
    for tree in structures(part.booster):
        if tree.feature.size and not 0 <= tree.feature.min() <= tree.feature.max() < max(n_columns, 1):
            raise ValueError("a split of an unknown column")
        if held := _held_of_others(tree, len(part.columns)):
            raise ValueError(f"{held} of another party")


def list_of_names(names: Any) -> tuple[str, ...]:
    """Return names that a file lists. Raises: TypeError."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("names")
    return tuple(names)


def _identity(document: Mapping[str, Any]) -> ModelIdentity:
    commitments = {str(site): bytes.fromhex(text) for site, text in document["commitments"].items()}
    identity = ModelIdentity(
        str(document["job_id"]), str(document["active"]), tuple(commitments), tuple(commitments.values())
    )
    if identity.model_id != document["model_id"]:
        raise ValueError("the model id does not follow from the commitments")
    return identity


def _own_commitment(identity: ModelIdentity, site: str) -> bytes:
    return identity.commitments[identity.sites.index(site)]


def _digest(content: Mapping[str, Any], nonce: bytes) -> bytes:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(encode_fields(f"{DOMAIN}/vertical part", nonce, canonical)).digest()


# The end of a job that leaves a model in several hands: every party commits to its part before any is written.


def conclude_part(attempt: SiteAttempt, active: str, part: Part, n_rounds: int) -> tuple[bytes, Path]:
    """Commit to this party's part together with the others, show that all mean the same model, write the part.

    Args:
        n_rounds: of the job, on which all parties must agree too.

    Returns:
        The HMAC of what all have equal; where the part lies.

    Raises:
        ProtocolError: a party's commitment is none, or the parties ended with different models.
    """
    context, commitment = attempt.context, commit(part)
    digests = attempt.gather_sealed("parts of the model", commitment.digest)
    if any(len(digest) != COMMITMENT_BYTES for digest in digests):
        raise ProtocolError("a party's commitment to its part of the model is not one")
    identity = ModelIdentity(context.job_id, active, context.sites, tuple(digests))
    hmac = attempt.conclude(f"{identity.model_id} {n_rounds}".encode())
    return hmac, write_part(attempt.folder.path, context.site, part, identity, commitment)


# How much each feature contributes to a vertical model, under the aliases that the parties chose.
#
# Importance needs gains, covers and counts of splits, which the active party's part holds for all features; thresholds
# play no role. The numbers are those of the centralized model, with its names in the place of the aliases.


ANY_COLUMN = "(any column)"
"""In the place of a feature: the party alone knows which of its columns split, in the preset sealed."""
KINDS = ("weight", "gain", "total_gain", "cover", "total_cover")
FILE_NAME = "importance.csv"


@dataclass(frozen=True, slots=True)
class FeatureImportance:
    """One feature. Attributes: party: "" for the active party; kinds as XGBoost's ``get_score`` names them."""

    party: str
    feature: str
    weight: float
    gain: float
    total_gain: float
    cover: float
    total_cover: float


def feature_importance(part: ActivePart, first_round: int = 0, end_round: int | None = None) -> list[FeatureImportance]:
    """Return the importance of every feature, the greatest total gain first; a feature without a split has zeros.

    Privacy: local at the active party, which has learnt gains and covers in training.
    """
    document = json.loads(part.booster)
    features = [("", name) for name in part.columns]
    features += [(party.site, alias) for party in part.parties for alias in party.aliases]
    # By position: XGBoost would not take the same name twice, and parties may choose equal ones.
    document["learner"]["feature_names"] = [f"f{i}" for i in range(len(features))]
    document["learner"]["feature_types"] = ["float"] * len(features)
    document["learner"]["gradient_booster"]["model"]["cats"] = model_json.NO_LISTS
    booster = xgb.Booster(model_file=bytearray(model_json.model_bytes(document)))
    booster = booster[first_round : end_round if end_round is not None else booster.num_boosted_rounds()]
    scores: dict[str, dict[str, Any]] = {kind: booster.get_score(importance_type=kind) for kind in KINDS}
    rows = [
        FeatureImportance(party, feature, **{kind: float(scores[kind].get(f"f{i}", 0.0)) for kind in KINDS})
        for i, (party, feature) in enumerate(features)
    ]
    if has_sealed_splits(document):
        n_own = len(part.columns)
        firsts = np.cumsum([n_own, *(len(party.aliases) for party in part.parties)])[:-1]
        rows = [*rows[:n_own], *(replace(rows[first], feature=ANY_COLUMN) for first in firsts)]
    return sorted(rows, key=lambda row: -row.total_gain)


def write_importance(folder: Path, rows: list[FeatureImportance]) -> Path:
    """Write ``importance.csv``. Privacy: aliases and sums over rows; no threshold."""
    lines = [(row.party, row.feature, *(repr(getattr(row, kind)) for kind in KINDS)) for row in rows]
    return write_atomically(folder / FILE_NAME, inert_csv([("party", "feature", *KINDS), *lines]))
