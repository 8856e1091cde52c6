"""The work that bench_cuda times: a Paillier owner and passive party on devices, and the row orders of a tree."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.cuda import CudaBatch, CudaResidues
from he_processors.bignum.interface import add, constant, ints_from_rows, lift, rows_from_ints, scale
from he_processors.cuda.device import Device
from he_processors.paillier import PaillierPrivateKey, generate_paillier_key

SHIFT_BITS = 127
VALUE_SHIFT = 63  # of the first of two numbers in a plaintext
SPARE_BITS = 64  # of a decryption modulo one prime

Levels = list[tuple[NDArray[np.int32], NDArray[np.int64]]]


@cache
def key_of(key_bits: int) -> PaillierPrivateKey:
    """Return a fresh key; toy lengths are for the emulated device."""
    return generate_paillier_key(key_bits, allow_toy_keys=True)


def level_orders(n: int, n_features: int, n_bins: int, depth: int, seed: int) -> Levels:
    """Return the row orders of one tree: all rows at the root, then the smaller child of each node of a level.

    Segments run by node, feature and bin; bins are skewed, as quantile bins of integer columns are. Children take
    0.35 to 0.5 of their parent's rows, scaled so that every level adds up half of the rows.
    """
    rng = np.random.default_rng(seed)
    bins = (n_bins * rng.random((n_features, n)) ** 1.5).astype(np.uint16)
    orders = [_order(bins, np.zeros(n, dtype=np.int64), np.arange(n), n_bins, 1)]
    for level in range(1, depth):
        n_built = 1 << (level - 1)
        members = rng.permutation(n)[: n // 2]
        weights = rng.uniform(0.7, 1.0, n_built)
        nodes = rng.choice(n_built, size=len(members), p=weights / weights.sum())
        orders.append(_order(bins, nodes, members, n_bins, n_built))
    return orders


def _order(
    bins: NDArray[np.uint16], nodes: NDArray[np.int64], rows: NDArray[np.int64], n_bins: int, n_nodes: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    n_features = len(bins)
    orders, counts = [], np.zeros((n_nodes, n_features, n_bins), dtype=np.int64)
    for node in range(n_nodes):
        own = rows[nodes == node]
        for feature in range(n_features):
            own_bins = bins[feature, own]
            orders.append(own[np.argsort(own_bins, kind="stable")].astype(np.int32))
            counts[node, feature] = np.bincount(own_bins, minlength=n_bins)
    return np.concatenate(orders), np.concatenate([[0], np.cumsum(counts.reshape(-1))]).astype(np.int64)


def segment_product(
    rows: NDArray[np.uint8], order: NDArray[np.int32], starts: NDArray[np.int64], segment: int, modulus: int
) -> int:
    """Return one segment's product by gmpy2."""
    product, wide = gmpy2.mpz(1), gmpy2.mpz(modulus)
    for value in ints_from_rows(rows[order[starts[segment] : starts[segment + 1]]]):
        product = product * value % wide
    return int(product)


