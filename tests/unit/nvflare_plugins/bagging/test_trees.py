"""Trees on their way: what they keep, what they lose, and bytes that are no tree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.kinds.bagging.model import _NODE, LARGEST_LEAF, LeafOutOfRange, SharedTree, most_nodes

DEPTH, N_FEATURES = 3, 4


def grown() -> tuple[xgb.Booster, xgb.DMatrix]:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(200, N_FEATURES)).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    matrix = xgb.DMatrix(values, label=np.nansum(values, axis=1))
    return xgb.train({"max_depth": DEPTH, "nthread": 1, "base_score": 0.0}, matrix, 1), matrix


def document(booster: xgb.Booster) -> dict:
    return json.loads(bytes(booster.save_raw("json")))


def tree() -> SharedTree:
    return SharedTree.of(document(grown()[0])["learner"]["gradient_booster"]["model"]["trees"][0])


def test_a_tree_scores_after_its_journey_as_before() -> None:
    booster, matrix = grown()
    whole = document(booster)
    model = whole["learner"]["gradient_booster"]["model"]
    shared = SharedTree.from_bytes(tree().to_bytes(DEPTH), DEPTH, N_FEATURES)
    model["trees"] = [shared.document(0, N_FEATURES)]
    again = xgb.Booster(model_file=bytearray(json.dumps(whole).encode()))
    assert np.array_equal(again.predict(matrix), booster.predict(matrix))
    assert len(shared.nodes) > 7


def test_statistics_of_rows_do_not_travel() -> None:
    """A tree whose statistics are other ones makes the same message."""
    original = document(grown()[0])["learner"]["gradient_booster"]["model"]["trees"][0]
    inner = [child >= 0 for child in original["left_children"]]
    changed = {
        **original,
        "sum_hessian": [7.0] * len(inner),
        "loss_changes": [7.0] * len(inner),
        "base_weights": [7.0] * len(inner),
    }
    assert original["sum_hessian"] != changed["sum_hessian"]
    assert SharedTree.of(original).to_bytes(DEPTH) == SharedTree.of(changed).to_bytes(DEPTH)


def test_every_message_of_a_depth_has_one_length() -> None:
    leaf = np.array([(-1, -1, 0, 0.5, 0)], _NODE)
    assert len(SharedTree(leaf).to_bytes(DEPTH)) == len(tree().to_bytes(DEPTH)) == 4 + 17 * most_nodes(DEPTH)


def test_the_protocol_states_the_size_of_a_tree() -> None:
    leaf = SharedTree(np.array([(-1, -1, 0, 0.5, 0)], _NODE))
    text = (Path(__file__).parents[4] / "nvflare_plugins" / "wire" / "PROTOCOL.md").read_text()
    assert all(f"{len(leaf.to_bytes(depth)):,} bytes at depth {depth}" in text for depth in (6, 12))


def damaged(**changes: tuple[int, float]) -> bytes:
    nodes = tree().nodes.copy()
    for field, (node, value) in changes.items():
        nodes[field][node] = value
    return SharedTree(nodes).to_bytes(DEPTH)


LEAF = int(np.flatnonzero(tree().nodes["left"] < 0)[0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        tree().to_bytes(DEPTH)[:-1],
        tree().to_bytes(DEPTH) + b"\0",
        tree().to_bytes(DEPTH)[:-1] + b"\1",
        bytes(4) + tree().to_bytes(DEPTH)[4:],
        b"\xff" * 4 + tree().to_bytes(DEPTH)[4:],
        b"\2\0\0\0" + tree().to_bytes(DEPTH)[4:],
        damaged(left=(0, 0)),
        damaged(left=(0, 2)),
        damaged(left=(0, 10_000)),
        damaged(right=(0, -1)),
        damaged(right=(0, -5)),
        damaged(right=(LEAF, 3)),
        damaged(left=(LEAF, -7)),
        damaged(feature=(0, N_FEATURES)),
        damaged(feature=(0, 2**32 - 1)),
        damaged(condition=(0, np.nan)),
        damaged(condition=(LEAF, np.inf)),
        damaged(condition=(0, -np.inf)),
        damaged(condition=(LEAF, np.nan)),
        damaged(condition=(LEAF, 1.1e30)),
        damaged(condition=(LEAF, -1.1e30)),
        damaged(default_left=(0, 2)),
    ],
    ids=range(23),
)
def test_what_is_no_tree_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        SharedTree.from_bytes(data, DEPTH, N_FEATURES)


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e-45, -1e9, LARGEST_LEAF])
def test_leaves_of_every_size_that_can_be_added_up_are_taken(value: float) -> None:
    read = SharedTree.from_bytes(damaged(condition=(LEAF, value)), DEPTH, N_FEATURES)
    assert read.nodes["condition"][LEAF] == np.float32(value)


def test_a_leaf_out_of_range_is_told_from_other_faults() -> None:
    with pytest.raises(LeafOutOfRange):
        SharedTree.from_bytes(damaged(condition=(LEAF, np.inf)), DEPTH, N_FEATURES)
    with pytest.raises(ProtocolError) as other:
        SharedTree.from_bytes(damaged(condition=(0, np.inf)), DEPTH, N_FEATURES)
    assert not isinstance(other.value, LeafOutOfRange)


def test_a_tree_that_is_too_deep_is_refused() -> None:
    chain = np.array(
        [(1, 2, 0, 0.0, 0), (-1, -1, 0, 1.0, 0), (3, 4, 0, 0.0, 0), (-1, -1, 0, 1.0, 0), (-1, -1, 0, 1.0, 0)], _NODE
    )
    SharedTree.from_bytes(SharedTree(chain).to_bytes(2), 2, 1)
    deeper = np.concatenate([chain, np.array([(-1, -1, 0, 1.0, 0), (-1, -1, 0, 1.0, 0)], _NODE)])
    deeper[4] = (5, 6, 0, 0.0, 0)
    with pytest.raises(ProtocolError, match="deeper"):
        SharedTree.from_bytes(SharedTree(deeper).to_bytes(2), 2, 1)


@given(st.data())
def test_any_bytes_are_a_tree_or_refused(data: st.DataObject) -> None:
    message = bytearray(tree_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(message) - 1))
        message[place] = data.draw(st.integers(0, 255))
    try:
        read = SharedTree.from_bytes(bytes(message), DEPTH, N_FEATURES)
    except ProtocolError:
        return
    assert read.to_bytes(DEPTH) == bytes(message)


tree_bytes = tree().to_bytes(DEPTH)
