"""Randomness that repeats itself through whole jobs, in the place of the operating system's.

A draw depends on the party that draws, on the function that asks, and on how often that function has asked there
before; so a job gives the same model again although its sites run in threads, and although the code between two draws
changes.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

import he_processors.randomness
from nvflare_plugins.attempt.session import Session

SERVER = "server"
RENAMED: dict[str, str] = {
    "Registry.__init__": "Registry._load_key",
    "AlignmentRegistry.__init__": "AlignmentRegistry._load_key",
    "ReleasedSums.__init__": "BinLedger._load_key",
    "PredictionBudget.__init__": "PredictionBudget._load_key",
    "SentRows.__init__": "SentRows._locked",
}
"""Present name of a function that draws -> its name when the golden files were written."""
PASSED_ON = ("Memory.secret",)
"""Functions that draw for the one that calls them."""

_SOURCES = (
    he_processors.randomness.OS_RANDOMNESS,
    he_processors.randomness.BULK_RANDOMNESS,
)
# The key of the rows' assignment comes from the session's transcript, which names the product's version.
_ASSIGNMENT = "assignment of rows to trees"


class Draws:
    """One endless stream of bytes for each party and function."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def bytes(self, n: int) -> bytes:
        key = (_party(), _asker())
        with self._lock:
            if key not in self._streams:
                secret = hashlib.sha256("/".join(key).encode()).digest()
                self._streams[key] = Cipher(algorithms.AES(secret), modes.CTR(bytes(16))).encryptor()
            return self._streams[key].update(bytes(n))


@contextmanager
def repeated_randomness() -> Iterator[None]:
    """Let everything of this process draw the same bytes each time; threads belong to the party that starts them."""
    draws, start, hmac = Draws(), threading.Thread.start, Session.hmac

    def start_for_party(thread: threading.Thread) -> None:
        thread.party = _party()
        start(thread)

    def hmac_of(session: Session, purpose: str, data: bytes) -> bytes:
        return hashlib.sha256(purpose.encode()).digest() if purpose == _ASSIGNMENT else hmac(session, purpose, data)

    patches = [mock.patch.object(type(source), "bytes", lambda _, n: draws.bytes(n)) for source in _SOURCES]
    patches += [
        mock.patch.object(threading.Thread, "start", start_for_party),
        mock.patch.object(Session, "hmac", hmac_of),
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def as_party(party: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that what it draws is the party's, in whatever thread it is called."""

    def called(*args: Any) -> Any:
        thread = threading.current_thread()
        before, thread.party = _party(), party
        try:
            return call(*args)
        finally:
            thread.party = before

    return called


def at_site(run_site: Callable[..., Any]) -> Callable[..., Any]:
    """Return a site's part in a job, (job, place, ...), so that it draws as that site."""
    return lambda job, place, *rest: as_party(place.site, run_site)(job, place, *rest)


def _party() -> str:
    return getattr(threading.current_thread(), "party", SERVER)


def _asker() -> str:
    frame = sys._getframe(1)
    while (
        frame.f_globals["__name__"] in (__name__, "he_processors.randomness") or frame.f_code.co_qualname in PASSED_ON
    ):
        frame = frame.f_back
    name = frame.f_code.co_qualname
    return RENAMED.get(name, name)
