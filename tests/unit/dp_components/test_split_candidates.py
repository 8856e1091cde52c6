"""C3: known answers of every rule, and where private quantiles land on planted data."""

from __future__ import annotations

import numpy as np
import pytest

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
