"""What exact sums per bin give away, and how far the guards help: the attack must succeed where it is said to.

Everything the attack uses is recorded at the active party of a real training; the truth is what the passive party has.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl

from he_processors.histogram.planner import BinLayout
from tests.support.bin_attack import KnownSplit, TreeSums, attack, breast, credit2, try_preset
from tests.support.vertical_federation import Joined

DATA = Path(os.environ.get("VEILBOOST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices: threads of the linear algebra would only wait for each other on a busy machine."""
    with threadpoolctl.threadpool_limits(1):
        yield


def planted(n_rows: int, n_trees: int, n_nodes: int, seed: int = 0) -> tuple[list[TreeSums], BinLayout, np.ndarray]:
    """Return sums over random nodes of random bins: eight bins and a few missing values."""
    rng = np.random.default_rng(seed)
    layout = BinLayout((8, 8))
    codes = rng.integers(0, 8, size=(2, n_rows)).astype(np.uint8)
    codes[1, ::10] = 8
    trees = []
    for _ in range(n_trees):
        g, h = rng.integers(-(2**40), 2**40, size=n_rows), rng.integers(1, 2**38, size=n_rows)
        nodes = [part.astype(np.int32) for part in np.array_split(rng.permutation(n_rows), n_nodes)]
        sums = np.zeros((n_nodes, layout.n_slots, 2), dtype=np.int64)
        for node, rows in enumerate(nodes):
            for feature, start in enumerate(layout.starts[:-1]):
                np.add.at(sums[node], start + codes[feature, rows], np.stack([g[rows], h[rows]], axis=1))
        trees.append(TreeSums(g, h, nodes, sums))
    return trees, layout, codes


def test_as_many_sums_as_rows_give_every_bin():
    recovery = attack(*planted(120, 15, 4))
    assert (recovery.n_sums, recovery.sums_per_row) == (120, 1.0)
    assert recovery.by_least_squares == 1.0 and recovery.by_guessing < 0.2


def test_few_sums_give_little_more_than_guessing_and_knowing_one_bin_per_row_helps():
    few, some = attack(*planted(200, 1, 2)), attack(*planted(200, 18, 2), n_projections=150)
    assert (few.n_sums, some.n_sums) == (4, 72)
    assert few.by_least_squares < few.by_guessing + 0.2
    assert some.by_least_squares < some.by_all - 0.1


def test_the_attack_needs_the_sums():
    trees, layout, codes = planted(120, 15, 4)
    rng = np.random.default_rng(1)
    shuffled = [dataclasses.replace(tree, sums=rng.permutation(tree.sums, axis=1)) for tree in trees]
    assert attack(shuffled, layout, codes).by_least_squares < 0.4
    other = [dataclasses.replace(tree, g=rng.permutation(tree.g), h=rng.permutation(tree.h)) for tree in trees]
    assert attack(other, layout, codes).by_least_squares < 0.4


def test_splits_leave_fewer_bins():
    trees, layout, codes = planted(200, 1, 2)
    rows = np.arange(200, dtype=np.int32)
    left = codes[1] <= 3
    missing = codes[1] == 8
    split = KnownSplit(1, 3, True, rows[left | missing], rows[~left & ~missing])
    lower = np.where(left)[0].astype(np.int32)
    finer = KnownSplit(1, 0, False, lower[codes[1, lower] == 0], lower[codes[1, lower] > 0])
    known = attack([dataclasses.replace(trees[0], splits=(split, finer))], layout, codes, features=[1])
    # Bin 0 is known; of the bins 1 to 3 and 4 to 7 the fullest is named, and missing values, on the left, with them.
    counts = np.bincount(codes[1], minlength=9)
    assert known.by_splits == (counts[0] + counts[1:4].max() + counts[4:8].max()) / 200
    assert known.by_all > known.by_least_squares
    assert attack(trees, layout, codes, features=[1]).by_splits == known.by_guessing == counts.max() / 200


def test_one_feature_is_attacked_like_all():
    trees, layout, codes = planted(120, 15, 4)
    assert attack(trees, layout, codes, features=[1]).by_least_squares == 1.0


def test_a_training_gives_its_bins_away_unless_guarded(tmp_path):
    rng = np.random.default_rng(4)
    features = rng.normal(size=(200, 4)).astype(np.float32)
    label = (features[:, 0] + features[:, 2] + rng.normal(size=200) > 0).astype(np.float32)
    joined = Joined(features, label, (2, 2))
    exact = try_preset(joined, "exact", tmp_path, 24, 5, None)
    assert exact.recovery.by_least_squares > 0.9
    # The party counted what was sent; more of it than there are rows, so that some sums follow from others.
    sent = sum(2 * len(tree.nodes) for tree in exact.tap.trees)
    assert exact.exposure.n_sums == sent > exact.recovery.n_sums > 185
    guarded = try_preset(joined, "guarded", tmp_path, 24, 5, None)
    assert guarded.recovery.sums_per_row <= 0.02 and guarded.exposure.nodes_withheld
    assert guarded.recovery.by_all < 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n_trees", "features", "exact", "guarded"),
    [
        ("breast", 50, (0, 3, 7, 11, 14), 0.9, 0.2),
        ("credit2", 100, (1, 4, 8), 0.99, 0.35),
    ],
)
def test_real_tables(tmp_path, name, n_trees, features, exact, guarded):
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"needs {path.name}; set VEILBOOST_DATA to its folder")
    joined = breast(path) if name == "breast" else credit2(path, 2000)
    found = {
        preset: try_preset(joined, preset, tmp_path, n_trees, 5, features).recovery
        for preset in ("exact", "floor of 20 rows only", "guarded")
    }
    assert found["exact"].by_least_squares > exact
    assert found["floor of 20 rows only"].by_all > 0.9  # floors do not stop it, and we do not say so
    assert found["guarded"].by_all < guarded
