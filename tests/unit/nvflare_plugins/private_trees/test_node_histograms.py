"""Sums of nodes by the kernels against those of numpy: equal integers, so that models do not depend on a compiler."""

from __future__ import annotations

import numpy as np
import pytest

from dp_components.split_methods.tree import in_numpy
from nvflare_plugins.kinds.private_trees import noisy_sums as module
from nvflare_plugins.kinds.private_trees.methods import MAX_DEPTH
from nvflare_plugins.kinds.private_trees.noisy_sums import node_histograms

N_BINS = 255


def rows(n_rows: int, n_coordinates: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n_rows)
    bins = rng.integers(0, N_BINS, size=(5, n_rows)).astype(np.uint8)
    return bins, rng.integers(-(1 << 40), 1 << 40, size=(n_rows, n_coordinates))


@pytest.mark.parametrize("n_rows", [0, 1, 700, 40_000])
@pytest.mark.parametrize("features", [[0, 1, 2, 3, 4], [3, 1], [2]])
def test_nodes_have_the_sums_that_numpy_finds(n_rows: int, features: list[int]) -> None:
    bins, pairs = rows(n_rows)
    ours, numpys = (make(bins, pairs, features, N_BINS) for make in (node_histograms, in_numpy))
    rng = np.random.default_rng(0)
    for n_nodes in (1, 2, 1 << (MAX_DEPTH - 1)):
        node = rng.integers(0, n_nodes + 1, n_rows)  # the last one is a leaf, of which nothing is asked
        asked = [np.flatnonzero(node == number) for number in range(n_nodes)]
        assert np.array_equal(ours(asked), numpys(asked))
    assert np.array_equal(ours([np.arange(n_rows)]), numpys([np.arange(n_rows)]))


@pytest.mark.parametrize("n_coordinates", [2, 3, 6])
def test_several_classes_and_machines_without_a_compiler_have_them_too(
    n_coordinates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bins, values = rows(300, n_coordinates)
    nodes = [np.arange(0, 300, 2), np.arange(1, 300, 3)]
    found = node_histograms(bins, values, [0, 4], N_BINS)(nodes)
    assert found.shape == (2, 2, N_BINS, n_coordinates)
    assert (found.sum(axis=2)[:, 0] == [values[one].sum(axis=0) for one in nodes]).all()
    monkeypatch.setattr(module, "growth", None)
    assert np.array_equal(node_histograms(bins, values, [0, 4], N_BINS)(nodes), found)


def test_the_kernels_add_what_greedy_trees_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    if module.growth is None:
        pytest.skip("the C extension was not built")

    def nothing(*_: object) -> None:
        raise AssertionError("numpy was asked")

    monkeypatch.setattr(module, "in_numpy", nothing)
    bins, pairs = rows(50)
    assert node_histograms(bins, pairs, [0, 1], N_BINS)([np.arange(50)]).sum() == 2 * pairs.sum()
