"""A passive party by itself: what it answers, and what it refuses."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.guards import TreeLimits
from nvflare_plugins.kinds.vertical.messages import (
    Bits,
    DecisionRequest,
    HistogramRequest,
    MoreSums,
    NodePartition,
    OwnDivision,
    OwnedSplit,
    PathQuery,
    SplitRequest,
    TrainingSetup,
    TreeGradients,
)
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from tests.support.clear_maker import ClearHistogramMaker

N_ROWS = 40
ALL = Bits.of(np.ones(3, dtype=bool))
PAIRS = np.stack([np.arange(N_ROWS), np.ones(N_ROWS)], axis=1).astype("<i8")


def party(features: np.ndarray | None = None, *, is_begun: bool = True) -> PassiveParty:
    if features is None:
        features = np.random.default_rng(0).normal(size=(N_ROWS, 3)).astype(np.float32)
        features[::7, 1] = np.nan
    passive = PassiveParty([features.T, features[:9].T], ["a", "b", "c"], 4, ClearHistogramMaker())
    passive.answer(TreeGradients(0, ALL, PAIRS.tobytes()))
    if is_begun:
        passive.answer(HistogramRequest(0, ()))
    return passive


def sums_of(answer, passive: PassiveParty) -> np.ndarray:
    n_slots = sum(n + 1 for n in passive.schema().n_bins)
    return np.frombuffer(answer.sums, "<i8").reshape(len(answer.nodes), n_slots, 2)


def halves() -> np.ndarray:
    return np.arange(N_ROWS) % 3 == 0


def test_root_sums_add_up_for_every_feature():
    passive = party(is_begun=False)
    sums = sums_of(passive.answer(HistogramRequest(0, ())), passive)
    per_feature = np.split(sums[0], np.cumsum([n + 1 for n in passive.schema().n_bins])[:-1])
    assert all((part.sum(axis=0) == PAIRS.sum(axis=0)).all() for part in per_feature)


def test_the_smaller_child_is_built_and_splits_follow_the_threshold():
    passive = party()
    part = NodePartition(0, 1, 2, Bits.of(halves()))
    answer = passive.answer(HistogramRequest(0, (part,)))
    assert answer.nodes == (1,)
    first = sums_of(answer, passive)[0][: passive.schema().n_bins[0] + 1]
    assert (first.sum(axis=0) == PAIRS[halves()].sum(axis=0)).all()
    reply = passive.answer(SplitRequest(0, (OwnedSplit(2, 1, 1, True),)))
    split = passive.table[0, 2]
    values = np.random.default_rng(0).normal(size=(N_ROWS, 3)).astype(np.float32)[:, 1]
    values[::7] = np.nan
    rows = np.flatnonzero(~halves())
    expected = np.where(np.isnan(values[rows]), True, values[rows] < split.threshold)
    np.testing.assert_array_equal(reply.goes_left[0].unpack(), expected)
    asked = np.arange(9) % 2 == 0
    decided = passive.answer(DecisionRequest(1, (PathQuery(0, 2, Bits.of(asked)),))).goes_left[0].unpack()
    here = values[:9][asked]
    np.testing.assert_array_equal(decided, np.where(np.isnan(here), True, here < split.threshold))


def test_a_tie_of_rows_builds_the_lower_node():
    passive = party()
    half = Bits.of(np.arange(N_ROWS) % 2 == 0)
    assert passive.answer(HistogramRequest(0, (NodePartition(0, 1, 2, half),))).nodes == (1,)


LEFT = Bits.of(halves())
SPLIT = SplitRequest(0, (OwnedSplit(0, 0, 1, False),))
HOSTILE = {
    "sums_of_nothing": MoreSums(0),
    "sums_of_other_tree": MoreSums(1),
    "own_without_split": HistogramRequest(0, (), (OwnDivision(0, 1, 2),)),
    "setup_again": TrainingSetup(0, 40, N_ROWS, b""),
    "old_tree": TreeGradients(0, ALL, PAIRS.tobytes()),
    "short_gradients": TreeGradients(1, ALL, PAIRS.tobytes()[:-1]),
    "other_features": TreeGradients(1, Bits.of(np.ones(4, dtype=bool)), PAIRS.tobytes()),
    "no_features": TreeGradients(1, Bits.of(np.zeros(3, dtype=bool)), PAIRS.tobytes()),
    "other_tree": HistogramRequest(5, ()),
    "root_twice": HistogramRequest(0, ()),
    "child_of_child": HistogramRequest(
        0, (NodePartition(0, 1, 2, LEFT), NodePartition(2, 3, 4, Bits.of(halves()[~halves()])))
    ),
    "unknown_node": HistogramRequest(0, (NodePartition(7, 8, 9, LEFT),)),
    "wrong_rows": HistogramRequest(0, (NodePartition(0, 1, 2, Bits.of(np.ones(3, dtype=bool))),)),
    "child_is_parent": HistogramRequest(0, (NodePartition(0, 0, 0, LEFT),)),
    "twice": HistogramRequest(0, (NodePartition(0, 1, 2, LEFT), NodePartition(0, 3, 4, LEFT))),
    "unknown_feature": SplitRequest(0, (OwnedSplit(0, 3, 0, False),)),
    "unknown_bin": SplitRequest(0, (OwnedSplit(0, 0, 200, False),)),
    "split_twice": SplitRequest(0, (OwnedSplit(0, 0, 0, False), OwnedSplit(0, 1, 0, False))),
    "split_other_tree": SplitRequest(3, (OwnedSplit(0, 0, 0, False),)),
    "foreign_node": DecisionRequest(0, (PathQuery(0, 0, Bits.of(np.ones(N_ROWS, dtype=bool))),)),
    "foreign_set": DecisionRequest(2, (PathQuery(0, 0, LEFT),)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_requests_out_of_place_are_refused(name):
    with pytest.raises(ProtocolError):
        party().answer(HOSTILE[name])


def test_children_of_an_own_split_follow_the_answer():
    passive = party()
    left = passive.answer(SPLIT).goes_left[0].unpack()
    with pytest.raises(ProtocolError):
        passive.answer(HistogramRequest(0, (NodePartition(0, 1, 2, LEFT),)))  # another division than the party's own
    answer = passive.answer(HistogramRequest(0, (), (OwnDivision(0, 1, 2),)))
    rows = left if left.sum() <= (~left).sum() else ~left
    assert answer.nodes == (1 if rows is left else 2,)
    first = sums_of(answer, passive)[0][: passive.schema().n_bins[0] + 1]
    assert (first.sum(axis=0) == PAIRS[rows].sum(axis=0)).all()
    with pytest.raises(ProtocolError):
        passive.answer(HistogramRequest(0, (), (OwnDivision(0, 3, 4),)))


StreamedMaker = partial(ClearHistogramMaker, is_streamed=True)


def test_sums_come_block_by_block_and_nothing_in_between(monkeypatch):
    monkeypatch.setattr(messages, "MOST_ADDITIONS", 1)
    features = np.random.default_rng(0).normal(size=(N_ROWS, 5)).astype(np.float32)
    every = Bits.of(np.ones(5, dtype=bool))

    def begun(maker) -> PassiveParty:
        passive = PassiveParty([features.T], list("abcde"), 4, maker)
        passive.answer(TreeGradients(0, every, PAIRS.tobytes()))
        return passive

    passive, whole = begun(StreamedMaker()), begun(ClearHistogramMaker())
    for request in (HistogramRequest(0, ()), HistogramRequest(0, (NodePartition(0, 1, 2, LEFT),))):
        answers = [passive.answer(request), passive.answer(MoreSums(0))]
        with pytest.raises(ProtocolError, match="between two blocks"):
            passive.answer(SPLIT)
        answers.append(passive.answer(MoreSums(0)))
        assert b"".join(answer.sums for answer in answers) == whole.answer(request).sums
        with pytest.raises(ProtocolError):
            passive.answer(MoreSums(0))


@pytest.mark.parametrize(
    "request_",
    [
        HistogramRequest(0, (NodePartition(0, 1, 2, LEFT),)),
        SplitRequest(0, (OwnedSplit(0, 0, 0, False),)),
    ],
    ids=["partition", "split"],
)
def test_a_node_whose_sums_were_not_given_is_neither_divided_nor_split(request_):
    with pytest.raises(ProtocolError):
        party(is_begun=False).answer(request_)


def test_a_second_node_of_the_same_number_is_refused():
    passive = party()
    passive.answer(HistogramRequest(0, (NodePartition(0, 1, 5, LEFT),)))
    with pytest.raises(ProtocolError):
        passive.answer(HistogramRequest(0, (NodePartition(1, 3, 5, Bits.of(np.arange(halves().sum()) % 2 == 0)),)))


def test_rows_of_a_set_are_answered_for_once_and_along_their_paths():
    """Asking for every row at every node would show ordered bits that no model needs."""
    everyone = Bits.of(np.ones(N_ROWS, dtype=bool))

    def grown() -> tuple[PassiveParty, np.ndarray]:
        passive = party()
        left = passive.answer(SplitRequest(0, (OwnedSplit(0, 0, 1, False),))).goes_left[0].unpack()
        passive.answer(HistogramRequest(0, (), (OwnDivision(0, 1, 2),)))
        passive.answer(SplitRequest(0, (OwnedSplit(1, 1, 1, False), OwnedSplit(2, 2, 1, False))))
        return passive, left

    def ask(passive: PassiveParty, node: int, rows: Bits) -> None:
        passive.answer(DecisionRequest(0, (PathQuery(0, node, rows),)))

    passive, left = grown()
    ask(passive, 0, everyone)
    ask(passive, 1, Bits.of(left))
    ask(passive, 2, Bits.of(~left))
    with pytest.raises(ProtocolError):
        ask(passive, 2, Bits.of(~left))
    for asked in ([(1, everyone)], [(0, everyone), (1, everyone)], [(0, everyone), (0, everyone)]):
        passive, _ = grown()
        with pytest.raises(ProtocolError):
            for node, rows in asked:
                ask(passive, node, rows)


def test_trees_beyond_those_of_the_job_are_refused():
    features = np.random.default_rng(0).normal(size=(N_ROWS, 3)).astype(np.float32)
    passive = PassiveParty([features.T], ["a", "b", "c"], 4, ClearHistogramMaker(), most_trees=2)
    for tree in (0, 1):
        passive.answer(TreeGradients(tree, ALL, PAIRS.tobytes()))
    with pytest.raises(ProtocolError):
        passive.answer(TreeGradients(2, ALL, PAIRS.tobytes()))


def limited(**limits: int) -> PassiveParty:
    features = np.random.default_rng(0).normal(size=(N_ROWS, 3)).astype(np.float32)
    return PassiveParty(
        [features.T],
        ["a", "b", "c"],
        4,
        ClearHistogramMaker(),
        most_trees=2,
        limits=TreeLimits(**{"max_depth": 0, "max_leaves": 0, **limits}),
    )


def grow(passive: PassiveParty, splits: str, tree: int = 0) -> None:
    """Grow a chain whose right child is always divided further: "p" asks for children's sums, "s" splits alone."""
    passive.answer(TreeGradients(tree, ALL, PAIRS.tobytes()))
    passive.answer(HistogramRequest(tree, ()))
    node, n_rows = 0, N_ROWS
    for step in splits:
        if step == "s":
            passive.answer(SplitRequest(tree, (OwnedSplit(node, 0, 1, False),)))
        else:
            part = NodePartition(node, node + 1, node + 2, Bits.of(np.arange(n_rows) < 2))
            passive.answer(HistogramRequest(tree, (part,)))
            node, n_rows = node + 2, n_rows - 2


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_depth": 1}, "s"),
        ({"max_depth": 3}, "pps"),
        ({"max_leaves": 2}, "s"),
        ({"max_leaves": 4}, "pps"),
        ({"max_depth": 3, "max_leaves": 10}, "pps"),
        ({"max_depth": 9, "max_leaves": 4}, "pps"),
        ({}, "ppppppps"),
    ],
    ids=str,
)
def test_trees_grow_as_far_as_the_job_allows_and_no_further(limits, most):
    passive = limited(**limits)
    grow(passive, most)
    grow(passive, most, tree=1)  # each tree is counted by itself
    if limits:
        with pytest.raises(ProtocolError, match="sums are asked for"):
            grow(limited(**limits), most[:-1] + "p")


