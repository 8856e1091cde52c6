"""Messages over FLARE: in pieces that fit, once each, in order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from nvflare.apis.fl_constant import CellMessageAuthHeaderKey
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from he_processors.errors import ProtocolError, VeilBoostError
from nvflare_plugins.base.errors import JobAborted, machine_failure
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.flare.timeouts import QUERY_INTERVAL_S, LifeSigns, resend_pause_s
from nvflare_plugins.wire.aggregation import Aggregator, Arriving
from nvflare_plugins.wire.envelope import CHUNK_BYTES, MAX_FRAME_BYTES

# Frames cut into messages that FLARE's connections carry well, and put together again.


_LABEL = "veilboost"


@dataclass(frozen=True, slots=True)
class Label:
    """Which piece of which frame a message carries.

    Units: size and offset in bytes; number counts the exchanges of one site from 1.
    """

    attempt: str
    number: int
    size: int
    offset: int

    @classmethod
    def of(cls, message: Message) -> Label:
        """Read the label of a message, or raise ProtocolError."""
        fields = message.get_header(_LABEL)
        if not isinstance(fields, (list, tuple)) or len(fields) != 4:
            raise ProtocolError("a message without a valid label")
        attempt, *integers = fields
        if not isinstance(attempt, str) or any(type(value) is not int for value in integers):
            raise ProtocolError("a message whose label has wrong types")
        number, size, offset = integers
        if number < 1 or not 0 <= offset <= size <= MAX_FRAME_BYTES:
            raise ProtocolError("a message whose label is out of range")
        return cls(attempt, number, size, offset)

    def message(self, payload: bytes | memoryview | None = None) -> Message:
        return Message({_LABEL: [self.attempt, self.number, self.size, self.offset]}, payload)


def pieces(attempt: str, number: int, frame: bytes) -> Iterator[Message]:
    """Cut a frame into messages of at most CHUNK_BYTES."""
    view = memoryview(frame)
    for offset in range(0, max(len(view), 1), CHUNK_BYTES):
        yield Label(attempt, number, len(view), offset).message(view[offset : offset + CHUNK_BYTES])


class Assembly:
    """Puts the pieces of one frame together, which may come in any order, each any number of times.

    Ask either for the whole frame (``add``), or for the pieces in their order as they come (``take`` and ``ready``).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.progress_at = time.monotonic()
        self._pieces: dict[int, bytes] = {}
        self._received = self._n_pieces = 0
        self._handed_out = 0

    def add(self, label: Label, payload: object) -> bytes | None:
        """Take one piece.

        Returns:
            The whole frame once it is complete, else None.

        Raises:
            ProtocolError: the piece does not fit the frame.
        """
        self.take(label, payload)
        return b"".join(self.ready()) if self.is_complete else None

    def take(self, label: Label, payload: object) -> None:
        """Take one piece. Raises: ProtocolError if it does not fit the frame."""
        piece = bytes(payload) if isinstance(payload, (bytes, bytearray, memoryview)) else b""
        expected = min(CHUNK_BYTES, label.size - label.offset)
        if label.size != self.size or label.offset % CHUNK_BYTES or len(piece) != expected:
            raise ProtocolError(f"a piece of {len(piece)} bytes at {label.offset} in a frame of {self.size} bytes")
        self.progress_at = time.monotonic()
        if label.offset >= self._handed_out and label.offset not in self._pieces:
            self._pieces[label.offset] = piece
            self._received += len(piece)
            self._n_pieces += 1

    @property
    def is_complete(self) -> bool:
        """Whether every piece has come."""
        return self._n_pieces > 0 and self._received == self.size  # an empty frame has a piece too

    def ready(self) -> list[bytes]:
        """Return the pieces that follow on what was returned before, without a gap; they are not kept."""
        pieces = []
        while (piece := self._pieces.pop(self._handed_out, None)) is not None:
            pieces.append(piece)
            self._handed_out += len(piece)
            if not piece:
                break
        return pieces


