from __future__ import annotations

import gmpy2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.ciphertext_wire import public_key_from_bytes, public_key_to_bytes
from he_processors.errors import ProtocolError
from he_processors.paillier import PaillierPublicKey
from tests.support.he_toys import toy_paillier

N = toy_paillier().public_key.n
KEY = PaillierPublicKey(N)


def test_round_trip() -> None:
    assert public_key_from_bytes(public_key_to_bytes(KEY), allow_toy_keys=True) == KEY


def test_short_keys_are_refused_outside_tests() -> None:
    with pytest.raises(ProtocolError, match="2048"):
        public_key_from_bytes(public_key_to_bytes(KEY))


@pytest.mark.parametrize(
    "key",
    [
        PaillierPublicKey(N + 1),
        PaillierPublicKey(N >> 1 | 1),  # not a permitted length
        PaillierPublicKey(int(gmpy2.next_prime(N))),
        PaillierPublicKey(3 * (N // 3 | 1)),
        PaillierPublicKey((1 << 20_480) - 1),
    ],
    ids=["even", "odd length", "prime", "small factor", "too long"],
)
def test_moduli_that_cannot_be_right_are_refused(key: PaillierPublicKey) -> None:
    with pytest.raises(ProtocolError):
        public_key_from_bytes(public_key_to_bytes(key), allow_toy_keys=True)


@given(st.data())
def test_changed_bytes_are_refused_or_another_key(data: st.DataObject) -> None:
    good = public_key_to_bytes(KEY)
    begin = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(begin, min(len(good), begin + 4)))
    changed = good[:begin] + data.draw(st.binary(max_size=6)) + good[end:]
    try:
        read = public_key_from_bytes(changed, allow_toy_keys=True)
    except ProtocolError:
        return
    assert public_key_to_bytes(read) == changed


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        public_key_from_bytes(noise, allow_toy_keys=True)
    with pytest.raises(ProtocolError):
        public_key_from_bytes(b"VBPK\x01\x01" + noise, allow_toy_keys=True)


@pytest.mark.parametrize("power", [2, 3, 5, 7])
@pytest.mark.parametrize("bits", [2048, 3072])
def test_perfect_powers_are_no_moduli(bits: int, power: int) -> None:
    """Whoever announces p^m instead of p q reads what should hide re-randomised sums."""
    base = gmpy2.next_prime(gmpy2.mpz(2) ** (bits // power))
    while (base**power).bit_length() != bits:  # the permitted lengths are even
        base = gmpy2.next_prime(gmpy2.iroot(gmpy2.mpz(2) ** bits, power)[0] * 99 // 100)
    n = int(base**power)
    with pytest.raises(ProtocolError, match="power of a smaller number"):
        public_key_from_bytes(public_key_to_bytes(PaillierPublicKey(n)))


def test_powers_of_composites_are_no_moduli_and_the_schemes_own_shape_is() -> None:
    primes = [int(gmpy2.next_prime(gmpy2.mpz(k) << 764)) for k in (14, 15)]
    with pytest.raises(ProtocolError, match="power of a smaller number"):
        public_key_from_bytes(public_key_to_bytes(PaillierPublicKey((primes[0] * primes[1]) ** 2)))
    p, q = (int(gmpy2.next_prime(gmpy2.mpz(k) << 1020)) for k in (14, 15))
    assert public_key_from_bytes(public_key_to_bytes(PaillierPublicKey(p * q))) == PaillierPublicKey(p * q)
