"""Positions of rows among thresholds: known answers, and hostile bytes."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical.model import ActivePart, PassivePart, PrivateSplit
from nvflare_plugins.kinds.vertical_inference.explanations import RowPositions, check_covers
from nvflare_plugins.xgb.versions import installed_wheel
from tests.support.examples import examples

TABLE = {
    (0, 0): PrivateSplit(2, np.float32(0.5), True),
    (0, 2): PrivateSplit(2, np.float32(-1.0), False),
    (1, 0): PrivateSplit(2, np.float32(0.5), False),
    (1, 4): PrivateSplit(0, np.float32(7.0), False),
}
PART = PassivePart(TABLE, ("a", "b", "c"), ("f0", "f1", "f2"))
FEATURES = np.array([[7, 0, -1], [6.5, 0, -2], [np.nan, 0, 0.5], [9, 0, np.nan]], dtype=np.float32)


def test_known_positions():
    told = RowPositions.of(PART, FEATURES)
    assert told.features.tolist() == [0, 2]
    assert told.splits.tolist() == [[0, 0, 1, 2], [0, 2, 1, 1], [1, 0, 1, 2], [1, 4, 0, 1]]
    missing = 2**32 - 1
    assert told.positions.tolist() == [[1, 1], [0, 0], [missing, 2], [1, missing]]


def test_what_is_told_is_read():
    told = RowPositions.of(PART, FEATURES)
    read = RowPositions.from_bytes(told.to_bytes(), 4)
    for name in ("features", "splits", "positions"):
        np.testing.assert_array_equal(getattr(read, name), getattr(told, name))


def test_a_party_whose_features_are_not_used():
    told = RowPositions.of(PassivePart({}, ("a",), ("f0",)), FEATURES[:, :1])
    read = RowPositions.from_bytes(told.to_bytes(), 4)
    assert read.features.size == read.splits.size == 0 and read.positions.shape == (4, 0)


def changed(**parts) -> bytes:
    told = RowPositions.of(PART, FEATURES)
    return RowPositions(**{name: parts.get(name, getattr(told, name)) for name in RowPositions.__slots__}).to_bytes()


GOOD = RowPositions.of(PART, FEATURES)
HOSTILE = {
    "short": GOOD.to_bytes()[:-1],
    "long": GOOD.to_bytes() + b"\0",
    "other_format": b"X" + GOOD.to_bytes()[1:],
    "other_version": GOOD.to_bytes()[:4] + b"\1" + GOOD.to_bytes()[5:],
    "other_rows": changed(positions=GOOD.positions[:3]),
    "features_twice": changed(features=np.array([2, 2])),
    "features_unsorted": changed(features=np.array([2, 0])),
    "place_out_of_range": changed(splits=np.array([[0, 0, 2, 1]])),
    "rank_zero": changed(splits=np.array([[0, 0, 1, 0]])),
    "rank_huge": changed(splits=np.array([[0, 0, 1, 1 << 24]])),
    "groups_of_a_threshold": changed(groups=np.array([[0, 1]])),
    "groups_of_no_split": changed(groups=np.array([[9, 1]])),
    "group_huge": changed(splits=np.array([[0, 0, 1, 0]]), groups=np.array([[0, 1 << 16]])),
    "no_group_but_missing": changed(splits=np.array([[0, 0, 1, 0]]), groups=np.array([[0, (1 << 16) - 1]])),
    "position_huge": changed(positions=np.full((4, 2), 1 << 24)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_positions_are_refused(name):
    with pytest.raises(ProtocolError):
        RowPositions.from_bytes(HOSTILE[name], 4)


@settings(max_examples=examples(200))
@given(st.binary(max_size=120))
def test_any_bytes_are_positions_or_refused(data):
    for prefix in (b"", b"VLBP\x02"):
        with contextlib.suppress(ProtocolError):
            RowPositions.from_bytes(prefix + data, 2)


def covered(covers: list[float], later: list[float]) -> ActivePart:
    """Return the active party's part of a model of two rounds, a tree each: a root and two leaves."""
    trees = [{"left_children": [1, -1, -1], "sum_hessian": of_tree} for of_tree in (covers, later)]
    model = {"learner": {"gradient_booster": {"model": {"iteration_indptr": [0, 1, 2], "trees": trees}}}}
    return ActivePart(json.dumps(model).encode(), ("a",), ())


def test_nodes_without_cover_are_refused_by_name_where_their_trees_are_explained():
    """XGBoost divides by the cover of a node that is divided, and gives NaN without a word; a leaf may have none."""
    check_covers(covered([5.0, 5.0, 0.0], [2.0, 1.0, 1.0]), "all")
    certain = covered([5.0, 3.0, 2.0], [0.0, 0.0, 0.0])
    with pytest.raises(ConfigurationError, match=r"sum_hessian.*min_child_weight"):
        check_covers(certain, "all")
    check_covers(certain, [0, 1])


def test_xgboost_itself_gives_no_numbers_there_or_such_that_look_right():
    """NaN from 3.2, numbers from later ones."""
    table = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    booster = xgb.train({"max_depth": 1, "nthread": 1}, xgb.DMatrix(table, table[:, 0]), 1)
    model = json.loads(booster.save_raw("json"))
    model["learner"]["gradient_booster"]["model"]["trees"][0]["sum_hessian"] = [0.0, 0.0, 0.0]
    changed_model = xgb.Booster(model_file=bytearray(json.dumps(model).encode()))
    found = changed_model.predict(xgb.DMatrix(table), pred_contribs=True)
    assert np.isnan(found).any() == (installed_wheel().version == "3.2")
