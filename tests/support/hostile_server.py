"""A server that cheats with sums: it has every site's frame before it answers, and answers each site as it likes."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from he_processors.field61 import MODULUS
from he_processors.masks import MessageLabel
from he_processors.ring_ciphertexts import KeyFacts, RingMessage
from he_processors.sum_tags import N_TAGS, SumTags
from nvflare_plugins.wire.aggregation import Aggregator, open_sum
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Kind, Operation, unpack


def believe_every_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sites open sums without a look at their tags: the control of an attack."""

    def open_(
        self: SumTags, values: NDArray[np.int64] | None, total: NDArray[np.uint64], label: MessageLabel
    ) -> NDArray[np.uint64]:
        opened = self._masks.unblind(total, label.counter)
        return opened if values is None else opened[:-N_TAGS]

    monkeypatch.setattr(SumTags, "open", open_)


Lie = Callable[["Meeting"], bytes]
"""Makes the payload that is answered in the place of the sum."""


@dataclass
class Meeting:
    """What a server holds when all sites have sent their part of one sum.

    Attributes:
        frames: by rank, whole.
        parameters: public parameters of the homomorphic schemes.
        earlier: sums that it answered before, of the same kind, codec and size, oldest first.
    """

    frames: list[Frame]
    parameters: dict[Codec, bytes]
    earlier: list[bytes] = field(default_factory=list)

    def sum_of(self, frames: Sequence[Frame]) -> bytes:
        """Add some contributions as an honest server would."""
        total = open_sum(frames[0], self.parameters)
        for frame in frames:
            total.add(frame.payload)
        return bytes(total.pack())

    @property
    def honest(self) -> bytes:
        return self.sum_of(self.frames)

    def body_and_tail(self, payload: bytes) -> tuple[bytes, bytes]:
        cut = len(payload) - self.frames[0].tail
        return payload[:cut], payload[cut:]


