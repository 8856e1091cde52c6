"""Are randomisers distributed as the textbook says? Each test also rejects a wrong distribution.

Statistics: chi-squared over all cells; seeds are fixed; limits are 1 - 1e-5 quantiles, so a right sampler with
another seed fails one test in 100,000 runs.
"""

from __future__ import annotations

from collections import Counter

import gmpy2
import numpy as np
import pytest

from he_processors import paillier
from he_processors.bignum.interface import ints_from_rows, random_rows_below
from he_processors.bignum.registry import open_backend
from tests.support.he_toys import SeededRandomness, toy_paillier

# p - 1 = 2 * 29, q - 1 = 2 * 23: n-th residues modulo n^2 form a group of 58 * 46 = 2668 elements.
P, Q = 59, 47
N = P * Q
N_CELLS = (P - 1) * (Q - 1)
N_DRAWS = 60_000
LIMIT = 2990.0  # 1 - 1e-5 quantile of chi2(2667)

RESIDUES = {pow(x, N, N * N) for x in range(1, N) if x % P and x % Q}


def chi_squared(values: list[int], cells: set[int]) -> float:
    counts = Counter(values)
    assert set(counts) <= cells, "a value that is no n-th residue"
    expected = len(values) / len(cells)
    return sum((counts[cell] - expected) ** 2 for cell in cells) / expected


def draw(source, arithmetic, n: int = N_DRAWS) -> list[int]:
    return ints_from_rows(arithmetic.to_wire(source.draw(n)))


def _generator(p: int) -> int:
    return next(g for g in range(2, p) if len({pow(g, e, p) for e in range(p - 1)}) == p - 1)


def _powers(p: int, exponent: int, source: SeededRandomness) -> paillier.GeneratorPowers:
    return paillier.GeneratorPowers(open_backend("gmpy2", p * p), pow(_generator(p), exponent, p * p), p - 1, source)


def _owner(source: SeededRandomness, structured: bool) -> tuple[paillier.OwnerRandomisers, object]:
    arithmetic = open_backend("gmpy2", N * N)
    halves = []
    for p in (P, Q):
        if structured:
            halves.append(_powers(p, p, source))
        else:
            halves.append(paillier.PrimePowers(open_backend("gmpy2", p * p), p, source))
    return paillier.OwnerRandomisers(arithmetic, *halves), arithmetic


def test_the_group_is_as_large_as_it_should_be() -> None:
    assert len(RESIDUES) == N_CELLS


@pytest.mark.parametrize("structured", [True, False])
def test_owner_randomisers_are_uniform_over_all_nth_residues(structured: bool) -> None:
    source, arithmetic = _owner(SeededRandomness(1), structured)
    assert chi_squared(draw(source, arithmetic), RESIDUES) < LIMIT


def test_public_randomisers_are_uniform_over_all_nth_residues() -> None:
    arithmetic = open_backend("gmpy2", N * N)
    source = paillier.PublicRandomisers(paillier.PaillierPublicKey(N), arithmetic, SeededRandomness(2))
    values: list[int] = []
    while len(values) < N_DRAWS // 2:  # small batches: with such primes every long batch holds a non-unit
        values += draw(source, arithmetic, 8)
    # The batch-wise refusal keeps whole batches of units, each of which is uniform.
    assert chi_squared(values, RESIDUES) < LIMIT


def test_rerandomisers_are_uniform_over_all_nth_residues() -> None:
    arithmetic = open_backend("gmpy2", N * N)
    source = paillier.Rerandomiser(paillier.PaillierPublicKey(N), arithmetic, SeededRandomness(3))
    assert chi_squared(draw(source, arithmetic), RESIDUES) < LIMIT


def test_one_base_for_all_is_rejected() -> None:
    # The short-cut of several libraries: a cyclic group reaches half of the residues at best.
    base = pow(2, N, N * N)
    exponents = np.random.default_rng(4).integers(0, N_CELLS, N_DRAWS)
    assert chi_squared([pow(base, int(a), N * N) for a in exponents], RESIDUES) > LIMIT


