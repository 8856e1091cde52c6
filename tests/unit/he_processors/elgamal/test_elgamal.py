"""Rows encrypted, added, hidden, opened: equal to plain sums, or one fixed refusal."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from he_processors.additive_schemes import Scheme
from he_processors.curve.interface import GROUP_ORDER
from he_processors.elgamal.decryption import draw_out, due
from he_processors.elgamal.encryption import (
    ElGamalEncryptor,
    ElGamalPublicKey,
    PointColumns,
    base_point,
    concat_columns,
    generate_elgamal_key,
    rows_of,
)
from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.fixed_point import REFUSED, join
from tests.support.elgamal_toys import ToyLevel, point_of_order_8, toy_curve, toy_elgamal
from tests.support.he_toys import SeededRandomness


@pytest.fixture(scope="module", params=[14, 40])
def level(request: pytest.FixtureRequest) -> ToyLevel:
    return ToyLevel(request.param, n_rows=24 if request.param == 14 else 12)


def test_opened_sums_are_the_plain_sums(level: ToyLevel) -> None:
    answer = level.answer(level.encrypt())
    for node, sums in enumerate(level.decryptor.open_level(answer, level.digits, level.layout, level.totals)):
        assert [join(sums.g[:, i]) for i in range(level.layout.n_slots)] == level.expected(level.g, node)
        assert [join(sums.h[:, i]) for i in range(level.layout.n_slots)] == level.expected(level.h, node)


def test_a_row_is_one_randomiser_and_its_messages(level: ToyLevel) -> None:
    """R = r B and C_k = x_k R + m_k B, by the definition."""
    curve, rows = level.curve, level.encrypt()
    r, *columns = rows.columns
    base = base_point(curve)
    for column, scalar, digit in zip(columns, level.key.scalars, level.digits.digits_of(level.g, level.h), strict=True):
        masks = curve.mul(r, rows_of([scalar] * len(rows)))
        messages = curve.fixed_base(base).mul(rows_of([int(m) for m in digit]))
        assert curve.equal(column, curve.add(masks, messages)).all()
    assert len({row.tobytes() for row in curve.to_affine(r)}) == len(rows), "no randomiser serves two rows"


def test_masks_are_handed_out_once() -> None:
    level = ToyLevel()
    encryptor = ElGamalEncryptor(level.key, level.curve)
    encryptor.fill(7)
    digits = [column[:5] for column in level.digits.digits_of(level.g, level.h)]
    seen = [row.tobytes() for _ in range(3) for row in level.curve.to_affine(encryptor.encrypt(digits).columns[0])]
    assert len(set(seen)) == 15


def refuse(level: ToyLevel, answer: PointColumns, totals=None) -> None:
    with pytest.raises(ProtocolError) as caught:
        level.decryptor.open_level(answer, level.digits, level.layout, totals or level.totals)
    assert str(caught.value) == REFUSED


@pytest.mark.parametrize(
    "wrong",
    [
        lambda total: replace(total, g=total.g + (1 << 20)),
        lambda total: replace(total, h=total.h + 1),
        lambda total: replace(total, lower=(total.lower[0] + 1, total.lower[1]), g=total.g + 1),
        lambda total: replace(total, n_rows=0),
    ],
)
def test_sums_that_are_not_the_nodes_are_refused(level: ToyLevel, wrong) -> None:
    refuse(level, level.answer(level.encrypt()), [level.totals[0], wrong(level.totals[1])])


@pytest.mark.parametrize("column", [0, 1, 2])
def test_points_that_do_not_add_up_cost_no_search(level: ToyLevel, column: int, monkeypatch) -> None:
    answer = level.answer(level.encrypt())
    curve, columns = level.curve, list(answer.columns)
    extra = curve.take(curve.concat([base_point(curve), curve.identity(1)]), np.minimum(np.arange(len(answer)), 1))
    columns[column] = curve.add(columns[column], extra)
    decryptor = level.decryptor
    monkeypatch.setattr(decryptor._logarithms, "find", lambda *arguments, **options: pytest.fail("it searched"))
    with pytest.raises(ProtocolError, match=REFUSED):
        decryptor.open_level(PointColumns(tuple(columns)), level.digits, level.layout, level.totals)


def moved(level: ToyLevel, answer: PointColumns, distance: int) -> PointColumns:
    """Move a sum from the second bin to the first, unseen in the feature's total."""
    curve = level.curve
    step = curve.fixed_base(curve.double(base_point(curve), 3)).mul(rows_of([distance, -distance]))
    moves = curve.take(curve.concat([step, curve.identity(1)]), np.minimum(np.arange(len(answer)), 2))
    return PointColumns((answer.columns[0], curve.add(answer.columns[1], moves), *answer.columns[2:]))


