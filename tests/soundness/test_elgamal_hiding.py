"""What the key owner learns from the sums that a passive party returns: the sums, and nothing of the rows behind them.

The planted attack: a key owner puts points of small order on the ciphertexts of rows. Without the multiplication by 8
they survive in the sums and tell how many of those rows are in a bin.
"""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.bignum.interface import random_rows_below
from he_processors.curve.interface import GROUP_ORDER, base_point, rows_of
from he_processors.elgamal.bin_sums import Hider
from he_processors.elgamal.encryption import ElGamalPublicKey, PointColumns
from tests.support.elgamal_toys import ToyLevel, hide, point_of_order_8
from tests.support.he_toys import SeededRandomness


@pytest.fixture(scope="module")
def level() -> ToyLevel:
    return ToyLevel()


class GivenScalars:
    """Yields given scalars as random bytes."""

    def __init__(self, scalars: list[int]) -> None:
        self._data = rows_of(scalars).tobytes()

    def bytes(self, n: int) -> bytes:
        assert n == len(self._data)
        return self._data


def plant(level: ToyLevel, rows: PointColumns, chosen: list[int]) -> PointColumns:
    """Add a point of order 8 to the first message of chosen rows."""
    curve = level.curve
    which = np.isin(np.arange(len(rows)), chosen).astype(np.int64)
    small = curve.take(curve.concat([curve.identity(1), point_of_order_8()]), which)
    return PointColumns((rows.columns[0], curve.add(rows.columns[1], small), *rows.columns[2:]))


def small_parts(level: ToyLevel, answer: PointColumns) -> list[int]:
    """Return what the key owner reads of each bin: the multiple of the planted point in it."""
    curve = level.curve
    points = level.decryptor.unmask(answer)[0]
    # Times the group order only what is of small order remains.
    n = len(points)
    rest = curve.add(curve.mul(points, rows_of([-1] * n)), points)
    multiples = [curve.identity(1)]
    order = curve.add(curve.mul(point_of_order_8(), rows_of([-1])), point_of_order_8())
    for _ in range(7):
        multiples.append(curve.add(multiples[-1], order))
    return [
        next(j for j, m in enumerate(multiples) if curve.equal(curve.take(rest, np.array([i])), m)[0]) for i in range(n)
    ]


def hide_without_eight(level: ToyLevel, bins: PointColumns) -> PointColumns:
    """Re-randomise as ``Hider`` does, but for the multiplication."""
    curve, s = level.curve, random_rows_below(len(bins), GROUP_ORDER)
    bases = curve.concat([base_point(curve), curve.from_affine(level.key.public_key.rows)])
    tables = [curve.fixed_base(curve.take(bases, np.array([i]))) for i in range(len(bases))]
    columns = zip(bins.columns, tables, strict=True)
    return PointColumns(tuple(curve.add(column, table.mul(s)) for column, table in columns))


def test_small_order_on_rows_tells_who_is_in_a_bin_unless_it_is_cleared(level: ToyLevel) -> None:
    chosen = [1, 4, 6]
    bins = level.bins(plant(level, level.encrypt(), chosen))
    membership = np.isin(np.arange(level.n_rows), chosen).astype(np.int64)
    due = [*level.expected(membership, 0), *level.expected(membership, 1)]
    assert any(due)
    assert small_parts(level, hide_without_eight(level, bins)) == due, "the control: the attack works without"
    hidden = hide(Hider(level.key.public_key, level.curve), bins)
    assert small_parts(level, hidden) == [0] * len(due)


def test_small_order_in_the_key_is_cleared_as_well(level: ToyLevel) -> None:
    """Were the key's points not checked, the new randomiser modulo 8 would still be hidden."""
    curve = level.curve
    first = curve.add(curve.from_affine(level.key.public_key.rows[:1]), point_of_order_8())
    spoilt = ElGamalPublicKey((curve.to_affine(first).tobytes(), *level.key.public_key.points[1:]))
    assert small_parts(level, hide(Hider(spoilt, curve), level.bins(level.encrypt()))) == [0] * (2 * 7)


