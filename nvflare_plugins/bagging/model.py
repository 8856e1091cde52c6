"""The common model of a bagging job: an ordinary XGBoost model, of which each round holds one tree of every site."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.bagging.trees import SharedTree
from nvflare_plugins.xgb.model_json import model_bytes


class BaggedModel:
    """Grows by the trees of all sites, in the order of the sites, each with the same weight.

    Args:
        params: for ``xgb.train``; equal at all sites, as far as a model shows them.
        feature_names: all columns, in order.
    """

    def __init__(self, params: Mapping[str, object], feature_names: Sequence[str], n_sites: int) -> None:
        self._params, self._names, self._n_sites = dict(params), list(feature_names), n_sites
        self._rounds: list[list[dict[str, Any]]] = []
        nothing = np.zeros((1, len(self._names)), dtype=np.float32)
        # Nothing of a row is in it: the model of all sites begins as the same bytes.
        self._empty = bytes(xgb.train(self._params, self._matrix(nothing, [0.0]), 0).save_raw("json"))

    def add(self, trees: Sequence[SharedTree]) -> None:
        """Add the trees of one round, in the order of the sites."""
        first = sum(map(len, self._rounds))
        self._rounds.append([tree.document(first + i, len(self._names)) for i, tree in enumerate(trees)])

    def to_bytes(self) -> bytes:
        """Return the whole model, as XGBoost itself writes it."""
        booster = xgb.Booster(model_file=bytearray(self._with(self._rounds)))
        return bytes(booster.save_raw("json"))

    def last_round(self) -> xgb.Booster:
        """Return the model with its last round alone, or without a tree: what it adds to margins before that round."""
        return xgb.Booster({"nthread": self._params["nthread"]}, model_file=bytearray(self._with(self._rounds[-1:])))

    def _with(self, rounds: Sequence[Sequence[dict[str, Any]]]) -> bytes:
        document = json.loads(self._empty)
        trees = [tree for of_round in rounds for tree in of_round]
        model = document["learner"]["gradient_booster"]["model"]
        model["trees"] = [{**tree, "id": number} for number, tree in enumerate(trees)]
        model["tree_info"] = [0] * len(trees)
        model["iteration_indptr"] = np.cumsum([0, *map(len, rounds)]).tolist()
        model["gbtree_model_param"] = {"num_parallel_tree": str(self._n_sites), "num_trees": str(len(trees))}
        return model_bytes(document)

    def _matrix(self, values: NDArray[np.float32], label: Sequence[float]) -> xgb.DMatrix:
        return own_matrix(values, np.asarray(label, dtype=np.float32), self._names, 1)


def own_matrix(
    values: NDArray[np.float32], label: NDArray[np.float32], names: Sequence[str], nthread: int
) -> xgb.DMatrix:
    """Return rows as they are: thresholds of other sites lie between the bins of this one.

    Shapes: values: float32[n_rows, n_features]; label: float32[n_rows].
    """
    types = ["float"] * len(names)
    return xgb.DMatrix(values, label=label, feature_names=list(names), feature_types=types, nthread=nthread)


def grow(params: Mapping[str, object], matrix: xgb.DMatrix, number: int) -> SharedTree:
    """Grow the tree of a round on a matrix whose margins are the common model's.

    Args:
        number: of the round; columns are drawn anew in each.
    """
    seeded = {**params, "seed": (int(str(params["seed"])) + number) % 2**31}
    document = json.loads(bytes(xgb.train(seeded, matrix, 1).save_raw("json")))
    return SharedTree.of(document["learner"]["gradient_booster"]["model"]["trees"][0])
