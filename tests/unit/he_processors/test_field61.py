"""Inner products modulo 2^61 - 1: every instruction set and numpy against Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors import field61
from he_processors.field61 import LARGEST, MODULUS, NUMPY, combine, powers, residues, variants

P = MODULUS
each_variant = pytest.mark.parametrize("variant", variants())
EDGES_SIGNED = [0, 1, -1, P - 1, P, P + 1, 1 - P, -P, -P - 1, 2 * P, 2**60, -(2**60), 2**63 - 1, -(2**63)]
EDGES = [0, 1, P - 1, P, P + 1, 2 * P, 7 * P, 2**52 - 1, 2**52, 2**61, 2**63, 2**64 - 1]


NONE = np.zeros(0, dtype=np.int64)


def sums_of(values: list[int], both: list[list[int]], variant: str) -> tuple[list[int], bool]:
    """Return both inner products of one block, and whether its values are in range."""
    scales = np.ones((2, 1 if values else 0), dtype=np.uint64)
    out, is_in_range = combine(np.array(values, np.int64), NONE, np.array(both, np.uint64), scales, variant)
    return out.tolist(), is_in_range


def exact(values: list[int], both: list[list[int]]) -> tuple[list[int], bool]:
    sums = [sum(x * c for x, c in zip(values, row, strict=False)) % P for row in both]
    return sums, all(abs(x) <= LARGEST for x in values)


def test_numpy_is_always_there_and_comes_last():
    assert variants()[-1] == NUMPY and len(set(variants())) == len(variants())


@each_variant
@pytest.mark.parametrize("n", [1, 3, 4, 7, 8, 9, 31, 32, 33, 64])
def test_edges(variant, n):
    """Every pair of edges, alone and as long runs in which sums could overflow."""
    for x in EDGES_SIGNED:
        for c, other in zip(EDGES, EDGES[1:] + EDGES[:1], strict=True):
            both = [[c] * n, [other] * n]
            assert sums_of([x] * n, both, variant) == exact([x] * n, both), (x, c)


@each_variant
@pytest.mark.parametrize("n", [8 * 1024, 8 * 1024 + 1, 70_000])
def test_long_sums_of_the_largest_products_do_not_overflow(variant, n):
    for x, c in ((P - 1, P - 1), (2**63 - 1, 2**64 - 1), (-(2**63), 2**64 - 1), (-1, P), (2**52 - 1, 2**52 - 1)):
        both = np.stack([np.full(n, c, dtype=np.uint64), np.ones(n, dtype=np.uint64)])
        found, _ = combine(np.full(n, x, dtype=np.int64), NONE, both, np.ones((2, 1), dtype=np.uint64), variant)
        assert found.tolist() == [n * x * c % P, n * x % P], (x, c)


@each_variant
@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 64, 100])
def test_one_value_out_of_range_is_told_wherever_it_stands(variant, n):
    for edge, is_in_range in ((LARGEST, True), (-LARGEST, True), (LARGEST + 1, False), (-LARGEST - 1, False)):
        for place in range(n):
            values = [0] * n
            values[place] = edge
            assert sums_of(values, [[1] * n] * 2, variant)[1] is is_in_range, (edge, place)
    more = np.full(n, 2**62, dtype=np.int64)  # these are residues
    both, scales = np.ones((2, n), dtype=np.uint64), np.ones((2, 1), dtype=np.uint64)
    assert combine(NONE, more, both, scales, variant)[1]


@given(st.data())
def test_all_variants_combine_blocks_alike(data):
    word = st.integers(0, 2**64 - 1) | st.sampled_from(EDGES)
    signed = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EDGES_SIGNED)
    m, t = data.draw(st.integers(1, 9)), 2
    values, more = (data.draw(st.lists(signed, max_size=20)) for _ in range(2))
    blocks = [part[i : i + m] for part in (values, more) for i in range(0, len(part), m)]
    rows = [[data.draw(word) for _ in range(m)] for _ in range(t)]
    scales = [[data.draw(word) for _ in blocks] for _ in range(t)]
    expected = [
        sum(s * sum(x * c for x, c in zip(block, row, strict=False)) for s, block in zip(of, blocks, strict=True)) % P
        for row, of in zip(rows, scales, strict=True)
    ]
    arrays = [np.array(part, dtype=np.int64) for part in (values, more)]
    factors = np.array(rows, dtype=np.uint64), np.array(scales, dtype=np.uint64).reshape(t, len(blocks))
    for variant in variants():
        found, is_in_range = combine(*arrays, *factors, variant)
        assert found.tolist() == expected and is_in_range is all(abs(x) <= LARGEST for x in values), variant


@each_variant
def test_powers(variant):
    bases = [0, 1, 2, P - 1, P, 12345678901234567, 2**64 - 1]
    for n in (0, 1, 2, 5, 7, 8, 9, 100):
        expected = [[pow(base, k, P) for k in range(n)] for base in bases]
        assert powers(np.array(bases, dtype=np.uint64), n, variant).tolist() == expected, n


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EDGES_SIGNED)), st.data())
def test_residues_and_their_sums_are_canonical(values, data):
    found = residues(np.array(values, dtype=np.int64))
    assert found.tolist() == [value % P for value in values]
    other = [data.draw(st.sampled_from([0, 1, P - 1])) for _ in values]
    total = field61.add(found, np.array(other, dtype=np.uint64))
    assert total.tolist() == [(value + o) % P for value, o in zip(values, other, strict=True)]


@pytest.mark.skipif(len(variants()) == 1, reason="the native extension was not built")
def test_the_c_functions_check_their_buffers():
    native, name, words = field61._field, variants()[0], np.zeros(8, dtype=np.int64)
    calls = [
        lambda: native.powers(words, bytearray(7)),
        lambda: native.powers(words[:2].copy(), words[:3].copy()),
        lambda: native.combine("none", words, NONE, words, words[:4].copy(), words[:2].copy()),
        lambda: native.combine(name, words, NONE, words, words[:3].copy(), words[:2].copy()),
        lambda: native.combine(name, words, NONE, words, words, words[:2].copy()),
        lambda: native.combine(name, words, NONE, words[:7].copy(), words[:4].copy(), words[:2].copy()),
        lambda: native.combine(name, words, NONE, NONE, words[:4].copy(), words[:2].copy()),
        lambda: native.combine(name, words, NONE, words, words[:4].copy(), words[:1].copy()),
        lambda: native.combine(name, words, words, words, words[:4].copy(), words[:2].copy()),
        lambda: native.combine(name, np.zeros(65, np.uint8)[1:], NONE, words, words[:4].copy(), words[:2].copy()),
        lambda: native.combine(name, bytes(7), NONE, words, words[:4].copy(), words[:2].copy()),
    ]
    for call in calls:
        with pytest.raises((ValueError, BufferError, TypeError)):
            call()
