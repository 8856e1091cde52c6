"""The one message of a refresh, and that inner nodes never leave."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dp_components.leaf_weights.query import UNIT
from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.totally_random import grow_totally_random
from dp_components.split_methods.tree import LEAF
from he_processors.errors import ProtocolError
from nvflare_plugins.private_trees.forest import Forest
from nvflare_plugins.private_trees.refresh_grammar import RefreshGrammar, leaf_integers, node_statistics
from nvflare_plugins.wire.catalogue import Dtype, Kind, Op, Phase, TrainingStep

TREES = tuple(grow_totally_random([5, 5], [0, 1], 3, random.Random(s)) for s in range(4))
FOREST = Forest(TREES, Candidates((np.arange(5, dtype=np.float32),) * 2), 2)


def size(number: int) -> int:
    return 16 * sum(t.feature.size for t in FOREST.of_round(number))


def entered(number: int = 0) -> RefreshGrammar:
    grammar = RefreshGrammar(FOREST)
    grammar.enter(TrainingStep(Phase.UPDATE, number))
    return grammar


def test_one_message_a_round_of_exactly_the_public_size() -> None:
    message = entered(1).classify("Allreduce", Dtype.FLOAT64, Op.MAX, size(1))
    assert message.kind is Kind.NODE_STATS and message.reply_size == size(1)


@pytest.mark.parametrize(
    ("call", "dtype", "op", "more"),
    [
        ("Allreduce", Dtype.FLOAT64, Op.SUM, 0),
        ("Allreduce", Dtype.FLOAT32, Op.MAX, 0),
        ("Allreduce", Dtype.FLOAT64, Op.MAX, 16),
        ("Allgather", 0, 0, 0),
        ("Broadcast", 0, 0, 0),
    ],
)
def test_anything_else_is_refused(call: str, dtype: int, op: int, more: int) -> None:
    with pytest.raises(ProtocolError, match="unknown message"):
        entered().classify(call, dtype, op, size(0) + more)


def test_a_second_message_and_a_missing_one_are_refused() -> None:
    grammar = entered()
    grammar.classify("Allreduce", Dtype.FLOAT64, Op.MAX, size(0))
    with pytest.raises(ProtocolError, match="unknown message"):
        grammar.classify("Allreduce", Dtype.FLOAT64, Op.MAX, size(0))
    with pytest.raises(ProtocolError, match="without"):
        entered().enter(TrainingStep(Phase.UPDATE, 1))


def test_only_leaves_are_read_and_inner_nodes_are_rebuilt() -> None:
    trees = FOREST.of_round(0)
    leaves = [t.feature == LEAF for t in trees]
    nodes = np.full((sum(t.feature.size for t in trees), 2), 12345.0)  # inner nodes hold what must not leave
    is_leaf = np.concatenate(leaves)
    nodes[is_leaf] = np.arange(2 * is_leaf.sum()).reshape(-1, 2) / UNIT
    integers = leaf_integers(nodes.tobytes(), trees)
    assert integers.tolist() == list(range(2 * is_leaf.sum()))
    rebuilt = np.frombuffer(node_statistics(integers.reshape(-1, 2) / UNIT, trees), dtype="<f8").reshape(-1, 2)
    assert not (rebuilt == 12345.0).any()
    start = 0
    for tree in trees:
        part = rebuilt[start : start + tree.feature.size]
        assert part[0] == pytest.approx(part[tree.leaves].sum(axis=0))
        start += tree.feature.size


@pytest.mark.parametrize("value", [0.3 / UNIT, np.nan, np.inf])
def test_sums_off_the_grid_are_refused(value: float) -> None:
    trees = FOREST.of_round(0)
    nodes = np.full((sum(t.feature.size for t in trees), 2), value)
    with pytest.raises(ProtocolError, match="grid"):
        leaf_integers(nodes.tobytes(), trees)
