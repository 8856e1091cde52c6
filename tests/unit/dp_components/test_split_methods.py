"""C1: structures that need no data, and greedy trees that find a planted split."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_components.leaf_weights import UNIT
from dp_components.sensitivity import GRID_BITS, grid_integers
from dp_components.split_candidates import dp_quantiles
from dp_components.split_candidates.candidates import (
    Candidates,
    FeatureBounds,
    as_candidates,
    bin_column,
    by_rule,
    logarithmic_candidates,
    non_private_quantile_candidates,
    uniform_candidates,
)
from dp_components.split_candidates.iterative_hessian import refine
from dp_components.split_methods.histogram import HistogramQuery, OneFeatureHistogramQuery
from dp_components.split_methods.partially_random import PartiallyRandomQuery
from dp_components.split_methods.totally_random import grow_totally_random
from dp_components.split_methods.tree import (
    LEAF,
    GainRule,
    GreedyQuery,
    OpenNode,
    Tree,
    TreeBuilder,
    gain,
    grow,
    in_numpy,
    split_scores,
)


def walk(tree: Tree, bins: np.ndarray, row: int) -> int:
    """Follow one row; the naive twin of ``leaf_of_rows``."""
    node = 0
    while tree.feature[node] != LEAF:
        goes_left = bins[tree.feature[node], row] <= tree.candidate[node]
        node = int((tree.left if goes_left else tree.right)[node])
    return int(np.flatnonzero(tree.leaves == node)[0])


@given(seed=st.integers(0, 10_000), depth=st.integers(0, 6), n_features=st.integers(1, 5))
def test_rows_fall_where_following_them_leads(seed: int, depth: int, n_features: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 20, n_features)
    bins = np.stack([rng.integers(0, c + 1, 30) for c in counts]).astype(np.uint8)
    tree = grow_totally_random(counts.tolist(), range(n_features), depth, random.Random(seed))
    assert tree.leaf_of_rows(bins).tolist() == [walk(tree, bins, row) for row in range(30)]


@given(seed=st.integers(0, 10_000))
def test_random_trees_never_split_where_a_feature_is_used_up(seed: int) -> None:
    tree = grow_totally_random([3, 1], [0, 1], 5, random.Random(seed))
    bins = np.array([[a, b] for a in range(4) for b in range(2)], dtype=np.uint8).T
    # Each leaf holds at least one of the 8 cells: no split was empty on either side.
    assert set(tree.leaf_of_rows(bins).tolist()) == set(range(tree.leaves.size))


def test_random_trees_depend_on_the_seed_alone() -> None:
    first, again, other = (grow_totally_random([31] * 4, range(4), 4, random.Random(s)) for s in (1, 1, 2))
    assert np.array_equal(first.candidate, again.candidate) and np.array_equal(first.feature, again.feature)
    assert not np.array_equal(first.candidate, other.candidate)


def test_random_trees_keep_to_their_features_and_depth() -> None:
    tree = grow_totally_random([31] * 6, [2, 5], 4, random.Random(3))
    assert set(tree.feature.tolist()) <= {LEAF, 2, 5}
    assert tree.leaves.size == 16


def test_a_tree_without_candidates_is_a_leaf() -> None:
    tree = grow_totally_random([0, 0], [0, 1], 4, random.Random(0))
    assert tree.leaves.tolist() == [0]
    assert tree.leaf_of_rows(np.zeros((2, 3), dtype=np.uint8)).tolist() == [0, 0, 0]


def test_gain_is_xgboosts() -> None:
    assert gain(np.float64(6.0), np.float64(8.0), 1.0, 100.0) == pytest.approx(36 / 9)
    # With the weight cut off at 0.5: -(2 * 6 * -0.5 + 9 * 0.25)
    assert gain(np.float64(6.0), np.float64(8.0), 1.0, 0.5) == pytest.approx(3.75)
    assert np.isfinite(gain(np.float64(0.0), np.float64(-1.0), 0.0, 1.0))


def test_split_score_is_half_the_improvement() -> None:
    scores = split_scores(np.array([[4.0, 3.0]]), np.array([[-3.0, 3.0]]), np.array([1.0, 6.0]), 1.0, 100.0)
    assert scores[0] == pytest.approx(0.5 * (16 / 4 + 9 / 4 - 1 / 7))


def planted(n_rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Gradients -1 to the right of bin 5 of feature 2, +1 to the left."""
    bins = np.random.default_rng(4).integers(0, 11, size=(4, n_rows)).astype(np.uint8)
    g = np.where(bins[2] > 5, -1.0, 1.0)
    return bins, np.stack([g, np.full(n_rows, 0.25)], axis=1).astype(np.float64) * UNIT


def exact(sums: np.ndarray) -> np.ndarray:
    return sums.copy()


