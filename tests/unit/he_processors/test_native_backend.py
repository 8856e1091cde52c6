"""The native backend against Python's integers, on every instruction set of this machine."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from he_processors.bignum import native
from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.bignum.native import NativeBatch
from he_processors.errors import ProtocolError
from tests.support.native_toys import VARIANTS, draw, each_variant, ints, needs_the_extension, product, toy

SUPPORTED_BITS = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)

# Python's own powers of the longest numbers are most of these tests; the contract of all backends meets them too.
LENGTHS = [pytest.param(bits, marks=[pytest.mark.slow] if bits == 6144 else []) for bits in SUPPORTED_BITS]

pytestmark = needs_the_extension


def edge_moduli(bits: int) -> list[int]:
    rng = random.Random(bits)
    return [
        (1 << bits) - 1,
        (1 << bits) - 59,  # small difference to a power of two
        (1 << (bits - 1)) + 1,
        rng.getrandbits(bits) | 1 << (bits - 1) | 1,
        (rng.getrandbits(bits) | 1 << (bits - 1)) & ~((1 << 64) - 1) | 1,  # n = 1 modulo a limb: S is as long as can be
        rng.getrandbits(bits) | 1 << (bits - 1) | ((1 << 64) - 1),  # n = -1 modulo a limb: S is n
    ]


def edge_values(modulus: int) -> list[int]:
    """0, 1, n - 1, and values whose residue form is extreme: near the powers of two that R and the limbs make."""
    near = [(1 << shift) % modulus for shift in (28, 52, 64, modulus.bit_length() - 1, modulus.bit_length() + 60)]
    inverses = [pow(1 << shift, -1, modulus) for shift in (28 * 37, 52 * 20, 64 * 17, modulus.bit_length())]
    return [0, 1, 2, modulus - 1, modulus - 2, modulus >> 1, *near, *inverses]


# Products ----------------------------------------------------------------------------------------------------------


@each_variant
@pytest.mark.parametrize("bits", LENGTHS)
def test_edge_operands_at_every_supported_length(variant: str, bits: int) -> None:
    for modulus in edge_moduli(bits):
        arithmetic = native.load(variant, 1)(modulus)
        values = edge_values(modulus)
        left = [a for a in values for _ in values]
        right = values * len(values)
        a = arithmetic.from_wire(rows_from_ints(left, arithmetic.width))
        b = arithmetic.from_wire(rows_from_ints(right, arithmetic.width))
        assert ints(arithmetic, a) == left
        assert ints(arithmetic, arithmetic.mul(a, b)) == [x * y % modulus for x, y in zip(left, right, strict=True)]
        assert ints(arithmetic, arithmetic.add(a, b)) == [(x + y) % modulus for x, y in zip(left, right, strict=True)]
        assert ints(arithmetic, arithmetic.pow_const(a, 4)) == [pow(x, 4, modulus) for x in left]


@each_variant
@pytest.mark.parametrize("bits", LENGTHS)
def test_long_chains_with_aliasing(variant: str, bits: int) -> None:
    """Almost-reduced results feed the next product; one step alone would not show a missing carry or an alias fault."""
    for modulus in edge_moduli(bits):
        arithmetic = native.load(variant, 1)(modulus)
        expected = edge_values(modulus)
        factors, x = expected, arithmetic.from_wire(rows_from_ints(expected, arithmetic.width))
        c = x
        for step in range(6):
            x = arithmetic.mul(x, x)
            x = arithmetic.mul(x, c) if step % 2 else arithmetic.mul(c, x)
            x = arithmetic.add(x, x)
            expected = [2 * v * v * f % modulus for v, f in zip(expected, factors, strict=True)]
        assert ints(arithmetic, x) == expected
        squared = arithmetic.pow_const(x, 1 << 40)
        assert ints(arithmetic, squared) == [pow(v, 1 << 40, modulus) for v in expected]


@each_variant
def test_random_odd_sizes(variant: str) -> None:
    rng = random.Random(3)
    for bits in [2, 3, 5, 27, 28, 29, 52, 53, 63, 64, 65, 127, 400, *(rng.randrange(500, 3000) for _ in range(40))]:
        modulus = max(3, rng.getrandbits(bits) | 1 << (bits - 1) | 1)
        arithmetic = native.load(variant, 1)(modulus)
        values, x = draw(arithmetic, 9, bits)
        y = arithmetic.mul(arithmetic.mul(x, x), x)
        assert ints(arithmetic, y) == [pow(v, 3, modulus) for v in values]
        assert ints(arithmetic, arithmetic.pow_const(y, 12345)) == [pow(v, 3 * 12345, modulus) for v in values]


@each_variant
@pytest.mark.parametrize("n", range(18))
def test_every_number_of_rows_around_the_lanes(variant: str, n: int) -> None:
    arithmetic = toy(variant, threads=2)
    modulus = arithmetic.modulus
    values, x = draw(arithmetic, n)
    assert ints(arithmetic, x) == values
    assert ints(arithmetic, arithmetic.mul(x, x)) == [v * v % modulus for v in values]
    assert ints(arithmetic, arithmetic.pow_const(x, 65537)) == [pow(v, 65537, modulus) for v in values]
    exponents = np.random.default_rng(n).integers(0, 256, (n, 9), dtype=np.uint8)
    powers = arithmetic.fixed_base(5, 72).pow(exponents)
    assert ints(arithmetic, powers) == [pow(5, e, modulus) for e in ints_from_rows(exponents)]
    packed = arithmetic.horner(x, 3, 7)
    groups = [values[i : i + 3] for i in range(0, n, 3)]
    assert ints(arithmetic, packed) == [
        product([pow(v, 1 << 7 * j, modulus) for j, v in enumerate(group)], modulus) for group in groups
    ]
    segments = arithmetic.segprod(x, np.arange(n, dtype=np.int32), np.array([0, n // 2, n], dtype=np.int64))
    assert ints(arithmetic, segments) == [product(values[: n // 2], modulus), product(values[n // 2 :], modulus)]


# Segments ----------------------------------------------------------------------------------------------------------


def check_segments(arithmetic: NativeBatch, n_rows: int, lengths: list[int], skip: int = 0) -> None:
    values, x = draw(arithmetic, n_rows)
    rng = np.random.default_rng(len(lengths))
    order = rng.integers(0, n_rows, skip + sum(lengths) + skip).astype(np.int32)
    starts = (skip + np.concatenate([[0], np.cumsum(lengths)])).astype(np.int64)
    expected = [product([values[i] for i in order[a:b]], arithmetic.modulus) for a, b in pairwise(starts)]
    assert ints(arithmetic, arithmetic.segprod(x, order, starts)) == expected


@each_variant
@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [1],
        [0, 0, 5, 0],
        [1] * 50,
        [2] * 17,
        list(range(40)),
        [3000],
        [0, 12_000, 0, 1, 2, 0],
        [1, 5000, 3, 700, 0, 513, 512, 511, 2],
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_segments(variant: str, lengths: list[int], threads: int) -> None:
    check_segments(toy(variant, threads), 61, lengths, skip=4)


@each_variant
def test_segments_merged_more_than_once_and_at_paillier_lengths(variant: str) -> None:
    check_segments(toy(variant, 1, bits=512), 100, [20_000, 3])
    for bits in (4096, 6144):
        check_segments(toy(variant, 2, bits), 20, [0, 90, 1, 7, 7, 2])


# Powers ------------------------------------------------------------------------------------------------------------


@each_variant
def test_a_fixed_base_table_grows_with_use(variant: str) -> None:
    arithmetic = toy(variant)
    table = arithmetic.fixed_base(7, 48)
    rng = np.random.default_rng(1)
    for n in (1, 30, 3000, 2):
        exponents = rng.integers(0, 256, (n, 6), dtype=np.uint8)
        sample = slice(None, None, max(1, n // 20))
        got = ints_from_rows(arithmetic.to_wire(table.pow(exponents))[sample])
        assert got == [pow(7, e, arithmetic.modulus) for e in ints_from_rows(exponents[sample])]


@each_variant
@pytest.mark.parametrize("bits", [2048, 4096, 6144])
def test_the_paillier_pipeline_at_full_length(variant: str, bits: int) -> None:
    """Fixed bases, products, packing and a long constant power in one chain: every result is almost reduced."""
    arithmetic = toy(variant, 2, bits)
    modulus, rng = arithmetic.modulus, random.Random(bits)
    exponents = [rng.getrandbits(96) for _ in range(11)]
    x = arithmetic.fixed_base(3, 96).pow(rows_from_ints(exponents, 12))
    x = arithmetic.mul(x, x)
    x = arithmetic.horner(x, 4, 31)
    x = arithmetic.pow_const(x, (1 << 130) + 12345)
    sums = [sum(2 * e << 31 * j for j, e in enumerate(exponents[i : i + 4])) for i in range(0, 11, 4)]
    assert ints(arithmetic, x) == [pow(3, s * ((1 << 130) + 12345), modulus) for s in sums]


# In and out --------------------------------------------------------------------------------------------------------


@each_variant
def test_residues_out_of_range_are_refused(variant: str) -> None:
    for modulus in edge_moduli(1024):
        arithmetic = native.load(variant, 1)(modulus)
        top = (1 << 8 * arithmetic.width) - 1
        for bad in {modulus, min(modulus + 1, top), top}:
            with pytest.raises(ProtocolError):
                arithmetic.from_wire(rows_from_ints([0, 1, bad], arithmetic.width))
    with pytest.raises(ValueError, match="rows must be"):
        arithmetic.from_wire(rows_from_ints([1], arithmetic.width + 1))


@each_variant
@pytest.mark.parametrize("bits", [512, 2048, 3072])
def test_wide_integers_are_reduced(variant: str, bits: int) -> None:
    for modulus in edge_moduli(bits):
        arithmetic = native.load(variant, 1)(modulus)
        for width in (1, arithmetic.width, arithmetic.width + 1, 2 * arithmetic.width, 5 * arithmetic.width + 3):
            top = (1 << 8 * width) - 1
            values = [0, 1, top, top >> 1, top ^ (1 << 8 * width // 2), *(v & top for v in edge_values(modulus))]
            assert ints(arithmetic, arithmetic.from_wide(rows_from_ints(values, width))) == [
                v % modulus for v in values
            ]


@each_variant
def test_a_factor_is_one_row_and_a_summand_one_or_all(variant: str) -> None:
    arithmetic = toy(variant)
    _, x = draw(arithmetic, 21)
    for operation in (arithmetic.add, arithmetic.scale):
        with pytest.raises(ValueError, match=r"length|single"):
            operation(x, arithmetic.take(x, np.arange(4)))


@each_variant
def test_results_do_not_share_memory_with_inputs(variant: str) -> None:
    arithmetic = toy(variant)
    values, x = draw(arithmetic, 12)
    everything = np.arange(12, dtype=np.int32)
    for y in (
        arithmetic.take(x, everything),
        arithmetic.concat([x]),
        arithmetic.pow_const(x, 1),
        arithmetic.segprod(x, everything, np.arange(13)),
        arithmetic.horner(x, 1, 1),
    ):
        y.limbs[:] = 0
    assert ints(arithmetic, x) == values


@each_variant
def test_foreign_residues_are_refused(variant: str) -> None:
    arithmetic = toy(variant)
    _, x = draw(native.load(variant, 1)(arithmetic.modulus + 2), 3)
    for call in (arithmetic.to_wire, lambda r: arithmetic.mul(r, r), lambda r: arithmetic.pow_const(r, 3)):
        with pytest.raises(ValueError, match="another modulus"):
            call(x)


@each_variant
def test_residues_show_neither_modulus_nor_values(variant: str) -> None:
    arithmetic = toy(variant)
    _, x = draw(arithmetic, 3)
    for shown in (repr(x), str(x), repr(arithmetic)):
        assert not {str(arithmetic.modulus)[i : i + 6] for i in range(100)} & {shown[i : i + 6] for i in range(400)}
        assert len(shown) < 100


@each_variant
def test_leaving_divides_with_every_correction(variant: str) -> None:
    """Moduli and values made of extreme words reach the rare corrections of the quotient digit."""
    rng = random.Random(5)
    words = [0, 1, 2, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 2, (1 << 64) - 1]
    for _ in range(300):
        modulus = sum(rng.choice(words) << 64 * i for i in range(rng.randrange(1, 6))) | 1
        if modulus < 3:
            continue
        arithmetic = native.load(variant, 1)(modulus)
        values = [sum(rng.choice(words) << 64 * i for i in range(12)) for _ in range(16)]
        x = arithmetic.from_wide(rows_from_ints(values, 96))
        assert ints(arithmetic, x) == [v % modulus for v in values]
        assert ints(arithmetic, arithmetic.mul(x, x)) == [v * v % modulus for v in values]


# Threads -----------------------------------------------------------------------------------------------------------


@each_variant
def test_the_number_of_threads_does_not_change_results(variant: str) -> None:
    results = []
    for threads in (1, 2, 5):
        arithmetic = toy(variant, threads)
        _, x = draw(arithmetic, 83)
        order = np.random.default_rng(0).integers(0, 83, 900).astype(np.int32)
        packed = arithmetic.horner(arithmetic.mul(x, x), 2, 3)
        segments = arithmetic.segprod(x, order, np.array([0, 5, 600, 900]))
        results.append(ints(arithmetic, arithmetic.concat([packed, segments])))
    assert results[0] == results[1] == results[2]


@each_variant
def test_several_callers_at_once(variant: str) -> None:
    arithmetic = toy(variant, threads=2)
    table = arithmetic.fixed_base(3, 64)
    exponents = np.random.default_rng(0).integers(0, 256, (200, 8), dtype=np.uint8)
    expected = [pow(3, e, arithmetic.modulus) for e in ints_from_rows(exponents)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(lambda: ints(arithmetic, table.pow(exponents))) for _ in range(8)]
        assert all(future.result() == expected for future in futures)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_a_table_is_made_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic = toy(VARIANTS[0])
    table, exponents = arithmetic.fixed_base(3, 16), rows_from_ints([5, 1000], 2)
    make_table, children = NativeBatch.power_table, []

    def fork_meanwhile(*arguments: int) -> np.ndarray:
        monkeypatch.setattr(NativeBatch, "power_table", make_table)
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(100)  # a lock held by the parent's thread would keep the child for ever
            os._exit(0 if ints(arithmetic, table.pow(exponents)) == [3**5, pow(3, 1000, arithmetic.modulus)] else 1)
        return make_table(*arguments)

    monkeypatch.setattr(NativeBatch, "power_table", fork_meanwhile)
    table.pow(exponents)
    assert os.waitpid(children[0], 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    arithmetic = toy(VARIANTS[0], threads=2)
    values, x = draw(arithmetic, 64)
    expected = [v * v % arithmetic.modulus for v in values]
    assert ints(arithmetic, arithmetic.mul(x, x)) == expected
    child = os.fork()
    if child == 0:
        os._exit(0 if ints(arithmetic, arithmetic.mul(x, x)) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
