"""Merged bins: enough rows of every class in each, against a naive twin, and nothing opened that is finer."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from nvflare_plugins.kinds.profile.site import (
    Cell,
    information_values,
    least_values,
    merge,
    monotone_groups,
    rows_of_bins,
    rows_of_cells,
    rows_of_spans,
    stability_index,
    values_by_chance,
    weights_of_evidence,
)
from nvflare_plugins.pooled.spans import are_enough, local_bits, spans_of


def cells_of(of_sites: list[np.ndarray], least: int) -> list[Cell]:
    """Merge with all sites in one place. Shapes: each int64[n_bins + 1, n_classes]."""
    n_bins = len(of_sites[0]) - 1
    spans = spans_of(n_bins)
    bits = [local_bits(rows_of_spans(rows, spans), least, len(of_sites)) for rows in of_sites]
    some_missing = any(rows[-1].any() for rows in of_sites)
    return merge(spans, are_enough(np.any(bits, axis=0)), n_bins, some_missing=some_missing)


def naive_ends(of_sites: list[np.ndarray], least: int) -> list[int]:
    """Lengthen each cell bin by bin until some span within shows each class to be enough."""
    n_bins, n_classes = len(of_sites[0]) - 1, of_sites[0].shape[1]

    def is_span(start: int, stop: int) -> bool:
        length = stop - start
        return start == 0 or stop == n_bins or (length.bit_count() == 1 and start % max(length // 2, 1) == 0)

    def shown(first: int, end: int, of_class: int) -> bool:
        for start in range(first, end):
            for stop in range(start + 1, end + 1):
                rows = [int(site[start:stop, of_class].sum()) for site in of_sites]
                if is_span(start, stop) and (max(rows) >= least or all(r * len(rows) >= least for r in rows)):
                    return True
        return False

    ends, first = [], 0
    for end in range(1, n_bins + 1):
        if all(shown(first, end, of_class) for of_class in range(n_classes)):
            ends.append(end)
            first = end
    if ends:
        ends[-1] = n_bins
    return ends


def sites(seed: int, n_bins: int, n_sites: int, n_classes: int, most: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, most + 1, (n_bins + 1, n_classes)) for _ in range(n_sites)]


@given(
    seed=st.integers(0, 9999),
    n_bins=st.integers(1, 40),
    n_sites=st.integers(1, 4),
    n_classes=st.integers(2, 3),
    most=st.integers(0, 12),
    least=st.integers(1, 30),
)
def test_cells_are_those_of_a_naive_twin_and_hold_enough(seed, n_bins, n_sites, n_classes, most, least) -> None:
    of_sites = sites(seed, n_bins, n_sites, n_classes, most)
    cells = cells_of(of_sites, least)
    ends = naive_ends(of_sites, least)
    values = [cell for cell in cells if cell.first < cell.end]
    assert [cell.end for cell in values] == (ends or [n_bins])
    assert [cell.first for cell in values] == [0, *[cell.end for cell in values[:-1]]]
    pooled = np.sum([rows_of_cells(rows, cells) for rows in of_sites], axis=0)
    assert (pooled.sum(axis=0) == np.sum(of_sites, axis=(0, 1))).all(), "every row is counted once"
    if ends:
        assert pooled.min() >= least
    else:
        assert len(cells) == 1
    assert sum(cell.has_missing for cell in cells) == any(rows[-1].any() for rows in of_sites)


def test_the_twin_has_something_to_find() -> None:
    assert len(cells_of(sites(0, 64, 3, 2, 20), 10)) > 15
    assert len(cells_of(sites(0, 64, 3, 2, 1), 5000)) == 1


@pytest.mark.parametrize("n_bins", [1, 2, 3, 7, 8, 255, 256])
def test_spans_are_runs_of_powers_of_two_and_to_both_ends(n_bins: int) -> None:
    spans = list(map(tuple, spans_of(n_bins).tolist()))
    assert len(set(spans)) == len(spans) <= 6 * n_bins
    assert {(first, first + 1) for first in range(n_bins)} <= set(spans)
    assert {(0, cut) for cut in range(1, n_bins + 1)} | {(cut, n_bins) for cut in range(n_bins)} <= set(spans)
    assert all(0 <= first < end <= n_bins for first, end in spans)


def test_small_sites_together_make_bins_that_no_site_could_fill_alone() -> None:
    """Ten sites with two rows a bin: by themselves they have ten rows in no five bins."""
    of_sites = [np.full((9, 2), 2) for _ in range(10)]
    assert len(cells_of(of_sites, 20)) == 8 + 1
    alone = are_enough(np.any([local_bits(of_sites[0], 20, 1)], axis=0))
    assert not alone.any()


def test_a_class_that_sits_in_the_upper_bins_leaves_more_than_one_cell() -> None:
    rows = np.zeros((33, 2), dtype=np.int64)
    rows[:32, 0], rows[24:32, 1] = 20, 10
    cells = cells_of([rows, rows], 10)
    assert [cell.end for cell in cells] == [25, 26, 27, 28, 29, 30, 31, 32]


def test_missing_values_that_are_too_few_are_counted_with_the_lowest_bin() -> None:
    rows = np.full((5, 2), 50)
    rows[-1] = [50, 1]
    assert cells_of([rows], 10)[0] == Cell(0, 1, True)
    rows[-1] = [50, 50]
    assert cells_of([rows], 10)[-1] == Cell(4, 4, True)
    rows[-1] = 0
    assert not any(cell.has_missing for cell in cells_of([rows], 10))


def test_rows_are_counted_by_bin_and_class() -> None:
    rows = rows_of_bins(np.array([0, 2, 2, 3, 1]), np.array([0, 1, 1, 0, 1]), 3, 2)
    assert rows.tolist() == [[1, 0], [0, 1], [0, 2], [1, 0]]
    assert rows_of_bins(np.array([], dtype=np.int64), np.array([], dtype=np.int64), 3, 2).tolist() == [[0, 0]] * 4
    assert rows_of_spans(rows, np.array([[0, 3], [2, 3]])).tolist() == [[1, 3], [0, 2], [1, 0]]


def least_of(of_sites: list[np.ndarray], least: int) -> np.ndarray:
    n_bins = len(of_sites[0]) - 1
    spans = spans_of(n_bins)
    bits = [local_bits(rows_of_spans(rows, spans), least, len(of_sites)) for rows in of_sites]
    enough, cells = are_enough(np.any(bits, axis=0)), cells_of(of_sites, least)
    pooled = np.sum([rows_of_cells(rows, cells) for rows in of_sites], axis=0)
    return least_values(
        spans, enough, cells, pooled, int(np.sum([rows[-1] for rows in of_sites])), least, len(of_sites)
    )


@given(
    seed=st.integers(0, 9999),
    n_bins=st.integers(2, 12),
    n_sites=st.integers(1, 3),
    n_classes=st.integers(2, 3),
    least=st.integers(2, 12),
)
def test_a_bound_is_never_above_the_best_cut_of_the_pooled_rows(seed, n_bins, n_sites, n_classes, least) -> None:
    """Against the true information value of single cut points, missing values on either side."""
    random = np.random.default_rng(seed)
    # Each class sits around a place of its own, so that some separate well.
    centres = random.random((n_classes, 1)) * n_bins
    chances = np.exp(-(((np.arange(n_bins + 1) - centres) / 1.2) ** 2)).T * random.integers(20, 400)
    of_sites = [random.poisson(chances) for _ in range(n_sites)]
    pooled = np.sum(of_sites, axis=0)
    if (pooled.sum(axis=0) < least * n_sites).any():
        return
    bounds = least_of(of_sites, least)
    for one in range(n_classes):
        best = 0.0
        for cut in range(1, n_bins):
            for side in (pooled[:cut], pooled[cut:-1]):
                p = side[:, one].sum() / pooled[:, one].sum()
                q = np.delete(side, one, axis=1).sum() / np.delete(pooled, one, axis=1).sum()
                if p > q:
                    with np.errstate(divide="ignore"):
                        best = max(best, (p - q) * np.log(p * (1 - q) / (q * (1 - p))) if q * (1 - p) else np.inf)
        assert bounds[one] <= best + 1e-9


def test_a_column_that_separates_the_classes_has_one_cell_and_a_large_bound() -> None:
    rows = np.zeros((21, 2), dtype=np.int64)
    rows[:10, 0], rows[10:20, 1] = 40, 30
    of_sites = [rows, rows, rows]
    assert len(cells_of(of_sites, 10)) == 1
    share, of_others = 1 - 21 / 1200, 21 / 900
    assert least_of(of_sites, 10)[0] == pytest.approx(
        (share - of_others) * np.log(share * (1 - of_others) / (of_others * (1 - share)))
    )
    assert least_of(of_sites, 10).min() > 6
    mixed = np.full((21, 2), 30)
    assert least_of([mixed] * 3, 10).tolist() == [0, 0]


# Weights of evidence and information values: known answers, identities, an independent sum.


COUNTS = st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=30).map(np.array)


def test_a_textbook_table() -> None:
    counts = np.array([[40, 10], [30, 20], [30, 70]])
    weights = [math.log(0.1 / 0.4), math.log(0.2 / 0.3), math.log(0.7 / 0.3)]
    assert weights_of_evidence(counts)[:, 1] == pytest.approx(weights, rel=1e-14)
    value = -0.3 * weights[0] - 0.1 * weights[1] + 0.4 * weights[2]
    assert information_values(counts) == pytest.approx([value, value], rel=1e-14)
    assert values_by_chance(counts).tolist() == pytest.approx([0.04, 0.04])


@given(COUNTS)
def test_an_information_value_is_the_symmetric_divergence(counts: np.ndarray) -> None:
    shares = counts / counts.sum(axis=0)
    exact = entropy(shares[:, 0], shares[:, 1]) + entropy(shares[:, 1], shares[:, 0])
    assert information_values(counts)[0] == pytest.approx(exact, rel=1e-6, abs=1e-9)
    assert np.allclose(weights_of_evidence(counts)[:, 0], -weights_of_evidence(counts)[:, 1])


@given(COUNTS, st.integers(1, 5))
def test_what_tells_nothing_has_no_value(counts: np.ndarray, factor: int) -> None:
    alike = np.stack([counts[:, 0], factor * counts[:, 0]], axis=1)
    assert np.abs(information_values(alike)).max() < 1e-12


def test_several_classes_are_compared_with_all_others() -> None:
    counts = np.random.default_rng(0).integers(1, 100, (6, 4))
    for of_class in range(4):
        two = np.stack([counts.sum(axis=1) - counts[:, of_class], counts[:, of_class]], axis=1)
        assert information_values(counts)[of_class] == pytest.approx(information_values(two)[1])
        assert weights_of_evidence(counts)[:, of_class] == pytest.approx(weights_of_evidence(two)[:, 1])


def test_chance_gives_about_the_value_that_is_stated() -> None:
    random, found = np.random.default_rng(1), []
    for _ in range(400):
        cells = random.integers(0, 12, 6000)
        labels = random.random(6000) < 0.3
        counts = np.stack([np.bincount(cells[labels == of], minlength=12) for of in (False, True)], axis=1)
        found.append(information_values(counts)[1] / values_by_chance(counts)[1])
    assert 0.9 < np.mean(found) < 1.1  # the mean of 400 with a deviation of 0.43 each: five standard errors


def test_a_shift_is_seen_also_where_a_site_has_no_row_in_a_cell() -> None:
    rest = np.array([100, 100, 100])
    assert stability_index(rest, rest) == 0
    assert stability_index(np.array([1000, 1000, 1000]), rest) < 1e-4
    assert 0.25 < stability_index(np.array([0, 50, 100]), rest) < 3


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=8))
def test_monotone_bins_are_the_best_of_all(counts: list[tuple[int, int]]) -> None:
    """Against all ways to join neighbours, and the control: the bins themselves are not always monotone."""
    rows = np.array(counts)
    found = monotone_groups(rows)
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == len(rows)

    def joined(ends: list[int]) -> np.ndarray:
        return np.stack([rows[first:end].sum(axis=0) for first, end in zip([0, *ends], ends, strict=False)])

    def is_monotone(of: np.ndarray) -> bool:
        rates = of[:, 0] / of.sum(axis=1)
        return bool((np.diff(rates) >= 0).all() or (np.diff(rates) <= 0).all())

    inner = range(1, len(rows))
    ways = [[*chosen, len(rows)] for n in range(len(rows)) for chosen in combinations(inner, n)]
    best = max(information_values(joined(ends))[0] for ends in ways if is_monotone(joined(ends)))
    ours = joined([end for _, end in found])
    assert is_monotone(ours) and information_values(ours)[0] == pytest.approx(best, abs=1e-9)


def test_bins_that_rise_already_stay_and_a_wave_does_not() -> None:
    assert monotone_groups(np.array([[1, 9], [5, 5], [9, 1]])) == [(0, 1), (1, 2), (2, 3)]
    assert len(monotone_groups(np.array([[1, 9], [9, 1], [2, 9], [9, 2]]))) < 4
