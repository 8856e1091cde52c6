from __future__ import annotations

import gmpy2
import numpy as np
import pytest

from he_processors.bignum.interface import ints_from_rows
from he_processors.bignum.registry import available_backends, open_backend
from he_processors.paillier import EXPONENT_SLACK_BITS, N_SUBSET_BASES, PaillierDecryptor, Rerandomiser, owner_encryptor
from tests.support.he_toys import signed_rows, toy_paillier

KEY = toy_paillier()
VALUES = [0, 5, -7, 2**100]


@pytest.mark.parametrize("backend", available_backends())
def test_plaintexts_stay_and_ciphertexts_change(backend: str) -> None:
    encryptor = owner_encryptor(KEY, backend)
    ciphertexts = encryptor.encrypt(signed_rows(VALUES))
    rerandomiser = Rerandomiser(KEY.public_key, encryptor.arithmetic)
    before = encryptor.arithmetic.to_wire(ciphertexts)
    after = [encryptor.arithmetic.to_wire(rerandomiser.rerandomise(ciphertexts)) for _ in range(2)]
    for rows in after:
        assert PaillierDecryptor(KEY, backend).decrypt(rows) == VALUES
    distinct = {row.tobytes() for rows in (before, *after) for row in rows}
    assert len(distinct) == 3 * len(VALUES)


def test_parameters_are_the_required_ones() -> None:
    assert N_SUBSET_BASES >= 96
    assert EXPONENT_SLACK_BITS >= 128
    rerandomiser = Rerandomiser(KEY.public_key, open_backend("gmpy2", KEY.public_key.modulus))
    assert 8 * rerandomiser._exponent_bytes >= KEY.public_key.key_bits + 128


def test_two_parties_and_two_sessions_have_different_bases() -> None:
    arithmetic = open_backend("gmpy2", KEY.public_key.modulus)
    tables = [Rerandomiser(KEY.public_key, arithmetic)._subsets for _ in range(2)]
    rows = [arithmetic.to_wire(table) for table in tables]
    assert not np.any(np.all(rows[0][1:256] == rows[1][1:256], axis=1))


def test_random_bits_choose_all_subsets_of_the_bases() -> None:
    # Entry 256 * t + s of the table is the product of the bases whose bits are set in s.
    arithmetic = open_backend("gmpy2", KEY.public_key.modulus)
    rows = ints_from_rows(arithmetic.to_wire(Rerandomiser(KEY.public_key, arithmetic)._subsets))
    assert len(rows) == N_SUBSET_BASES // 8 * 256
    for table in range(N_SUBSET_BASES // 8):
        entries = rows[256 * table : 256 * (table + 1)]
        assert entries[0] == 1
        for subset in (1, 2, 3, 77, 255):
            product = gmpy2.mpz(1)
            for bit in range(8):
                if subset >> bit & 1:
                    product = product * entries[1 << bit] % KEY.public_key.modulus
            assert entries[subset] == product
