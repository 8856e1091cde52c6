from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from he_processors.additive import randomiser_pool
from he_processors.additive.one_prime import OnePrimeLogarithm
from he_processors.bignum.registry import available_backends
from he_processors.bignum.rows import ints_from_rows, rows_from_ints
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.okamoto_uchiyama.decryption import OkamotoUchiyamaDecryptor
from he_processors.okamoto_uchiyama.encryption import owner_encryptor, public_encryptor
from he_processors.okamoto_uchiyama.keys import generate_okamoto_uchiyama_key
from tests.support.he_toys import signed_rows, toy_okamoto_uchiyama

KEY = toy_okamoto_uchiyama()
VALUES = [0, 1, -1, 2**126, -(2**126), 123456789, -987654321, 2**127 - 1, -(2**127)]


@pytest.mark.parametrize("backend", available_backends())
def test_both_ways_to_encrypt_decrypt(backend: str) -> None:
    for encryptor in (owner_encryptor(KEY, backend), public_encryptor(KEY.public_key, backend)):
        ciphertexts = encryptor.encrypt(signed_rows(VALUES))
        decryptor = OkamotoUchiyamaDecryptor(KEY, backend)
        assert decryptor.decrypt(encryptor.arithmetic.to_wire(ciphertexts)) == VALUES
        order, starts = np.arange(len(VALUES), dtype=np.int32), np.array([0, len(VALUES)], dtype=np.int64)
        total = encryptor.arithmetic.segprod(ciphertexts, order, starts)
        assert decryptor.decrypt(encryptor.arithmetic.to_wire(total)) == [sum(VALUES)]


def test_no_plaintexts_and_more_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomiser_pool, "BLOCK_ROWS", 4)
    encryptor = owner_encryptor(KEY)
    for values in ([], VALUES):
        rows = encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows(values)))
        assert OkamotoUchiyamaDecryptor(KEY).decrypt(rows) == values


def test_ciphertexts_follow_the_textbook_formula() -> None:
    # g^m x^n modulo n: dividing by g^m leaves an n-th residue, whose (p-1)-th power is 1 modulo p^2.
    encryptor = owner_encryptor(KEY)
    n, g = KEY.public_key.n, KEY.g
    rows = encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows(VALUES)))
    for value, ciphertext in zip(VALUES, ints_from_rows(rows), strict=True):
        residue = ciphertext * pow(g, -value, n) % n
        assert pow(residue, KEY.p - 1, KEY.p**2) == 1
        assert residue != 1


def test_keys_have_the_right_shape() -> None:
    n = KEY.public_key.n
    assert n == KEY.p**2 * KEY.q and n.bit_length() == 768
    assert KEY.p.bit_length() == KEY.q.bit_length() == 256 and KEY.p != KEY.q
    assert math.gcd(n, (KEY.p - 1) * (KEY.q - 1)) == 1
    assert pow(KEY.g, KEY.p - 1, KEY.p**2) != 1


def test_capacity_is_known_from_the_public_key() -> None:
    assert OkamotoUchiyamaDecryptor(KEY).plaintext_bits == KEY.p.bit_length() - 2
    assert toy_okamoto_uchiyama(832).public_key.plaintext_bits == toy_okamoto_uchiyama(832).p.bit_length() - 2


def test_plaintexts_have_a_fixed_width_that_fits_the_key() -> None:
    encryptor = owner_encryptor(KEY)
    with pytest.raises(CapacityExceeded):
        encryptor.encrypt(signed_rows([1], 17))
    with pytest.raises(CapacityExceeded):
        owner_encryptor(toy_okamoto_uchiyama(320))


def test_what_is_no_unit_does_not_decrypt() -> None:
    n = KEY.public_key.n
    for bad in (0, KEY.p, KEY.q, n, n + 1):
        with pytest.raises(ProtocolError):
            OkamotoUchiyamaDecryptor(KEY).decrypt(rows_from_ints([bad], 96))


def test_a_wrong_base_has_no_logarithm() -> None:
    with pytest.raises(ZeroDivisionError):
        OnePrimeLogarithm(KEY.p, 1)


def test_keys_print_as_fingerprints_and_short_ones_are_refused() -> None:
    assert str(KEY.p) not in repr(KEY) and KEY.public_key.fingerprint[:16] in repr(KEY)
    with pytest.raises(TypeError):
        pickle.dumps(KEY)
    with pytest.raises(ConfigurationError):
        generate_okamoto_uchiyama_key(1024)
