from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from he_processors import fixed_point
from he_processors.bignum.interface import rows_from_ints
from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.fixed_point import REFUSED, Grid, Grids, PackingLayout, PairFormat, as_words, bit_field, join

FORMAT = PairFormat.logistic(fraction_bits=40, max_additions=227_845)


def test_widths_of_the_creditcard_shape() -> None:
    # g: 2 * 227,845 * 2^40 < 2^59; h: 227,845 * 2^38 < 2^56.
    assert (FORMAT.pair_bits, FORMAT.h_bits) == (115, 56)


def test_a_million_rows_with_unit_bounds_take_127_bits() -> None:
    pair_format = PairFormat(40, 2**22 - 1, g_bound=1.0, h_low=0.0, h_high=1.0)
    assert pair_format.pair_bits == 63 + 62


@given(
    st.lists(st.tuples(st.floats(-1, 1, width=32), st.floats(0, 0.25, width=32)), min_size=1, max_size=20),
    st.integers(24, 44),
)
def test_plaintexts_are_g_shifted_plus_h(pairs: list[tuple[float, float]], fraction_bits: int) -> None:
    pair_format = PairFormat.logistic(fraction_bits, 1000)
    g, h = pair_format.encode_pairs(np.array([g for g, _ in pairs]), np.array([h for _, h in pairs]))
    rows = pair_format.plaintext_rows(g, h)
    plaintexts = [int.from_bytes(row.tobytes(), "little", signed=True) for row in rows]
    assert plaintexts == [(int(a) << pair_format.h_bits) + int(b) for a, b in zip(g, h, strict=True)]


SIGNED = PairFormat(0, 1, g_bound=2.0**62, h_low=-(2.0**61), h_high=2.0**61)
LONG = [PairFormat(40, n_rows, g_bound=1.0, h_low=0.0, h_high=1.0) for n_rows in (2**23, 2**24, 2**30, 2**31 - 1)]


@given(
    st.tuples(st.just(SIGNED), st.integers(-(2**62), 2**62), st.integers(-(2**61), 2**61))
    | st.tuples(st.sampled_from(LONG), st.integers(-(2**40), 2**40), st.integers(0, 2**40))
)
def test_plaintexts_of_signed_h_and_of_sums_that_leave_64_bits(case: tuple[PairFormat, int, int]) -> None:
    pair_format, g, h = case
    assert pair_format is SIGNED or (pair_format.n_words, pair_format.h_bits >= 64) == (2, True)
    row = pair_format.plaintext_rows(np.array([g]), np.array([h]))[0]
    assert int.from_bytes(row.tobytes(), "little", signed=True) == (g << pair_format.h_bits) + h


def test_encoding_rounds_half_to_even_and_decodes_exactly() -> None:
    pair_format = PairFormat(2, 10, 1.0, 0.0, 1.0)
    g, _ = pair_format.encode_pairs(np.array([0.125, 0.375, -0.125, 1.0]), np.zeros(4))
    assert g.tolist() == [0, 2, 0, 4]
    assert pair_format.decode(g).tolist() == [0.0, 0.5, 0.0, 1.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1.0000001, -1.5])
def test_gradients_out_of_bounds_are_refused_without_being_shown(bad: float) -> None:
    with pytest.raises(CapacityExceeded) as caught:
        FORMAT.encode_pairs(np.array([0.5, bad]), np.array([0.1, 0.1]))
    assert str(bad) not in str(caught.value)


@pytest.mark.parametrize("bad", [np.nan, -1e-9, 0.2500001])
def test_hessians_out_of_bounds_are_refused(bad: float) -> None:
    with pytest.raises(CapacityExceeded):
        FORMAT.encode_pairs(np.array([0.5]), np.array([bad]))


def test_capacity_is_checked_when_the_format_is_made() -> None:
    assert PairFormat.logistic(44, 2**18).n_words == 1
    assert PairFormat.logistic(46, 2**18).n_words == 2
    for too_much in ((56, 2**18), (40, 2**33)):
        with pytest.raises(CapacityExceeded, match="72 bits"):
            PairFormat.logistic(*too_much)
    with pytest.raises(CapacityExceeded, match="128 bits"):
        PairFormat(0, 2**8, g_bound=2.0**62, h_low=0.0, h_high=2.0**62)
    for arguments in ((40, 0, 1.0, 0.0, 1.0), (40, 5, -1.0, 0.0, 1.0), (40, 5, 1.0, 1.0, 0.5), (40, 5, np.inf, 0, 1)):
        with pytest.raises(ValueError):
            PairFormat(*arguments)


