from __future__ import annotations

import math
import pickle

import gmpy2
import numpy as np
import phe
import pytest

from he_processors import paillier
from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.bignum.registry import available_backends
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.paillier import (
    Encryptor,
    PaillierDecryptor,
    PaillierPrivateKey,
    _prime_factors,
    generate_paillier_key,
    generate_structured_prime,
    is_generator,
    owner_encryptor,
    public_encryptor,
)
from tests.support.he_toys import SeededRandomness, signed_rows, toy_paillier

KEY = toy_paillier()
N = KEY.public_key.n
VALUES = [0, 1, -1, 2, -2, 2**126, -(2**126), 123456789, -987654321, 2**127 - 1, -(2**127)]


def imported() -> PaillierPrivateKey:
    return PaillierPrivateKey.from_primes(KEY.p, KEY.q, allow_toy_keys=True)


def encryptors(backend: str) -> dict[str, Encryptor]:
    return {
        "owner": owner_encryptor(KEY, backend),
        "owner of an imported key": owner_encryptor(imported(), backend),
        "public": public_encryptor(KEY.public_key, backend),
    }


@pytest.fixture(params=available_backends())
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_way_to_encrypt_decrypts(backend: str) -> None:
    for name, encryptor in encryptors(backend).items():
        rows = encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows(VALUES)))
        assert PaillierDecryptor(KEY, backend).decrypt(rows) == VALUES, name


def test_no_plaintexts_and_more_than_one_block(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paillier, "BLOCK_ROWS", 4)
    encryptor = owner_encryptor(KEY, backend)
    for values in ([], VALUES):
        rows = encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows(values)))
        assert PaillierDecryptor(KEY, backend).decrypt(rows) == values


def test_products_of_ciphertexts_are_sums(backend: str) -> None:
    encryptor = owner_encryptor(KEY, backend)
    arithmetic = encryptor.arithmetic
    ciphertexts = encryptor.encrypt(signed_rows(VALUES))
    order, starts = np.arange(len(VALUES), dtype=np.int32), np.array([0, 4, 4, len(VALUES)], dtype=np.int64)
    sums = arithmetic.to_wire(arithmetic.segprod(ciphertexts, order, starts))
    assert PaillierDecryptor(KEY, backend).decrypt(sums) == [sum(VALUES[:4]), 0, sum(VALUES[4:])]


def test_a_phe_key_pair_works() -> None:
    public, private = phe.generate_paillier_keypair(n_length=512)
    key = PaillierPrivateKey.from_primes(private.p, private.q, allow_toy_keys=True)
    encryptor = owner_encryptor(key)
    rows = encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows(VALUES)))
    assert [private.raw_decrypt(c) for c in ints_from_rows(rows)] == [value % public.n for value in VALUES]
    theirs = rows_from_ints([public.raw_encrypt(value % public.n) for value in VALUES], encryptor.arithmetic.width)
    assert PaillierDecryptor(key).decrypt(np.concatenate([rows, theirs])) == VALUES * 2


def test_plaintexts_up_to_n_and_no_further() -> None:
    encryptor = owner_encryptor(KEY)
    width = (N.bit_length() + 15) // 8
    edges = [N // 2, -(N // 2), N - 1, 1 - N]
    rows = encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows(edges, width)))
    assert PaillierDecryptor(KEY).decrypt(rows) == [N // 2, -(N // 2), -1, 1]
    for bad in (N, -N - 1, 2 * N):
        with pytest.raises(CapacityExceeded):
            encryptor.encrypt(signed_rows([0, bad], width + 1))


def test_plaintexts_of_another_type_are_refused(backend: str) -> None:
    # As 64-bit numbers they would lose their high bytes in some backends.
    no_width = np.zeros((1, 0), dtype=np.uint8)
    for wrong in (np.full((1, 16), 300, dtype=np.int64), np.zeros(16, dtype=np.uint8), no_width):
        with pytest.raises(ValueError, match="uint8"):
            owner_encryptor(KEY, backend).encrypt(wrong)


def test_primes_have_the_structure_that_encryption_rests_on() -> None:
    for seed in range(5):
        key = generate_paillier_key(512, SeededRandomness(seed), allow_toy_keys=True)
        p, q, n = key.p, key.q, key.public_key.n
        assert n.bit_length() == 512 and p > q and p % 4 == q % 4 == 3
        assert math.gcd(p - 1, q - 1) == 2 and math.gcd(n, (p - 1) * (q - 1)) == 1
        for prime, generator in ((p, key.p_generator), (q, key.q_generator)):
            # The cofactor is below 2^17: trial division leaves the large prime.
            small, rest = set(), prime - 1
            for divisor in range(2, 1 << 17):
                while rest % divisor == 0:
                    small.add(divisor)
                    rest //= divisor
            assert gmpy2.is_prime(rest) and rest > 1
            assert is_generator(generator, prime, small | {rest})


def test_a_non_generator_is_recognised() -> None:
    prime = generate_structured_prime(64, SeededRandomness(9))
    assert is_generator(prime.generator, prime.p, {2})
    assert not is_generator(pow(prime.generator, 2, prime.p), prime.p, {2})


def test_prime_factors_by_trial_division() -> None:
    assert _prime_factors(1) == set()
    assert _prime_factors(2 * 2 * 3 * 49 * 101) == {2, 3, 7, 101}
    assert _prime_factors(65521) == {65521}


def test_short_and_odd_key_lengths_are_refused() -> None:
    for bits in (1024, 2047, 2049, 0):
        with pytest.raises(ConfigurationError):
            generate_paillier_key(bits)


def _unsuitable_primes() -> dict[str, tuple[int, int]]:
    return {
        "composite": (KEY.p + 2, KEY.q),
        "equal": (KEY.p, KEY.p),
        "neighbours": (int(gmpy2.next_prime(KEY.p)), KEY.p),
        "unbalanced": (int(gmpy2.next_prime(3 << 702)), int(gmpy2.next_prime(3 << 62))),
    }


@pytest.mark.parametrize("case", ["composite", "equal", "neighbours", "unbalanced"])
def test_unsuitable_imported_primes_are_refused(case: str) -> None:
    with pytest.raises(ConfigurationError):
        PaillierPrivateKey.from_primes(*_unsuitable_primes()[case], allow_toy_keys=True)


def test_short_imported_keys_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="2048"):
        PaillierPrivateKey.from_primes(KEY.p, KEY.q)


def test_keys_print_as_fingerprints_and_are_not_pickled() -> None:
    text = repr(KEY) + str(KEY) + f"{KEY}"
    assert KEY.public_key.fingerprint[:16] in text
    assert str(KEY.p) not in text and str(KEY.q) not in text
    with pytest.raises(TypeError):
        pickle.dumps(KEY)


def test_fingerprints_tell_keys_apart() -> None:
    assert toy_paillier(seed=2).public_key.fingerprint != KEY.public_key.fingerprint
    assert len(KEY.public_key.fingerprint) == 64


def test_what_is_no_unit_does_not_decrypt() -> None:
    width = (2 * N.bit_length() + 7) // 8
    for bad in (0, KEY.p, KEY.q, KEY.q * 5, N, N * N, N * N + 1):
        with pytest.raises(ProtocolError):
            PaillierDecryptor(KEY).decrypt(rows_from_ints([1, bad], width))


def test_a_full_size_key_end_to_end() -> None:
    key = generate_paillier_key(2048)
    encryptor = owner_encryptor(key)
    rows = encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows(VALUES)))
    assert PaillierDecryptor(key).decrypt(rows) == VALUES
