"""The order of nodes: what whole trees of the oracle do not show."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nvflare_plugins.growth.splits import Entry
from nvflare_plugins.growth.tree import MAX_BATCH, TreeDriver
from tests.unit.nvflare_plugins.vertical.test_split_evaluation import parameters


def entry(node: int, depth: int, change: float, right_hessian: float = 1.0) -> Entry:
    return Entry(node, depth, change, 0, (1.0, 1.0), (1.0, right_hessian))


def driver(**changes) -> TreeDriver:
    return TreeDriver(dataclasses.replace(parameters(), **changes))


def nodes(applied) -> list[tuple[int, int, int]]:
    return [(split.entry.node, split.left, split.right) for split in applied]


def test_best_node_first_and_ties_to_the_lower_node():
    tree = driver(lossguide=True, max_depth=0, max_leaves=4)
    tree.push([entry(0, 0, 5.0)])
    assert nodes(tree.pop()) == [(0, 1, 2)]
    tree.push([entry(1, 1, 3.0), entry(2, 1, 3.0)])
    assert nodes(tree.pop()) == [(1, 3, 4)]
    tree.push([entry(3, 2, 4.0), entry(4, 2, 0.5)])
    applied = tree.pop()
    assert nodes(applied) == [(3, 5, 6)]
    assert not applied[0].evaluates_children  # four leaves are reached
    assert tree.pop() == []


def test_an_invalid_best_node_ends_the_tree():
    tree = driver(lossguide=True, min_split_loss=np.float32(2))
    tree.push([entry(0, 0, 5.0)])
    tree.pop()
    tree.push([entry(1, 1, 9.0, right_hessian=0.0), entry(2, 1, 8.0)])
    assert tree.pop() == []


@pytest.mark.parametrize(("change", "is_split"), [(1e-6, False), (1.1e-6, True), (0.0, False)])
def test_smallest_gain(change, is_split):
    tree = driver()
    tree.push([entry(0, 0, change)])
    assert bool(tree.pop()) == is_split


def test_a_wide_level_comes_in_batches():
    tree = driver(max_depth=20)
    tree.push([entry(node, 9, 1.0) for node in range(1000, 1000 + MAX_BATCH + 5)])
    assert [len(tree.pop()) for _ in range(3)] == [MAX_BATCH, 5, 0]
