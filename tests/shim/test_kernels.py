"""The kernels themselves on an emulated warp: every shape, edge operands, and any representative below R."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from he_processors.cuda.device import SHAPES, Shape
from tests.shim.shim_device import has_compiler, run_kernel

pytestmark = pytest.mark.skipif(not has_compiler(), reason="the emulation needs g++")

ALL_SHAPES = sorted({shape for pair in SHAPES for shape in (pair.narrow, pair.wide)}, key=lambda s: (s.limbs, s.lanes))
GUARD = 0xA5A5A5A5


def to_words(values: list[int], shape: Shape) -> NDArray[np.uint32]:
    joined = b"".join(value.to_bytes(shape.row_bytes, "little") for value in values)
    return np.frombuffer(joined, "<u4").reshape(-1, shape.limbs).copy()


def to_ints(words: NDArray[np.uint32]) -> list[int]:
    return [int.from_bytes(row.tobytes(), "little") for row in words]


class Numbers:
    """One modulus in one shape."""

    def __init__(self, shape: Shape, n: int) -> None:
        self.shape, self.n = shape, n
        self.radix = 1 << (32 * shape.limbs)
        self.tail = (to_words([n], shape), np.uint32(-pow(n, -1, 1 << 32) % (1 << 32)))
        self.one = to_words([self.radix % n], shape)
        self.r_squared = to_words([self.radix**2 % n], shape)

    def run(self, kernel: str, n_rows: int, *arguments: object, groups: int | None = None) -> NDArray[np.uint32]:
        """Run a kernel into ``n_rows`` rows and check that nothing before or after them was written."""
        guarded = np.full((n_rows + 2, self.shape.limbs), GUARD, dtype=np.uint32)
        run_kernel(self.shape, kernel, n_rows if groups is None else groups, (guarded[1:-1], *arguments, *self.tail))
        assert (guarded[[0, -1]] == GUARD).all(), "a kernel wrote outside its rows"
        return guarded[1:-1]

    def operands(self) -> list[int]:
        """Return edge representatives, up to R - 1 where the modulus is that long, else up to 2n - 1."""
        limit = self.radix if 4 * self.n >= self.radix else 2 * self.n
        half = 1 << (16 * self.shape.limbs)
        edges = [0, 1, self.n - 1, self.n, self.n + 1, limit - 1, limit - 2, half - 1, half, self.radix // 2 - 1]
        rng = random.Random(self.n)
        return [value for value in edges if value < limit] + [rng.randrange(limit) for _ in range(3)]


def moduli(shape: Shape) -> dict[str, int]:
    bits = 32 * shape.limbs
    rng = random.Random(bits)
    return {
        "R - 1": (1 << bits) - 1,
        "R / 2 + 1": (1 << (bits - 1)) + 1,
        "R / 4 - 1": (1 << (bits - 2)) - 1,
        "random": rng.getrandbits(bits) | 1 << (bits - 1) | 1,
        "short": rng.getrandbits(bits - 70) | 1,
        "three": 3,
    }


# Emulating long shapes takes longest: the longest carries, and a number far shorter than the shape, are quick there.
CASES = [
    pytest.param(
        (shape, name),
        marks=[pytest.mark.slow] if shape.limbs > 64 and name not in ("R - 1", "short") else [],
        id=f"{shape.limbs}/{shape.lanes} {name}",
    )
    for shape, name in product(ALL_SHAPES, moduli(ALL_SHAPES[0]))
]


@pytest.fixture(params=CASES)
def numbers(request: pytest.FixtureRequest) -> Numbers:
    shape, name = request.param
    return Numbers(shape, moduli(shape)[name])


def is_product(numbers: Numbers, result: int, a: int, b: int) -> bool:
    """Tell whether result = a * b / R mod n, in the range that the kernels promise."""
    limit = numbers.radix if 4 * numbers.n >= numbers.radix else 2 * numbers.n
    return result < limit and (result * numbers.radix - a * b) % numbers.n == 0


def test_products_of_edge_operands(numbers: Numbers) -> None:
    values = numbers.operands()
    pairs = list(product(values, values))
    a, b = (to_words([pair[side] for pair in pairs], numbers.shape) for side in (0, 1))
    results = to_ints(numbers.run("k_mul", len(pairs), a, b, np.uint64(1), np.uint64(len(pairs))))
    assert all(is_product(numbers, result, *pair) for result, pair in zip(results, pairs, strict=True))


def test_chain_of_products_in_place(numbers: Numbers) -> None:
    values = numbers.operands()
    x, y = to_words(values, numbers.shape), to_words(values[::-1], numbers.shape)
    expected = values
    for left, right in ((x, x), (x, y), (x, x), (y, x), (x, x)):  # out is x: an operand of every product
        a, b = to_ints(left), to_ints(right)
        count = np.uint64(len(values))
        run_kernel(numbers.shape, "k_mul", len(values), (x, left, right, np.uint64(1), count, *numbers.tail))
        expected = to_ints(x)
        assert all(is_product(numbers, *three) for three in zip(expected, a, b, strict=True))
    assert to_ints(y) == values[::-1]


def test_one_row_for_all(numbers: Numbers) -> None:
    values = numbers.operands()[:5]
    b = to_words([values[-1]], numbers.shape)
    results = to_ints(numbers.run("k_mul", 5, to_words(values, numbers.shape), b, np.uint64(0), np.uint64(5)))
    assert all(is_product(numbers, result, value, values[-1]) for result, value in zip(results, values, strict=True))


def test_leaving_gives_canonical_values(numbers: Numbers) -> None:
    values = numbers.operands()
    results = numbers.run("k_leave", len(values), to_words(values, numbers.shape), np.uint64(len(values)))
    inverse = pow(numbers.radix, -1, numbers.n)
    assert to_ints(results) == [value * inverse % numbers.n for value in values]


def test_entering_reduces_and_reports_values_from_the_modulus_up(numbers: Numbers) -> None:
    edges = [0, 1, numbers.n - 1, numbers.n // 2, numbers.n, numbers.n + 1, numbers.radix - 1]
    batches = [[value for value in edges if value < numbers.n]]
    batches += [[1, value, 0] for value in edges if numbers.n <= value < numbers.radix]
    for values in batches:
        flag = np.zeros(1, dtype=np.uint32)
        rows = to_words(values, numbers.shape)
        entered = numbers.run("k_enter", len(values), rows, numbers.r_squared, flag, np.uint64(len(values)))
        assert bool(flag[0]) == (max(values) >= numbers.n)
        pairs = zip(to_ints(entered), values, strict=True)
        assert all((result - value * numbers.radix) % numbers.n == 0 for result, value in pairs)


def test_sums_of_edge_operands(numbers: Numbers) -> None:
    pairs = list(product(numbers.operands(), repeat=2))
    a, b = (to_words([pair[side] for pair in pairs], numbers.shape) for side in (0, 1))
    results = numbers.run("k_add", len(pairs), a, b, np.uint64(1), np.uint64(len(pairs)))
    assert to_ints(results) == [(x + y) % numbers.n for x, y in pairs]


def test_segments_of_unequal_length_in_one_warp(numbers: Numbers) -> None:
    values = numbers.operands()
    rows = to_words(values, numbers.shape)
    length = np.array([9, 5, 5, 3, 2, 1, 1, 0, 0], dtype=np.int32)
    begin = np.array([0, 9, 1, 3, 0, 14, 2, 0, 15], dtype=np.int64)
    target = np.array([4, 3, 8, 0, 7, 1, 6, 2, 5], dtype=np.int32)
    order = np.random.default_rng(1).integers(0, len(values), 15).astype(np.int32)
    arguments = (rows, order, begin, length, target, np.uint64(len(length)), numbers.one)
    results = to_ints(numbers.run("k_segprod", len(length), *arguments))
    inverse = pow(numbers.radix, -1, numbers.n)
    for chunk, place in enumerate(target):
        expected = numbers.radix % numbers.n
        for row in order[begin[chunk] : begin[chunk] + length[chunk]]:
            expected = expected * values[row] * inverse % numbers.n
        assert (results[place] - expected) % numbers.n == 0
