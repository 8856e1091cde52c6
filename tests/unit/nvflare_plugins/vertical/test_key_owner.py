"""Randomisers made ahead: all of them are used, none for trees that never come, and decryption does not wait long."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from he_processors.additive_schemes import Scheme
from he_processors.ciphertext_wire import public_key_to_bytes
from he_processors.errors import ProtocolError
from he_processors.paillier import PaillierPublicKey
from nvflare_plugins.kinds.vertical import key_owner
from nvflare_plugins.kinds.vertical.histogram_maker import unpack_public_key
from nvflare_plugins.kinds.vertical.key_owner import PrecomputingKeyOwner, pair_format
from tests.support.he_toys import toy_paillier


class Recorder:
    """Stands in for the owner."""

    def __init__(self, n_rows: int):
        self.pair_format = pair_format(n_rows)
        self.is_streamed, self.setup = True, None
        self.calls: list[object] = []
        self.filled = threading.Event()

    def encrypt(self, g, h):
        self.calls.append(("encrypt", g.size))
        return b""

    def fill(self, n):
        self.calls.append(("fill", n))
        time.sleep(0.02)
        if n == 10:
            self.filled.set()

    def open_sums(self, sums, layout, totals):
        before = len(self.calls)
        time.sleep(0.1)
        self.during = self.calls[before:]
        return []


def encrypt(owner: PrecomputingKeyOwner, n: int) -> None:
    ones = np.ones(n, dtype=np.int64)
    owner.encrypt(ones, ones)


def test_each_tree_but_the_last_is_prepared(monkeypatch):
    monkeypatch.setattr(key_owner, "_FILL_STEP", 4)
    recorder = Recorder(10)
    with PrecomputingKeyOwner(recorder, 10, 2) as owner:
        encrypt(owner, 6)
        encrypt(owner, 4)
        assert recorder.filled.wait(60)
        encrypt(owner, 6)
        encrypt(owner, 4)
    fills = [("fill", 4), ("fill", 8), ("fill", 10)]
    assert recorder.calls == [("encrypt", 6), ("encrypt", 4), *fills, ("encrypt", 6), ("encrypt", 4)]


def test_encryption_does_not_wait_until_all_is_made(monkeypatch):
    monkeypatch.setattr(key_owner, "_FILL_STEP", 1)
    recorder = Recorder(10)
    with PrecomputingKeyOwner(recorder, 100_000, 2) as owner:  # half an hour of making
        encrypt(owner, 100_000)
        encrypt(owner, 100_000)
    assert recorder.calls[-1] == ("encrypt", 100_000) and len(recorder.calls) < 50_000


def test_opening_sums_comes_first_and_leaving_ends_the_making(monkeypatch):
    monkeypatch.setattr(key_owner, "_FILL_STEP", 1)
    recorder = Recorder(10)
    with PrecomputingKeyOwner(recorder, 100_000, 2) as owner:  # half an hour of making
        encrypt(owner, 100_000)
        owner.open_sums(b"", None, [])
        assert len(recorder.during) <= 1
    n_calls = len(recorder.calls)
    time.sleep(0.1)
    assert n_calls < 50_000 and len(recorder.calls) == n_calls


# -- announced keys ----------------------------------------------------------------------------------------------------


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
