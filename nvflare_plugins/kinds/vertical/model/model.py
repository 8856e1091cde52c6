"""The parts of a vertical model, and what can be done with them.

The active party keeps an ordinary XGBoost model in which the thresholds of other parties are zero. Each passive party
keeps a private table. Rows are predicted by asking the owners along each row's path; with every owner's consent the
parts merge into one ordinary XGBoost model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical.model.routing import PathWalker, PrivateTable, TreeStructure
from nvflare_plugins.kinds.vertical.protocol.conversation import Party
from nvflare_plugins.xgb.model_json import (
    CATEGORY_FIELDS,
    NO_LISTS,
    Lists,
    category_sets,
    model_bytes,
    set_categories,
    with_lists,
)

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
