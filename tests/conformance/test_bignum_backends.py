"""One contract for every big-number backend, compared with Python integers."""

from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
import pytest

from he_processors.bignum import registry
from he_processors.bignum.interface import ModBatch, add, constant, ints_from_rows, lift, product, rows_from_ints, scale
from he_processors.errors import BackendUnavailable, ProtocolError
from tests.support.he_toys import segment_products

# Keys of 2048, 3072 and 4096 bits, of which Paillier computes modulo n^2 and p^2; and widths beside whole limbs.
PAILLIER_BITS = (4096, 6144, 8192, 2048, 3072)
KEY_MODULUS_BITS = sorted({682, 683, 1364, 1366, 2732, *PAILLIER_BITS})


def _moduli() -> dict[str, int]:
    rng = random.Random(20)
    moduli = {f"random {bits}": rng.getrandbits(bits) | 1 << (bits - 1) | 1 for bits in KEY_MODULUS_BITS}
    # Edges of the representations: smallest, one word, all ones, barely longer than a whole number of limbs.
    moduli |= {"three": 3, "61 ones": 2**61 - 1, "2^64 + 13": 2**64 + 13, "2047 + 1": 2**2047 + 1}
    return moduli | {f"{bits} ones": 2**bits - 1 for bits in (520, 2048, 4096, 6144)}


MODULI = _moduli()
power = cache(pow)  # expected values are the same for every backend


@cache
def _open(backend: str, name: str) -> ModBatch:
    try:
        return registry.load_backend(backend)(MODULI[name])
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=registry.available_backends())
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", registry.BACKEND_NAMES)
def test_every_backend_runs_on_this_machine(name: str) -> None:
    """The only one that says so: the others are not even made for a backend that does not run."""
    if name not in registry.available_backends():
        pytest.skip(f"{name} does not run on this machine")


@pytest.fixture(params=MODULI)
def arithmetic(request: pytest.FixtureRequest, backend: str) -> ModBatch:
    return _open(backend, request.param)


def _for_powers() -> list[object]:
    """Powers are made of products, which are compared at every length: those of the longest moduli are slow tests."""
    slow = [name for name, modulus in MODULI.items() if modulus.bit_length() > 4096]
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in MODULI]


@pytest.fixture(params=_for_powers())
def raising(request: pytest.FixtureRequest, backend: str) -> ModBatch:
    return _open(backend, request.param)