# Frames between the sites and the server, over FLARE's own connections.
#
# A frame (wire/envelope.py) travels as one or more messages on a cell channel of our own, without waiting for an
# acknowledgement, and the reply comes back the same way once the last site has arrived. FLARE's aux requests would
# stream, serialise and acknowledge every message and hold a thread of the server for each waiting site. Median time of
# one rendezvous of three sites on two cores: simulator 0.7 to 1.0 ms at 16 bytes (aux request 6.5), 5 ms at 1 MiB (44),
# 6 s at 400 MiB; POC with mutual TLS and its second hop 2 to 3 ms and 16 to 22 ms.
#
# What FLARE 2.9 gives and what this module adds: * Only connections that the client opened are used, so sites behind a
# firewall work, and TLS is FLARE's. * In a provisioned federation the server's parent process checks on every message
# that the sender's token was signed by this server for this client name, and that the cell the message claims to come
# from is the one registered for that client; with mutual TLS the connection itself is bound to the certificate's common
# name. `FrameServer` accepts a frame only if the authenticated client name and the claimed cell both belong to the same
# site of this job. The name of a site is never read from the frame. The simulator authenticates nobody: all its sites
# are one machine. * A message can be lost when a connection breaks. The site asks after silence, the server says what
# it has, and the same bytes are sent again. The server takes each numbered frame of a site once. * FLARE notices a dead
# process late, and a dead machine after ten minutes. Sites and server therefore exchange signs of life here
# (timeouts.py). FLARE calls back in a pool of threads: a sign of life is answered there at once, while frames are added
# and replies are sent in threads of this module, so that no load can hold the signs up.


CHANNEL = "veilboost"
TOPIC_FRAME = "frame"  # site to server: a piece of a frame
TOPIC_QUERY = "query"  # site to server: what has become of my frame?
TOPIC_REPLY = "reply"  # server to site: a piece of the reply
TOPIC_STATE = "state"  # server to site: answer to a query that has no reply yet
TOPIC_ABORT = "abort"  # server to site: the job has ended, with the reason as text
TOPIC_BEAT = "beat"  # both ways: a sign of life; STOPPING as payload if FLARE stops the site

STATE_MISSING = b"missing"
STATE_PENDING = b"pending"
STOPPING = b"stopping"

ENDED_BEFORE = "this attempt of the job had ended before this site took part in it"
MAX_REASON_BYTES = 4096
WORKERS = 8  # threads of the server that add frames and send replies

logger = logging.getLogger(__name__)


class Cell(Protocol):
    """The part of FLARE's CoreCell that is used here."""

    def register_request_cb(self, channel: str, topic: str, cb: Callable[[Message], None]) -> None: ...

    def fire_and_forget(
        self, channel: str, topic: str, targets: str, message: Message, *, optional: bool = False
    ) -> dict[str, str]: ...