def asking(kind, bins: np.ndarray, pairs: np.ndarray, features, counts: list[int], noise, *draws) -> GreedyQuery:
    values = pairs.astype(np.int64)
    of_nodes = in_numpy(bins, values, features, max(counts[f] for f in features) + 1)
    return kind(values, features, counts, GainRule(1.0, 2.0), noise, of_nodes, *draws)


def test_histogram_trees_find_the_planted_split_exactly_and_under_noise() -> None:
    bins, pairs = planted()
    rng = np.random.default_rng(0)

    def noisy(sums: np.ndarray) -> np.ndarray:
        return sums + np.rint(rng.normal(0, 5 * UNIT, sums.shape)).astype(np.int64)

    for noise in (exact, noisy):
        query = asking(HistogramQuery, bins, pairs, range(4), [10] * 4, noise)
        grown = grow(bins, query, 1)
        assert (grown.tree.feature[0], grown.tree.candidate[0]) == (2, 5)


@pytest.mark.parametrize("kind", [[HistogramQuery], [PartiallyRandomQuery, random.Random(1)]], ids=["all", "drawn"])
def test_leaf_sums_of_trees_without_noise_are_those_of_their_rows(kind: list) -> None:
    bins, pairs = planted(500)
    query = asking(kind[0], bins, pairs, range(4), [10] * 4, exact, *kind[1:])
    grown = grow(bins, query, 3)
    leaf = grown.tree.leaf_of_rows(bins)
    for i, sums in enumerate(grown.leaf_sums):
        assert sums * UNIT == pytest.approx(pairs[leaf == i].sum(axis=0))


def test_without_noise_the_roots_histogram_gives_the_tree_of_fresh_ones() -> None:
    """The tree of one feature whose every level is asked for, from one question."""
    bins, pairs = planted(500)
    pairs[:, 0] = np.random.default_rng(3).integers(-UNIT, UNIT, size=500)
    trees, asked = [], []

    def counted(sums: np.ndarray) -> np.ndarray:
        asked.append(sums.shape)
        return sums.copy()

    for kind in (HistogramQuery, OneFeatureHistogramQuery):
        grown = grow(bins, asking(kind, bins, pairs, [2], [10] * 4, counted), 4)
        trees.append((grown.tree.feature.tolist(), grown.tree.candidate.tolist(), grown.leaf_sums.tolist()))
    assert trees[0] == trees[1] and len(trees[0][0]) >= 15
    assert asked[-1] == (1, 1, 11, 2) and len(asked) == 5, "four levels, then one"


def test_a_tree_of_one_feature_is_post_processing_of_its_roots_noisy_histogram() -> None:
    """Same answer, other rows: same tree and leaves. No row is looked at below the root."""
    answer = np.random.default_rng(6).normal(scale=50 * UNIT, size=(1, 1, 11, 2)).astype(np.int64)
    grown = []
    for seed in (1, 2):
        bins = np.random.default_rng(seed).integers(0, 11, size=(4, 300)).astype(np.uint8)
        pairs = np.random.default_rng(seed).integers(-UNIT, UNIT, size=(300, 2))
        grown.append(grow(bins, asking(OneFeatureHistogramQuery, bins, pairs, [3], [10] * 4, lambda _: answer), 4))
    assert grown[0].leaf_sums.tolist() == grown[1].leaf_sums.tolist()
    assert grown[0].tree.candidate.tolist() == grown[1].tree.candidate.tolist()
    assert grown[0].leaf_sums.sum(axis=0) * UNIT == pytest.approx(answer[0, 0].sum(axis=0), abs=1)
    with pytest.raises(ValueError, match="only where the tree has one feature"):
        grow(bins, asking(OneFeatureHistogramQuery, bins, pairs, [1, 3], [10] * 4, exact), 4)


def test_features_with_fewer_candidates_are_never_split_beyond_them() -> None:
    bins, pairs = planted(300)
    bins[1] = np.minimum(bins[1], 2)
    rng = np.random.default_rng(2)

    def loud(sums: np.ndarray) -> np.ndarray:
        return sums + np.rint(rng.normal(0, 100 * UNIT, sums.shape)).astype(np.int64)

    for _ in range(30):
        query = asking(HistogramQuery, bins, pairs, [1], [10, 2, 10, 10], loud)
        tree = grow(bins, query, 3).tree
        assert (tree.candidate[tree.feature != LEAF] < 2).all()


def test_partially_random_trees_choose_the_best_of_the_drawn_candidates() -> None:
    bins, pairs = planted()
    for seed in range(10):
        drawn = random.Random(seed)
        candidates = [drawn.randrange(10) for _ in range(4)]
        query = asking(PartiallyRandomQuery, bins, pairs, range(4), [10] * 4, exact, random.Random(seed))
        tree = grow(bins, query, 1).tree
        assert (tree.feature[0], tree.candidate[0]) == (2, candidates[2])


