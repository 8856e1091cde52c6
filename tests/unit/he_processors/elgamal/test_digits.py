from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from he_processors.bignum.interface import ints_from_rows
from he_processors.curve.interface import GROUP_ORDER, base_point, rows_of
from he_processors.elgamal.decryption import SearchBounds, SmallLogarithms
from he_processors.elgamal.encryption import DigitFormat
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.fixed_point import join
from he_processors.histogram.sums import NodeTotal
from tests.support.elgamal_toys import toy_curve

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


# -- scalars -----------------------------------------------------------------------------------------------------------


def test_integers_become_scalars_modulo_the_order() -> None:
    values = [0, 1, -1, GROUP_ORDER, GROUP_ORDER - 1, 2**256]
    assert ints_from_rows(rows_of(values)) == [value % GROUP_ORDER for value in values]
    assert rows_of([]).shape == (0, 32)


# -- small logarithms --------------------------------------------------------------------------------------------------


BITS = 6


@pytest.fixture(scope="module")
def logarithms() -> SmallLogarithms:
    curve = toy_curve()
    return SmallLogarithms(curve, curve.double(base_point(curve), 3), BITS)


def one_group(values: list[int], expected: int = 0, low: int = -5000, high: int = 5000) -> SearchBounds:
    distance = sum(abs(value - expected) for value in values)
    return SearchBounds(*(np.array([one]) for one in (expected, low, high, distance, len(values))))


def find(logarithms: SmallLogarithms, values: list[int], bounds: SearchBounds, **options: bool) -> NDArray[np.int64]:
    points = logarithms.times(np.array(values))
    return logarithms.find(points, np.zeros(len(values), dtype=np.int64), bounds, **options)


def test_every_value_around_every_step_is_found(logarithms: SmallLogarithms) -> None:
    values = [*range(-300, 301, 7), 63, 64, -63, -64, logarithms.step, -logarithms.step, 190, 191, -191, 4999, -5000]
    assert find(logarithms, values, one_group(values)).tolist() == values
    assert find(logarithms, values, one_group(values, expected=-170)).tolist() == values


def test_one_sided_ranges(logarithms: SmallLogarithms) -> None:
    values = [0, 1, 600, 5000]
    assert find(logarithms, values, one_group(values, expected=1400, low=0)).tolist() == values


def test_a_value_that_is_very_far_is_found_in_growing_strides(logarithms: SmallLogarithms) -> None:
    far = 300_001
    for values in ([far, 0], [-far, 17], [far, -far]):
        bounds = one_group(values, low=-400_000, high=400_000)
        assert find(logarithms, values, bounds).tolist() == values


@pytest.mark.parametrize(("values", "low", "high"), [([5001], -5000, 5000), ([-1], 0, 100), ([2**40], -5000, 5000)])
def test_values_out_of_range_are_not_found(logarithms: SmallLogarithms, values: list[int], low: int, high: int) -> None:
    bounds = one_group(values, low=low, high=high)
    with pytest.raises(ProtocolError) as caught:
        find(logarithms, values, bounds)
    assert str(values[0]) not in str(caught.value)


def test_a_group_may_not_take_more_steps_than_honest_sums_do(logarithms: SmallLogarithms) -> None:
    """Three points as far as one may be: within the range, but their sum is not."""
    far = [4000, 4000, 4000]
    assert find(logarithms, far, one_group(far)).tolist() == far
    honest = one_group([4000, 0, 0])
    with pytest.raises(ProtocolError):
        find(logarithms, far, honest)
    assert find(logarithms, [4000, 0, 0], honest).tolist() == [4000, 0, 0]


def test_groups_have_budgets_of_their_own(logarithms: SmallLogarithms) -> None:
    bounds = SearchBounds(*(np.array(one) for one in ([0, 50], [-9000, 0], [9000, 9000], [9000, 8000], [2, 2])))
    values = np.array([9000, 0, 60, 8000])
    assert logarithms.find(logarithms.times(values), np.array([0, 0, 1, 1]), bounds).tolist() == values.tolist()


def test_random_sums_never_exceed_their_budget(logarithms: SmallLogarithms) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.integers(-20, 21, (8, 40)).sum(axis=1) * rng.integers(0, 30, 8)
        bounds = one_group(values.tolist(), expected=int(values.sum()) // 8, low=-40_000, high=40_000)
        assert find(logarithms, values.tolist(), bounds).tolist() == values.tolist()


class CollidingCurve:
    """A curve whose coordinates are cut to a few bits, so that the table finds what is not in it."""

    def __init__(self) -> None:
        self._curve = toy_curve()

    def __getattr__(self, name: str) -> object:
        return getattr(self._curve, name)

    def y_words(self, points):
        words, signs = self._curve.y_words(points)
        return words & np.uint64(0x3FFF), signs


def test_chance_hits_are_found_out_when_hits_are_checked() -> None:
    curve = CollidingCurve()
    colliding = SmallLogarithms(curve, curve.double(base_point(curve), 3), BITS)  # its own entries stay distinct
    values = list(range(1000, 3000, 50))
    bounds = one_group(values)
    assert find(colliding, values, bounds).tolist() != values, "the control: unchecked hits mislead"
    assert find(colliding, values, bounds, checks_hits=True).tolist() == values
