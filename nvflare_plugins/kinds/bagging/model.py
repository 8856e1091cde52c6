"""The common model of a bagging job, its trees as they travel between sites, and the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.base.formatting import human_bytes
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.model_json import model_bytes, tree_document

# Trees as they travel between sites: what scores a row, and nothing of the statistics that XGBoost keeps beside it.


_NODE = np.dtype(
    [("left", "<i4"), ("right", "<i4"), ("feature", "<u4"), ("condition", "<f4"), ("default_left", "u1")], align=False
)
_COUNT_BYTES = 4
LARGEST_LEAF = 1e30  # so that the leaves of any number of trees add up to a float32


class LeafOutOfRange(ProtocolError):
    """A leaf is no number, or too large to be added to others."""


def most_nodes(depth: int) -> int:
    """Return how many nodes a tree of this depth may have."""
    return int(2 ** (depth + 1) - 1)


def message_bytes(depth: int) -> int:
    """Return the length of the message of any tree of this depth."""
    return int(_COUNT_BYTES + most_nodes(depth) * _NODE.itemsize)


@dataclass(frozen=True, slots=True)
class SharedTree:
    """One regression tree over columns of numbers.

    Privacy: thresholds are values of single rows that it was grown on, leaves are statistics of them. Sums of hessians,
        gains and weights of inner nodes are not in it.
    Shapes:  nodes: one record a node, the root first. ``condition`` is the threshold, or the value of a leaf.
    """

    nodes: NDArray[np.void]

    @property
    def largest_leaf(self) -> float:
        """Magnitude of the largest leaf."""
        return float(np.abs(self.nodes["condition"][self.nodes["left"] < 0]).max())

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
        return (count + self.nodes.tobytes()).ljust(message_bytes(depth), b"\0")

    @classmethod
    def from_bytes(cls, data: bytes, depth: int, n_features: int) -> SharedTree:
        """Read a peer's tree strictly.

        Raises:
            ProtocolError: it is not one tree of at most this depth over these columns; ``LeafOutOfRange`` if nothing
                but a leaf is wrong.
        """
        if len(data) != message_bytes(depth):
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
        if not np.isfinite(nodes["condition"][inner]).all():
            raise ProtocolError("a shared tree has a threshold that is no number")
        if not (np.abs(nodes["condition"][~inner]) <= LARGEST_LEAF).all():
            raise LeafOutOfRange("a shared tree has a leaf that is no number or out of range")

    def document(self, number: int, n_features: int) -> dict[str, Any]:
        """Return XGBoost's document of the tree; the statistics that were not shared are zero."""
        nodes, is_leaf = self.nodes, self.nodes["left"] < 0
        conditions, default_left = nodes["condition"].tolist(), nodes["default_left"].tolist()
        document = tree_document(
            number, n_features, nodes["left"], nodes["right"], nodes["feature"], conditions, default_left
        )
        return {**document, "base_weights": np.where(is_leaf, nodes["condition"], np.float32(0)).tolist()}


# The common model of a bagging job: an ordinary XGBoost model, of which each round holds one tree of every site.


class BaggedModel:
    """Grows by the trees of all sites, in the order of the sites, each with the same weight.

    Args:
        params: for ``xgb.train``; equal at all sites, as far as a model shows them.
        feature_names: all columns, in order.
    """

    def __init__(self, params: Mapping[str, object], feature_names: Sequence[str], n_sites: int) -> None:
        self._params, self._names, self._n_sites = dict(params), list(feature_names), n_sites
        self._rounds: list[list[dict[str, Any]]] = []
        nothing = own_matrix(np.zeros((1, len(self._names)), np.float32), np.zeros(1, np.float32), self._names, 1)
        # Nothing of a row is in it: the model of all sites begins as the same bytes.
        self._empty = bytes(xgb.train(self._params, nothing, 0).save_raw("json"))

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


def plan(request: PlanRequest, job: BaggingJob) -> Plan:
    """Return what a site sends and receives, and who reads it. Raises: ConfigurationError."""
    depth = int(job.parameters(job.features or ["any"]).effective["max_depth"])
    sent = message_bytes(depth)
    received = sent * request.sites
    figures = {"rounds": job.num_rounds, "sites": request.sites, "depth": depth, "bytes_sent_per_round": sent}
    text = [
        f"{job.num_rounds} rounds, each one tree of depth {depth} of each of {request.sites} sites: "
        f"{job.num_rounds * request.sites} trees in all",
        f"sent      {human_bytes(sent)} a round and site, whatever its tree; {human_bytes(sent * job.num_rounds)} "
        "in all",
        f"received  {human_bytes(received)} a round and site",
        f"privacy   {THREAT_MODELS[job.profile].summary}",
    ]
    return Plan({**figures, "bytes_received_per_round": received}, "\n".join(text))
