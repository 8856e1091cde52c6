"""Inner products modulo 2^61 - 1: every instruction set and numpy against Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors import field61
from he_processors.field61 import MODULUS, NUMPY, block_dots, powers, residues, variants

P = MODULUS
each_variant = pytest.mark.parametrize("variant", variants())
EDGES_SIGNED = [0, 1, -1, P - 1, P, P + 1, 1 - P, -P, -P - 1, 2 * P, 2**60, -(2**60), 2**63 - 1, -(2**63)]
EDGES = [0, 1, P - 1, P, P + 1, 2 * P, 7 * P, 2**52 - 1, 2**52, 2**61, 2**63, 2**64 - 1]


def exact(values: list[int], coefficients: list[int]) -> list[int]:
    m = len(coefficients)
    blocks = [values[i : i + m] for i in range(0, len(values), m)]
    return [sum(x * c for x, c in zip(block, coefficients, strict=False)) % P for block in blocks]


def test_numpy_is_always_there_and_comes_last():
    assert variants()[-1] == NUMPY and len(set(variants())) == len(variants())


@each_variant
@pytest.mark.parametrize("n", [1, 3, 4, 7, 8, 9, 31, 32, 33, 64])
def test_edges(variant, n):
    """Every pair of edges, alone and as long runs in which sums could overflow."""
    for x in EDGES_SIGNED:
        for c in EDGES:
            found = block_dots(np.full(n, x, dtype=np.int64), np.full(n, c, dtype=np.uint64), variant)
            assert found.tolist() == [n * x * c % P], (x, c)


@each_variant
@pytest.mark.parametrize("n", [8 * 1024, 8 * 1024 + 1, 70_000])
def test_long_sums_of_the_largest_products_do_not_overflow(variant, n):
    for x, c in ((P - 1, P - 1), (2**63 - 1, 2**64 - 1), (-(2**63), 2**64 - 1), (-1, P), (2**52 - 1, 2**52 - 1)):
        found = block_dots(np.full(n, x, dtype=np.int64), np.full(n, c, dtype=np.uint64), variant)
        assert found.tolist() == [n * x * c % P], (x, c)


@settings(max_examples=60)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EDGES_SIGNED), max_size=70),
    st.lists(st.integers(0, 2**64 - 1) | st.sampled_from(EDGES), min_size=1, max_size=40),
)
def test_all_variants_are_exact_for_any_blocks(values, coefficients):
    for variant in variants():
        found = block_dots(np.array(values, dtype=np.int64), np.array(coefficients, dtype=np.uint64), variant)
        assert found.dtype == np.uint64 and found.tolist() == exact(values, coefficients), variant


@settings(max_examples=60)
@given(st.data())
def test_all_variants_combine_blocks_alike(data):
    word = st.integers(0, 2**64 - 1) | st.sampled_from(EDGES)
    signed = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EDGES_SIGNED)
    m, t = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 2))
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
        assert field61.combine(*arrays, *factors, variant).tolist() == expected, variant


@each_variant
def test_powers(variant):
    for base in (0, 1, 2, P - 1, P, 12345678901234567, 2**64 - 1):
        for n in (0, 1, 2, 5, 100):
            assert powers(base, n, variant).tolist() == [pow(base, k, P) for k in range(n)], (base, n)


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
        lambda: native.block_dots("none", words, words, words.copy()),
        lambda: native.block_dots(name, words, words[:3].copy(), words[:2].copy()),
        lambda: native.block_dots(name, words, words[:3].copy(), words[:4].copy()),
        lambda: native.block_dots(name, words, b"", b""),
        lambda: native.block_dots(name, np.zeros(65, np.uint8)[1:], words, words[:1].copy()),  # not aligned
        lambda: native.block_dots(name, bytes(7), words, words[:1].copy()),
        lambda: native.powers(2, bytearray(7)),
        lambda: native.combine("none", words, words, words, words[:2].copy(), 8, words[:1].copy()),
        lambda: native.combine(name, words, words, words, words[:1].copy(), 8, words[:1].copy()),
        lambda: native.combine(name, words, words, words[:7].copy(), words[:2].copy(), 8, words[:1].copy()),
        lambda: native.combine(name, words, words, words, words[:2].copy(), 0, words[:1].copy()),
        lambda: native.combine(name, words, words, words, words[:2].copy(), 8, words[:2].copy()),
    ]
    for call in calls:
        with pytest.raises((ValueError, BufferError, TypeError)):
            call()
