"""The server adds while frames arrive: one message in all for a sum, whatever comes when, and nothing half added."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from nvflare.apis.fl_constant import CellMessageAuthHeaderKey
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from he_processors import bfv
from nvflare_plugins.flare import transport as pieces_module
from nvflare_plugins.flare.transport import CHANNEL, TOPIC_ABORT, TOPIC_REPLY, Assembly, FrameServer, Label, pieces
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.envelope import (
    CHUNK_BYTES,
    Codec,
    FrameType,
    Kind,
    Operation,
    Phase,
    TrainingStep,
    Transfer,
    commitment,
    unpack,
)
from tests.support.frames import ATTEMPT, SALT, frame
from tests.support.threads import in_threads, wait_until


class Cell:
    """Puts the replies together, where the test wants them, and keeps nothing else."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps, self.lock = keeps, threading.Lock()
        self.incoming: dict[tuple[str, int], Assembly] = {}
        self.replies: dict[str, list[bytes]] = {}
        self.n_replied = 0
        self.aborts: list[str] = []

    def register_request_cb(self, channel: str, topic: str, cb: Callable[[Message], None]) -> None: ...

    def fire_and_forget(self, channel, topic, targets, message, *, optional=False) -> dict[str, str]:
        assert channel == CHANNEL
        with self.lock:
            if topic == TOPIC_ABORT:
                self.aborts.append(targets)
            if topic == TOPIC_REPLY:
                label = Label.of(message)
                last = label.offset + len(message.payload) == label.size
                self.n_replied += last
                if self.keeps:
                    assembly = self.incoming.setdefault((targets, label.number), Assembly(label.size))
                    whole = assembly.add(label, message.payload)
                    if whole is not None:
                        self.replies.setdefault(targets, []).append(whole)
        return {}


class Server:
    def __init__(self, n_sites: int, keeps: bool = True, deadline_s: float = 60.0) -> None:
        self.sites = [f"site-{rank:03}" for rank in range(n_sites)]
        self.transfers: list[Transfer] = []
        self.cell = Cell(keeps)
        self.aggregator = Aggregator(self.sites, ATTEMPT, deadline_s, self._note, on_abort=self._abort)
        cells = {site: f"{site}.job" for site in self.sites}
        self.frames = FrameServer(self.cell, self.aggregator, cells, ATTEMPT.hex(), self._violation)

    def _note(self, transfer: Transfer) -> None:
        self.transfers.append(Transfer(transfer.sites, transfer.direction, transfer.frame, transfer.commitment))
        if not self.cell.keeps:
            self.transfers.clear()

    def _abort(self, reason: str) -> None:
        self.frames.abort_sites(reason)

    def _violation(self, site: str, text: str) -> None:
        self.aggregator.abort(f"{site} sent {text}")

    def deliver(self, rank: int, message: Message) -> None:
        """As FLARE calls back, in the order of the test."""
        site = self.sites[rank]
        message.add_headers({MessageHeaderKey.ORIGIN: f"{site}.job", CellMessageAuthHeaderKey.CLIENT_NAME: site})
        self.frames._on_frame(message)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, 30, lambda: self.aggregator.reason)


def words_frame(
    rank: int, payload: bytes, counter: int = 0, attachment: bytes = b"", codec: Codec = Codec.MASKED
) -> bytes:
    return frame(payload, rank, counter, attachment=attachment, codec=codec).pack()


def cut(frame: bytes, number: int = 1) -> list[Message]:
    return list(pieces(ATTEMPT.hex(), number, frame))