def test_bounds_of_a_sum_hold_for_rounded_bounds() -> None:
    pair_format = PairFormat(3, 7, g_bound=0.3, h_low=-0.1, h_high=0.3)  # 0.3 * 8 = 2.4 rounds to 2, bounded by 3
    assert (pair_format.g_range(7).low, pair_format.g_range(7).high) == (-21, 21)
    assert (pair_format.h_range(7).low, pair_format.h_range(7).high) == (-7, 21)


def test_more_rows_than_additions_are_refused() -> None:
    pair_format = PairFormat.logistic(40, 3)
    pair_format.encode_pairs(np.zeros(3), np.zeros(3))
    with pytest.raises(CapacityExceeded):
        pair_format.encode_pairs(np.zeros(4), np.zeros(4))


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError):
        FORMAT.encode_pairs(np.zeros(3), np.zeros(2))


# -- the rounding of many values ---------------------------------------------------------------------------------------


needs_extension = pytest.mark.skipif(fixed_point._grids is None, reason="the C extension was not built")

GRIDS = (Grid(-40, 3), Grid(-59, 2), Grid(0, 61))
HARD = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 2.0**-41, 3 * 2.0**-41, 5e-324, 2.0**52 - 0.5, 2.0**52 + 1, 7.999, 8.0, -8.0]


def _outcome(grids: Grids, values: NDArray[np.float64], running: bool, by_numpy: bool) -> object:
    try:
        if by_numpy:
            return grids.rounded_by_numpy(values, running=running).tolist()
        return (grids.encode_running(values) if running else grids.encode(values)).tolist()
    except CapacityExceeded as error:
        return str(error)


@needs_extension
@pytest.mark.parametrize("running", [False, True])
@given(
    st.lists(st.sampled_from(GRIDS), min_size=1, max_size=3),
    st.lists(st.one_of(st.sampled_from(HARD), st.floats(-4, 4), st.floats(allow_nan=True)), max_size=60),
)
def test_both_ways_to_round_agree(running: bool, of: list[Grid], values: list[float]) -> None:
    grids, array = Grids(tuple(of)), np.array(values[: len(values) // len(of) * len(of)])
    assert _outcome(grids, array, running, False) == _outcome(grids, array, running, True)


@needs_extension
@pytest.mark.parametrize("running", [False, True])
def test_both_ways_to_round_agree_over_blocks(running: bool) -> None:
    values = np.random.default_rng(1).normal(size=3 * 5003) * np.tile([1.0, 0.3, 1e15], 5003)
    grids = Grids(GRIDS)
    assert _outcome(grids, values, running, False) == _outcome(grids, values, running, True)
    backwards = values[::-1]  # not contiguous
    grids = Grids(GRIDS[::-1])
    assert _outcome(grids, backwards, running, False) == _outcome(grids, backwards, running, True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 8.1, -8.1])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9_999])
def test_a_value_that_does_not_fit_is_refused_wherever_it_stands(bad: float, place: int) -> None:
    values = np.ones(10_000)
    values[place] = bad
    for encode in (Grids((GRIDS[0],)).encode, Grids((GRIDS[0],)).encode_running):
        with pytest.raises(CapacityExceeded, match=r"not finite or larger than 2\^3"):
            encode(values)


def test_sums_over_runs_stay_within_a_step() -> None:
    grid = Grid(-10, 3)
    values = np.random.default_rng(2).normal(size=100_000)
    off = np.cumsum(Grids((grid,)).encode_running(values)) * 2.0**-10 - np.cumsum(values)
    assert np.abs(off).max() <= 2.0**-10


def test_integers_come_back_as_the_nearest_numbers() -> None:
    integers = np.array([0, -1, 3, 2**62 + 1, -(2**53) - 1, 5], dtype=np.int64)
    steps = np.tile([2.0**-40, 2.0**-59], 3)
    assert np.array_equal(Grids(GRIDS[:2]).decode(integers), integers.astype(np.float64) * steps)


@needs_extension
def test_the_extension_refuses_buffers_that_do_not_fit() -> None:
    good = np.zeros(4), np.ones(2), np.ones(2), True, np.zeros(4, dtype=np.int64)
    for place, wrong in enumerate([np.zeros(3), np.ones(3), np.ones(1), None, np.zeros(3, dtype=np.int64)]):
        if wrong is not None:
            with pytest.raises(ValueError, match="round"):
                fixed_point._grids.round(*(*good[:place], wrong, *good[place + 1 :]))
    with pytest.raises(ValueError, match="too fine"):
        fixed_point._grids.round(np.zeros(1), np.array([2.0**62]), np.array([2.0]), True, np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="scale"):
        fixed_point._grids.scale(np.zeros(3, dtype=np.int64), np.ones(2), np.zeros(3))


# -- several pairs in a plaintext --------------------------------------------------------------------------------------