def test_every_bin_is_noised_empty_ones_too() -> None:
    bins, pairs = planted(10)
    seen: list[tuple[int, ...]] = []

    def record(sums: np.ndarray) -> np.ndarray:
        seen.append(sums.shape)
        return sums

    query = asking(HistogramQuery, bins, pairs, range(4), [10] * 4, record)
    query.best([OpenNode(np.arange(0), np.tile([0, 10], (4, 1)), None)] * 2)
    assert seen == [(2, 4, 11, 2)]  # one query for the level


def test_noise_of_bins_that_earlier_splits_made_empty_is_left_out() -> None:
    """Below candidate 5 the bins above it hold noise alone; here it is so loud that it would decide everything."""
    bins, pairs = planted(400)
    rows = np.flatnonzero(bins[2] <= 5)

    def loud_outside(sums: np.ndarray) -> np.ndarray:
        sums = sums.copy()
        sums[:, 2, 6:] += 10**6 * UNIT
        return sums

    ranges = np.tile([0, 10], (4, 1))
    ranges[2] = 0, 5
    query = asking(HistogramQuery, bins, pairs, range(4), [10] * 4, loud_outside)
    [(totals, split)] = query.best([OpenNode(rows, ranges, None)])
    assert totals * UNIT == pytest.approx(pairs[rows].sum(axis=0))
    assert split is not None
    assert (split.left + split.right)[1] * UNIT == pytest.approx(pairs[rows, 1].sum())
    assert split.feature != 2 or split.candidate < 5


@pytest.mark.parametrize("is_histogram", [True, False])
def test_no_node_is_split_where_earlier_splits_left_nothing_to_divide(is_histogram: bool) -> None:
    bins, pairs = planted(300)
    rng = np.random.default_rng(3)

    def loud(sums: np.ndarray) -> np.ndarray:
        return sums + np.rint(rng.normal(0, 100 * UNIT, sums.shape)).astype(np.int64)

    for seed in range(20):
        common = (np.minimum(bins, 3), pairs, range(4), [3] * 4, loud)
        query = (
            asking(HistogramQuery, *common)
            if is_histogram
            else asking(PartiallyRandomQuery, *common, random.Random(seed))
        )
        tree = grow(bins, query, 5).tree
        open_nodes = [(0, dict.fromkeys(range(4), (0, 3)))]
        while open_nodes:
            node, ranges = open_nodes.pop()
            if tree.feature[node] == LEAF:
                continue
            feature, cut = int(tree.feature[node]), int(tree.candidate[node])
            low, high = ranges[feature]
            assert low <= cut < high
            open_nodes.append((int(tree.left[node]), {**ranges, feature: (low, cut)}))
            open_nodes.append((int(tree.right[node]), {**ranges, feature: (cut + 1, high)}))


def test_a_builder_numbers_children_after_their_parent() -> None:
    builder = TreeBuilder()
    left, right = builder.split(0, 1, 7)
    builder.split(right, 0, 2)
    tree = builder.build()
    assert (left, right) == (1, 2) and tree.leaves.tolist() == [1, 3, 4]


# -- candidates --------------------------------------------------------------------------------------------------------


def test_uniform_includes_the_left_end_only() -> None:
    assert uniform_candidates(FeatureBounds(0.0, 8.0), 4).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_logarithmic_is_even_in_the_logarithm_and_mirrors() -> None:
    points = logarithmic_candidates(FeatureBounds(0.0, 15.0), 4)
    assert points == pytest.approx([0.0, 1.0, 3.0, 7.0])
    mirrored = logarithmic_candidates(FeatureBounds(0.0, 15.0), 4, skewed_left=True)
    assert mirrored == pytest.approx([8.0, 12.0, 14.0, 15.0])


def test_quantiles_of_the_data() -> None:
    assert non_private_quantile_candidates(np.arange(5, dtype=np.float32), 4).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_value_equal_to_a_candidate_goes_left_and_a_missing_one_right() -> None:
    cuts = np.array([1.0, 2.0], dtype=np.float32)
    values = np.array([0.5, 1.0, 1.5, 2.0, 2.5, np.nan], dtype=np.float32)
    assert bin_column(values, cuts).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("cuts", [[2.0, 1.0], [1.0, 1.0], [np.nan], [np.inf]])
def test_candidates_refuse_what_is_not_ascending_and_finite(cuts: list[float]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Candidates((np.array(cuts, dtype=np.float32),))


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (np.nan, 1.0), (0.0, np.inf)])
def test_bounds_are_finite_and_ordered(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="bounds"):
        FeatureBounds(*bounds)


def test_a_constant_feature_has_one_candidate() -> None:
    assert by_rule(uniform_candidates, [FeatureBounds(3.0, 3.0)], 32).counts == [1]