@pytest.mark.parametrize("distance", [1 << 26, 1 << 60, GROUP_ORDER // 3])
def test_a_digit_that_overflows_is_not_decrypted_and_ends_the_job(level: ToyLevel, distance: int, capsys) -> None:
    refuse(level, moved(level, level.answer(level.encrypt()), distance))
    assert str(distance) not in capsys.readouterr().out


def test_sums_moved_within_the_range_of_a_node_are_honest_looking() -> None:
    """The control of the tests above: one that chooses its sums within the bounds is not found out."""
    level = ToyLevel()
    answer = moved(level, level.answer(level.encrypt()), 5)
    sums = level.decryptor.open_level(answer, level.digits, level.layout, level.totals)[0]
    plain = level.expected(level.g, 0)
    assert sums.g[0, :3].tolist() == [plain[0] + 5, plain[1] - 5, plain[2]]


def test_points_of_small_order_in_an_answer_are_refused(level: ToyLevel) -> None:
    answer = level.answer(level.encrypt())
    columns = list(answer.columns)
    small = level.curve.take(level.curve.concat([point_of_order_8(), level.curve.identity(1)]), np.ones(1, np.int64))
    index = np.ones(len(answer), dtype=np.int64)
    index[3] = 0
    both = level.curve.concat([point_of_order_8(), small])
    columns[1] = level.curve.add(columns[1], level.curve.take(both, index))
    refuse(level, PointColumns(tuple(columns)))


def test_digits_that_are_too_large_are_not_encrypted() -> None:
    encryptor = ElGamalEncryptor(toy_elgamal(2), toy_curve())
    for bad in ((1 << 20) + 1, -(1 << 20) - 1):
        with pytest.raises(CapacityExceeded) as caught:
            encryptor.encrypt([np.array([0, bad]), np.zeros(2, dtype=np.int64)])
        assert str(bad) not in str(caught.value)
    with pytest.raises(ValueError, match="digit"):
        encryptor.encrypt([np.zeros(2, dtype=np.int64)])


def test_keys_stay_and_print_nothing() -> None:
    key = toy_elgamal(4)
    assert len({*key.scalars}) == 4
    assert not any(str(scalar) in repr(key) or f"{scalar:x}" in repr(key) for scalar in key.scalars)
    for secret in (key, ElGamalEncryptor(key, toy_curve()), ToyLevel().decryptor):
        with pytest.raises(TypeError):
            pickle.dumps(secret)
    with pytest.raises(ValueError, match="messages"):
        generate_elgamal_key(3, toy_curve(), SeededRandomness(1))


@pytest.mark.parametrize("n_messages", [2, 4])
def test_a_public_key_has_one_encoding(n_messages: int) -> None:
    public_key = toy_elgamal(n_messages).public_key
    data = public_key.to_bytes()
    assert ElGamalPublicKey.from_bytes(data, toy_curve()) == public_key
    assert public_key.scheme is Scheme.ELGAMAL
    neutral = bytes(32) + b"\1" + bytes(31)
    small = toy_curve().to_affine(toy_curve().add(point_of_order_8(), base_point(toy_curve()))).tobytes()
    head = data[:7]
    hostile = [
        b"",
        data[:-1],
        data + b"\0",
        data[:6] + bytes([3]) + data[7:],
        b"X" + data[1:],
        head + bytes(len(data) - 7),
        head + neutral + data[71:],
        head + small + data[71:],
        head + b"\xff" * 64 + data[71:],
    ]
    for bad in hostile:
        with pytest.raises(ProtocolError):
            ElGamalPublicKey.from_bytes(bad, toy_curve())


def test_time_is_drawn_out_to_powers_of_two_of_a_step() -> None:
    assert [due(t, 0.5) for t in (0.0, 0.3, 0.5, 0.51, 1.0, 1.1, 3.9, 4.1)] == [0.5, 0.5, 0.5, 1, 1, 2, 4, 8]
    slept = []
    draw_out(20.0, 0.5, lambda: 20.7, slept.append)
    assert slept == [pytest.approx(0.3)]


def test_batches_of_rows_join_in_order() -> None:
    level = ToyLevel()
    rows = level.encrypt()
    parts = [rows.take(level.curve, np.arange(first, first + 12)) for first in (0, 12)]
    joined = concat_columns(level.curve, parts)
    assert all(level.curve.equal(a, b).all() for a, b in zip(joined.columns, rows.columns, strict=True))