SIGNED_PAIRS = PairFormat(30, 1000, g_bound=2.0, h_low=-1.0, h_high=3.0)
TWO_WORDS = PairFormat(40, 11_000_000, g_bound=1.0, h_low=0.0, h_high=1.0)
MOST_ROWS = PairFormat(40, 2**31 - 1, g_bound=1.0, h_low=-0.5, h_high=1.0)
WIDEST = PairFormat(0, 1, g_bound=2.0**62, h_low=0.0, h_high=2.0**62)


def pack(layout: PackingLayout, g: list[int], h: list[int]) -> list[int]:
    """Pack as Horner does in the exponent: plain integer arithmetic."""
    pair_format, t = layout.pair_format, layout.pairs_per_plaintext
    pairs = [(a << pair_format.h_bits) + b for a, b in zip(g, h, strict=True)]
    return [
        sum(pair << (pair_format.pair_bits * j) for j, pair in enumerate(pairs[begin : begin + t]))
        for begin in range(0, len(pairs), t)
    ]


@st.composite
def histograms(draw: st.DrawFn) -> tuple[PackingLayout, list[int], list[int]]:
    pair_format = draw(st.sampled_from([FORMAT, SIGNED_PAIRS, WIDEST, TWO_WORDS, MOST_ROWS]))
    layout = PackingLayout(pair_format, draw(st.integers(1, 17)))
    g_range, h_range = (r(pair_format.max_additions) for r in (pair_format.g_range, pair_format.h_range))
    g = st.one_of(st.integers(g_range.low, g_range.high), st.sampled_from([g_range.low, g_range.high, 0, -1]))
    h = st.one_of(st.integers(h_range.low, h_range.high), st.sampled_from([h_range.low, h_range.high, 0]))
    pairs = draw(st.lists(st.tuples(g, h), min_size=1, max_size=40))
    return layout, [a for a, _ in pairs], [b for _, b in pairs]


@given(histograms())
def test_round_trip_is_exact(case: tuple[PackingLayout, list[int], list[int]]) -> None:
    layout, g, h = case
    got_g, got_h = layout.unpack(pack(layout, g, h), len(g))
    assert got_g.dtype == got_h.dtype == np.int64
    assert got_g.shape == ((len(g),) if layout.pair_format.n_words == 1 else (2, len(g)))
    assert ([join(x) for x in as_words(got_g).T], [join(x) for x in as_words(got_h).T]) == (g, h)


def test_as_many_pairs_as_leave_64_spare_bits() -> None:
    assert PackingLayout.fit(FORMAT, 2046).pairs_per_plaintext == 17
    assert PackingLayout.fit(FORMAT, 1022).pairs_per_plaintext == 8
    assert PackingLayout.fit(FORMAT, 115 + 64).pairs_per_plaintext == 1
    with pytest.raises(CapacityExceeded):
        PackingLayout.fit(FORMAT, 115 + 63)


@pytest.mark.parametrize("spoil", [1 << 345, -(1 << 345), 1 << 400, -1 << 400])
def test_anything_in_the_spare_bits_is_refused(spoil: int) -> None:
    layout = PackingLayout(FORMAT, 3)
    plaintexts = pack(layout, [5, -6, 7], [1, 2, 3])
    layout.unpack(plaintexts, 3)
    with pytest.raises(ProtocolError, match=REFUSED):
        layout.unpack([plaintexts[0] + spoil], 3)


def test_random_plaintexts_are_refused() -> None:
    # What a wrapped or invented value decrypts to; each passes with probability 2^-64.
    layout = PackingLayout.fit(FORMAT, 1022)
    rng = np.random.default_rng(1)
    for _ in range(200):
        with pytest.raises(ProtocolError, match=REFUSED):
            layout.unpack([int.from_bytes(rng.bytes(127), "little", signed=True)], 8)


def test_counts_must_agree_and_unused_places_must_be_empty() -> None:
    layout = PackingLayout(FORMAT, 4)
    plaintexts = pack(layout, [1, 2, 3, 4, 5], [1, 1, 1, 1, 1])
    layout.unpack(plaintexts, 5)
    for n_bins in (4, 9, 3):
        with pytest.raises(ProtocolError, match=REFUSED):
            layout.unpack(plaintexts, n_bins)
    with pytest.raises(ProtocolError, match=REFUSED):
        layout.unpack(pack(layout, [1, 2, 3, 4, 5, 6], [0] * 6), 5)


@given(st.binary(min_size=30, max_size=30), st.integers(0, 160), st.integers(1, 64))
def test_bit_field_reads_bits(data: bytes, first_bit: int, n_bits: int) -> None:
    value = int.from_bytes(data, "little")
    field = bit_field(rows_from_ints([value, 0], 30), first_bit, n_bits)
    assert field.tolist() == [value >> first_bit & ((1 << n_bits) - 1), 0]
