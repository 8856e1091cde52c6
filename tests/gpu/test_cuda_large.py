"""Batches that fill a GPU, compared with gmpy2 row by row; Paillier from encryption to decryption on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import gmpy2
import numpy as np
import pytest
from numpy.typing import NDArray

from he_processors.bignum.cuda import CudaBatch, load
from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.errors import BackendUnavailable
from he_processors.paillier import PaillierDecryptor, generate_paillier_key, owner_encryptor
from tests.support.he_toys import signed_rows

pytestmark = pytest.mark.gpu

MODULUS_BITS = (2048, 3072, 4096, 6144, 8192)


@pytest.fixture(scope="module")
def open_batch() -> Callable[[int], CudaBatch]:
    try:
        return load()
    except BackendUnavailable as error:
        pytest.skip(str(error))


def random_rows(n: int, modulus: int, seed: int) -> NDArray[np.uint8]:
    """Return rows below a modulus whose highest byte is 255."""
    rows = np.random.default_rng(seed).integers(0, 256, (n, (modulus.bit_length() + 7) // 8), dtype=np.uint8)
    rows[:, -1] %= 255
    return rows


def random_modulus(bits: int) -> int:
    raw = np.random.default_rng(bits).bytes(bits // 8)
    return int.from_bytes(raw, "little") | 1 | 255 << (bits - 8)


@pytest.mark.parametrize("bits", MODULUS_BITS)
def test_many_products(open_batch: Callable[[int], CudaBatch], bits: int) -> None:
    m = random_modulus(bits)
    batch = open_batch(m)
    n = 60_000
    rows_a, rows_b = random_rows(n, m, 1), random_rows(n, m, 2)
    a, b = batch.from_wire(rows_a), batch.from_wire(rows_b)
    chain = batch.mul(batch.mul(batch.mul(a, b), a), b)
    wide = gmpy2.mpz(m)
    expected = rows_from_ints(
        ((gmpy2.mpz(x) * y) ** 2 % wide for x, y in zip(ints_from_rows(rows_a), ints_from_rows(rows_b), strict=True)),
        batch.width,
    )
    assert (batch.to_wire(chain) == expected).all()


@pytest.mark.parametrize("bits", MODULUS_BITS)
def test_histogram_of_products(open_batch: Callable[[int], CudaBatch], bits: int) -> None:
    m = random_modulus(bits)
    batch = open_batch(m)
    n, n_features, n_bins = 30_000, 3, 64
    rows = random_rows(n, m, 3)
    # Bin 0 takes almost half the rows: segments of very different length.
    bins = np.random.default_rng(4).integers(-n_bins, n_bins, (n_features, n)).clip(0)
    order = np.argsort(bins, axis=1, kind="stable").astype(np.int32).reshape(-1)
    counts = np.stack([np.bincount(feature, minlength=n_bins) for feature in bins]).reshape(-1)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    products = ints_from_rows(batch.to_wire(batch.segprod(batch.from_wire(rows), order, starts)))
    values, wide = [gmpy2.mpz(value) for value in ints_from_rows(rows)], gmpy2.mpz(m)
    for segment, product in enumerate(products):
        expected = gmpy2.mpz(1)
        for row in order[starts[segment] : starts[segment + 1]]:
            expected = expected * values[row] % wide
        assert product == expected


def test_many_fixed_base_and_constant_powers(open_batch: Callable[[int], CudaBatch]) -> None:
    for bits in (2048, 3072):
        m = random_modulus(bits)
        batch = open_batch(m)
        exponents = np.random.default_rng(5).integers(0, 256, (20_000, bits // 16), dtype=np.uint8)
        sample = range(0, 20_000, 97)
        powers = ints_from_rows(batch.to_wire(batch.fixed_base(12345, bits // 2).pow(exponents)))
        values = ints_from_rows(exponents)
        assert all(powers[i] == gmpy2.powmod(12345, values[i], m) for i in sample)
        rows = random_rows(20_000, m, 6)
        exponent = values[0]
        powers = ints_from_rows(batch.to_wire(batch.pow_const(batch.from_wire(rows), exponent)))
        bases = ints_from_rows(rows)
        assert all(powers[i] == gmpy2.powmod(bases[i], exponent, m) for i in sample)


@pytest.mark.parametrize("key_bits", [2048, 3072])
def test_paillier_on_the_gpu(open_batch: Callable[[int], CudaBatch], key_bits: int) -> None:
    key = generate_paillier_key(key_bits)
    encryptor = owner_encryptor(key, "cuda")
    values = [int(v) for v in np.random.default_rng(7).integers(-(2**60), 2**60, 3000)]
    encrypted = encryptor.encrypt(signed_rows(values))
    wire = encryptor.arithmetic.to_wire(encrypted)
    assert len({row.tobytes() for row in wire}) == len(values)
    assert list(PaillierDecryptor(key, "reference").decrypt(wire[:40])) == values[:40]
    assert list(PaillierDecryptor(key, "cuda").decrypt(wire)) == values

    order = np.random.default_rng(8).permutation(3000).astype(np.int32)
    starts = np.array([0, 1000, 1000, 1001, 3000], dtype=np.int64)
    sums = encryptor.arithmetic.segprod(encrypted, order, starts)
    packed = encryptor.arithmetic.to_wire(encryptor.arithmetic.horner(sums, 2, 100))
    expected = [sum(values[row] for row in order[a:b]) for a, b in itertools.pairwise(starts)]
    pairs = [low + (high << 100) for low, high in zip(expected[::2], expected[1::2], strict=True)]
    assert list(PaillierDecryptor(key, "cuda").decrypt(packed)) == pairs
