"""Weights of evidence and information values: known answers, identities, an independent sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from nvflare_plugins.kinds.profile.cells import (
    information_values,
    stability_index,
    values_by_chance,
    weights_of_evidence,
)

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
