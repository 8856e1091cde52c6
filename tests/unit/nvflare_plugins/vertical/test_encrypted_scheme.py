"""What a passive party checks of the key that an active party announces."""

from __future__ import annotations

import pytest

from he_processors.additive_schemes import Scheme
from he_processors.ciphertext_wire import public_key_to_bytes
from he_processors.errors import ProtocolError
from he_processors.paillier import PaillierPublicKey
from nvflare_plugins.kinds.vertical.histogram_maker import unpack_public_key
from tests.support.he_toys import toy_paillier

N = toy_paillier().public_key.n


@pytest.mark.parametrize("other", [2, Scheme.ELGAMAL.value])  # 2 was Okamoto-Uchiyama
def test_an_announced_key_reads_back_under_its_own_scheme_only(other):
    key = toy_paillier().public_key
    data = public_key_to_bytes(key)
    assert unpack_public_key(key.scheme.value, data, allow_toy_keys=True) == key
    with pytest.raises(ProtocolError):
        unpack_public_key(other, data, allow_toy_keys=True)
    with pytest.raises(ProtocolError):
        unpack_public_key(other, data[:5] + bytes([other]) + data[6:], allow_toy_keys=True)


@pytest.mark.parametrize(
    "key",
    [
        PaillierPublicKey(3 * N),  # nearly every draw of 97 units would fail: the party would draw for ever
        PaillierPublicKey((1 << (1 << 15)) + 1),  # a longer one would only cost the party time
    ],
    ids=["small_factor", "too_long"],
)
def test_keys_that_would_hang_or_mislead_a_party_are_refused(key):
    with pytest.raises(ProtocolError):
        unpack_public_key(key.scheme.value, public_key_to_bytes(key), allow_toy_keys=True)


def test_toy_keys_are_refused_outside_tests():
    with pytest.raises(ProtocolError, match="bits"):
        unpack_public_key(Scheme.PAILLIER.value, public_key_to_bytes(toy_paillier().public_key))