def test_a_hidden_sum_is_eight_times_the_sum_under_a_new_randomiser(level: ToyLevel) -> None:
    curve, bins = level.curve, level.bins(level.encrypt())
    hidden = hide(Hider(level.key.public_key, curve), bins)
    for before, after in zip(level.decryptor.unmask(bins), level.decryptor.unmask(hidden), strict=True):
        assert curve.equal(curve.double(before, 3), after).all()
    again = hide(Hider(level.key.public_key, curve), bins)
    points = [p.tobytes() for one in (bins, hidden, again) for column in one.columns for p in curve.to_affine(column)]
    n_empty = sum(1 for p in curve.to_affine(bins.columns[0]) if p.tobytes() == bytes(32) + b"\1" + bytes(31))
    assert len(set(points)) >= len(points) - n_empty * len(bins.columns), "no point stays, and none comes twice"


def test_any_rows_with_the_same_sums_could_have_made_an_answer(level: ToyLevel) -> None:
    """Perfect hiding: between two sets of rows with equal sums the randomisers are shifted, and stay uniform.

    Two rows with the same digits change places between bins. For every randomiser of the one answer there is one that
    makes the very same points of the other, so that both are equally likely.
    """
    curve = level.curve
    level_g, level_h = level.g.copy(), level.h.copy()
    both = level.nodes[1]  # rows of both nodes
    first, second = (int(both[level.codes[0, both] == code][0]) for code in (0, 1))
    level_g[second], level_h[second] = level_g[first], level_h[first]
    r = [1000 + 17 * i for i in range(level.n_rows)]
    base = curve.fixed_base(base_point(curve))
    columns = [base.mul(rows_of(r))]
    for scalar, digit in zip(level.key.scalars, level.digits.digits_of(level_g, level_h), strict=True):
        columns.append(base.mul(rows_of([x * scalar + int(m) for x, m in zip(r, digit, strict=True)])))
    rows = PointColumns(tuple(columns))
    swapped = level.codes.copy()
    swapped[:, [first, second]] = swapped[:, [second, first]]
    answers = []
    for codes, shift in ((level.codes, 0), (swapped, 1)):
        bins = level.bins_of(rows, codes)
        r_sums = bin_sums_of(level, codes, np.array(r, dtype=np.int64))
        start = bin_sums_of(level, level.codes, np.array(r, dtype=np.int64))
        s = [5 + i + (a - b if shift else 0) for i, (a, b) in enumerate(zip(start, r_sums, strict=True))]
        answers.append(hide(Hider(level.key.public_key, curve, GivenScalars(s)), bins))
    assert bin_sums_of(level, swapped, np.array(r)) != bin_sums_of(level, level.codes, np.array(r))
    for a, b in zip(answers[0].columns, answers[1].columns, strict=True):
        assert curve.equal(a, b).all()


def bin_sums_of(level: ToyLevel, codes: np.ndarray, values: np.ndarray) -> list[int]:
    return [
        int(values[rows[codes[feature, rows] == code]].sum())
        for rows in level.nodes
        for feature, n_bins in enumerate(level.layout.n_bins)
        for code in range(n_bins + 1)
    ]


def test_new_randomisers_are_uniform(level: ToyLevel) -> None:
    """Every bit of R's encoding is balanced, for an empty bin too; the control is one that is not re-randomised."""
    curve = level.curve
    empty = PointColumns(tuple(curve.identity(150) for _ in range(3)))
    hider = Hider(level.key.public_key, curve, SeededRandomness(3))
    bits = np.unpackbits(curve.to_ristretto(hide(hider, empty).columns[0]), axis=1, bitorder="little")[:, 1:252]
    deviations = np.abs(bits.mean(axis=0) - 0.5) / (0.5 / np.sqrt(len(bits)))
    assert deviations.max() < 5  # of 251 bits none is off by five standard errors
    assert 0.7 < np.sqrt((deviations**2).mean()) < 1.3
    unhidden = np.unpackbits(curve.to_ristretto(empty.columns[0]), axis=1, bitorder="little")[:, 1:252]
    assert (np.abs(unhidden.mean(axis=0) - 0.5) / (0.5 / np.sqrt(len(bits)))).min() > 5
