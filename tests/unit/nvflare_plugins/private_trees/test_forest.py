"""The public forest as an XGBoost model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb

from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.tree import in_numpy
from nvflare_plugins.kinds.private_trees import noisy_sums as module
from nvflare_plugins.kinds.private_trees.methods import MAX_DEPTH, dp_tr_newton
from nvflare_plugins.kinds.private_trees.noisy_sums import node_histograms
from tests.support.refreshed import drawn_trees, empty_model

CANDIDATES = Candidates(
    (
        np.linspace(-1, 1, 7, dtype=np.float32),
        np.array([0.1, 1 / 3, 2.5e-8 + 1], dtype=np.float32),
        np.arange(4, dtype=np.float32),
    )
)
METHOD = replace(dp_tr_newton(), n_trees=6)


def test_xgboost_follows_every_row_to_the_leaf_that_we_do() -> None:
    """Rows on the candidates themselves, beside them, and missing."""
    trees = drawn_trees(METHOD, CANDIDATES, 5)
    rng = np.random.default_rng(0)
    columns = np.stack(
        [
            np.concatenate(
                [cuts, np.nextafter(cuts, np.float32(np.inf)), rng.uniform(-2, 4, 60 - 2 * cuts.size), [np.nan] * 4]
            )[:60]
            for cuts in CANDIDATES.of_feature
        ]
    ).astype(np.float32)
    rng.permuted(columns, axis=1, out=columns)
    booster = xgb.Booster(model_file=bytearray(empty_model(trees, CANDIDATES, 1)))
    leaves = booster.predict(xgb.DMatrix(columns.T, nthread=1), pred_leaf=True).astype(int)
    bins = CANDIDATES.bin_rows(columns)
    for number, tree in enumerate(trees):
        assert np.array_equal(leaves[:, number], tree.leaves[tree.leaf_of_rows(bins)])


# -- sums of nodes by the kernels --------------------------------------------------------------------------------------


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