def operands(modulus: int, n_random: int = 6) -> list[int]:
    """Return edge operands and random ones: carries run longest next to powers of two and next to the modulus."""
    bits = modulus.bit_length()
    edges = {0, 1, 2, modulus - 1, modulus - 2, modulus // 2, modulus // 2 + 1, (1 << (bits - 1)) - 1}
    edges |= {(1 << shift) - 1 for shift in (26, 28, 32, 52, 64, 104)} | {modulus - (1 << (bits // 2))}
    rng = random.Random(bits)
    chosen = sorted(edge for edge in edges if 0 <= edge < modulus)
    return chosen + [rng.randrange(modulus) for _ in range(n_random)]


def enter(arithmetic: ModBatch, values: list[int]):
    return arithmetic.from_wire(rows_from_ints(values, arithmetic.width))


def leave(arithmetic: ModBatch, residues) -> list[int]:
    rows = arithmetic.to_wire(residues)
    assert rows.dtype == np.uint8 and rows.shape == (len(residues), arithmetic.width)
    return ints_from_rows(rows)


def test_wire_round_trip(arithmetic: ModBatch) -> None:
    values = operands(arithmetic.modulus)
    assert leave(arithmetic, enter(arithmetic, values)) == values


def test_wire_refuses_values_from_the_modulus_up(arithmetic: ModBatch) -> None:
    for value in (arithmetic.modulus, (1 << 8 * arithmetic.width) - 1):
        if value >= arithmetic.modulus:
            with pytest.raises(ProtocolError):
                enter(arithmetic, [1, value, 0])


def test_wire_refuses_other_widths_and_types(arithmetic: ModBatch) -> None:
    for rows in (np.zeros((2, arithmetic.width + 1), np.uint8), np.zeros((2, arithmetic.width), np.int64)):
        with pytest.raises((ValueError, TypeError)):
            arithmetic.from_wire(rows)


def test_products_of_all_operand_pairs(arithmetic: ModBatch) -> None:
    values = operands(arithmetic.modulus, 3)
    left = [x for x in values for _ in values]
    right = [y for _ in values for y in values]
    products = arithmetic.mul(enter(arithmetic, left), enter(arithmetic, right))
    assert leave(arithmetic, products) == [x * y % arithmetic.modulus for x, y in zip(left, right, strict=True)]


def test_chained_products_with_aliased_operands(arithmetic: ModBatch) -> None:
    m = arithmetic.modulus
    xs, ys = operands(m), operands(m)[::-1]
    x, y = enter(arithmetic, xs), enter(arithmetic, ys)
    chain = arithmetic.mul(x, x)
    chain = arithmetic.mul(chain, y)
    chain = arithmetic.mul(chain, chain)
    chain = arithmetic.mul(y, chain)
    chain = arithmetic.mul(chain, chain)
    expected = [pow(y0 * pow(x0 * x0 * y0, 2, m), 2, m) for x0, y0 in zip(xs, ys, strict=True)]
    assert leave(arithmetic, chain) == expected
    assert leave(arithmetic, x) == xs and leave(arithmetic, y) == ys, "an input was overwritten"


def test_long_chain_never_leaves_its_range(arithmetic: ModBatch) -> None:
    m = arithmetic.modulus
    value = m - 1 if m > 3 else 2
    start = [value, m - 2, m // 2]
    chain, expected = enter(arithmetic, start), start
    factor = enter(arithmetic, [m - 1, m // 2 + 1, m - 2])
    for _ in range(20):
        chain = arithmetic.mul(arithmetic.mul(chain, factor), chain)
        expected = [e * f * e % m for e, f in zip(expected, (m - 1, m // 2 + 1, m - 2), strict=True)]
    assert leave(arithmetic, chain) == expected


def test_products_refuse_unequal_lengths(arithmetic: ModBatch) -> None:
    with pytest.raises(ValueError):
        arithmetic.mul(enter(arithmetic, [1, 2]), enter(arithmetic, [1, 2, 2]))


def test_take_and_concat(arithmetic: ModBatch) -> None:
    values = operands(arithmetic.modulus)
    residues = enter(arithmetic, values)
    index = np.array([3, 0, 0, len(values) - 1], dtype=np.int64)
    taken = arithmetic.take(residues, index)
    assert leave(arithmetic, taken) == [values[i] for i in index]
    assert leave(arithmetic, arithmetic.concat([taken, residues, taken])) == [
        *(values[i] for i in index),
        *values,
        *(values[i] for i in index),
    ]
    for bad in (-1, len(values)):
        with pytest.raises(IndexError):
            arithmetic.take(residues, np.array([0, bad], dtype=np.int64))


def test_segmented_products(arithmetic: ModBatch) -> None:
    m = arithmetic.modulus
    values = operands(m, 20)
    residues = enter(arithmetic, values)
    rng = np.random.default_rng(3)
    lengths = [0, 1, 2, 0, 3, 40, 1, 0, 7, 5, 0]
    starts = np.concatenate([[2], 2 + np.cumsum(lengths)]).astype(np.int64)  # rows before the first segment: unused
    order = rng.integers(0, len(values), starts[-1] + 3).astype(np.int32)  # and rows after the last one
    products = arithmetic.segprod(residues, order, starts)
    assert leave(arithmetic, products) == segment_products(values, order, starts, m)
    assert leave(arithmetic, residues) == values


def test_long_segments_among_short_ones(backend: str) -> None:
    arithmetic = _open(backend, "random 683")
    m = arithmetic.modulus
    values = operands(m, 30)[8:]
    residues = enter(arithmetic, [v for v in values if v])
    values = [v for v in values if v]
    lengths = [1300, 0, 1, 2, 513, 512, 511, 3]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    order = np.random.default_rng(4).integers(0, len(values), starts[-1]).astype(np.int32)
    products = arithmetic.segprod(residues, order, starts)
    assert leave(arithmetic, products) == segment_products(values, order, starts, m)


def test_segmented_products_refuse_bad_segments(arithmetic: ModBatch) -> None:
    residues = enter(arithmetic, [1, 2, 2])
    for starts in ([0, 2, 1], [0, 3], [-1, 2]):
        with pytest.raises(ValueError):
            arithmetic.segprod(residues, np.array([0, 1], np.int32), np.array(starts, np.int64))
    with pytest.raises(IndexError):
        arithmetic.segprod(residues, np.array([0, 3], np.int32), np.array([0, 2], np.int64))
    with pytest.raises(IndexError):
        arithmetic.segprod(residues, np.array([0, -1], np.int32), np.array([0, 2], np.int64))


@pytest.mark.parametrize("exponent_bits", [1, 13, 64, 200])
def test_fixed_base_powers(raising: ModBatch, exponent_bits: int) -> None:
    m = raising.modulus
    rng = random.Random(exponent_bits)
    exponents = [0, 1, (1 << exponent_bits) - 1, 1 << (exponent_bits - 1)]
    exponents += [rng.getrandbits(exponent_bits) for _ in range(9)]
    rows = rows_from_ints(exponents, (exponent_bits + 7) // 8)
    for base in (m - 1, rng.randrange(m), 1, 0)[: 2 if exponent_bits == 200 else 4]:  # tables of these take longest
        table = raising.fixed_base(base, exponent_bits)
        assert leave(raising, table.pow(rows)) == [power(base, exponent, m) for exponent in exponents]


def test_fixed_base_of_a_long_exponent_for_few_and_for_many_rows(backend: str) -> None:
    arithmetic = _open(backend, "random 1366")
    m = arithmetic.modulus
    rng = random.Random(5)
    table = arithmetic.fixed_base(5, 341)
    for n in (1, 7, 30):
        exponents = [rng.getrandbits(341) for _ in range(n)]
        assert leave(arithmetic, table.pow(rows_from_ints(exponents, 43))) == [power(5, e, m) for e in exponents]


def test_fixed_base_refuses_longer_exponents(arithmetic: ModBatch) -> None:
    table = arithmetic.fixed_base(2, 13)
    with pytest.raises(ValueError):
        table.pow(rows_from_ints([1, 1 << 13], 2))
    with pytest.raises(ValueError):
        table.pow(rows_from_ints([1, 1], 3))


def test_constant_powers(raising: ModBatch) -> None:
    m = raising.modulus
    values = operands(m)
    residues = enter(raising, values)
    for exponent in (0, 1, 2, 3, 16, 255, 256, 257, (1 << 61) - 1, random.Random(6).getrandbits(150)):
        assert leave(raising, raising.pow_const(residues, exponent)) == [power(v, exponent, m) for v in values]
    assert leave(raising, residues) == values
    with pytest.raises(ValueError):
        raising.pow_const(residues, -1)


@pytest.mark.parametrize(("n", "group", "shift_bits"), [(1, 1, 1), (5, 3, 7), (9, 8, 61), (17, 4, 52), (6, 2, 119)])
def test_horner_packing(raising: ModBatch, n: int, group: int, shift_bits: int) -> None:
    m = raising.modulus
    values = (operands(m, 20) * 2)[-n:]
    expected = []
    for begin in range(0, n, group):
        total = 1 % m
        for j, value in enumerate(values[begin : begin + group]):
            total = total * power(value, 1 << (shift_bits * j), m) % m
        expected.append(total)
    assert leave(raising, raising.horner(enter(raising, values), group, shift_bits)) == expected
    with pytest.raises(ValueError):
        raising.horner(enter(raising, values), 0, shift_bits)


def test_empty_batches(arithmetic: ModBatch) -> None:
    empty = enter(arithmetic, [])
    one = enter(arithmetic, [1])
    assert len(empty) == 0
    assert leave(arithmetic, arithmetic.mul(empty, empty)) == []
    assert leave(arithmetic, arithmetic.pow_const(empty, 5)) == []
    assert leave(arithmetic, arithmetic.horner(empty, 4, 9)) == []
    assert leave(arithmetic, arithmetic.concat([empty, one, empty])) == [1]
    assert leave(arithmetic, arithmetic.take(one, np.array([], dtype=np.int64))) == []
    assert leave(arithmetic, arithmetic.fixed_base(2, 9).pow(np.zeros((0, 2), np.uint8))) == []
    no_rows, no_segments = np.array([], np.int32), np.array([0], np.int64)
    assert leave(arithmetic, arithmetic.segprod(one, no_rows, no_segments)) == []
    assert leave(arithmetic, arithmetic.segprod(empty, no_rows, np.array([0, 0, 0], np.int64))) == [1, 1]


def test_batch_operations_beyond_the_interface(arithmetic: ModBatch) -> None:
    m = arithmetic.modulus
    xs, ys = operands(m), operands(m)[::-1]
    x, y = enter(arithmetic, xs), enter(arithmetic, ys)
    factor = m - 2
    assert leave(arithmetic, scale(arithmetic, x, constant(arithmetic, factor))) == [v * factor % m for v in xs]
    assert leave(arithmetic, add(arithmetic, x, y)) == [(a + b) % m for a, b in zip(xs, ys, strict=True)]
    assert leave(arithmetic, add(arithmetic, x, constant(arithmetic, 1))) == [(v + 1) % m for v in xs]
    chained = arithmetic.mul(add(arithmetic, x, y), add(arithmetic, arithmetic.mul(x, y), y))
    assert leave(arithmetic, chained) == [(a + b) * (a * b + b) % m for a, b in zip(xs, ys, strict=True)]
    units = [v or 1 for v in xs]
    assert product(arithmetic, enter(arithmetic, units)) == math.prod(units) % m


def test_lift_to_a_larger_modulus(backend: str) -> None:
    small, large = _open(backend, "random 2048"), _open(backend, "random 4096")
    values = operands(small.modulus)
    residues = enter(small, values)
    squares = small.mul(residues, residues)
    assert leave(large, lift(large, small, squares)) == [v * v % small.modulus for v in values]


def test_even_and_tiny_moduli_are_refused(backend: str) -> None:
    for modulus in (-3, 0, 1, 2, 10, 2**64):
        with pytest.raises(ValueError):
            registry.load_backend(backend)(modulus)
