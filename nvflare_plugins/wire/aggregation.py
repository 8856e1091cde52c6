"""The server's side: sites meet, their contributions are added or passed on, and no key is needed for it."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from he_processors.errors import ProtocolError, VeilBoostError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.wire.catalogue import Kind, Moment, Phase
from nvflare_plugins.wire.envelope import (
    ATTEMPT_BYTES, MAX_ATTACHMENT, Codec, Frame, FrameType, Operation, pack_list, unpack, unpack_list,
)  # fmt: skip
from nvflare_plugins.wire.evidence_format import SALT_BYTES

Reply = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One frame that passed the server, as its evidence log wants it."""

    sites: tuple[str, ...]  # the sender of a received frame, all receivers of a sent one
    direction: str  # "received" or "sent", seen from the server
    frame: Frame


@dataclass(slots=True)
class _Exchange:
    """One counter at which all sites meet."""

    opened: float
    frames: dict[int, Frame] = field(default_factory=dict)
    waiting: dict[int, Reply] = field(default_factory=dict)
    n_recorded: int = 0
    answers: list[bytes] | None = None  # by rank; the same bytes for all but in routed exchanges


class Aggregator:
    """Meets the sites of one job attempt, exchange by exchange.

    Security: holds no key and sees only what the codec leaves visible; under masks the sums too are blinded.
    Threads: ``submit`` may be called from any thread and never waits for another site.
    """

    def __init__(
        self,
        sites: Sequence[str],
        attempt: bytes,
        deadline_s: float,
        on_transfer: Callable[[Transfer], None] | None = None,
        attachment: Callable[[], bytes] | None = None,
        on_abort: Callable[[str], None] | None = None,
        on_sum: Callable[[Frame, bytes], bytes] | None = None,
        randomness: RandomSource = OS_RANDOMNESS,
        transfer_s: Callable[[int], float] | None = None,
    ):
        """Prepare to meet the sites.

        Args:
            deadline_s: how long a site may be missing from an exchange.
            on_sum: turns the added words into the answer; a trusted aggregator adds its noise there, once.
            transfer_s: how long so many bytes may be on their way, which adds to the deadline.
        """
        if list(sites) != sorted(set(sites)) or not sites:
            raise ValueError("sites must be sorted and distinct")
        if len(attempt) != ATTEMPT_BYTES:
            raise ValueError(f"attempt must be {ATTEMPT_BYTES} bytes")
        self._sites = tuple(sites)
        self._attempt = attempt
        self._deadline_s = deadline_s
        self._on_transfer = on_transfer
        self._attachment = attachment
        self._on_abort = on_abort
        self._on_sum = on_sum
        self._randomness = randomness
        self._transfer_s = transfer_s or (lambda n_bytes: 0.0)
        self._lock = threading.Lock()
        self._next = [0] * len(sites)  # counter that each site sends next
        self._exchanges: dict[int, _Exchange] = {}
        self._public_parameters: dict[Codec, bytes] = {}
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the attempt was aborted, or None."""
        return self._reason

    def submit(self, site: str, data: bytes, reply: Reply) -> None:
        """Take one frame of an authenticated site; ``reply`` gets the answer once all sites are there.

        A frame that does not belong here aborts the attempt for every site.
        """
        try:
            frame = self._check(site, data)
            exchange = self._join(frame, reply)
            if exchange is None:
                return
            # Hashing for the evidence takes longer than adding: do it while the slower sites are on their way.
            self._record((site,), "received", frame)
            if self._is_complete(exchange):
                self._complete(frame, exchange)
        except VeilBoostError as error:
            self.abort(f"{site}: {error}")
            reply(self._abort_frame())

    def abort(self, reason: str) -> None:
        """End the attempt: every waiting and every later frame is answered with this reason."""
        with self._lock:
            first = self._reason is None
            self._reason = self._reason or reason[:4000]
            waiting = [r for e in self._exchanges.values() for r in e.waiting.values()]
            for exchange in self._exchanges.values():
                exchange.waiting = {}
        for reply in waiting:
            reply(self._abort_frame())
        if first and self._on_abort is not None:
            self._on_abort(self._reason)

    def expire(self) -> None:
        """Abort if an exchange has waited longer than the deadline; call about once a second."""
        with self._lock:
            late = self._late(time.monotonic())
        if late is not None:
            missing, deadline_s = late
            self.abort(f"no message from {', '.join(missing)} within {deadline_s:.0f} s")

    def _late(self, now: float) -> tuple[list[str], float] | None:
        """Return the sites that an exchange has waited for too long, and how long it may wait.

        The sites' messages of one exchange are about as long as each other, and those who come late may still have been
        receiving the answer before it: the deadline follows what is really sent, however wide the sites' tables are.
        """
        n_answered = 0
        for counter in sorted(self._exchanges):
            exchange = self._exchanges[counter]
            if exchange.answers is not None:
                n_answered = max(map(len, exchange.answers))
                continue
            if len(exchange.frames) == len(self._sites):
                continue
            longest = max((len(frame.payload) for frame in exchange.frames.values()), default=0)
            deadline_s = self._deadline_s + self._transfer_s(n_answered + longest)
            if now - exchange.opened > deadline_s:
                return [site for rank, site in enumerate(self._sites) if rank not in exchange.frames], deadline_s
        return None

    # -- one exchange -------------------------------------------------------------------------------------------------

    def _check(self, site: str, data: bytes) -> Frame:
        if site not in self._sites:
            raise ProtocolError("is not a site of this job")
        frame = unpack(data)
        if frame.attempt != self._attempt:
            raise ProtocolError("sent a frame of another job attempt")
        if frame.rank != self._sites.index(site):
            raise ProtocolError(f"claims rank {frame.rank}, which belongs to another site")
        if frame.type not in (FrameType.CONTRIBUTION, FrameType.RESCALE):
            raise ProtocolError("sent a frame that only the server may send")
        return frame

    def _join(self, frame: Frame, reply: Reply) -> _Exchange | None:
        """Enter the frame; return its exchange unless it is answered already or was here before."""
        answer = None
        with self._lock:
            if self._reason is not None:
                answer = self._abort_frame()
            else:
                known = self._exchanges.get(frame.counter)
                if known is not None and frame.rank in known.frames:
                    # A retry after a lost reply: the same bytes get the same answer.
                    if known.frames[frame.rank] != frame:
                        raise ProtocolError(f"sent two different frames under counter {frame.counter}")
                    if known.answers is None:
                        known.waiting[frame.rank] = reply
                        return None
                    answer = known.answers[frame.rank]
                else:
                    return self._enter(frame, reply)
        reply(answer)
        return None

    def _enter(self, frame: Frame, reply: Reply) -> _Exchange:
        if frame.counter != self._next[frame.rank]:
            raise ProtocolError(f"sent counter {frame.counter} where {self._next[frame.rank]} is due")
        exchange = self._exchanges.setdefault(frame.counter, _Exchange(time.monotonic()))
        first = next(iter(exchange.frames.values()), frame)
        if frame.place() != first.place():
            raise ProtocolError(
                f"sent {_describe(frame)} where {self._sites[first.rank]} sent {_describe(first)}: the sites are no "
                "longer in step"
            )
        words = frame.operation is Operation.SUM and frame.codec in (Codec.PLAIN, Codec.MASKED)
        if words and frame.type is FrameType.CONTRIBUTION and len(frame.payload) != 8 * frame.n_values:
            raise ProtocolError(f"sent {len(frame.payload)} bytes for {frame.n_values} values of 8 bytes")
        if frame.operation is Operation.ROUTE and unpack_list(frame.payload, len(self._sites))[frame.rank]:
            raise ProtocolError("sent a routed message to itself")
        exchange.frames[frame.rank] = frame
        exchange.waiting[frame.rank] = reply
        self._next[frame.rank] += 1
        self._exchanges.pop(frame.counter - 2, None)  # every site has its answer to that one
        return exchange

    def _is_complete(self, exchange: _Exchange) -> bool:
        """Count a recorded frame; true for exactly one caller, the one that recorded the last."""
        with self._lock:
            exchange.n_recorded += 1
            return exchange.n_recorded == len(self._sites)

    def _complete(self, frame: Frame, exchange: _Exchange) -> None:
        frames = [exchange.frames[rank] for rank in range(len(self._sites))]
        type_, payloads = FrameType.RESULT, [b""]
        if any(f.type is FrameType.RESCALE for f in frames):
            type_ = FrameType.RESCALE
        elif frame.operation is Operation.ROUTE:
            payloads = route([f.payload for f in frames])
        else:
            payloads = [self._combine(frames)]
        attachments = b""
        if any(f.attachment for f in frames):
            own = self._attachment() if self._attachment is not None else b""
            attachments = pack_list([*(f.attachment for f in frames), own])
            if len(attachments) > MAX_ATTACHMENT:
                raise ProtocolError("attachments of all sites are longer than a frame may carry")
        receivers = [self._sites] if len(payloads) == 1 else [(site,) for site in self._sites]
        packed, salt = [], self._randomness.bytes(SALT_BYTES) if frame.codec.is_salted else b""
        for sites, payload in zip(receivers, payloads, strict=True):
            answer = Frame(
                type_, frame.operation, frame.kind, frame.moment, frame.codec, len(self._sites), frame.counter,
                self._attempt, frame.n_values, payload, attachments, salt,
            )  # fmt: skip
            self._record(sites, "sent", answer)
            packed.append(answer.pack())
        answers = packed if len(packed) == len(self._sites) else packed * len(self._sites)
        with self._lock:
            exchange.answers = answers
            waiting, exchange.waiting = exchange.waiting, {}
        for rank, reply in waiting.items():
            reply(answers[rank])

    def _record(self, sites: tuple[str, ...], direction: str, frame: Frame) -> None:
        if self._on_transfer is not None:
            self._on_transfer(Transfer(sites, direction, frame))

    def _combine(self, frames: list[Frame]) -> bytes:
        first = frames[0]
        payloads = [f.payload for f in frames]
        if first.operation is Operation.GATHER:
            if first.kind is Kind.HE_PUBLIC:
                self._public_parameters[first.codec] = payloads[0]
            return pack_list(payloads)
        if first.operation is Operation.BROADCAST:
            if any(payloads[1:]):
                raise ProtocolError(f"{first.kind.name}: only rank 0 may send content in a broadcast")
            return payloads[0]
        if first.codec in (Codec.PLAIN, Codec.MASKED):
            total = add_words(payloads, first.n_values)
            return total if self._on_sum is None else self._on_sum(first, total)
        if first.codec in (Codec.BFV, Codec.CKKS):
            parameters = self._public_parameters.get(first.codec)
            if parameters is None:
                raise ProtocolError(f"{first.codec.name} contribution before its public parameters")
            return _lattice(first.codec).add_ciphertexts(parameters, payloads)
        raise ProtocolError(f"{first.kind.name}: codec {first.codec.name} cannot be summed")

    def _abort_frame(self) -> bytes:
        text = (self._reason or "aborted").encode()
        return Frame(
            FrameType.ABORT, Operation.GATHER, Kind.CLOSING, Moment(Phase.FINISH), Codec.PUBLIC, len(self._sites), 0,
            self._attempt, 0, text,
        ).pack()  # fmt: skip


def route(payloads: Sequence[bytes]) -> list[bytes]:
    """Return, for each rank, the parts that all ranks addressed to it, from lists of parts by rank."""
    parts = [unpack_list(payload, len(payloads)) for payload in payloads]
    return [pack_list([of_rank[rank] for of_rank in parts]) for rank in range(len(payloads))]


def add_words(payloads: Sequence[bytes], n_values: int) -> bytes:
    """Add vectors of 64-bit words modulo 2^64.

    Raises:
        ProtocolError: a payload does not hold exactly ``n_values`` words.
    """
    for rank, payload in enumerate(payloads):  # before memory is taken for what a header only claims
        if len(payload) != 8 * n_values:
            raise ProtocolError(f"rank {rank} sent {len(payload)} bytes for {n_values} values of 8 bytes")
    total = np.zeros(n_values, dtype="<u8")
    for payload in payloads:
        total += np.frombuffer(payload, dtype="<u8")
    return total.tobytes()


def _lattice(codec: Codec) -> ModuleType:
    # Imported when first needed: the lattice library takes long to load and most jobs do without it.
    return importlib.import_module("he_processors.bfv" if codec is Codec.BFV else "he_processors.ckks")


def _describe(frame: Frame) -> str:
    return f"{frame.kind.name} ({frame.moment}, {frame.codec.name}, {frame.n_values} values)"
