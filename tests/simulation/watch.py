"""Watches what must never be used twice while jobs run, and what was released; counters, masks, noise, answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import he_processors.randomness
from dp_components.events import Release
from dp_components.ledger import Ledger
from he_processors import key_agreement, masks
from he_processors.masks import PairwiseMasks, ResidueMasks
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.kinds.dpboost.server import DpBoostServer
from nvflare_plugins.wire.envelope import Frame

_LONG = 24
"""Bytes of a draw that never comes twice by chance."""

_SOURCES = (type(he_processors.randomness.OS_RANDOMNESS),)


@dataclass
class Watch:
    """What was seen.

    Attributes:
        faults: what was used twice, in words.
        spent: by site and job, the releases that a site has noted: its messages before, epsilon so far, delta.
        rounds: by site and job, for each round that its evidence notes, its messages before.
    """

    n_messages: Callable[[str], int] = lambda site: 0
    faults: list[str] = field(default_factory=list)
    spent: dict[tuple[str, str], list[tuple[int, float, float]]] = field(default_factory=dict)

    rounds: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen: dict[tuple[Any, ...], bytes] = {}
        self._kept: list[object] = []  # so that no other object gets the same identity

    def once(self, what: str, key: tuple[Any, ...], content: bytes) -> None:
        """Take note that something was used for a content; the same content again is a retry."""
        digest = hashlib.sha256(content).digest()
        if self._seen.setdefault((what, *key), digest) != digest:
            self.faults.append(f"{what} was used twice")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Watch this process."""
        with ExitStack() as stack:
            for place, name, made in (
                (PairwiseMasks, "mask", self._mask),
                (ResidueMasks, "mask", self._residues),
                (Ledger, "release", self._release),
                (DpBoostServer, "answer", self._answer),
                (EvidenceLog, "spend", self._spend),
                (EvidenceLog, "round", self._round),
            ):
                stack.enter_context(patch.object(place, name, made(getattr(place, name))))
            stack.enter_context(patch.object(key_agreement, "AESGCM", self._cipher()))
            for source in _SOURCES:
                stack.enter_context(patch.object(source, "bytes", self._drawn(source.bytes)))
            yield

    def _mask(self, mask: Callable[..., Any]) -> Callable[..., Any]:
        def watched(this: PairwiseMasks, values: Any, label: Any, modulus: int | None = None) -> Any:
            masked = mask(this, values, label, modulus)
            info = masks._info(label, modulus)
            for key in this._pair_keys.values():
                self.once("a mask", (this._rank, key, info), values.tobytes())
            return masked

        return watched

    def _residues(self, mask: Callable[..., Any]) -> Callable[..., Any]:
        def watched(this: ResidueMasks, residues: Any, counter: int) -> Any:
            self._kept.append(this)
            self.once("a mask of residues", (id(this), counter), residues.tobytes())
            return mask(this, residues, counter)

        return watched

    def _release(self, release: Callable[..., Any]) -> Callable[..., Any]:
        def watched(this: Ledger, job_id: str, query: str, make: Callable[[], Release]) -> Any:
            value = release(this, job_id, query, make)
            self.once("a question of the ledger", (str(this._journal.path), job_id, query), value.tobytes())
            if value.size >= 4 and np.abs(value).max() > 1000:
                place = (str(this._journal.path), job_id, query)
                noised = hashlib.sha256(value.tobytes()).digest()
                if self._seen.setdefault(("a noised answer", noised), repr(place).encode()) != repr(place).encode():
                    self.faults.append("noise was used twice")
            return value

        return watched

    def _answer(self, answer: Callable[..., bytes]) -> Callable[..., bytes]:
        """A step of a trusted server's job has one answer, to one sum, whatever attempts there are."""

        def watched(this: DpBoostServer, frame: Frame, total: bytes, spend: Callable[..., None]) -> bytes:
            answered = answer(this, frame, total, spend)
            if this not in self._kept:
                self._kept.append(this)
            place = (id(this), frame.kind, frame.moment, frame.n_values)
            self.once("a step of DPBoost", place, total + answered)
            return answered

        return watched

    def _spend(self, spend: Callable[..., None]) -> Callable[..., None]:
        def watched(this: EvidenceLog, query: str, event: str, epsilon: float, delta: float) -> None:
            spend(this, query, event, epsilon, delta)
            known = self.spent.setdefault((this.site, this.job_id), [])
            known.append((self.n_messages(this.site), epsilon, delta))

        return watched

    def _round(self, note: Callable[..., None]) -> Callable[..., None]:
        def watched(this: EvidenceLog, index: int) -> None:
            note(this, index)
            self.rounds.setdefault((this.site, this.job_id), []).append(self.n_messages(this.site))

        return watched

    def _cipher(self) -> type:
        watch = self

        class Watched:
            def __init__(self, key: bytes) -> None:
                self._key, self._cipher = key, AESGCM(key)
                self.decrypt = self._cipher.decrypt

            def encrypt(self, nonce: bytes, plaintext: bytes, associated_data: bytes) -> bytes:
                watch.once("a nonce of a sealed message", (self._key, nonce), plaintext + associated_data)
                return self._cipher.encrypt(nonce, plaintext, associated_data)

        return Watched

    def _drawn(self, draw: Callable[..., bytes]) -> Callable[..., bytes]:
        def watched(this: object, n: int) -> bytes:
            content = draw(this, n)
            if n >= _LONG:
                self._kept.append(None)
                self.once("a draw of randomness", (hashlib.sha256(content).digest(),), str(len(self._kept)).encode())
            return content

        return watched


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Let the one source of randomness be a seed's: one thread runs at a time, so that the draws come in one order."""
    dice = Random(f"randomness {seed}")
    with ExitStack() as stack:
        for source in _SOURCES:
            stack.enter_context(patch.object(source, "bytes", lambda _, n: dice.randbytes(n)))
        yield
