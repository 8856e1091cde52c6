"""Small additive ElGamal for tests: keys from a seed, short tables, a level to open, on this machine's curve."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.interface import FIELD_PRIME, Curve, Points
from he_processors.curve.registry import open_curve
from he_processors.elgamal.bin_sums import Hider, bin_summer
from he_processors.elgamal.decryption import ElGamalDecryptor
from he_processors.elgamal.encryption import (
    DigitFormat,
    ElGamalEncryptor,
    ElGamalPrivateKey,
    PointColumns,
    generate_elgamal_key,
    rows_of,
)
from he_processors.histogram.planner import BinLayout, plan_level
from he_processors.histogram.sums import NodeTotal
from tests.support.he_toys import SeededRandomness

TABLE_BITS = 12


@cache
def toy_curve() -> Curve:
    return open_curve()


@cache
def toy_elgamal(n_messages: int, seed: int = 1) -> ElGamalPrivateKey:
    """Return a key that is the same in every run."""
    return generate_elgamal_key(n_messages, toy_curve(), SeededRandomness(seed))


@cache
def point_of_order_8() -> Points:
    """Return a point of order 8. Shapes: Points[1]."""
    curve = toy_curve()
    for y in range(2, 100):
        for x in _roots(y):
            row = np.frombuffer(x.to_bytes(32, "little") + y.to_bytes(32, "little"), dtype=np.uint8)
            point = curve.from_affine(row[None])
            small = curve.add(curve.mul(point, rows_of([-1])), point)
            if not curve.equal(curve.double(small, 2), curve.identity(1))[0]:
                return small
    raise AssertionError("no point of order 8 found")


def _roots(y: int) -> list[int]:
    """Return the x with x^2 = (y^2 - 1) / (d y^2 + 1)."""
    p = FIELD_PRIME
    d = -121665 * pow(121666, -1, p) % p
    square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
    root = pow(square, (p + 3) // 8, p)
    candidates = (root, root * pow(2, (p - 1) // 4, p) % p)
    return [x for x in candidates if x * x % p == square]


def hide(hider: Hider, bins: PointColumns) -> PointColumns:
    """Hide all columns of an answer."""
    randomisers = hider.draw(len(bins))
    return PointColumns(tuple(hider.hide(number, column, randomisers) for number, column in enumerate(bins.columns)))


@dataclass
class ToyLevel:
    """Rows at a key owner, bins at a passive party, and two nodes to open."""

    fraction_bits: int = 14
    n_rows: int = 24

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        self.curve = toy_curve()
        self.digits = DigitFormat.of(self.fraction_bits, self.n_rows)
        self.key = toy_elgamal(self.digits.n_messages)
        values = rng.uniform(-0.4, 0.4, self.n_rows), rng.uniform(0, 0.25, self.n_rows)
        self.g, self.h = self.digits.encode_pairs(*values)
        self.layout = BinLayout((2, 3))
        codes = [rng.integers(0, n + 1, self.n_rows) for n in self.layout.n_bins]
        self.codes = np.stack(codes).astype(np.uint8)
        self.nodes = [np.arange(self.n_rows, dtype=np.int32), np.arange(0, self.n_rows, 2, dtype=np.int32)]
        self.totals = [NodeTotal.of_rows(self.g[rows], self.h[rows]) for rows in self.nodes]

    @property
    def decryptor(self) -> ElGamalDecryptor:
        return ElGamalDecryptor(self.key, self.curve, TABLE_BITS)

    def encrypt(self) -> PointColumns:
        return ElGamalEncryptor(self.key, self.curve).encrypt(self.digits.digits_of(self.g, self.h))

    def bins(self, rows: PointColumns) -> PointColumns:
        return self.bins_of(rows, self.codes)

    def bins_of(self, rows: PointColumns, codes: NDArray[np.uint8]) -> PointColumns:
        plan = plan_level(codes, self.layout, self.nodes)
        return PointColumns(tuple(map(bin_summer(self.curve, len(rows), plan), rows.columns)))

    def answer(self, rows: PointColumns) -> PointColumns:
        return hide(Hider(self.key.public_key, self.curve), self.bins(rows))

    def expected(self, values: NDArray[np.int64], node: int) -> list[int]:
        """Return the plain sums of one node, slot by slot."""
        rows = self.nodes[node]
        return [
            int(values[rows[self.codes[feature, rows] == code]].sum())
            for feature, n_bins in enumerate(self.layout.n_bins)
            for code in range(n_bins + 1)
        ]