class CheatingServer(Aggregator):
    """Answers the nth sum of a kind with a lie, to some sites or to all; otherwise it is honest."""

    def __init__(
        self,
        *arguments: object,
        kind: Kind,
        lie: Lie,
        nth: int = 1,
        victims: Sequence[int] | None = None,
        **rest: object,
    ) -> None:
        super().__init__(*arguments, **rest)  # type: ignore[arg-type]
        self._kind, self._lie, self._nth, self._victims = kind, lie, nth, victims
        self._met: dict[int, dict[int, Frame]] = {}
        self._answers: dict[int, bytes] = {}
        self._history: dict[tuple[object, ...], list[bytes]] = {}
        self._seen: list[int] = []
        self._cheating = threading.Lock()
        self.has_lied = False

    def begin(self, site: str, first: bytes, size: int) -> None:
        """Take every frame as a whole."""

    def submit(self, site: str, data: bytes, reply: Callable[[bytes], None]) -> None:
        frame = unpack(data)
        is_sum = frame.operation is Operation.SUM and frame.type is FrameType.CONTRIBUTION
        if is_sum:
            with self._cheating:
                self._met.setdefault(frame.counter, {})[frame.rank] = frame
        super().submit(site, data, self._lying(frame, reply) if is_sum else reply)

    def _lying(self, sent: Frame, reply: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def answer(data: bytes) -> None:
            true = unpack(data)
            if true.type is FrameType.RESULT:
                lie = self._lie_once(true, len(self._sites))
                if lie is not None and (self._victims is None or sent.rank in self._victims):
                    data = replace(true, payload=lie).pack()
            reply(data)

        return answer

    def _lie_once(self, true: Frame, n_sites: int) -> bytes | None:
        with self._cheating:
            met = self._met.get(true.counter, {})
            if true.counter not in self._answers and len(met) == n_sites:
                key = (true.kind, true.codec, true.n_values, true.tail)
                earlier = self._history.setdefault(key, [])
                if true.kind is self._kind:
                    self._seen.append(true.counter)
                    if len(self._seen) == self._nth:
                        frames = [met[rank] for rank in range(n_sites)]
                        self._answers[true.counter] = self._lie(Meeting(frames, self._public_parameters, list(earlier)))
                        self.has_lied = True
                earlier.append(bytes(true.payload))
                self._answers.setdefault(true.counter, bytes(true.payload))
            lied = bool(self._seen) and len(self._seen) >= self._nth and true.counter == self._seen[self._nth - 1]
            return self._answers[true.counter] if lied else None


# -- lies -------------------------------------------------------------------------------------------------------------


def drop(meeting: Meeting) -> bytes:
    """Leave the last site's part out, values and tags."""
    return meeting.sum_of(meeting.frames[:-1])


def drop_values(meeting: Meeting) -> bytes:
    """Leave the last site's values out, but not its tags."""
    body, _ = meeting.body_and_tail(meeting.sum_of(meeting.frames[:-1]))
    return body + meeting.body_and_tail(meeting.honest)[1]


def double(meeting: Meeting) -> bytes:
    """Count the first site's values twice; a ring message takes no more summands, so another is left out for it."""
    first = meeting.frames[0]
    frames = [first, first, *meeting.frames[1:]]
    if first.codec in (Codec.BFV, Codec.CKKS):
        frames = [first, first, *meeting.frames[2:]]
    body, _ = meeting.body_and_tail(meeting.sum_of(frames))
    return body + meeting.body_and_tail(meeting.honest)[1]


def replay(meeting: Meeting) -> bytes:
    """Answer with the sum of an earlier message of the same size."""
    return meeting.earlier[-1]


def one_step(meeting: Meeting) -> bytes:
    """Add one to the first word, which under masks is one grid step in the first value."""
    first = meeting.frames[0]
    if first.codec in (Codec.BFV, Codec.CKKS):
        return _one_in_every_slot(meeting)
    return _with_word(meeting.honest, 0, 1)


def _one_in_every_slot(meeting: Meeting) -> bytes:
    """Add the constant polynomial 1 to the plaintext, for which no key is needed: a step in every value."""
    codec = meeting.frames[0].codec
    scheme = importlib.import_module(f"he_processors.{codec.name.lower()}")._SCHEME
    facts = KeyFacts.unpack(meeting.parameters[codec], scheme)
    body, tail = meeting.body_and_tail(meeting.honest)
    message = RingMessage.unpack(body, scheme, facts)
    for prime, residues in zip(scheme.primes, message.residues, strict=True):
        if codec is Codec.BFV:  # of coefficients: the first one, in units of q/t
            from he_processors.bfv import choose_plain_modulus

            residues[:, 0, 0] = (residues[:, 0, 0] + np.uint64(prime // choose_plain_modulus(3))) % np.uint64(prime)
        else:  # of values at roots of unity: all, in units of the scale
            residues[:, 0, :] = (residues[:, 0, :] + np.uint64(1 << 40)) % np.uint64(prime)
    return message.pack(scheme, facts.key_id) + tail


def flip(meeting: Meeting) -> bytes:
    """Turn the highest bit of a word in the middle of the values."""
    body, tail = meeting.body_and_tail(meeting.honest)
    middle = len(body) // 16
    return _with_word(body, middle, 1 << 59) + tail if len(body) >= 8 else _with_word(tail, 0, 1)


def scale(meeting: Meeting) -> bytes:
    """Double every word and every residue."""
    body, tail = meeting.body_and_tail(meeting.honest)
    words, residues = np.frombuffer(body, "<u8"), np.frombuffer(tail, "<u8")
    return (2 * words).astype("<u8").tobytes() + (2 * residues % MODULUS).astype("<u8").tobytes()


def other_tags(meeting: Meeting) -> bytes:
    """Change a tag alone."""
    body, tail = meeting.body_and_tail(meeting.honest)
    return body + ((np.frombuffer(tail, "<u8") + 1) % MODULUS).astype("<u8").tobytes()


def _with_word(payload: bytes, place: int, change: int) -> bytes:
    words = np.frombuffer(payload, "<u8").copy()
    words[place : place + 1] += np.uint64(change)  # an array wraps in silence
    return words.astype("<u8").tobytes()