def test_exponents_by_modulo_instead_of_rejection_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def biased(n: int, bound: int, source: SeededRandomness) -> np.ndarray:
        return random_rows_below(n, 64, source) % bound

    source, arithmetic = _owner(SeededRandomness(5), structured=True)
    monkeypatch.setattr(paillier, "random_rows_below", biased)
    assert chi_squared(draw(source, arithmetic), RESIDUES) > LIMIT


def test_a_base_that_is_no_generator_is_rejected() -> None:
    square, small = _powers(P, 2 * P, SeededRandomness(6)), _powers(Q, Q, SeededRandomness(7))
    arithmetic = open_backend("gmpy2", N * N)
    assert chi_squared(draw(paillier.OwnerRandomisers(arithmetic, square, small), arithmetic), RESIDUES) > LIMIT


def _symbol_counts(values: list[int], p: int, q: int) -> list[int]:
    counts = Counter((int(gmpy2.legendre(v, p)), int(gmpy2.legendre(v, q))) for v in values)
    return [counts[a, b] for a in (1, -1) for b in (1, -1)]


def _quarters_statistic(counts: list[int]) -> float:
    expected = sum(counts) / 4
    return sum((count - expected) ** 2 for count in counts) / expected


def test_quadratic_characters_modulo_both_primes_are_independent() -> None:
    # Real structure: 768-bit key, n = 2000 draws, chi2(3), limit at 1 - 1e-5: 26.
    key = toy_paillier()
    owner = paillier.owner_encryptor(key, source=SeededRandomness(8))
    for source in (owner.randomisers, paillier.Rerandomiser(key.public_key, owner.arithmetic, SeededRandomness(9))):
        values = draw(source, owner.arithmetic, 2000)
        assert _quarters_statistic(_symbol_counts(values, key.p, key.q)) < 26.0


def test_a_single_base_shows_in_the_quadratic_characters() -> None:
    # What the key owner sees if re-randomisation is h^a alone: two of four classes, whatever h is.
    key = toy_paillier()
    n, modulus = key.public_key.n, key.public_key.modulus
    rng = SeededRandomness(10)
    for _ in range(3):
        h = pow(int.from_bytes(rng.bytes(96), "big") % n, n, modulus)
        values = [int(gmpy2.powmod(h, int.from_bytes(rng.bytes(112), "big"), modulus)) for _ in range(300)]
        counts = _symbol_counts(values, key.p, key.q)
        assert counts.count(0) >= 2 and _quarters_statistic(counts) > 26.0


def test_cosets_of_small_odd_order_are_uniform_too() -> None:
    # The character x^((p-1)/f) for the odd factors f of the cofactor k: each class equally often.
    key = toy_paillier()
    owner = paillier.owner_encryptor(key, source=SeededRandomness(11))
    rerandomiser = paillier.Rerandomiser(key.public_key, owner.arithmetic, SeededRandomness(12))
    n_checked = 0
    for p in (key.p, key.q):
        factors = [f for f in range(3, 60, 2) if (p - 1) % f == 0 and gmpy2.is_prime(f)]
        for f in factors:
            n_checked += 1
            for source in (owner.randomisers, rerandomiser):
                values = draw(source, owner.arithmetic, 60 * f)
                counts = Counter(int(gmpy2.powmod(v, (p - 1) // f, p)) for v in values)
                # chi2(f - 1) lies below f + 7.1 sqrt(2 f) + 30 with probability 1 - 1e-6 for these f.
                statistic = sum((c - 60) ** 2 for c in counts.values()) / 60
                assert len(counts) == f and statistic < f + 7.1 * (2 * f) ** 0.5 + 30
    assert n_checked, "choose a seed of the toy key whose cofactors have small odd factors"
