"""Buckets are sent with exactly the probabilities of the mechanism, per feature with its own number of buckets.

Draws are seeded. Each statistic has a false-alarm probability of at most ALPHA = 1e-5 over random seeds, on both sides.
Each is shown to reject wrong probabilities at the same n: another epsilon, another number of buckets, and a wrong
bucket that is not chosen uniformly.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dp_components.bucket_ldp import (
    PublicValues,
    public_edges,
    release_buckets,
    release_cell_counts,
    transition_probabilities,
    wrong_bucket_rate,
)
from dp_components.split_candidates.candidates import FeatureBounds
from tests.support.seeded_randomness import SeededRandomness

ALPHA = 1e-5
N = 48_000
EPSILON = 4.0
FEATURES = [FeatureBounds(0, 16), PublicValues((1.0, 2.0, 5.0)), FeatureBounds(0, 16)]
SIZES = (16, 3, 16)
EDGES = public_edges(FEATURES, 16)


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray]:
    """True and sent buckets. Shapes: int64[N, 3] each."""
    rng = np.random.default_rng(0)
    columns = np.stack([rng.uniform(0, 16, N), rng.choice([1.0, 2.0, 5.0], N), np.full(N, 5.5)]).astype(np.float32)
    sent = release_buckets(columns, EDGES, EPSILON, randomness=SeededRandomness(1)).value
    return EDGES.bin_rows(columns).T.astype(np.int64), sent


def is_plausible(p_value: float) -> bool:
    return ALPHA / 2 < p_value < 1 - ALPHA / 2


def matrix_p_value(truth: np.ndarray, sent: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square of the table of true and sent buckets; rows are given, so each takes one degree of freedom."""
    q = probabilities.shape[0]
    table = np.bincount(truth * q + sent, minlength=q * q).reshape(q, q)
    rows = table.sum(axis=1) > 0
    expected = table.sum(axis=1, keepdims=True)[rows] * probabilities[rows]
    statistic = ((table[rows] - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, int(rows.sum()) * (q - 1)))


def leaning(n_buckets: int) -> np.ndarray:
    """The right rate of wrong buckets, but the next bucket three times as often as any other."""
    matrix = transition_probabilities(n_buckets, EPSILON)
    for true in range(n_buckets):
        wrong = np.ones(n_buckets)
        wrong[true], wrong[(true + 1) % n_buckets] = 0, 3
        matrix[true] = np.where(wrong > 0, wrong_bucket_rate(n_buckets, EPSILON) * wrong / wrong.sum(), matrix[true])
    return matrix


@pytest.mark.parametrize("feature", [0, 1, 2])
def test_the_whole_table_of_probabilities(drawn: tuple[np.ndarray, np.ndarray], feature: int) -> None:
    truth, sent = drawn[0][:, feature], drawn[1][:, feature]
    q = SIZES[feature]
    assert is_plausible(matrix_p_value(truth, sent, transition_probabilities(q, EPSILON)))
    for wrong in (2 / 3, 3 / 2):
        assert not is_plausible(matrix_p_value(truth, sent, transition_probabilities(q, wrong * EPSILON)))
    assert not is_plausible(matrix_p_value(truth, sent, leaning(q)))


@pytest.mark.parametrize("feature", [0, 1, 2])
def test_the_rate_of_wrong_buckets(drawn: tuple[np.ndarray, np.ndarray], feature: int) -> None:
    n_wrong = int(np.sum(drawn[0][:, feature] != drawn[1][:, feature]))

    def p_value(n_buckets: int) -> float:
        return float(stats.binomtest(n_wrong, N, wrong_bucket_rate(n_buckets, EPSILON)).pvalue)

    assert p_value(SIZES[feature]) > ALPHA
    # The formula with another number of buckets, as if every feature had 16, or one too few.
    assert p_value(SIZES[feature] - 1) < ALPHA
    assert p_value(3 if SIZES[feature] == 16 else 16) < ALPHA


def test_values_of_a_row_are_randomised_independently(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    """Fisher's exact test of wrong against wrong; the same coins for two features must be rejected."""
    is_wrong = drawn[0] != drawn[1]

    def p_value(a: np.ndarray, b: np.ndarray) -> float:
        table = np.bincount(2 * a + b, minlength=4).reshape(2, 2)
        return float(stats.fisher_exact(table).pvalue)

    assert p_value(is_wrong[:, 0], is_wrong[:, 2]) > ALPHA
    assert p_value(is_wrong[:, 0], is_wrong[:, 1]) > ALPHA
    assert p_value(is_wrong[:, 0], is_wrong[:, 0]) < ALPHA


def test_measured_epsilon_is_the_accounted_one(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    """The log ratio of the rates of sending bucket 3 from 3 and from elsewhere: within 5 standard errors of epsilon."""
    truth, sent = drawn[0][:, 0], drawn[1][:, 0]
    kept, moved = sent[truth == 3] == 3, sent[truth != 3] == 3
    measured = math.log(kept.mean() / moved.mean())
    error = math.sqrt((1 - kept.mean()) / kept.sum() + 1 / moved.sum())
    assert abs(measured - EPSILON) < 5 * error < EPSILON / 3


def test_the_noise_of_paid_edges() -> None:
    """Counts of nothing but noise: Laplace with parameter 2 / epsilon, since a changed value moves two counts."""
    features = [FeatureBounds(0.0, 1.0 + i) for i in range(40)]
    noise = release_cell_counts(np.zeros((40, 0), np.float32), features, 16, 0.02, randomness=SeededRandomness(3)).value
    assert noise.size > 8000
    # The scale is 100 counts, so whole numbers are 0.3 % off a continuous one at most: below what 15,000 draws see.
    uniform = np.random.default_rng(0).uniform(-0.5, 0.5, noise.size)
    for wrong, is_right in ((1.0, True), (2 / 3, False), (3 / 2, False), (1 / 2, False)):
        assert (stats.kstest(noise + uniform, stats.laplace(scale=wrong * 100).cdf).pvalue > ALPHA) == is_right
