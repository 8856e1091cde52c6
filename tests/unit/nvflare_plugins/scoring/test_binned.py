"""Bounds of metrics from binned counts hold for every order within the bins; the extreme ones reach them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from nvflare_plugins.scoring.columns import auc, average_precision, kolmogorov_smirnov

COUNTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6).filter(
    lambda bins: sum(n for n, _ in bins) > 0 and sum(p for _, p in bins) > 0
)


def scored(bins: list[tuple[int, int]], order: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and scores: in every bin positive rows above the negative ones, below them, or anywhere."""
    random = np.random.default_rng(seed)
    labels, scores = [], []
    for place, (n, p) in enumerate(bins):
        within = random.random(n + p)
        if order != "any":
            within = np.sort(within) if order == "best" else np.sort(within)[::-1]
        labels += [0] * n + [1] * p
        scores += list(place + within)
    return np.array(labels), np.array(scores)


def largest_difference(labels: np.ndarray, scores: np.ndarray) -> float:
    return max(abs((scores[labels == 0] <= at).mean() - (scores[labels == 1] <= at).mean()) for at in scores)


METRICS = [
    (auc, roc_auc_score),
    (average_precision, average_precision_score),
    (kolmogorov_smirnov, largest_difference),
]


@pytest.mark.parametrize(("bound", "exact"), METRICS, ids=["auc", "average precision", "ks"])
@given(bins=COUNTS, seed=st.integers(0, 1000))
def test_every_order_lies_within(bound, exact, bins, seed) -> None:
    found = bound(*np.array(bins, dtype=np.int64).T)
    assert found.low - 1e-9 <= exact(*scored(bins, "any", seed)) <= found.high + 1e-9


@pytest.mark.parametrize(("bound", "exact"), METRICS[:2], ids=["auc", "average precision"])
@given(bins=COUNTS)
def test_both_bounds_are_reached(bound, exact, bins) -> None:
    found = bound(*np.array(bins, dtype=np.int64).T)
    assert found.high == pytest.approx(exact(*scored(bins, "best")), abs=1e-9)
    assert found.low == pytest.approx(exact(*scored(bins, "worst")), abs=1e-9)


def test_known_answers() -> None:
    negative, positive = np.array([3, 1]), np.array([1, 3])
    assert (auc(negative, positive).low, auc(negative, positive).high) == (9 / 16, 15 / 16)
    found = kolmogorov_smirnov(negative, positive)
    assert (found.low, found.high) == (0.5, 0.75)
    large = average_precision(np.array([10**9, 10**6]), np.array([10**6, 10**9]))
    assert 0.99 < large.low < large.high <= 1
