"""The server's side: sites meet, their contributions are added or passed on, and no key is needed for it."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Protocol

import numpy as np

from he_processors import field61
from he_processors.errors import ProtocolError, VeilBoostError
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.wire.envelope import (
    ATTEMPT_BYTES,
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
    unpack_head,
    unpack_list,
)

# What the server adds: words modulo 2^64 or 2^32, or ciphertexts, and behind them residues modulo 2^61 - 1.
#
# It needs no key.


_RESIDUE = 8
_SHORT = 4
_SHORT_KINDS = (Kind.HISTOGRAM, Kind.HISTOGRAM_METRIC)  # that may travel in 32-bit words


class Summing(Protocol):
    """A sum to which whole contributions are added, one after the other."""

    def add(self, payload: bytes | memoryview) -> None:
        """Add one. Raises: ProtocolError; it has not been added then."""

    def pack(self) -> bytes | memoryview:
        """Return the sum as it travels."""


class WordSum:
    """A sum of vectors of words: of values modulo 2^64, or 2^32, then of residues modulo 2^61 - 1."""

    def __init__(self, n_values: int, n_residues: int = 0, word_bytes: int = 8) -> None:
        n_bytes = word_bytes * n_values
        # Takes memory where something is added, not before.
        self._total = np.zeros(n_bytes + _RESIDUE * n_residues, dtype=np.uint8)
        self._values, self._residues = self._total[:n_bytes].view(f"<u{word_bytes}"), self._total[n_bytes:].view("<u8")

    def add(self, payload: bytes | memoryview) -> None:
        """Add a whole vector. Raises: ProtocolError if it has another length, or a residue is none."""
        if len(payload) != self._total.size:
            raise ProtocolError(f"sent {len(payload)} bytes where words of {self._total.size} bytes are due")
        self.add_at(0, payload)

    def add_at(self, start: int, piece: bytes | memoryview) -> int:
        """Add the whole words of a piece of a vector.

        Args:
            start: the byte at which the piece begins, and with it a word.

        Returns:
            Bytes of the words that were added: all but those of a word that ends behind the piece.

        Raises:
            ProtocolError: as ``add``.
        """
        width, data = self._values.itemsize, np.frombuffer(piece, dtype=np.uint8)
        n_bytes = min(max(self._values.nbytes - start, 0), data.size)
        n_bytes -= n_bytes % width
        words, first = data[:n_bytes].view(self._values.dtype), start // width
        is_behind = start + n_bytes >= self._values.nbytes
        rest = data[n_bytes : data.size - (data.size - n_bytes) % _RESIDUE] if is_behind else data[:0]
        residues = rest.view("<u8").copy()
        if residues.size and int(residues.max()) >= field61.MODULUS:
            raise ProtocolError("sent a residue that is not below its modulus")
        self._values[first : first + words.size] += words
        place = (start + n_bytes - self._values.nbytes) // _RESIDUE if is_behind else 0
        where = slice(place, place + residues.size)
        self._residues[where] = field61.add(self._residues[where], residues)
        return n_bytes + rest.size

    def pack(self) -> memoryview:
        """Return the sum, without a copy."""
        return self._total.data


OpenSum = Callable[[bytes, int], Summing]
"""Of a plugin: (what rank 0 has published, number of values) -> an empty sum of such messages."""


class _ForeignSum:
    """A sum that a plugin computes. Whatever its code raises ends the attempt, in words of ours."""

    def __init__(self, open_plugin: OpenSum, parameters: bytes, n_values: int) -> None:
        with _no_foreign_errors():
            self._total = open_plugin(parameters, n_values)

    def add(self, payload: bytes | memoryview) -> None:
        """Add one. Raises: ProtocolError; the attempt ends then."""
        with _no_foreign_errors():
            self._total.add(payload)

    def pack(self) -> bytes:
        """Return the sum as it travels."""
        with _no_foreign_errors():
            return bytes(self._total.pack())


@contextmanager
def _no_foreign_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # foreign code, of which anything may come; its text may hold anything too
        raise ProtocolError(f"the server's plugin could not add a message ({type(error).__name__})") from error


class _TailedSum:
    """A sum of ciphertexts with residues behind each."""

    def __init__(self, ciphertexts: Summing, n_residues: int) -> None:
        self._ciphertexts, self._residues = ciphertexts, WordSum(0, n_residues)
        self._tail = _RESIDUE * n_residues

    def add(self, payload: bytes | memoryview) -> None:
        """Add one. Raises: ProtocolError; the attempt ends then."""
        body = memoryview(payload)[: len(payload) - self._tail]
        self._ciphertexts.add(bytes(body))
        self._residues.add(memoryview(payload)[len(body) :])

    def pack(self) -> bytes:
        """Return the sum as it travels."""
        return b"".join((self._ciphertexts.pack(), self._residues.pack()))


def adds_words(frame: Frame) -> bool:
    """Tell whether a frame holds words that are added."""
    is_contribution = frame.operation is Operation.SUM and frame.type is FrameType.CONTRIBUTION
    return is_contribution and frame.codec.word_bytes > 0


def check_size(frame: Frame, n_bytes: int) -> None:
    """Refuse a sum whose size does not fit its header. Raises: ProtocolError."""
    width = frame.codec.word_bytes
    if width == _SHORT and frame.kind not in _SHORT_KINDS:
        raise ProtocolError(f"{frame.kind.name} does not travel in words of 32 bits")
    if frame.tail % _RESIDUE:
        raise ProtocolError(f"sent a sum with {frame.tail} bytes of residues, which have 8 bytes each")
    if adds_words(frame) and n_bytes != width * frame.n_values + frame.tail:
        raise ProtocolError(
            f"sent {n_bytes} bytes for {frame.n_values} values of {width} bytes and {frame.tail} bytes of residues"
        )


def sum_of_words(frame: Frame) -> WordSum:
    """Return an empty sum for contributions like this one, of words and of the right size."""
    return WordSum(frame.n_values, frame.tail // _RESIDUE, frame.codec.word_bytes)


def open_sum(frame: Frame, public_parameters: Mapping[Codec, bytes], open_plugin: OpenSum | None = None) -> Summing:
    """Return an empty sum for contributions like this one. Raises: ProtocolError."""
    check_size(frame, len(frame.payload))  # before memory is taken for what a header only claims
    if adds_words(frame):
        return sum_of_words(frame)
    if frame.codec in (Codec.BFV, Codec.CKKS):
        parameters = public_parameters.get(frame.codec)
        if parameters is None:
            raise ProtocolError(f"{frame.codec.name} contribution before its public parameters")
        total: Summing = lattice(frame.codec).open_sum(parameters)
        return _TailedSum(total, frame.tail // _RESIDUE)
    if frame.codec is Codec.PLUGIN_BYTES and open_plugin is not None:
        parameters = public_parameters.get(frame.codec, b"")
        return _TailedSum(_ForeignSum(open_plugin, parameters, frame.n_values), frame.tail // _RESIDUE)
    if frame.codec is Codec.PLUGIN_BYTES:
        raise ProtocolError(
            "the job's plugin makes messages that only the plugin can add, and this server pins none. Remedy: have the "
            "server's operator pin it (local/veilboost_server.json, key plugins), or choose another profile"
        )
    raise ProtocolError(f"{frame.kind.name}: codec {frame.codec.name} cannot be summed")


def add_words(payloads: Sequence[bytes], n_values: int) -> bytes:
    """Add vectors of 64-bit words modulo 2^64.

    Raises:
        ProtocolError: a payload does not hold exactly ``n_values`` words.
    """
    total = WordSum(n_values)
    for payload in payloads:
        total.add(payload)
    return bytes(total.pack())


def lattice(codec: Codec) -> ModuleType:
    """Return the module of a codec of ciphertexts."""
    # Imported when first needed: the lattice library takes long to load and most jobs do without it.
    return importlib.import_module("he_processors.bfv" if codec is Codec.BFV else "he_processors.ckks")


# The server's side: sites meet, their contributions are added or passed on, and no key is needed for it.
#
# Sums are added as contributions arrive and hold one message in all, however many sites there are; long frames of words
# are added piece by piece (``begin``). A sum is answered only when every site's whole frame is in it: anything else
# ends the attempt. What sites give to each other is kept until the last of them is there.


Reply = Callable[[bytes], None]


@dataclass(slots=True)
class _Exchange:
    """One counter at which all sites meet. By rank: heads are frames without payload."""

    opened: float
    arriving: dict[int, Frame] = field(default_factory=dict)  # heads of frames that are added piece by piece
    heads: dict[int, Frame] = field(default_factory=dict)  # of frames that are there as a whole
    digests: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)  # of everything but sums
    total: Summing | None = None
    adding: threading.Lock = field(default_factory=threading.Lock)
    waiting: dict[int, Reply] = field(default_factory=dict)
    n_recorded: int = 0
    answers: list[bytes] | None = None  # by rank; the same bytes for all but in routed exchanges


class Arriving:
    """A long frame of words that is added while it comes; made by ``Aggregator.begin``.

    Not safe for concurrent use: the pieces of a frame come one after the other, in order.
    """

    def __init__(
        self, owner: Aggregator, site: str, head: Frame, payload: slice, total: WordSum, adding: threading.Lock
    ) -> None:
        self._owner, self._site, self._head, self._total, self._adding = owner, site, head, total, adding
        self._skip, self._left = payload.start, payload.stop - payload.start
        self._commitment = Commitment(head.salt)
        self._added = 0  # bytes
        self._rest = b""  # of a word that a piece cut in two
        self._attachment = b""

    def feed(self, piece: bytes) -> None:
        """Add the next piece of the frame."""
        skipped = min(self._skip, len(piece))
        self._skip -= skipped
        words = memoryview(piece)[skipped : skipped + self._left]
        self._left -= len(words)
        self._attachment += bytes(memoryview(piece)[skipped + len(words) :])
        self._commitment.update(words)
        data = self._rest + words
        with self._adding:
            n_bytes = self._total.add_at(self._added, data)
        self._rest = data[n_bytes:]
        self._added += n_bytes

    def finish(self, reply: Reply) -> None:
        """The frame is complete: as ``Aggregator.submit`` from here on."""
        self._owner.arrived(self._site, replace(self._head, attachment=self._attachment), self._commitment, reply)


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
        self._open_plugin: OpenSum | None = None
        self._transfer_s = transfer_s or (lambda n_bytes: 0.0)
        self._lock = threading.Lock()
        self._next = [0] * len(sites)  # counter that each site sends next
        self._exchanges: dict[int, _Exchange] = {}
        self._public_parameters: dict[Codec, bytes] = {}
        self.reason: str | None = None
        """Why the attempt was aborted, or None."""
        self.has_summed = False
        """Whether the sites got a sum."""

    def add_by(self, open_plugin: OpenSum | None) -> None:
        """Have a plugin add messages of ``Codec.PLUGIN_BYTES``; without one they are refused."""
        self._open_plugin = open_plugin

    def submit(self, site: str, data: bytes, reply: Reply) -> None:
        """Take one frame of an authenticated site; ``reply`` gets the answer once all sites are there.

        A frame that does not belong here aborts the attempt for every site.
        """
        try:
            frame = unpack(data)
            self._check(site, frame)
            # Hashing for the evidence takes longer than adding: do it while the slower sites are on their way.
            committed = Commitment(frame.salt, frame.payload)
            exchange = self._join(frame, committed, reply)
            if exchange is not None:
                self._take(exchange, frame)
                self._recorded(site, exchange, frame, committed)
        except VeilBoostError as error:
            self._refuse(site, error, reply)

    def begin(self, site: str, first: bytes, size: int) -> Arriving | None:
        """Take the beginning of a long frame, to add the frame while it comes.

        Args:
            first: the first bytes, at least the header.
            size: of the whole frame.

        Returns:
            None if the frame must be taken as a whole, by ``submit``: it holds no words to add, or the attempt is over.
        """
        try:
            head, payload = unpack_head(first, size)
            self._check(site, head)
            if not adds_words(head):
                return None
            check_size(head, payload.stop - payload.start)
            with self._lock:
                if self.reason is not None:
                    return None
                exchange = self._enter(head, size)
                exchange.arriving[head.rank] = head
            with exchange.adding:
                total = exchange.total if isinstance(exchange.total, WordSum) else sum_of_words(head)
                exchange.total = total
        except VeilBoostError as error:
            self.abort(f"{site}: {error}")
            return None
        return Arriving(self, site, head, payload, total, exchange.adding)

    def arrived(self, site: str, head: Frame, committed: Commitment, reply: Reply) -> None:
        """Take note that a frame that was added piece by piece is complete."""
        with self._lock:
            exchange = self._exchanges.get(head.counter) if self.reason is None else None
            if exchange is not None:
                del exchange.arriving[head.rank]
                self._settle(exchange, head, committed, reply)
        if exchange is None:
            reply(self._abort_frame())
            return
        try:
            self._recorded(site, exchange, head, committed)
        except VeilBoostError as error:
            self._refuse(site, error, reply)

    def _refuse(self, site: str, error: VeilBoostError, reply: Reply) -> None:
        self.abort(f"{site}: {error}")
        reply(self._abort_frame())

    def abort(self, reason: str) -> None:
        """End the attempt: every waiting and every later frame is answered with this reason."""
        with self._lock:
            first = self.reason is None
            self.reason = self.reason or reason[:4000]
            waiting = [r for e in self._exchanges.values() for r in e.waiting.values()]
            for exchange in self._exchanges.values():
                exchange.waiting = {}
        if first and self._on_abort is not None:  # before a site could act upon it
            self._on_abort(self.reason)
        for reply in waiting:
            reply(self._abort_frame())

    def expire(self) -> None:
        """Abort if an exchange has waited longer than the deadline; call about once a second."""
        with self._lock:
            late = self._late(time.monotonic())
        if late is not None:
            missing, deadline_s = late
            self.abort(f"no message from {', '.join(missing)} within {deadline_s:.0f} s")

    def waiting_for(self) -> tuple[list[str], float]:
        """Return the sites whose message the oldest open exchange lacks, and for how many seconds it is open."""
        with self._lock:
            for _, exchange in sorted(self._exchanges.items()):
                if exchange.answers is None and len(exchange.heads) < len(self._sites):
                    missing = [site for rank, site in enumerate(self._sites) if rank not in exchange.heads]
                    return missing, time.monotonic() - exchange.opened
        return [], 0.0

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
            if len(exchange.heads) == len(self._sites):
                continue
            longest = max(exchange.sizes.values(), default=0)
            deadline_s = self._deadline_s + self._transfer_s(n_answered + longest)
            if now - exchange.opened > deadline_s:
                return [site for rank, site in enumerate(self._sites) if rank not in exchange.heads], deadline_s
        return None

    # -- one exchange -------------------------------------------------------------------------------------------------

    def _check(self, site: str, frame: Frame) -> None:
        if site not in self._sites:
            raise ProtocolError("is not a site of this job")
        if frame.attempt != self._attempt:
            raise ProtocolError("sent a frame of another job attempt")
        if frame.rank != self._sites.index(site):
            raise ProtocolError(f"claims rank {frame.rank}, which belongs to another site")
        if frame.type not in (FrameType.CONTRIBUTION, FrameType.RESCALE):
            raise ProtocolError("sent a frame that only the server may send")

    def _join(self, frame: Frame, committed: Commitment, reply: Reply) -> _Exchange | None:
        """Enter the frame; return its exchange unless it is answered already or was here before."""
        answer = None
        with self._lock:
            if self.reason is not None:
                answer = self._abort_frame()
            else:
                known = self._exchanges.get(frame.counter)
                if known is not None and frame.rank in known.heads:
                    # A retry after a lost reply: the same bytes get the same answer.
                    same_head = known.heads[frame.rank] == replace(frame, payload=b"")
                    if not same_head or known.digests[frame.rank] != committed.hexdigest():
                        raise ProtocolError(f"sent two different frames under counter {frame.counter}")
                    if known.answers is None:
                        known.waiting[frame.rank] = reply
                        return None
                    answer = known.answers[frame.rank]
                else:
                    exchange = self._enter(frame, len(frame.payload))
                    is_routed = frame.operation is Operation.ROUTE
                    if is_routed and unpack_list(bytes(frame.payload), len(self._sites))[frame.rank]:
                        raise ProtocolError("sent a routed message to itself")
                    self._settle(exchange, replace(frame, payload=b""), committed, reply)
                    return exchange
        reply(answer)
        return None

    def _enter(self, frame: Frame, size: int) -> _Exchange:
        """Let a site take the next step, if the frame belongs there."""
        if frame.counter != self._next[frame.rank]:
            raise ProtocolError(f"sent counter {frame.counter} where {self._next[frame.rank]} is due")
        exchange = self._exchanges.setdefault(frame.counter, _Exchange(time.monotonic()))
        first = next(iter((exchange.heads or exchange.arriving).values()), frame)
        if frame.place() != first.place():
            raise ProtocolError(
                f"sent {_describe(frame)} where {self._sites[first.rank]} sent {_describe(first)}: the sites are no "
                "longer in step"
            )
        exchange.sizes[frame.rank] = size
        self._next[frame.rank] += 1
        self._exchanges.pop(frame.counter - 2, None)  # every site has its answer to that one
        return exchange

    @staticmethod
    def _settle(exchange: _Exchange, head: Frame, committed: Commitment, reply: Reply) -> None:
        """Take note of a frame that is there as a whole."""
        exchange.heads[head.rank] = head
        exchange.digests[head.rank] = committed.hexdigest()
        exchange.waiting[head.rank] = reply

    def _take(self, exchange: _Exchange, frame: Frame) -> None:
        """Add a contribution to the exchange's sum, or keep it for the others."""
        if frame.type is FrameType.RESCALE:
            return
        if frame.operation is not Operation.SUM:
            exchange.payloads[frame.rank] = bytes(frame.payload)
            return
        with exchange.adding:
            exchange.total = exchange.total or open_sum(frame, self._public_parameters, self._open_plugin)
            exchange.total.add(frame.payload)

    def _recorded(self, site: str, exchange: _Exchange, frame: Frame, committed: Commitment) -> None:
        """Record a frame that is taken; whoever records the last one answers all sites."""
        self._record((site,), "received", frame, committed)
        with self._lock:
            exchange.n_recorded += 1
            is_last = exchange.n_recorded == len(self._sites)
        if is_last:
            self._complete(frame, exchange)

    def _complete(self, frame: Frame, exchange: _Exchange) -> None:
        heads = [exchange.heads[rank] for rank in range(len(self._sites))]
        type_ = FrameType.RESULT
        payloads: Sequence[bytes | memoryview] = [b""]
        if any(head.type is FrameType.RESCALE for head in heads):
            type_ = FrameType.RESCALE
        else:
            payloads = self._results(heads[0], exchange)
        if max(map(len, payloads)) > MAX_FRAME_BYTES - 2 * MAX_ATTACHMENT:
            raise ProtocolError(f"{frame.kind.name}: the answer for all sites is longer than a message may be")
        exchange.total, exchange.payloads = None, {}
        attachments = b""
        if any(head.attachment for head in heads):
            own = self._attachment() if self._attachment is not None else b""
            attachments = pack_list([*(head.attachment for head in heads), own])
            if len(attachments) > MAX_ATTACHMENT:
                raise ProtocolError("attachments of all sites are longer than a frame may carry")
        receivers = [self._sites] if len(payloads) == 1 else [(site,) for site in self._sites]
        packed, salt = [], OS_RANDOMNESS.bytes(SALT_BYTES) if frame.codec.is_salted else b""
        for sites, payload in zip(receivers, payloads, strict=True):
            rank = len(self._sites)
            answer = replace(frame, type=type_, rank=rank, payload=payload, attachment=attachments, salt=salt)
            self._record(sites, "sent", answer, Commitment(salt, payload))
            packed.append(answer.pack())
        answers = packed if len(packed) == len(self._sites) else packed * len(self._sites)
        with self._lock:
            exchange.answers = answers
            waiting, exchange.waiting = exchange.waiting, {}
        for rank, reply in waiting.items():
            reply(answers[rank])

    def _record(self, sites: tuple[str, ...], direction: str, frame: Frame, committed: Commitment) -> None:
        if self._on_transfer is not None:
            self._on_transfer(Transfer(sites, direction, frame, committed))

    def _results(self, first: Frame, exchange: _Exchange) -> Sequence[bytes | memoryview]:
        """Return what the sites get: one payload for all, or one for each."""
        if first.operation is Operation.SUM:
            self.has_summed = True
            total = b"" if exchange.total is None else exchange.total.pack()
            if self._on_sum is not None and adds_words(first):
                if first.tail:
                    raise ProtocolError(f"{first.kind.name}: a sum for a trusted server carries residues")
                return [self._on_sum(first, bytes(total))]
            return [total]
        payloads = [exchange.payloads[rank] for rank in range(len(self._sites))]
        if first.operation is Operation.ROUTE:
            return route(payloads)
        if first.operation is Operation.GATHER:
            if first.kind is Kind.HE_PUBLIC:
                self._public_parameters[first.codec] = payloads[0][: len(payloads[0]) - first.tail]
            return [pack_list(payloads)]
        if any(payloads[1:]):
            raise ProtocolError(f"{first.kind.name}: only rank 0 may send content in a broadcast")
        return [payloads[0]]

    def _abort_frame(self) -> bytes:
        text = (self.reason or "aborted").encode()
        about = FrameType.ABORT, Operation.GATHER, Kind.CLOSING, TrainingStep(Phase.FINISH), Codec.PUBLIC
        return Frame(*about, len(self._sites), 0, self._attempt, 0, text).pack()


def route(payloads: Sequence[bytes]) -> list[bytes]:
    """Return, for each rank, the parts that all ranks addressed to it, from lists of parts by rank."""
    parts = [unpack_list(payload, len(payloads)) for payload in payloads]
    return [pack_list([of_rank[rank] for of_rank in parts]) for rank in range(len(payloads))]


def _describe(frame: Frame) -> str:
    return f"{frame.kind.name} ({frame.moment}, {frame.codec.name}, {frame.n_values} values)"
