from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.bignum.interface import (
    add_mod,
    add_rows,
    ints_from_rows,
    less_than,
    random_rows_below,
    rows_from_ints,
    sum_rows,
    widen,
)
from tests.support.he_toys import SeededRandomness

widths = st.integers(1, 20)


@st.composite
def residues(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    modulus = draw(st.one_of(st.integers(1, 2**130), st.sampled_from([2**64, 2**64 - 1, 2**128, 2**64 + 1])))
    # Values next to the ends make the longest carries.
    value = st.one_of(st.integers(0, modulus - 1), st.sampled_from([0, modulus - 1, modulus // 2]))
    pairs = draw(st.lists(st.tuples(value, value), min_size=1, max_size=5))
    return modulus, [a for a, _ in pairs], [b for _, b in pairs]


@given(residues())
def test_add_mod_is_modular_addition(case: tuple[int, list[int], list[int]]) -> None:
    modulus, a, b = case
    width = max(1, (modulus.bit_length() + 7) // 8)
    total = add_mod(rows_from_ints(a, width), rows_from_ints(b, width), modulus)
    assert ints_from_rows(total) == [(x + y) % modulus for x, y in zip(a, b, strict=True)]


@given(st.lists(st.integers(0, 2**152 - 1), min_size=1, max_size=5), st.integers(0, 2**152 - 1))
def test_add_rows_adds_one_row_to_many(values: list[int], addend: int) -> None:
    total = add_rows(rows_from_ints(values, 20), rows_from_ints([addend], 20))
    assert ints_from_rows(total) == [value + addend for value in values]


@given(widths, st.data())
def test_less_than_compares_integers(width: int, data: st.DataObject) -> None:
    bound = data.draw(st.integers(0, 2 ** (8 * width) + 3))
    near = st.integers(-2, 2).map(lambda d: min(max(bound + d, 0), 2 ** (8 * width) - 1))
    values = data.draw(st.lists(st.one_of(st.integers(0, 2 ** (8 * width) - 1), near), min_size=1))
    assert less_than(rows_from_ints(values, width), bound).tolist() == [value < bound for value in values]


def test_less_than_compares_only_where_top_words_tie() -> None:
    bound = 5 << 128 | 7 << 64 | 9
    values = [bound - 1, bound, bound + 1, bound - (1 << 64), bound + (1 << 64), bound - (1 << 128)]
    assert less_than(rows_from_ints(values, 24), bound).tolist() == [True, False, False, True, False, True]


@given(st.lists(st.integers(0, 2**88 - 1), max_size=300))
def test_sum_rows_is_exact(values: list[int]) -> None:
    assert sum_rows(rows_from_ints(values, 11)) == sum(values)


def test_rows_refuse_integers_that_do_not_fit() -> None:
    with pytest.raises(OverflowError):
        rows_from_ints([256], 1)


def test_widen_pads_with_zeros() -> None:
    assert ints_from_rows(widen(rows_from_ints([258], 2), 9)) == [258]


def test_random_rows_stay_below_an_awkward_bound() -> None:
    bound = 2**64 + 1  # nearly half of all 65-bit draws are rejected
    rows = random_rows_below(2000, bound, SeededRandomness(1))
    assert rows.shape == (2000, 9)
    assert max(ints_from_rows(rows)) < bound


def test_random_rows_are_uniform_and_the_test_sees_modulo_bias() -> None:
    # chi-squared over 1018 cells, n = 60,000; the limit is the 1 - 1e-5 quantile of chi2(1017), about 1216.
    bound, n, limit = 1018, 60_000, 1216.0

    def statistic(values: np.ndarray) -> float:
        counts = np.bincount(values, minlength=bound)
        return float(((counts - n / bound) ** 2).sum() / (n / bound))

    rows = random_rows_below(n, bound, SeededRandomness(2))
    assert statistic(rows.view("<u2").reshape(-1).astype(np.int64)) < limit
    ten_bits = np.frombuffer(SeededRandomness(3).bytes(2 * n), dtype="<u2") & 1023
    assert statistic(ten_bits.astype(np.int64) % bound) > limit


def test_random_rows_need_a_choice() -> None:
    with pytest.raises(ValueError):
        random_rows_below(3, 1)
