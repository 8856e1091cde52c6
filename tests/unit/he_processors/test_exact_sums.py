"""Sums in one word and in two, compared with Python's integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from he_processors.fixed_point import (
    are_within,
    as_words,
    exact_sum,
    is_zero,
    join,
    lower_words,
    segments_sum_to,
    split,
    to_float,
    words_for,
)

ONE_WORD = st.integers(-(2**62), 2**62)
TWO_WORDS = st.integers(-(2**71), 2**71)
SUMS = st.one_of(
    st.tuples(st.just(1), st.lists(ONE_WORD, min_size=1, max_size=6)),
    st.tuples(st.just(2), st.lists(TWO_WORDS, min_size=1, max_size=6)),
)


def in_any_form(values: list[int], n_words: int, seed: int) -> np.ndarray:
    """Write integers in words, two of them with what one has more the other has less."""
    words = split(values, n_words)
    if n_words == 2:
        moved = np.random.default_rng(seed).integers(-(2**30), 2**30, len(values))
        words = words + np.stack([moved << 20, -moved])
    return words


@given(SUMS, st.integers(0, 2**20))
def test_words_are_read_as_integers_and_rounded_once(sums: tuple[int, list[int]], seed: int) -> None:
    n_words, values = sums
    words = in_any_form(values, n_words, seed)
    assert [join(words[:, i]) for i in range(len(values))] == values
    assert to_float(words).tolist() == [float(Fraction(value)) for value in values]
    assert is_zero(words).tolist() == [value == 0 for value in values]
    assert is_zero(words - words).all()


@given(SUMS, TWO_WORDS, st.integers(0, 2**71), st.integers(0, 2**20))
def test_ranges_and_segments(sums: tuple[int, list[int]], low: int, width: int, seed: int) -> None:
    n_words, values = sums
    words = in_any_form(values, n_words, seed)
    assert are_within(words, low, low + width) == all(low <= value <= low + width for value in values)
    assert are_within(words, min(values), max(values))
    assert not are_within(words, min(values) + 1, 2**80)
    assert not are_within(words, -(2**80), max(values) - 1)
    starts = np.array([0, len(values) // 2] if len(values) > 1 else [0], dtype=np.int64)
    parts = np.split(np.array(values, dtype=object), starts[1:])
    total = sum(parts[0])
    assert segments_sum_to(words, starts, total).tolist() == [sum(part) == total for part in parts]
    assert not segments_sum_to(words, starts[:1], sum(values) + 2**64).any(), "nothing is compared modulo 2^64"


def test_a_64_bit_sum_wraps_where_two_words_do_not() -> None:
    """The control: eleven million rows at 40 fraction bits."""
    n_rows, hessian = 11_000_000, 1 << 40
    due = n_rows * hessian
    with np.errstate(over="ignore"):
        wrapped = int(np.int64(hessian) * np.int64(n_rows))
    assert wrapped != due
    assert words_for(due) == 2
    assert words_for(2**63 - 1) == 1
    words = np.array([[0], [n_rows * (hessian >> 20)]])
    assert (join(words[:, 0]), float(to_float(words)[0])) == (due, float(due))
    assert segments_sum_to(words, np.array([0]), due).all()
    assert not segments_sum_to(words, np.array([0]), wrapped).any()
    assert exact_sum(np.full(3, 2**62)) == 3 * 2**62


def test_lower_words_are_balanced() -> None:
    values = np.array([0, 1, -1, 2**19 - 1, 2**19, -(2**19), -(2**19) - 1, 2**40, -(2**40)])
    low = lower_words(values)
    assert low.min() >= -(2**19)
    assert low.max() < 2**19
    assert ((values - low) % 2**20 == 0).all()
    assert as_words(values).shape == (1, 9)