def added(payloads: Sequence[bytes]) -> bytes:
    return sum(np.frombuffer(payload, "<u8") for payload in payloads).astype("<u8").tobytes()


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_sites", [4, 20])
def test_memory_for_a_sum_does_not_grow_with_the_sites(n_sites: int) -> None:
    """All sites send at the same time, and all but the last piece of each is there: 2 x sites x message once."""
    message_bytes = 8 << 20
    server = Server(n_sites, keeps=False)
    payload = np.random.default_rng(0).bytes(message_bytes)
    tracemalloc.start()
    try:
        n_pieces = len(cut(words_frame(0, payload)))
        assert n_pieces == -(-(message_bytes + 100) // CHUNK_BYTES)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(n_pieces):
            for rank in range(n_sites):
                server.deliver(rank, cut(words_frame(rank, payload))[number])
        server.wait_for(lambda: server.cell.n_replied == n_sites)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # Of it one message is this test's own: the frame that it cuts.
    assert peak < 4.5 * message_bytes, f"{peak / message_bytes:.1f} messages"


def test_memory_for_encrypted_sums_does_not_grow_with_the_sites() -> None:
    """Whole ciphertext messages are added one after the other, and not kept."""
    n_sites, values = 12, np.zeros(1 << 19, dtype=np.int64)
    secret = bfv.BfvProcessor(bfv.BfvProcessor.generate(n_sites))
    public, payload = secret.public_parameters(), secret.encrypt(values)
    server = Server(n_sites, keeps=False)
    for rank in range(n_sites):
        content = public if rank == 0 else b""
        about = {"operation": Operation.GATHER, "kind": Kind.HE_PUBLIC, "moment": TrainingStep(Phase.SETUP)}
        key = frame(content, rank, codec=Codec.BFV, n_values=0, **about)
        server.aggregator.submit(server.sites[rank], key.pack(), lambda answer: None)
    sums: list[bytes] = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for rank in range(n_sites):
            server.aggregator.submit(server.sites[rank], words_frame(rank, payload, 1, codec=Codec.BFV), sums.append)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(sums) == n_sites and sums[0] is sums[-1]
    assert peak < 9 * len(payload), f"{peak / len(payload):.1f} messages"


# -- right whatever comes when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_pieces_in_any_order_and_number_give_the_sum_and_the_evidence(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces cut words in two, change places within and between sites, and come twice."""
    chunk = [997, 1000, 1024][seed % 3]
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", chunk)
    source, n_values = random.Random(seed), 700 + seed
    server = Server(3)
    payloads = [source.randbytes(8 * n_values) for _ in server.sites]
    heads = [b"head of %d" % rank for rank in range(3)]
    messages = [
        (rank, message) for rank in range(3) for message in cut(words_frame(rank, payloads[rank], 0, heads[rank])) * 2
    ]
    source.shuffle(messages)
    for rank, message in messages:
        server.deliver(rank, message)
    server.wait_for(lambda: server.cell.n_replied == 3)
    answers = [unpack(whole[0]) for whole in server.cell.replies.values()]
    assert {bytes(answer.payload) for answer in answers} == {added(payloads)}
    assert all(head in answers[0].attachment for head in heads)
    received = {t.sites[0]: t.commitment for t in server.transfers if t.direction == "received"}
    for rank, site in enumerate(server.sites):
        assert received[site].hexdigest() == commitment(payloads[rank], SALT)
        assert len(received[site]) == len(payloads[rank])


def test_pieces_from_many_threads_at_once_are_each_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE calls back in up to 100 threads."""
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", 1000)
    server, source = Server(6), random.Random(1)
    payloads = [source.randbytes(80_000) for _ in server.sites]
    messages = [(rank, m) for rank in range(6) for m in cut(words_frame(rank, payloads[rank])) * 2]
    source.shuffle(messages)
    parts = [messages[i::8] for i in range(8)]
    in_threads(lambda part: [server.deliver(*one) for one in part], parts)
    server.wait_for(lambda: server.cell.n_replied == 6)
    assert {bytes(unpack(w[0]).payload) for w in server.cell.replies.values()} == {added(payloads)}


def test_small_and_long_frames_meet_in_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """One site's frame comes as a whole, the others' in pieces."""
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", 1000)
    server = Server(3)
    payloads = [random.Random(rank).randbytes(4000) for rank in range(3)]
    answers: list[bytes] = []
    server.aggregator.submit(server.sites[1], words_frame(1, payloads[1]), answers.append)
    for rank in (0, 2):
        for message in cut(words_frame(rank, payloads[rank])):
            server.deliver(rank, message)
    server.wait_for(lambda: server.cell.n_replied == 2 and len(answers) == 1)
    assert bytes(unpack(answers[0]).payload) == added(payloads)


@pytest.mark.parametrize("end", ["deadline", "abort", "wrong", "vanished"])
def test_a_half_added_sum_is_never_answered(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", 1000)
    server = Server(3, deadline_s=0.05)
    payloads = [random.Random(rank).randbytes(8000) for rank in range(3)]
    for rank in (0, 1):
        for message in cut(words_frame(rank, payloads[rank])):
            server.deliver(rank, message)
    half = cut(words_frame(2, payloads[2]))
    for message in half[:4]:
        server.deliver(2, message)
    if end == "deadline":
        server.wait_for(lambda: [len(e.heads) for e in server.aggregator._exchanges.values()] == [2])
        time.sleep(0.1)
        server.aggregator.expire()
        assert server.aggregator.reason == "no message from site-002 within 0 s"
    elif end == "abort":
        server.aggregator.abort("stopped")
    elif end == "wrong":
        server.deliver(2, Label(ATTEMPT.hex(), 1, 9000, 5000).message(bytes(1000)))
        assert "site-002 sent a piece of 1000 bytes" in str(server.aggregator.reason)
    else:
        time.sleep(0.2)
    for message in half[4:] if end != "vanished" else []:
        server.deliver(2, message)  # too late
    time.sleep(0.1)
    results = [unpack(whole) for wholes in server.cell.replies.values() for whole in wholes]
    assert not [frame for frame in results if frame.type is not FrameType.ABORT]
    assert not [t for t in server.transfers if t.direction == "sent"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counter": 1}, "counter 1 where 0 is due"),
        ({"rank": 1}, "claims rank 1"),
        ({"n_values": 10**9}, "for 1000000000 values of 8 bytes"),
        ({"attempt": bytes(16)}, "another job attempt"),
        ({"moment": TrainingStep(Phase.UPDATE, 4)}, "no longer in step"),
    ],
)
def test_a_long_frame_out_of_place_ends_the_attempt_at_its_first_piece(
    change: dict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", 1000)
    server = Server(3)
    server.aggregator.submit(server.sites[1], words_frame(1, bytes(4000)), lambda answer: None)
    tracemalloc.start()
    try:
        server.deliver(0, cut(frame(**{"payload": bytes(4000), **change}).pack())[0])
        assert tracemalloc.get_traced_memory()[1] < 1 << 24, "memory for what a header only claims"
    finally:
        tracemalloc.stop()
    assert server.aggregator.reason is not None
    assert words in server.aggregator.reason and server.aggregator.reason.startswith("site-000: ")
