"""Faults of other implementations, re-stated as attacks: each works on the fault and fails on ours."""

from __future__ import annotations

import inspect
import itertools
import math

import numpy as np
import pytest

from he_processors import paillier
from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from tests.support.he_toys import SeededRandomness, signed_rows, toy_paillier

KEY = toy_paillier()
N, MODULUS = KEY.public_key.n, KEY.public_key.modulus


def encrypted(encryptor, values: list[int]) -> list[int]:
    return ints_from_rows(encryptor.arithmetic.to_wire(encryptor.encrypt(signed_rows(values))))


# --- one randomiser for all ciphertexts --------------------------------------------------------------------------


def difference_without_key(c1: int, c2: int) -> int | None:
    """Return m1 - m2 if both ciphertexts carry the same randomiser."""
    quotient, rest = divmod(c1 * pow(c2, -1, MODULUS) % MODULUS - 1, N)
    return None if rest else min(quotient, quotient - N, key=abs)


class OneRandomiser:
    """The fault: r drawn once."""

    def __init__(self, encryptor: paillier.Encryptor) -> None:
        self._arithmetic = encryptor.arithmetic
        self._residue = encryptor.randomisers.draw(1)

    def draw(self, n: int):
        return self._arithmetic.take(self._residue, np.zeros(n, dtype=np.int64))


def test_a_shared_randomiser_reveals_differences_and_ours_are_not_shared() -> None:
    values = [7, 1000, -3, 7]
    ours = paillier.owner_encryptor(KEY)
    faulty = paillier.Encryptor(KEY.public_key, ours.arithmetic, OneRandomiser(ours))
    first, second, *_ = encrypted(faulty, values)
    assert difference_without_key(first, second) == 7 - 1000
    for encryptor in (ours, paillier.public_encryptor(KEY.public_key)):
        batches = encrypted(encryptor, values) + encrypted(encryptor, values)
        for c1, c2 in itertools.combinations(batches, 2):
            assert difference_without_key(c1, c2) is None


@pytest.mark.parametrize("n_batches", [1, 5])
def test_equal_plaintexts_have_different_ciphertexts(n_batches: int) -> None:
    for encryptor in (paillier.owner_encryptor(KEY), paillier.public_encryptor(KEY.public_key)):
        ciphertexts = [c for _ in range(n_batches) for c in encrypted(encryptor, [0] * 40)]
        assert len(set(ciphertexts)) == 40 * n_batches


# --- key from a small seed -----------------------------------------------------------------------------------------


def test_a_key_from_a_small_seed_is_found_by_trying_seeds() -> None:
    target = paillier.generate_paillier_key(512, SeededRandomness(37), allow_toy_keys=True).public_key.n
    guesses = (paillier.generate_paillier_key(512, SeededRandomness(seed), allow_toy_keys=True) for seed in range(64))
    assert any(math.gcd(guess.p, target) > 1 for guess in guesses)


def test_our_keys_come_from_the_operating_system_and_take_no_seed() -> None:
    parameters = inspect.signature(paillier.generate_paillier_key).parameters
    assert not any("seed" in name for name in parameters)
    assert parameters["source"].default.bytes(16) != parameters["source"].default.bytes(16)
    keys = [paillier.generate_paillier_key(512, allow_toy_keys=True) for _ in range(8)]
    primes = [prime for key in keys for prime in (key.p, key.q)]
    assert len(set(primes)) == 16


# --- faults in the Chinese remainder -----------------------------------------------------------------------------


def test_a_fault_in_one_half_reveals_a_factor_and_is_caught() -> None:
    encryptor = paillier.owner_encryptor(KEY, "gmpy2")
    owner = encryptor.randomisers._source
    right = ints_from_rows(encryptor.arithmetic.to_wire(owner.draw(1)))[0]
    wrong_in_q = (right + KEY.p**2) % MODULUS  # right modulo p^2, wrong modulo q^2
    # r^phi(n) = 1 modulo n^2 for an n-th residue; a fault breaks it modulo one prime only, and so does any public
    # consistency test between two such ciphertexts.
    assert math.gcd(right - wrong_in_q, N) == KEY.p
    for half in (owner._larger, owner._smaller):
        _break_one_residue(half)
        with pytest.raises(paillier.ArithmeticFault):
            encryptor.encrypt(signed_rows([1, 2, 3]))
        del half.draw
    encryptor.encrypt(signed_rows([1, 2, 3]))


def _break_one_residue(half) -> None:
    """Make a half return one residue off by one, as a bit flip would."""
    honest = type(half).draw

    def faulty(n: int):
        elements = honest(half, n)
        values = ints_from_rows(half.arithmetic.to_wire(elements.residues))
        values[n // 2] ^= 1 << 40
        broken = half.arithmetic.from_wire(rows_from_ints(values, half.arithmetic.width))
        return type(elements)(broken, elements.expected_product)

    half.draw = faulty


# --- the key owner recognises its own randomisers ------------------------------------------------------------------


def test_the_owner_tests_membership_without_rerandomisation_and_cannot_with_it() -> None:
    encryptor = paillier.owner_encryptor(KEY)
    arithmetic = encryptor.arithmetic
    ciphertexts = encryptor.encrypt(signed_rows([4, 4, 4, 4]))
    # A bin of rows 0 and 2. Sums of equal gradients tell nothing, but the product names its rows.
    returned = arithmetic.segprod(ciphertexts, np.array([0, 2], np.int32), np.array([0, 2], np.int64))

    def owner_finds_rows(bin_ciphertext) -> list[tuple[int, ...]]:
        target = arithmetic.to_wire(bin_ciphertext).tobytes()
        subsets = [s for size in range(1, 5) for s in itertools.combinations(range(4), size)]
        order = np.array([row for subset in subsets for row in subset], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum([len(s) for s in subsets])]).astype(np.int64)
        products = arithmetic.to_wire(arithmetic.segprod(ciphertexts, order, starts))
        return [s for s, row in zip(subsets, products, strict=True) if row.tobytes() == target]

    assert owner_finds_rows(returned) == [(0, 2)]
    rerandomiser = paillier.Rerandomiser(KEY.public_key, arithmetic)
    assert owner_finds_rows(rerandomiser.rerandomise(returned)) == []
