"""Masks modulo 2^61 - 1 for the few words that travel with every sum."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from he_processors.field61 import MODULUS
from he_processors.key_agreement import derive_key
from he_processors.masks import ResidueMasks
from tests.support.he_toys import pair_secrets

SESSION, GROUP = b"session-" * 4, b"g" * 32


def make_sites(world: int, session: bytes = SESSION) -> list[ResidueMasks]:
    return [ResidueMasks(session, rank, pair_secrets(rank, world), GROUP) for rank in range(world)]


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


@settings(max_examples=40)
@given(st.integers(1, 12), st.lists(st.sampled_from([0, 1, MODULUS - 1]) | st.integers(0, MODULUS - 1), max_size=6))
def test_masks_cancel_and_the_sum_is_unblinded(world, residues):
    sites = make_sites(world)
    sent = [site.mask(words(*residues), 3) for site in sites]
    total = words(*(sum(int(part[i]) for part in sent) % MODULUS for i in range(len(residues))))
    for site in sites:
        assert site.unblind(total, 3).tolist() == [world * r % MODULUS for r in residues]


def test_masks_are_those_that_are_documented():
    def stream(key: bytes, counter: int, n: int) -> list[int]:
        aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
        blocks = [counter.to_bytes(8, "little") + k.to_bytes(8, "little") for k in range(n)]
        return [int.from_bytes(aes.update(block), "little") for block in blocks]

    pair = stream(derive_key(pair_secrets(0, 2)[1], SESSION, "residues/pair", 0, 1), 7, 2)
    group = stream(derive_key(GROUP, SESSION, "residues/group"), 7, 2)
    first, second = make_sites(2)
    assert first.mask(words(5, 6), 7).tolist() == [
        (v + a + b) % MODULUS for v, a, b in zip((5, 6), pair, group, strict=True)
    ]
    assert second.mask(words(5, 6), 7).tolist() == [(v - a) % MODULUS for v, a in zip((5, 6), pair, strict=True)]


def test_no_two_messages_sessions_or_places_share_a_mask():
    seen = [
        int(word)
        for session in (SESSION, b"another-" * 4)
        for site in make_sites(3, session)
        for counter in range(100)
        for word in site.mask(words(0, 0, 0), counter)
    ]
    assert len(set(seen)) == len(seen) and max(seen) < MODULUS
    shares = np.unpackbits(np.array(seen, dtype=">u8").view(np.uint8)).reshape(-1, 64)[:, 3:].mean(axis=0)
    assert np.abs(shares - 0.5).max() * 2 * np.sqrt(len(seen)) < 8  # a fair coin is farther off once in 10^15 times


def test_a_counter_masks_once_in_order_and_not_after_the_session():
    [site] = make_sites(1)
    with pytest.raises(ProtocolError, match="not been masked"):
        site.unblind(words(1), 4)
    site.mask(words(1), 4)
    for counter in (4, 3):
        with pytest.raises(ProtocolError, match="only once"):
            site.mask(words(1), counter)
    site.close()
    for use in (site.mask, site.unblind):
        with pytest.raises(ProtocolError, match="closed"):
            use(words(1), 5)


def test_keys_that_do_not_fit_the_session_are_refused():
    for arguments in ((SESSION, 0, {2: bytes(32)}, GROUP), (SESSION, 0, {1: b"short"}, GROUP), (b"", 0, {}, GROUP)):
        with pytest.raises(ValueError):
            ResidueMasks(*arguments)
