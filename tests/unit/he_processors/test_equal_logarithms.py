"""Proofs of equal logarithms: weighted sums against the definition, on every backend; what is no proof is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.curve.equal_logarithms import PROOF_BYTES, commitment, draw_weights, holds, prove, weighted_sums
from he_processors.curve.interface import BASE_POINT, GROUP_ORDER
from he_processors.curve.reference import ReferenceCurve
from he_processors.curve.registry import available_backends, load_backend, open_curve
from he_processors.randomness import OS_RANDOMNESS
from tests.support.seeded_randomness import SeededRandomness

CURVE, SECRET, TRANSCRIPT = open_curve(), 2**200 + 77, b"session 1, block 0"


def multiples(logarithms: list[int]) -> np.ndarray:
    base = CURVE.fixed_base(CURVE.from_affine(np.frombuffer(BASE_POINT, dtype=np.uint8).reshape(1, -1)))
    return CURVE.to_ristretto(base.mul(rows_from_ints(logarithms, 32)))


def multiple(logarithm: int) -> bytes:
    return multiples([logarithm % GROUP_ORDER]).tobytes()


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("n", [0, 1, 7, 1_000])
def test_a_weighted_sum_is_the_sum_of_weight_times_logarithm(backend, n):
    curve, logarithms = load_backend(backend), [[k * i + 1 for i in range(n)] for k in (3, 5)]
    weights = draw_weights(b"x", n)
    found = weighted_sums(curve, [curve.from_ristretto(multiples(of_batch)) for of_batch in logarithms], weights)
    whole = ints_from_rows(weights)
    assert found == [multiple(sum(w * x for w, x in zip(whole, of_one, strict=True))) for of_one in logarithms]


@pytest.mark.parametrize("byte", [0, 1, 0x80, 0xFF])
@pytest.mark.parametrize("n", [3, 1_000])
def test_extreme_weights_are_weights_too(byte, n):
    weights = np.full((n, 16), byte, dtype=np.uint8)
    found = weighted_sums(CURVE, [CURVE.from_ristretto(multiples([1] * n))], weights)
    assert found == [multiple(n * int.from_bytes(bytes([byte] * 16), "little"))]


def test_weights_depend_on_everything_before_them():
    assert not np.array_equal(draw_weights(b"x", 3), draw_weights(b"y", 3))
    assert np.array_equal(draw_weights(b"x", 3)[:2], draw_weights(b"x", 2)) and draw_weights(b"x", 0).shape == (0, 16)


@given(st.integers(1, GROUP_ORDER - 1), st.integers(0, GROUP_ORDER - 1), st.binary(max_size=9))
@settings(max_examples=25)
def test_what_is_so_is_proven_on_any_backend(secret, base, transcript):
    product = multiple(base * secret)
    proof = prove(CURVE, secret, transcript, product, SeededRandomness(base % 99))
    assert len(proof) == PROOF_BYTES
    for curve in (CURVE, ReferenceCurve()):
        assert commitment(curve, secret) == multiple(secret)
        assert holds(curve, transcript, multiple(secret), multiple(base), product, proof)


GOOD = {
    "transcript": TRANSCRIPT,
    "committed": multiple(SECRET),
    "base": multiple(5),
    "product": multiple(5 * SECRET),
    "proof": prove(CURVE, SECRET, TRANSCRIPT, multiple(5 * SECRET), SeededRandomness(1)),
}
PROOF = GOOD["proof"]


def plus_order(place: int) -> bytes:
    number = int.from_bytes(PROOF[place : place + 32], "little") + GROUP_ORDER
    return PROOF[:place] + number.to_bytes(32, "little") + PROOF[place + 32 :]


@pytest.mark.parametrize(
    "change",
    [
        {"transcript": b"session 2, block 0"},
        {"committed": multiple(SECRET + 1)},
        {"base": multiple(6)},
        {"product": multiple(6 * SECRET)},
        {"base": multiple(6), "product": multiple(6 * SECRET)},
        {"base": bytes(32), "product": bytes(32)},
        {"committed": bytes(32), "product": bytes(32)},
        *({field: bad} for field in ("committed", "base", "product") for bad in (b"", b"\xff" * 32, bytes(33))),
        *({"proof": bad} for bad in (b"", bytes(64), b"\xff" * 64, PROOF[:-1], PROOF + b"\0", PROOF[32:] + PROOF[:32])),
        *({"proof": plus_order(place)} for place in (0, 32)),
        *({"proof": bytes([*PROOF[:at], PROOF[at] ^ 1, *PROOF[at + 1 :]])} for at in (0, 31, 32, 63)),
        {"proof": prove(CURVE, SECRET + 1, TRANSCRIPT, multiple(5 * SECRET), SeededRandomness(1))},
    ],
)
def test_anything_else_is_no_proof(change):
    assert holds(CURVE, **GOOD) and not holds(CURVE, **{**GOOD, **change})


def test_no_two_proofs_share_their_randomness():
    """From two with one nonce the secret follows."""
    assert len({prove(CURVE, SECRET, TRANSCRIPT, GOOD["product"], OS_RANDOMNESS) for _ in range(5)}) == 5