def test_more_splits_than_leaves_allow_are_refused():
    passive = limited(max_leaves=3)
    grow(passive, "p")
    with pytest.raises(ProtocolError, match="more nodes are split"):
        passive.answer(SplitRequest(0, (OwnedSplit(1, 0, 1, False), OwnedSplit(2, 0, 1, False))))


@pytest.mark.parametrize(
    ("depth", "leaves", "n_rows", "expected"),
    [
        (3, 0, 1000, 7),
        (3, 5, 1000, 4),
        (0, 0, 1000, 1000),
        (6, 0, 10, 10),
        (10**9, 0, 10, 10),
        (0, 1, 10, 0),
    ],
)
def test_the_most_splits_of_a_tree(depth, leaves, n_rows, expected):
    assert TreeLimits(depth, leaves).most_splits(n_rows) == expected


def test_trees_of_the_model_that_training_continues_do_not_grow_again():
    passive = party()
    passive.answer(SplitRequest(0, (OwnedSplit(0, 0, 0, False),)))
    features = np.zeros((N_ROWS, 3), dtype=np.float32)
    continued = PassiveParty([features.T], ["a", "b", "c"], 4, ClearHistogramMaker(), passive.table)
    with pytest.raises(ProtocolError):
        continued.answer(TreeGradients(0, ALL, PAIRS.tobytes()))
    continued.answer(TreeGradients(1, ALL, PAIRS.tobytes()))
