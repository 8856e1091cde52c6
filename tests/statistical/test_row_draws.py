"""Which rows a round takes are independent coins of the site: the right rate, for every row, round, site and fraction.

Secrets are fixed, so results are too. The bounds are those at which a random run would fail with probability 1e-6 or
less, and each statistic is shown to reject a wrong distribution.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from nvflare_plugins.data.table import Table
from nvflare_plugins.pooled.row_floors import RowDraws

N_ROWS, N_ROUNDS = 2_000, 200
ALPHA = 1e-6


def rows(seed: int = 0, n_rows: int = N_ROWS) -> Table:
    features = np.random.default_rng(seed).normal(size=(n_rows, 3)).astype(np.float32)
    return Table(features, ("a", "b", "c"), ("float",) * 3, (features[:, 0] > 0).astype(np.float32), "y")


def drawn(secret: bytes = b"s" * 32, table: Table | None = None, fraction: float = 0.3) -> np.ndarray:
    """Shapes: bool[n_rounds, n_rows]."""
    draws = RowDraws(secret, table or rows(), fraction)
    return np.stack([draws.of_round(number) for number in range(N_ROUNDS)])


def rate_p_value(taken: np.ndarray, fraction: float) -> float:
    return stats.binomtest(int(taken.sum()), taken.size, fraction).pvalue


def counts_p_value(counts: np.ndarray, n: int, fraction: float) -> float:
    """Two-sided: counts of n coins each, neither too uneven nor too even."""
    statistic = (((counts - n * fraction) ** 2) / (n * fraction * (1 - fraction))).sum()
    tail = stats.chi2(counts.size).cdf(statistic)
    return 2 * min(tail, 1 - tail)


def together_p_value(one: np.ndarray, other: np.ndarray) -> float:
    """p-value of two draws of the same rows or rounds being independent."""
    table = [[int((one == a)[other == b].sum()) for b in (False, True)] for a in (False, True)]
    return stats.chi2_contingency(table).pvalue


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.98])
def test_the_rate_is_the_jobs(fraction):
    taken = drawn(fraction=fraction)
    assert rate_p_value(taken, fraction) > ALPHA
    assert counts_p_value(taken.sum(axis=0), N_ROUNDS, fraction) > ALPHA, "some rows come more often than others"
    assert counts_p_value(taken.sum(axis=1), N_ROWS, fraction) > ALPHA, "some rounds are larger than others"


@pytest.mark.parametrize("distance", [1, 2, 7, 100])
def test_rounds_and_neighbours_are_independent(distance):
    taken = drawn()
    assert together_p_value(taken[:-distance].ravel(), taken[distance:].ravel()) > ALPHA
    assert together_p_value(taken[:, :-distance].ravel(), taken[:, distance:].ravel()) > ALPHA


def test_sites_and_fractions_are_independent():
    assert together_p_value(drawn().ravel(), drawn(b"t" * 32).ravel()) > ALPHA


def test_a_row_keeps_its_draws_wherever_it_stands():
    table = rows()
    order = np.random.default_rng(1).permutation(N_ROWS)
    moved = Table(table.features[order], table.feature_names, table.feature_types, table.label[order], "y")
    assert np.array_equal(drawn(table=table)[:, order], drawn(table=moved))


def test_equal_rows_are_drawn_apart():
    table = rows(n_rows=2)
    twins = Table(
        np.repeat(table.features[:1], N_ROWS, axis=0),
        table.feature_names,
        table.feature_types,
        np.repeat(table.label[:1], N_ROWS),
        "y",
    )
    taken = drawn(table=twins)
    assert rate_p_value(taken, 0.3) > ALPHA and counts_p_value(taken.sum(axis=1), N_ROWS, 0.3) > ALPHA


def test_wrong_draws_are_rejected():
    fair = drawn()
    assert rate_p_value(drawn(fraction=0.31), 0.3) < ALPHA
    assert counts_p_value(np.repeat(fair[:1], N_ROUNDS, axis=0).sum(axis=0), N_ROUNDS, 0.3) < ALPHA
    assert counts_p_value(np.full(N_ROWS, int(0.3 * N_ROUNDS)), N_ROUNDS, 0.3) < ALPHA, "too even"
    assert together_p_value(fair[:-1].ravel(), (fair[1:] | fair[:-1]).ravel()) < ALPHA


def test_at_least_one_row_of_weight_takes_part_if_asked_for():
    table = rows(n_rows=20)
    weight = np.zeros(20, np.float32)
    weight[[3, 8]] = 1
    table = Table(table.features, table.feature_names, table.feature_types, table.label, "y", weight, "w")
    for fraction in (0.001, 0.3):
        draws = RowDraws(b"s" * 32, table, fraction, at_least_one=True)
        taken = np.stack([draws.of_round(number) for number in range(N_ROUNDS)])
        assert taken[:, [3, 8]].any(axis=1).all()
        assert 0.3 < taken[:, 3].mean() / taken[:, [3, 8]].sum(axis=1).mean() < 0.7
