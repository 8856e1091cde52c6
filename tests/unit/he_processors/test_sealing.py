"""Sealed boxes open only unchanged, in order, in their direction, session and purpose."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from he_processors import key_agreement
from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.key_agreement import SEALED_OVERHEAD_BYTES, SealedBox

SECRET, SESSION = b"k" * 32, b"s" * 32


def pair() -> tuple[SealedBox, SealedBox]:
    return SealedBox(SECRET, SESSION, 0, 1), SealedBox(SECRET, SESSION, 0, 1)


@pytest.mark.parametrize("plaintext", [b"", b"x", bytes(100_000)])
def test_round_trip(plaintext):
    sender, recipient = pair()
    sealed = sender.seal(plaintext, b"purpose")
    assert len(sealed) == len(plaintext) + SEALED_OVERHEAD_BYTES
    assert recipient.open(sealed, b"purpose") == plaintext


def test_equal_plaintexts_look_different():
    sender, _ = pair()
    first, second = sender.seal(bytes(32)), sender.seal(bytes(32))
    assert first[13:] != second[13:]


def test_any_changed_byte_is_noticed():
    sealed = pair()[0].seal(b"secret share", b"purpose")
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises((AuthenticationError, ProtocolError)):
            pair()[1].open(bytes(changed), b"purpose")


@pytest.mark.parametrize("cut", [0, 1, SEALED_OVERHEAD_BYTES - 1, SEALED_OVERHEAD_BYTES])
def test_truncated(cut):
    sealed = pair()[0].seal(b"secret share")
    with pytest.raises((AuthenticationError, ProtocolError)):
        pair()[1].open(sealed[:cut])


def test_replayed_and_reordered_messages_are_refused():
    sender, recipient = pair()
    first, second = sender.seal(b"1"), sender.seal(b"2")
    assert recipient.open(second) == b"2"
    for old in (first, second):
        with pytest.raises(ProtocolError, match="replayed or out of order"):
            recipient.open(old)


def test_a_refused_message_does_not_move_the_counter():
    sender, recipient = pair()
    sealed = sender.seal(b"1")
    forged = sealed[:5] + (1000).to_bytes(8, "little") + sealed[13:]
    with pytest.raises(AuthenticationError):
        recipient.open(forged)
    assert recipient.open(sealed) == b"1"


@pytest.mark.parametrize(
    "other",
    [
        SealedBox(SECRET, SESSION, 1, 0),  # reflected
        SealedBox(SECRET, SESSION, 0, 2),
        SealedBox(SECRET, SESSION, 0, None),
        SealedBox(SECRET, b"t" * 32, 0, 1),
        SealedBox(b"l" * 32, SESSION, 0, 1),
    ],
    ids=["reflected", "recipient", "group", "session", "key"],
)
def test_other_directions_and_sessions_do_not_open(other):
    with pytest.raises(AuthenticationError):
        other.open(pair()[0].seal(b"x"))


def test_other_purpose_does_not_open():
    with pytest.raises(AuthenticationError):
        pair()[1].open(pair()[0].seal(b"x", b"group share"), b"agreement")


def test_messages_hold_no_plaintext_or_key():
    sealed = pair()[0].seal(b"plaintext" * 10)
    with pytest.raises(AuthenticationError) as caught:
        SealedBox(SECRET, SESSION, 1, 0).open(sealed)
    assert "plaintext" not in str(caught.value) and SECRET.hex() not in str(caught.value)


def at_once(monkeypatch: pytest.MonkeyPatch, work: Callable[[], bytes]) -> list[bytes | Exception]:
    """Have two threads do the same, and meet where they form their nonces, if nothing keeps them from it."""
    meeting, form = threading.Barrier(2), key_agreement._nonce

    def nonce(counter: int) -> bytes:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(1)
        return form(counter)

    monkeypatch.setattr(key_agreement, "_nonce", nonce)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(work) for _ in range(2)]
    return [future.exception() or future.result() for future in asked]  # type: ignore[misc]


def test_two_threads_never_seal_under_one_counter(monkeypatch):
    sender, recipient = pair()
    sealed = at_once(monkeypatch, lambda: sender.seal(b"same"))
    assert len({one[:13] for one in sealed}) == 2
    assert [recipient.open(one) for one in sorted(sealed)] == [b"same"] * 2


def test_two_threads_never_open_one_message_twice(monkeypatch):
    sender, recipient = pair()
    sealed = sender.seal(b"once")
    found = at_once(monkeypatch, lambda: recipient.open(sealed))
    assert [type(one) for one in found].count(ProtocolError) == 1 and b"once" in found


def test_a_forked_process_does_not_seal(monkeypatch):
    sender, _ = pair()
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(ProtocolError, match="forked"):
        sender.seal(b"x")