def test_refine_divides_inside_the_heavy_bin() -> None:
    """Bins (-inf,0], (0,4], (4,8], (8,inf): all weight lies in (4,8]."""
    cuts, hessians = np.array([0.0, 4.0, 8.0], dtype=np.float32), np.array([0.0, 0.0, 100.0, 0.0])
    kept = refine(cuts, hessians, target=10.0, n_candidates=4)
    assert 8.0 in kept
    four, heavy = np.array([0, 4, 8, 12], dtype=np.float32), np.array([0, 0, 100.0, 0, 0])
    mended = refine(four, heavy, 10.0, 8)
    published = refine(four, heavy, 10.0, 8, as_published=True)
    assert 6.0 in mended  # the midpoint of the heavy bin (4, 8]
    assert 6.0 not in published and 10.0 in published  # the slip: the bin to its right


def test_refine_merges_light_bins_and_fills_up_evenly() -> None:
    cuts = np.arange(8, dtype=np.float32)
    points = refine(cuts, np.array([0, 0, 0, 50.0, 0, 0, 0, 50.0, 0]), target=10.0, n_candidates=8)
    assert points.tolist() == sorted(points) and points[0] == 3.0 and points[-1] == 7.0
    assert {1.0, 2.0, 5.5}.isdisjoint(points) and points.size == 5  # 3, 4, 5, 6, 7: the gap in equal parts


def test_refine_takes_negative_noise_for_nothing() -> None:
    cuts = np.arange(4, dtype=np.float32)
    assert np.isfinite(refine(cuts, np.full(5, -3.0), 1.0, 4)).all()


def test_the_public_grid_needs_bounds_only_and_is_dense_at_the_low_end() -> None:
    grid = dp_quantiles.public_grid(FeatureBounds(0.0, 1e6))
    assert grid.size <= dp_quantiles.LINEAR_EDGES + dp_quantiles.LOGARITHMIC_EDGES
    assert (grid < 100.0).sum() > 50


def test_each_row_counts_once_per_feature_also_where_the_value_is_missing() -> None:
    columns = np.array([[0.1, np.nan, 5.0, -9.0], [np.nan, np.nan, 0.0, 1.0]], dtype=np.float32)
    grids = [dp_quantiles.public_grid(FeatureBounds(0.0, 1.0))] * 2
    counts = dp_quantiles.count_cells(columns, grids)
    assert counts.sum() == 2 * 4 << GRID_BITS
    assert [part.sum() >> GRID_BITS for part in np.split(counts, 2)] == [4, 4]


def test_one_row_moves_one_cell_of_each_feature() -> None:
    columns = np.random.default_rng(1).uniform(size=(5, 40)).astype(np.float32)
    grids = [dp_quantiles.public_grid(FeatureBounds(0.0, 1.0))] * 5
    moved = dp_quantiles.count_cells(columns, grids) - dp_quantiles.count_cells(columns[:, 1:], grids)
    assert sorted(moved[moved != 0].tolist()) == [1 << GRID_BITS] * 5


def test_private_quantiles_find_a_skewed_feature() -> None:
    """Planted: exponential values far below the upper bound; uniform candidates would put all rows into one bin."""
    rng = np.random.default_rng(3)
    columns = rng.exponential(100.0, size=(1, 20_000)).astype(np.float32)
    grids = [dp_quantiles.public_grid(FeatureBounds(0.0, 1e6))]
    noise_std = 10.0
    noisy = dp_quantiles.count_cells(columns, grids) / (1 << GRID_BITS) + rng.normal(0, noise_std, grids[0].size + 1)
    candidates = dp_quantiles.cut_at_quantiles(noisy, grids, noise_std, 16)
    shares = np.bincount(candidates.bin_rows(columns)[0], minlength=17) / columns.size
    uniform = by_rule(uniform_candidates, [FeatureBounds(0.0, 1e6)], 16)
    assert shares.max() < 0.2
    assert np.bincount(uniform.bin_rows(columns)[0]).max() / columns.size > 0.99


def test_nothing_but_noise_falls_back_to_the_grid() -> None:
    grids = [dp_quantiles.public_grid(FeatureBounds(0.0, 1.0))]
    candidates = dp_quantiles.cut_at_quantiles(np.zeros(grids[0].size + 1), grids, 1.0, 16)
    assert 0 < candidates.counts[0] <= 16


def test_union_keeps_both() -> None:
    a, b = (Candidates((as_candidates(np.array(c)),)) for c in ([1.0, 2.0], [2.0, 3.0]))
    assert dp_quantiles.union(a, b).of_feature[0].tolist() == [1.0, 2.0, 3.0]


def test_counts_are_on_the_grid_of_all_queries() -> None:
    assert grid_integers(np.array([3])).tolist() == [3 << GRID_BITS]
