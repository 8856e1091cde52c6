"""A site's way to the other sites: every exchange is numbered, checked, counted and recorded."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from he_processors.errors import AuthenticationError, CapacityExceeded, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from he_processors.sum_tags import PairMacs
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.wire.envelope import (
    MAX_ATTACHMENT,
    MAX_FRAME_BYTES,
    SALT_BYTES,
    Codec,
    Commitment,
    Frame,
    FrameType,
    Kind,
    Operation,
    Phase,
    TrainingStep,
    Transfer,
    pack_list,
    unpack,
    unpack_list,
)

_MAX_REASON_BYTES = 4000
_ROOM_BESIDE = MAX_ATTACHMENT + 1024  # of a payload: header and attachment


class Transport(Protocol):
    """Carries frames to the server and back; FLARE's is in flare/transport.py."""

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a frame and wait for the answer; retries send the same bytes. Raises: JobAborted, ProtocolError."""

    def abort(self, reason: str) -> None:
        """Wake every waiting exchange of this site with JobAborted."""


class Recorder(Protocol):
    """What the channel needs of an evidence log."""

    def transfer(self, transfer: Transfer) -> None:
        """Record a frame, before it is sent or after it was received."""


class SiteProgress(Protocol):
    """What a training loop needs of a channel: whose part it plays, and where to say how far it is.

    Attributes:
        moment: phase and round, as announced.
        network_seconds: how long the site has waited for answers so far.
    """

    moment: TrainingStep

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def network_seconds(self) -> float: ...


@dataclass(slots=True)
class Traffic:
    """Totals of one kind under one codec. Units: bytes, seconds."""

    messages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0


class RescaleRequested(ProtocolError):
    """Some site's value did not fit the agreed scale; nothing was summed.

    Internal to sums.py where a scale can change; elsewhere a server that answers so breaks the protocol.
    """


class Channel:
    """Numbered exchanges of one site within one job attempt.

    Not safe for concurrent use: a site has one exchange under way at a time.
    """

    def __init__(
        self,
        site: str,
        sites: Sequence[str],
        job_id: str,
        attempt: bytes,
        transport: Transport,
        timeout_s: float,
        randomness: RandomSource = OS_RANDOMNESS,
    ):
        self.site = site
        self.sites = tuple(sites)
        self.rank: int = self.sites.index(site)
        self.world: int = len(self.sites)
        self.job_id = job_id
        self.attempt = attempt.hex()
        self.counter = 0
        self.moment = TrainingStep(Phase.SETUP)
        self.recorder: Recorder | None = None
        self.heads: HeadExchange | None = None
        self.macs: PairMacs | None = None  # of the session, once it is open: the handshake proves itself
        self.traffic: dict[tuple[Kind, Codec], Traffic] = defaultdict(Traffic)
        self._attempt = attempt
        self._transport = transport
        self._timeout_s = timeout_s
        self._randomness = randomness

    @property
    def network_seconds(self) -> float:
        """Return how long this site has waited for answers so far."""
        return sum(one.seconds for one in self.traffic.values())

    def gather(self, kind: Kind, payload: bytes, codec: Codec = Codec.PUBLIC) -> list[bytes]:
        """Give this site's bytes to all sites and get those of all sites, in rank order.

        Raises:
            AuthenticationError: these are not the bytes that a site has given here, or not this site's own.
        """
        place = (kind.name, str(self.moment), codec.name, self.counter)
        macs = self.macs
        message = payload if macs is None else macs.append(payload, place)
        tail = len(message) - len(payload)
        reply = self._exchange(FrameType.CONTRIBUTION, Operation.GATHER, kind, codec, message, 0, tail)
        parts = unpack_list(reply, self.world)
        if macs is None:
            return parts
        if parts[self.rank] != message:
            raise _changed(kind, self.moment, self.site, "the server returned something else to it than it had sent")
        contents = []
        for rank, part in enumerate(parts):
            try:
                contents.append(payload if rank == self.rank else macs.check(rank, part, place))
            except AuthenticationError as error:
                raise _changed(kind, self.moment, self.sites[rank], str(error)) from None
        return contents

    def broadcast(self, kind: Kind, payload: bytes | None, codec: Codec = Codec.SEALED) -> bytes:
        """Pass rank 0's bytes to all sites; the other ranks give None."""
        if (payload is None) == (self.rank == 0):
            raise ValueError("exactly rank 0 gives content in a broadcast")
        return self._exchange(FrameType.CONTRIBUTION, Operation.BROADCAST, kind, codec, payload or b"", 0)

    def route(self, kind: Kind, parts: Sequence[bytes]) -> list[bytes]:
        """Give each other site its own bytes and get those that each addressed to this one, in rank order.

        Security: the parts are sealed by the caller, end to end; the server sees their sizes. This site's own is empty.
        """
        if len(parts) != self.world or parts[self.rank]:
            raise ValueError("one part for each site, the own one empty")
        reply = self._exchange(FrameType.CONTRIBUTION, Operation.ROUTE, kind, Codec.SEALED, pack_list(list(parts)), 0)
        received = unpack_list(reply, self.world)
        if received[self.rank]:
            raise ProtocolError("the server returned a part of this site's own to it")
        return received

    def sum(self, kind: Kind, codec: Codec, payload: bytes, n_values: int, tail: int = 0) -> bytes:
        """Have the server add the sites' protected vectors.

        Args:
            payload: the protected values, and behind them ``tail`` bytes of residues modulo 2^61 - 1.

        Raises:
            RescaleRequested: a site asked for another scale; nothing was summed.
        """
        return self._exchange(FrameType.CONTRIBUTION, Operation.SUM, kind, codec, payload, n_values, tail)

    def request_rescale(self, kind: Kind, codec: Codec, n_values: int, tail: int = 0) -> NoReturn:
        """Say, instead of contributing, that this site's values do not fit the agreed scale.

        Privacy: the server learns which site asked; the other sites learn that one did.

        Raises:
            RescaleRequested: always.
        """
        self._exchange(FrameType.RESCALE, Operation.SUM, kind, codec, b"", n_values, tail)
        raise ProtocolError("the server answered a request for another scale with a sum")

    def _exchange(
        self,
        type_: FrameType,
        operation: Operation,
        kind: Kind,
        codec: Codec,
        payload: bytes,
        n_values: int,
        tail: int = 0,
    ) -> bytes:
        self._check_size(kind, len(payload))
        attachment = self.heads.take() if self.heads is not None else b""
        salt = self._randomness.bytes(SALT_BYTES) if codec.is_salted else b""
        about = type_, operation, kind, self.moment, codec, self.rank, self.counter, self._attempt, n_values
        frame = Frame(*about, payload, attachment, salt, tail)
        self._record("sent", frame)
        started = time.perf_counter()
        data = self._transport.exchange(frame.pack(), self._timeout_s)
        seconds = time.perf_counter() - started
        answer = self._check(frame, unpack(data))
        self._record("received", answer)
        self._count(kind, codec, len(payload), len(answer.payload), seconds)
        self.counter += 1
        if self.heads is not None and bool(answer.attachment) != bool(attachment):
            raise ProtocolError("the server kept evidence heads of the other sites back, or sent some that are not due")
        if answer.attachment and self.heads is not None:
            self.heads.receive(unpack_list(answer.attachment, self.world + 1))
        if answer.type is FrameType.RESCALE:
            raise RescaleRequested(f"the server asks for another scale for {kind.name}, which has none to change")
        return bytes(answer.payload)

    def _check_size(self, kind: Kind, n_bytes: int) -> None:
        most = MAX_FRAME_BYTES - _ROOM_BESIDE
        if n_bytes > most:
            raise CapacityExceeded(
                f"{kind.name} ({self.moment}): a message of {n_bytes} bytes; {most} are the most. It was not sent. "
                "Remedy: fewer features, a smaller max_bin or max_depth, or grow_policy=lossguide, whose messages are "
                "of one node each; `veilboost plan` tells sizes beforehand"
            )

    def _check(self, sent: Frame, answer: Frame) -> Frame:
        if answer.type is FrameType.ABORT:
            raise JobAborted(_readable(bytes(answer.payload)))
        if answer.type not in (FrameType.RESULT, FrameType.RESCALE) or answer.attempt != self._attempt:
            raise ProtocolError("the server answered with a frame of another job attempt or type")
        if answer.place() != sent.place():
            raise ProtocolError(f"the server answered {sent.kind.name} with a frame that belongs elsewhere")
        if answer.type is FrameType.RESCALE and sent.operation is not Operation.SUM:
            raise ProtocolError(f"{sent.kind.name} has no scale that could change")
        return answer

    def _record(self, direction: str, frame: Frame) -> None:
        if self.recorder is not None:
            committed = Commitment(frame.salt, frame.payload)
            self.recorder.transfer(Transfer(("server",), direction, frame, committed))

    def _count(self, kind: Kind, codec: Codec, n_out: int, n_in: int, seconds: float) -> None:
        totals = self.traffic[kind, codec]
        totals.messages += 1
        totals.bytes_out += n_out
        totals.bytes_in += n_in
        totals.seconds += seconds


def _changed(kind: Kind, moment: TrainingStep, site: str, what: str) -> AuthenticationError:
    return AuthenticationError(f"{kind.name} ({moment}), the part of {site}: {what}")


def _readable(text: bytes) -> str:
    """Return a peer's text for logs and screens: of bounded length, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_REASON_BYTES].decode(errors="replace"))


@dataclass(slots=True)
class HeadExchange:
    """Evidence heads that ride on the next frame after a round.

    ``make_head`` returns this site's signed head; ``receive`` gets those of all sites and, last, the server's.
    """

    make_head: Callable[[], bytes]
    receive: Callable[[list[bytes]], None]
    is_due: bool = False

    def take(self) -> bytes:
        """Return the head if one is due."""
        is_due, self.is_due = self.is_due, False
        return self.make_head() if is_due else b""
