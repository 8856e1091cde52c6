"""Private tables, merging, and the checks between the parts of a model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.vertical import model as vertical_model


def model() -> bytes:
    """One tree: the root belongs to the active party, node 1 to a passive one."""
    tree = {
        "left_children": [1, 3, -1, -1, -1],
        "right_children": [2, 4, -1, -1, -1],
        "split_indices": [0, 2, 0, 0, 0],
        "split_conditions": [0.5, 0.0, 0.1, 0.2, 0.3],
        "default_left": [0, 1, 0, 0, 0],
    }
    learner = {"gradient_booster": {"model": {"trees": [tree]}}, "feature_names": [], "feature_types": []}
    return json.dumps({"learner": learner}).encode()


SPLIT = vertical_model.PrivateSplit(1, np.float32(0.1), True)


def test_merging_restores_the_float32():
    merged = vertical_model.merge(model(), 1, [(1, {(0, 1): SPLIT})])
    structure = vertical_model.structures(merged)[0]
    assert structure.threshold[1] == np.float32(0.1) and structure.threshold[0] == np.float32(0.5)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {(0, 1): vertical_model.PrivateSplit(0, np.float32(0.1), True)},
        {(0, 1): vertical_model.PrivateSplit(1, np.float32(0.1), False)},
        {(0, 0): SPLIT},
        {(0, 1): SPLIT, (0, 2): SPLIT},
    ],
    ids=["nobody", "other_feature", "other_direction", "own_node", "a_leaf"],
)
def test_tables_of_another_model_are_refused(table):
    with pytest.raises(ConfigurationError):
        vertical_model.merge(model(), 1, [(1, table)])


def test_splits_of_trees_that_were_not_kept_are_left_out():
    assert vertical_model.merge(model(), 1, [(1, {(0, 1): SPLIT, (7, 0): SPLIT})])


def test_an_unmasked_threshold_is_noticed():
    document = json.loads(model())
    document["learner"]["gradient_booster"]["model"]["trees"][0]["split_conditions"][1] = 0.25
    with pytest.raises(ProtocolError) as caught:
        vertical_model.mask_columns(json.dumps(document).encode(), 1, ["a", "b", "c"])
    assert "0.25" not in str(caught.value)
    assert json.loads(vertical_model.mask_columns(model(), 1, ["a", "b", "c"]))["learner"]["feature_names"] == [
        "a",
        "b",
        "c",
    ]


def test_tables_survive_the_disk_bit_for_bit():
    rng = np.random.default_rng(0)
    thresholds = rng.integers(0, 2**32, 500, dtype=np.uint32).view(np.float32)
    table = {
        (i, i % 7): vertical_model.PrivateSplit(i % 3, value, bool(i % 2), (None, vertical_model.NOTHING_ABOVE)[i % 2])
        for i, value in enumerate(thresholds)
        if np.isfinite(value)
    }
    read, aliases = vertical_model.table_from_json(vertical_model.table_to_json(table, ("a", "b", "c")))
    table[3, 9] = vertical_model.PrivateSplit(0, np.float32(1), False, (3, True))
    read, aliases = vertical_model.table_from_json(vertical_model.table_to_json(table, ("a", "b", "c")))
    assert read == table and aliases == ("a", "b", "c")
    assert all(read[key].threshold.tobytes() == split.threshold.tobytes() for key, split in table.items())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"aliases": ["a"], "splits": [[0, 0, 1, "1", 0, null]]}',
        '{"aliases": ["a"], "splits": [[0, 0, 0, "1", 0]]}',
        '{"aliases": ["a"], "splits": [[0, 3, 0, "1", 0, [1, 0]]]}',
        '{"aliases": 3}',
        '{"aliases": ["a"], "splits": [[Infinity, 0, 0, "1", 0, null]]}',
        '{"aliases": ["a"], "splits": [[0, 0, 0, "nan", 0, null]]}',
        "[" * 100_000,
    ],
)
def test_other_files_are_refused(text):
    with pytest.raises(ConfigurationError):
        vertical_model.table_from_json(text)


def test_a_private_split_does_not_show_its_threshold():
    assert "0.1" not in repr(SPLIT)
