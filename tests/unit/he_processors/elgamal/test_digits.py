from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.elgamal.encryption import DigitFormat
from he_processors.errors import ConfigurationError
from he_processors.fixed_point import join
from he_processors.histogram.sums import NodeTotal

PAIRS = st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(0, 2**40)), min_size=1, max_size=30)


@given(PAIRS)
def test_sums_of_digits_are_sums_of_values(pairs: list[tuple[int, int]]) -> None:
    g, h = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    digits = DigitFormat.of(40, len(pairs))
    columns = digits.digits_of(g, h)
    for column, bounds in zip(columns, digits.digit_ranges(1), strict=True):
        assert bounds.low <= column.min()
        assert column.max() <= bounds.high
    sums = [np.array([int(column.sum())]) for column in columns]
    total_g, total_h = digits.join(sums)
    assert (join(total_g[:, 0]), join(total_h[:, 0])) == (int(g.sum()), int(h.sum()))
    for one, bounds in zip(sums, digits.digit_ranges(len(pairs)), strict=True):
        assert bounds.low <= int(one[0]) <= bounds.high
    node = NodeTotal.of_rows(g, h)
    assert digits.digits_of_total(node.g, node.h, *node.lower) == [int(one[0]) for one in sums]


@given(PAIRS, st.integers(0, 30))
def test_totals_of_digits_subtract(pairs: list[tuple[int, int]], n_left: int) -> None:
    g, h = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    left, right = NodeTotal.of_rows(g[:n_left], h[:n_left]), NodeTotal.of_rows(g[n_left:], h[n_left:])
    assert NodeTotal.of_rows(g, h).minus(left) == right


def test_the_edges_of_a_digit() -> None:
    digits = DigitFormat.of(40, 10)
    edges = np.array([-(2**40), 2**40, 2**40 - 1, 2**19, 2**19 - 1, -(2**19), 0])
    low, high = digits.digits_of(edges, np.abs(edges))[:2]
    assert low.tolist() == [0, 0, -1, -(2**19), 2**19 - 1, -(2**19), 0]
    assert high.tolist() == [-(2**20), 2**20, 2**20, 1, 0, 0, 0]


def test_any_number_of_rows_keeps_its_bits() -> None:
    digits = DigitFormat.of(40, 11_000_000)
    assert digits.h_range(11_000_000).high == 11_000_000 << 40
    assert [one.bits <= 52 for one in DigitFormat.of(40, 2**31 - 1).digit_ranges(2**31 - 1)] == [True] * 4


def test_one_digit_at_14_bits() -> None:
    digits = DigitFormat.of(14, 100)
    g, h = digits.encode_pairs(np.array([-1.0, 0.5]), np.array([0.25, 1.0]))
    assert [column.tolist() for column in digits.digits_of(g, h)] == [[-(2**14), 2**13], [2**12, 2**14]]
    assert (digits.n_messages, digits.join([g, h])[0].shape) == (2, (1, 2))


@pytest.mark.parametrize(("fraction_bits", "n_rows"), [(39, 10), (21, 10), (52, 10), (40, 2**31)])
def test_other_formats_are_refused(fraction_bits: int, n_rows: int) -> None:
    with pytest.raises(ConfigurationError):
        DigitFormat.of(fraction_bits, n_rows)