class PaillierOnDevice:
    """Both parties of one tree. The randomness is numpy's: this is a benchmark."""

    def __init__(self, key: PaillierPrivateKey, devices: tuple[Device, ...]) -> None:
        self.n = key.public_key.n
        self._primes = (key.p, key.q)
        self.arithmetic = CudaBatch(self.n * self.n, devices=devices)
        self._halves = tuple(CudaBatch(prime * prime, devices=devices) for prime in self._primes)
        generators = (key.p_generator, key.q_generator)
        self._bases = tuple(pow(g, prime, prime**2) for g, prime in zip(generators, self._primes, strict=True))
        self._tables = tuple(
            half.fixed_base(base, prime.bit_length())
            for half, base, prime in zip(self._halves, self._bases, self._primes, strict=True)
        )
        p_batch, q_batch = self._halves
        inverse = pow(q_batch.modulus, -1, p_batch.modulus)
        self._inverse, self._minus_inverse = constant(p_batch, inverse), constant(p_batch, -inverse)
        self._q_square, self._n = constant(self.arithmetic, q_batch.modulus), constant(self.arithmetic, self.n)
        self._one = constant(self.arithmetic, 1)
        p = self._primes[0]
        self._log_inverse = pow((pow(self.n + 1, p - 1, p * p) - 1) // p, -1, p)

    def random_exponents(self, n: int, seed: int) -> list[NDArray[np.uint8]]:
        """Draw one exponent for each row and prime, as long as the prime."""
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 256, (n, (prime.bit_length() + 7) // 8), dtype=np.uint8) for prime in self._primes]

    def encrypt(self, plaintexts: NDArray[np.uint8], exponents: list[NDArray[np.uint8]]) -> CudaResidues:
        """Encrypt non-negative plaintexts. Shapes: plaintexts: uint8[n, w]; result: Residues[n]."""
        batch = self.arithmetic
        randomisers = self._join(*(table.pow(part) for table, part in zip(self._tables, exponents, strict=True)))
        opened = add(batch, scale(batch, batch.from_wide(plaintexts), self._n), self._one)
        return batch.mul(opened, randomisers)

    def _join(self, in_p: CudaResidues, in_q: CudaResidues) -> CudaResidues:
        batch, (p_batch, q_batch) = self.arithmetic, self._halves
        lifted = scale(p_batch, lift(p_batch, q_batch, in_q), self._minus_inverse)
        quotient = add(p_batch, scale(p_batch, in_p, self._inverse), lifted)
        return add(batch, scale(batch, lift(batch, p_batch, quotient), self._q_square), lift(batch, q_batch, in_q))

    def expected(self, plaintext: NDArray[np.uint8], exponents: list[NDArray[np.uint8]]) -> int:
        """Return one ciphertext by Python integers."""
        in_p, in_q = (
            pow(base, int.from_bytes(part.tobytes(), "little"), half.modulus)
            for base, part, half in zip(self._bases, exponents, self._halves, strict=True)
        )
        p_square, q_square = (half.modulus for half in self._halves)
        randomiser = in_q + q_square * ((in_p - in_q) * pow(q_square, -1, p_square) % p_square)
        message = int.from_bytes(plaintext.tobytes(), "little")
        return (1 + message * self.n) * randomiser % self.arithmetic.modulus

    def plaintexts(self, values: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Write two numbers below 2^40 as one plaintext. Shapes: values: uint64[n, 2]; result: uint8[n, 16]."""
        return rows_from_ints(((int(high) << VALUE_SHIFT) + int(low) for high, low in values.tolist()), 16)

    def tree(
        self,
        plaintexts: NDArray[np.uint8],
        exponents: list[NDArray[np.uint8]],
        levels: Levels,
        drain: Callable[[], None],
    ) -> tuple[dict[str, float], list[NDArray[np.uint64]]]:
        """Run one tree. Returns the seconds of each stage and the decrypted sums of each level, uint64[segments, 2]."""
        spent = dict.fromkeys(("encrypt", "histogram", "pack", "decrypt"), 0.0)
        sums = []

        def timed(stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments)
            drain()
            spent[stage] += time.perf_counter() - start
            return result

        encrypted = timed("encrypt", self.encrypt, plaintexts, exponents)
        group = (min(prime.bit_length() for prime in self._primes) - SPARE_BITS) // SHIFT_BITS
        for order, starts in levels:
            bins = timed("histogram", self.arithmetic.segprod, encrypted, order, starts)
            packed = timed("pack", self._pack, bins, group)
            sums.append(_unpack(timed("decrypt", self._decrypt, packed), group, len(starts) - 1))
        return spent, sums

    def _pack(self, bins: CudaResidues, group: int) -> NDArray[np.uint8]:
        """Pack sums and give them out in wire form."""
        return self.arithmetic.to_wire(self.arithmetic.horner(bins, group, SHIFT_BITS))

    def _decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Decrypt modulo the first prime."""
        half, p = self._halves[0], gmpy2.mpz(self._primes[0])
        powers = half.to_wire(half.pow_const(half.from_wide(ciphertexts), int(p) - 1))
        return [int((gmpy2.mpz(value) - 1) // p * self._log_inverse % p) for value in ints_from_rows(powers)]

    @staticmethod
    def plain_sums(
        values: NDArray[np.uint64], order: NDArray[np.int32], starts: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Return each segment's sums without encryption. Shapes: result: uint64[n_segments, 2]."""
        running = np.concatenate([np.zeros((1, 2), dtype=np.uint64), np.cumsum(values[order], axis=0)])
        return running[starts[1:]] - running[starts[:-1]]


def _unpack(packed: list[int], group: int, n_segments: int) -> NDArray[np.uint64]:
    digits = [value >> (SHIFT_BITS * j) & ((1 << SHIFT_BITS) - 1) for value in packed for j in range(group)]
    pairs = [(digit >> VALUE_SHIFT, digit & ((1 << VALUE_SHIFT) - 1)) for digit in digits[:n_segments]]
    return np.array(pairs, dtype=np.uint64)