class SiteTransport:
    """A site's end: sends one frame at a time and waits for the reply.

    Args:
        cell: this site's job cell.
        server: name of the server's cell; messages from any other cell are ignored.
        attempt: id of this run of the job; messages of another run are ignored.
        query_interval_s: silence after which the site asks the server.
        clock: seconds, for the server's signs of life.
    """

    def __init__(
        self,
        cell: Cell,
        server: str,
        attempt: str,
        query_interval_s: float = QUERY_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cell = cell
        self._server = server
        self._attempt = attempt
        self._query_interval_s = query_interval_s
        self._changed = threading.Condition()
        self._number = 0
        self._incoming: Assembly | None = None
        self._reply: bytes | None = None
        self._is_missing = False
        self._sent_at: float | None = None
        self.abort_reason: str | None = None  # why this site's part was ended
        self._life_signs = LifeSigns([server], clock)
        self.is_stopping = False  # FLARE stops this site's part: its signs of life say so
        cell.register_request_cb(CHANNEL, TOPIC_BEAT, self._on_beat)
        cell.register_request_cb(CHANNEL, TOPIC_REPLY, self._on_reply)
        cell.register_request_cb(CHANNEL, TOPIC_STATE, self._on_state)
        cell.register_request_cb(CHANNEL, TOPIC_ABORT, self._on_abort)

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a frame and wait for its reply.

        Raises:
            JobAborted: the job was ended meanwhile, or if no reply came within timeout_s.
        """
        with self._changed:
            self._check_not_aborted()
            self._number += 1
            self._incoming = self._reply = None
            self._is_missing = False
        self._sent_at = time.monotonic()
        try:
            self._send_frame(frame)
            return self._wait_for_reply(frame, timeout_s)
        finally:
            self._sent_at = None

    @property
    def waiting_s(self) -> float | None:
        """How long the present exchange has been waiting, or None if there is none."""
        sent_at = self._sent_at
        return None if sent_at is None else time.monotonic() - sent_at

    @property
    def server_silent_s(self) -> float:
        """How long nothing was heard of the server."""
        return self._life_signs.silent_s(self._server)

    def beat(self) -> None:
        """Send a sign of life; may wait while the connection is congested. Raises: JobAborted if it is closed."""
        self._send(TOPIC_BEAT, Message({}, STOPPING if self.is_stopping else None))

    def abort(self, reason: str) -> None:
        """End the waiting exchange and all later ones with JobAborted(reason). The first reason stays."""
        with self._changed:
            self.abort_reason = self.abort_reason or reason
            self._changed.notify_all()

    def _wait_for_reply(self, frame: bytes, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                now = time.monotonic()
                ready = self._changed.wait_for(self._is_decided, min(self._query_interval_s, max(deadline - now, 0.0)))
                self._check_not_aborted()
                if self._reply is not None:
                    reply, self._reply, self._incoming = self._reply, None, None
                    return reply
                is_missing, self._is_missing = self._is_missing, False
            if is_missing:
                self._send_frame(frame)
            elif time.monotonic() >= deadline:
                raise JobAborted(f"no reply from the server to exchange {self._number} within {timeout_s:.0f} s")
            elif not ready and not self._has_progress():
                self._send(TOPIC_QUERY, Label(self._attempt, self._number, len(frame), 0).message())

    def _is_decided(self) -> bool:
        return self.abort_reason is not None or self._reply is not None or self._is_missing

    def _has_progress(self) -> bool:
        incoming = self._incoming
        return incoming is not None and time.monotonic() - incoming.progress_at < self._query_interval_s

    def _check_not_aborted(self) -> None:
        if self.abort_reason is not None:
            raise JobAborted(self.abort_reason)

    def _send_frame(self, frame: bytes) -> None:
        for message in pieces(self._attempt, self._number, frame):
            self._send(TOPIC_FRAME, message)

    def _send(self, topic: str, message: Message) -> None:
        # An unreachable server is not an error yet: FLARE reconnects, and the next query finds out what is missing.
        try:
            self._cell.fire_and_forget(CHANNEL, topic, self._server, message, optional=True)
        except RuntimeError as error:
            raise JobAborted("this site's connection to the FLARE server has been closed") from error

    def _on_beat(self, message: Message) -> None:
        self._accepts(message)

    def _accepts(self, message: Message) -> bool:
        """Return whether a message is the server's, whatever it says; if so, it is a sign of life."""
        origin = message.get_header(MessageHeaderKey.ORIGIN)
        if origin != self._server:
            logger.warning("ignored a message from %s, which is not this job's server", printable(str(origin)))
            return False
        self._life_signs.heard(self._server)
        return True

    def _on_reply(self, message: Message) -> None:
        if not self._accepts(message):
            return
        try:
            label = Label.of(message)
            with self._changed:
                if label.attempt != self._attempt or label.number != self._number or self._reply is not None:
                    return
                self._incoming = self._incoming or Assembly(label.size)
                self._reply = self._incoming.add(label, message.payload)
                if self._reply is not None:
                    self._changed.notify_all()
        except ProtocolError as error:
            self.abort(f"the server sent {error}")

    def _on_state(self, message: Message) -> None:
        if not self._accepts(message):
            return
        try:
            label = Label.of(message)
        except ProtocolError as error:
            self.abort(f"the server sent {error}")
            return
        with self._changed:
            if label.attempt == self._attempt and label.number == self._number and message.payload == STATE_MISSING:
                self._is_missing = True
                self._changed.notify_all()

    def _on_abort(self, message: Message) -> None:
        if not self._accepts(message) or not isinstance(message.payload, (bytes, bytearray, memoryview)):
            return
        attempt, _, reason = bytes(message.payload[:MAX_REASON_BYTES]).decode("utf-8", "replace").partition("\n")
        if attempt == self._attempt:
            self.abort(printable(reason, MAX_REASON_BYTES))


_Handle = Callable[[str, Label, object], None]
"""(site, label, payload) of a message of the present attempt -> what the server does."""


@dataclass(slots=True)
class _SiteState:
    """What the server knows of one site: the frame being received or answered, and no other."""

    cell_name: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = 0
    incoming: Assembly | None = None
    arriving: Arriving | None = None  # takes the pieces as they come
    pieces: list[bytes] = field(default_factory=list)  # or they are kept
    reply: bytes | None = None
    reply_sent_at: float = 0.0


class FrameServer:
    """The server's end: hands each frame to the aggregator once, whole or piece by piece, and sends the replies.

    Nothing here blocks a thread of the cell's pool: a waiting site costs memory only.

    Args:
        cell: the cell that the server's engine uses for this job.
        sink: the aggregator.
        site_cells: site name -> name of that site's job cell, from FLARE's list of authenticated clients.
        attempt: id of this run of the job.
        on_violation: called with (site, text) when a site breaks the protocol of this module.
        clock: seconds, for the sites' signs of life.
        on_failure: called with what the server's machine lacks, and the error.
    """

    def __init__(
        self,
        cell: Cell,
        sink: Aggregator,
        site_cells: Mapping[str, str],
        attempt: str,
        on_violation: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[str, Exception], None] = lambda text, error: None,
    ) -> None:
        self.life_signs = LifeSigns(site_cells, clock)
        self.stopping: frozenset[str] = frozenset()  # sites that say that FLARE stops them
        self._workers = ThreadPoolExecutor(WORKERS, "veilboost_frames")
        self._cell = cell
        self._sink = sink
        self._attempt = attempt
        self._on_violation, self._on_failure = on_violation, on_failure
        self._site_of_cell = {cell_name: site for site, cell_name in site_cells.items()}
        self._states = {site: _SiteState(cell_name) for site, cell_name in site_cells.items()}
        self._ended: dict[str, str] = {}  # attempts that another process has led, and why they have ended
        cell.register_request_cb(CHANNEL, TOPIC_BEAT, self._on_beat)
        cell.register_request_cb(CHANNEL, TOPIC_FRAME, self._on_frame)
        cell.register_request_cb(CHANNEL, TOPIC_QUERY, self._on_query)

    def abort_sites(self, reason: str) -> None:
        """Wake every site with the reason, also those that wait for nothing at the moment."""
        payload = f"{self._attempt}\n{reason}".encode()[:MAX_REASON_BYTES]
        for site, state in self._states.items():
            self._work(site, self._send, state, TOPIC_ABORT, Message({}, payload))

    def end_other(self, attempt: str, reason: str) -> None:
        """Wake every site that is still in an attempt that another process has led."""
        self._ended[attempt] = reason
        for site in self._states:
            self._work(site, self._tell_of_end, site, attempt)

    def remind(self, reason: str, sites: Iterable[str]) -> None:
        """Wake some sites again, which may not have heard it."""
        payload = f"{self._attempt}\n{reason}".encode()[:MAX_REASON_BYTES]
        for site in sites:
            self._send(self._states[site], TOPIC_ABORT, Message({}, payload))

    def beat(self) -> None:
        """Send a sign of life to every site of which one was heard; may wait while a connection is congested."""
        for site, state in self._states.items():
            if self.life_signs.has_begun(site):
                self._send(state, TOPIC_BEAT, Message({}, None))

    def close(self) -> None:
        """Take no more frames; what is under way is finished."""
        self._workers.shutdown(wait=False)

    def _site_of(self, message: Message) -> str | None:
        """The sender by FLARE's authentication, or None if it is not a site of this job."""
        origin = message.get_header(MessageHeaderKey.ORIGIN)
        name = message.get_header(CellMessageAuthHeaderKey.CLIENT_NAME)
        site = self._site_of_cell.get(origin)
        if site is None or name != site:
            logger.warning(
                "ignored a message of client %s from cell %s: not a site of this job",
                printable(str(name)),
                printable(str(origin)),
            )
            return None
        self.life_signs.heard(site)
        return site

    def _on_beat(self, message: Message) -> None:
        site = self._site_of(message)
        if site is not None and message.payload == STOPPING:
            self.stopping |= {site}

    def _on_frame(self, message: Message) -> None:
        self._guarded(message, self._receive_piece, lambda site, attempt: None)

    def _on_query(self, message: Message) -> None:
        self._guarded(message, self._answer_query, self._tell_of_end)

    def _guarded(self, message: Message, handle: _Handle, of_another_attempt: Callable[[str, str], None]) -> None:
        site = self._site_of(message)
        if site is None:
            return
        self._reported(site, self._handle, site, message, handle, of_another_attempt)

    def _handle(
        self, site: str, message: Message, handle: _Handle, of_another_attempt: Callable[[str, str], None]
    ) -> None:
        label = Label.of(message)
        if label.attempt == self._attempt:
            handle(site, label, message.payload)
        else:
            of_another_attempt(site, label.attempt)

    def _tell_of_end(self, site: str, attempt: str) -> None:
        """Wake a site that began an attempt when that had ended already: it heard no word of the end."""
        reason = self._ended.get(attempt, ENDED_BEFORE)
        payload = f"{attempt}\n{reason}".encode("utf-8", "replace")[:MAX_REASON_BYTES]
        self._send(self._states[site], TOPIC_ABORT, Message({}, payload))

    def _reported(self, site: str, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except VeilBoostError as error:
            self._on_violation(site, str(error))
        except Exception as error:  # the edge of the process: FLARE would hide it, and the sites would wait
            known = machine_failure(error)
            if known is not None:
                logger.error("a frame could not be taken: %s", known)
                self._on_failure(known, error)
                return
            logger.exception("a defect in the server's part of VeilBoost, please report it")
            self._on_violation(site, "something that the server failed on; see the server's log")

    def _receive_piece(self, site: str, label: Label, payload: object) -> None:
        state = self._states[site]
        with state.lock:
            if label.number < state.number:
                return  # a late copy of a piece of an earlier frame
            if label.number > state.number:
                self._start_frame(state, label)
            if state.incoming is None:
                return  # a late copy of a piece of a frame that is already complete
            self._take_piece(site, state, state.incoming, label, payload)
            if not state.incoming.is_complete:
                return
            state.incoming = None
            arriving, state.arriving = state.arriving, None
            pieces, state.pieces = state.pieces, []
        reply = self._replier(site, label.number)
        if arriving is not None:
            self._work(site, arriving.finish, reply)
        else:
            self._work(site, self._sink.submit, site, b"".join(pieces), reply)

    def _take_piece(self, site: str, state: _SiteState, incoming: Assembly, label: Label, payload: object) -> None:
        """Hand a piece on, if those before it have come; this is short work for a thread of the cell's pool."""
        incoming.take(label, payload)
        for piece in incoming.ready():
            if not state.pieces and state.arriving is None and len(piece) < label.size:
                state.arriving = self._sink.begin(site, piece, label.size)
            if state.arriving is not None:
                state.arriving.feed(piece)
            else:
                state.pieces.append(piece)

    def _replier(self, site: str, number: int) -> Callable[[bytes], None]:
        """Return what sends the reply to one frame: apart for each site, so that none waits for another's line."""
        return lambda reply: self._work(site, self._reply_to, self._states[site], number, reply)

    def _work(self, site: str, function: Callable[..., None], *arguments: object) -> None:
        """Call a function of this site's in a thread of this module."""
        try:
            self._workers.submit(self._reported, site, function, *arguments)
        except RuntimeError:
            logger.debug("the attempt is over: a frame or a reply of %s is dropped", site)

    @staticmethod
    def _start_frame(state: _SiteState, label: Label) -> None:
        is_answered = state.number == 0 or state.reply is not None
        if label.number != state.number + 1 or not is_answered:
            raise ProtocolError(f"frame {label.number} while frame {state.number} is not answered")
        state.number = label.number
        state.incoming, state.arriving, state.pieces = Assembly(label.size), None, []
        state.reply = None

    def _answer_query(self, site: str, label: Label, payload: object) -> None:
        state = self._states[site]
        with state.lock:
            if label.number < state.number:
                return
            now = time.monotonic()
            reply = state.reply if label.number == state.number else None
            if reply is not None and now - state.reply_sent_at < resend_pause_s(len(reply)):
                return  # it is probably still on its way
            is_missing = label.number > state.number or (
                state.incoming is not None and now - state.incoming.progress_at > resend_pause_s(CHUNK_BYTES)
            )
        if reply is not None:
            self._replier(site, label.number)(reply)
        else:
            self._send(state, TOPIC_STATE, label_state(label, is_missing=is_missing))

    def _reply_to(self, state: _SiteState, number: int, reply: bytes) -> None:
        with state.lock:
            if number != state.number:
                return
            state.reply = reply
            state.reply_sent_at = time.monotonic()
        for message in pieces(self._attempt, number, reply):
            self._send(state, TOPIC_REPLY, message)

    def _send(self, state: _SiteState, topic: str, message: Message) -> None:
        try:
            error = self._cell.fire_and_forget(CHANNEL, topic, state.cell_name, message, optional=True)
        except RuntimeError:
            logger.debug("the cell is closed: %s to %s not sent", topic, state.cell_name)
            return
        if error.get(state.cell_name):
            logger.debug("could not send %s to %s: %s", topic, state.cell_name, error[state.cell_name])


def label_state(label: Label, *, is_missing: bool) -> Message:
    """The answer to a query that has no reply yet."""
    return label.message(STATE_MISSING if is_missing else STATE_PENDING)
