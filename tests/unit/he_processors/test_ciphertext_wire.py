from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.bignum.interface import rows_from_ints
from he_processors.bignum.registry import open_backend
from he_processors.ciphertext_wire import (
    CiphertextHeader,
    Content,
    decode_ciphertexts,
    decode_for_decryption,
    encode_ciphertexts,
)
from he_processors.errors import KeyMismatch, ProtocolError
from he_processors.fixed_point import PackingLayout, PairFormat
from he_processors.paillier import PaillierDecryptor, owner_encryptor
from tests.support.he_toys import signed_rows, toy_paillier

KEY = toy_paillier()
OTHER_KEY = toy_paillier(seed=2)
ENCRYPTOR = owner_encryptor(KEY)
ARITHMETIC = ENCRYPTOR.arithmetic
PACKING = PackingLayout(PairFormat.logistic(40, 1000), 5)
HEADER = CiphertextHeader(KEY.public_key, Content.PACKED_BINS, PACKING, 3)
MESSAGE = encode_ciphertexts(HEADER, ARITHMETIC, ENCRYPTOR.encrypt(signed_rows([1, -2, 3])))
WIDTH = ARITHMETIC.width


def test_round_trip() -> None:
    assert len(MESSAGE) == HEADER.message_bytes
    assert PaillierDecryptor(KEY).decrypt(decode_for_decryption(MESSAGE, HEADER, ARITHMETIC)) == [1, -2, 3]
    residues = decode_ciphertexts(memoryview(MESSAGE), HEADER, ARITHMETIC)
    assert encode_ciphertexts(HEADER, ARITHMETIC, residues) == MESSAGE


def test_no_ciphertexts_are_a_message_too() -> None:
    header = replace(HEADER, count=0)
    message = encode_ciphertexts(header, ARITHMETIC, ARITHMETIC.from_wire(rows_from_ints([], WIDTH)))
    assert len(decode_ciphertexts(message, header, ARITHMETIC)) == 0


@pytest.mark.parametrize(
    "expected",
    [
        replace(HEADER, content=Content.PAIRS),
        replace(HEADER, count=2),
        replace(HEADER, count=4),
        replace(HEADER, packing=PackingLayout(PACKING.pair_format, 4)),
        replace(HEADER, packing=PackingLayout(PairFormat.logistic(39, 1000), 5)),
        replace(HEADER, packing=PackingLayout(PairFormat.logistic(40, 1001), 5)),
        replace(HEADER, packing=PackingLayout(PairFormat(40, 1000, 1.0, 0.0, 1.0), 5)),
    ],
)
def test_anything_but_the_expected_is_refused(expected: CiphertextHeader) -> None:
    with pytest.raises(ProtocolError):
        decode_ciphertexts(MESSAGE, expected, ARITHMETIC)


def test_a_message_for_another_key_is_refused() -> None:
    expected = replace(HEADER, public_key=OTHER_KEY.public_key)
    other = open_backend("auto", OTHER_KEY.public_key.modulus)
    with pytest.raises(ProtocolError):
        decode_ciphertexts(MESSAGE, expected, other)
    with pytest.raises(KeyMismatch):
        decode_ciphertexts(MESSAGE, expected, ARITHMETIC)
    with pytest.raises(KeyMismatch):
        encode_ciphertexts(expected, ARITHMETIC, ENCRYPTOR.encrypt(signed_rows([1, 2, 3])))


def test_a_message_of_another_scheme_is_refused() -> None:
    message = bytearray(MESSAGE)
    for scheme in (2, 3):  # 2 was Okamoto-Uchiyama
        message[6] = scheme
        with pytest.raises(ProtocolError):
            decode_ciphertexts(bytes(message), HEADER, ARITHMETIC)


@given(st.integers(0, 75), st.integers(1, 255))
def test_every_changed_header_byte_is_refused(position: int, change: int) -> None:
    changed = bytearray(MESSAGE)
    changed[position] ^= change
    with pytest.raises(ProtocolError):
        decode_ciphertexts(bytes(changed), HEADER, ARITHMETIC)


@given(st.one_of(st.binary(max_size=900), st.integers(0, len(MESSAGE) - 1).map(lambda n: MESSAGE[:n])))
def test_other_bytes_and_lengths_are_refused(data: bytes) -> None:
    for message in (data, MESSAGE + data[:40] + b"\0"):
        with pytest.raises(ProtocolError):
            decode_ciphertexts(message, HEADER, ARITHMETIC)


@pytest.mark.parametrize(
    "bad", [0, KEY.p, KEY.q * 12345, KEY.public_key.n, ARITHMETIC.modulus, ARITHMETIC.modulus + 1, 2 ** (8 * WIDTH) - 1]
)
def test_what_is_no_unit_is_refused(bad: int) -> None:
    for place in range(3):
        start = len(MESSAGE) - (3 - place) * WIDTH
        message = MESSAGE[:start] + bad.to_bytes(WIDTH, "little") + MESSAGE[start + WIDTH :]
        with pytest.raises(ProtocolError):
            decode_ciphertexts(message, HEADER, ARITHMETIC)
        with pytest.raises(ProtocolError):
            decode_for_decryption(message, HEADER, ARITHMETIC)


def test_counts_must_agree_when_writing() -> None:
    with pytest.raises(ValueError):
        encode_ciphertexts(HEADER, ARITHMETIC, ENCRYPTOR.encrypt(signed_rows([1, 2])))
