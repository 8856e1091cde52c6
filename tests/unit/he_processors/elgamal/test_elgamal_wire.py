"""Messages of points: one encoding, and one refusal for everything else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.curve.interface import FIELD_PRIME
from he_processors.elgamal.bin_sums import Content, PointHeader, decode_points, encode_points
from he_processors.elgamal.encryption import DigitFormat
from he_processors.errors import ProtocolError
from tests.support.elgamal_toys import ToyLevel, point_of_order_8, toy_elgamal


@cache
def message(point_bytes: int = 64) -> tuple[ToyLevel, PointHeader, bytes]:
    level = ToyLevel(14, n_rows=5)
    header = PointHeader(level.key.public_key, Content.PAIRS, replace(level.digits, point_bytes=point_bytes), 5)
    return level, header, encode_points(header, level.curve, level.encrypt())


def body_of(header: PointHeader, data: bytes, point_bytes: int = 64) -> int:
    return len(data) - header.count * header.n_columns * point_bytes


@pytest.mark.parametrize("point_bytes", [64, 32])
def test_a_message_reads_back(point_bytes: int) -> None:
    level, header, data = message(point_bytes)
    assert len(data) == header.message_bytes == 60 + 5 * 3 * point_bytes
    rows = decode_points(data, header, level.curve)
    assert encode_points(header, level.curve, rows) == data


def test_points_of_small_order_are_read_as_points() -> None:
    level, header, data = message()
    start = body_of(header, data)
    planted = data[:start] + level.curve.to_affine(point_of_order_8()).tobytes() + data[start + 64 :]
    assert len(decode_points(planted, header, level.curve)) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda h: replace(h, content=Content.BINS),
        lambda h: replace(h, public_key=toy_elgamal(2, seed=2).public_key),
        lambda h: replace(h, public_key=toy_elgamal(4).public_key),
        lambda h: replace(h, digits=DigitFormat.of(14, 6)),
        lambda h: replace(h, digits=DigitFormat.of(40, 5)),
        lambda h: replace(h, digits=DigitFormat.of(14, 5, point_bytes=32)),
        lambda h: replace(h, count=4),
        lambda h: replace(h, count=6),
    ],
)
def test_a_message_for_something_else_is_refused(change) -> None:
    level, header, data = message()
    with pytest.raises(ProtocolError):
        decode_points(data, change(header), level.curve)


@pytest.mark.parametrize("place", [0, 7, 14])
@pytest.mark.parametrize("kind", ["zeros", "ones", "x over p", "y over p", "off the curve", "high bit"])
def test_what_is_no_point_is_refused(place: int, kind: str) -> None:
    level, header, data = message()
    start = body_of(header, data) + 64 * place
    x, y = (int.from_bytes(data[start + i : start + i + 32], "little") for i in (0, 32))
    pair = {
        "zeros": (0, 0),
        "ones": (2**256 - 1, 2**256 - 1),
        "x over p": (FIELD_PRIME, 1),
        "y over p": (0, FIELD_PRIME + 1),
        "off the curve": (x, y ^ 1),
        "high bit": (x, y | 1 << 255),
    }[kind]
    bad = b"".join(value.to_bytes(32, "little") for value in pair)
    with pytest.raises(ProtocolError) as caught:
        decode_points(data[:start] + bad + data[start + 64 :], header, level.curve)
    assert bad.hex() not in str(caught.value)


@given(st.integers(0, 10**6), st.integers(1, 255), st.integers(-3, 3), st.sampled_from([64, 32]))
def test_any_other_bytes_are_refused(position: int, flip: int, longer: int, point_bytes: int) -> None:
    level, header, data = message(point_bytes)
    changed = bytearray(data)
    changed[position % len(data)] ^= flip
    cut = bytes(changed) + bytes(longer) if longer >= 0 else bytes(changed)[:longer]
    if (point_bytes, longer) == (32, 0) and position % len(data) >= body_of(header, data, 32):
        with suppress(ProtocolError):  # every other y is one of a point, of another one
            rows = decode_points(cut, header, level.curve)
            assert encode_points(header, level.curve, rows) == cut
        return
    with pytest.raises(ProtocolError):
        decode_points(cut, header, level.curve)
    with pytest.raises(ProtocolError):
        decode_points(b"", header, level.curve)


def test_rows_must_be_those_of_the_header() -> None:
    level, header, _ = message()
    with pytest.raises(ValueError, match="header"):
        encode_points(replace(header, count=4), level.curve, level.encrypt())
