from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.bignum.interface import rows_from_ints
from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.fixed_point import REFUSED, PackingLayout, PairFormat, as_words, bit_field, join

FORMAT = PairFormat.logistic(fraction_bits=40, max_additions=227_845)
SIGNED = PairFormat(30, 1000, g_bound=2.0, h_low=-1.0, h_high=3.0)
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
    pair_format = draw(st.sampled_from([FORMAT, SIGNED, WIDEST, TWO_WORDS, MOST_ROWS]))
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
