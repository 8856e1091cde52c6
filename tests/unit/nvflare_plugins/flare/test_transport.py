"""The transport over a network that loses, doubles, reorders and forges messages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from nvflare.fuel.f3.message import Message

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.flare import transport
from nvflare_plugins.flare import transport as pieces_module
from nvflare_plugins.flare.transport import (
    CHANNEL,
    TOPIC_ABORT,
    TOPIC_BEAT,
    TOPIC_FRAME,
    TOPIC_QUERY,
    TOPIC_REPLY,
    TOPIC_STATE,
    FrameServer,
    Label,
    SiteTransport,
    label_state,
    pieces,
)
from nvflare_plugins.wire.envelope import MAX_FRAME_BYTES
from tests.support.flare_network import FakeCell, Network
from tests.support.threads import answers_in_threads, wait_until

SERVER = "server.job"
ATTEMPT = "00" * 16


class Joiner:
    """Answers every site with the frames of all, once the last one is there."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.lock = threading.Lock()
        self.waiting: list[tuple[str, bytes, Callable[[bytes], None]]] = []
        self.submissions: list[tuple[str, bytes]] = []

    def begin(self, site: str, first: bytes, size: int) -> None:
        return None

    def submit(self, site: str, frame: bytes, reply: Callable[[bytes], None]) -> None:
        with self.lock:
            self.submissions.append((site, frame))
            self.waiting.append((site, frame, reply))
            if len(self.waiting) < self.world:
                return
            complete, self.waiting = self.waiting, []
        answer = b"|".join(frame for _, frame, _ in sorted(complete, key=lambda entry: entry[0]))
        for _, _, send in complete:
            send(answer)


class Federation:
    def __init__(self, sites: tuple[str, ...] = ("site-1", "site-2", "site-3"), query_interval_s: float = 0.1) -> None:
        self.network = Network()
        self.violations: list[tuple[str, str]] = []
        self.sink = Joiner(len(sites))
        cell = FakeCell(self.network, SERVER)
        cells = {site: f"{site}.job" for site in sites}
        self.server = FrameServer(cell, self.sink, cells, ATTEMPT, lambda *found: self.violations.append(found))
        self.cells = {site: FakeCell(self.network, name, site) for site, name in cells.items()}
        self.sites = {s: SiteTransport(c, SERVER, ATTEMPT, query_interval_s) for s, c in self.cells.items()}

    def exchange(self, frames: dict[str, bytes], timeout_s: float = 60.0) -> dict[str, bytes | Exception]:
        def exchange(site: str) -> bytes:
            return self.sites[site].exchange(frames[site], timeout_s)

        return answers_in_threads(exchange, frames, (JobAborted, ProtocolError), 90)


@pytest.fixture(autouse=True)
def quick_resend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "resend_pause_s", lambda size: 0.05)


def frames_of(sites: dict[str, SiteTransport], size: int, seed: int = 0) -> dict[str, bytes]:
    source = random.Random(seed)
    return {site: source.randbytes(size) for site in sites}


@pytest.mark.parametrize("size", [0, 1, 16, 999, 1000, 1001, 10_000])
def test_everyone_gets_the_frames_of_all(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", 1000)
    federation = Federation()
    for seed in range(3):
        frames = frames_of(federation.sites, size, seed)
        assert set(federation.exchange(frames).values()) == {b"|".join(frames[s] for s in sorted(frames))}
    assert not federation.violations


def test_lost_and_doubled_messages_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of all messages is lost, a third arrives twice; the aggregator still sees each frame once."""
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", 1000)
    federation = Federation(query_interval_s=0.03)
    source = random.Random(7)
    federation.network.rule = lambda origin, topic, message: source.choice([0, 1, 2])
    for seed in range(4):
        frames = frames_of(federation.sites, 3500, seed)
        assert set(federation.exchange(frames, 60).values()) == {b"|".join(frames[s] for s in sorted(frames))}
    assert len(federation.sink.submissions) == 4 * 3
    assert not federation.violations


def test_no_resend_and_no_query_when_all_goes_well() -> None:
    federation = Federation(query_interval_s=100)
    federation.exchange(frames_of(federation.sites, 100))
    assert [federation.network.count("site-1.job", topic) for topic in (TOPIC_FRAME, TOPIC_QUERY)] == [1, 0]
    assert federation.network.count(SERVER, TOPIC_REPLY) == 3


def test_a_slow_peer_costs_queries_but_no_second_frame() -> None:
    federation = Federation(query_interval_s=0.02)
    answered: list[str] = []

    def rule(origin: str, topic: str, message: Message) -> int:
        """On a connection no question overtakes the frame it is about, however late a busy machine delivers that."""
        arrived = [f"{site}.job" for site, _ in federation.sink.submissions]
        answered.extend([origin] * (topic == TOPIC_QUERY and origin in arrived))
        return int(topic != TOPIC_QUERY or origin in arrived)

    federation.network.rule = rule

    def late() -> None:
        wait_until(lambda: answered.count("site-1.job") > 1)
        federation.sites["site-3"].exchange(b"c", 60)

    slow = threading.Thread(target=late)
    slow.start()
    results = federation.exchange({"site-1": b"a", "site-2": b"b"})
    slow.join()
    assert set(results.values()) == {b"a|b|c"}
    assert federation.network.count("site-1.job", TOPIC_FRAME) == 1


def test_deadline_ends_the_wait() -> None:
    federation = Federation()
    results = federation.exchange({"site-1": b"a"}, timeout_s=0.3)
    assert isinstance(results["site-1"], JobAborted) and "within 0 s" in str(results["site-1"])


def test_signs_of_life_go_both_ways_while_frames_are_held_up() -> None:
    """The threads that add frames may all be at work: signs of life do not need them."""
    federation = Federation()
    hold = threading.Event()
    federation.sink.submit = lambda site, frame, reply: hold.wait(60)
    for _ in range(3 * transport.WORKERS):
        federation.server._work("site-2", hold.wait, 60)
    try:
        assert not federation.server.life_signs.has_begun("site-1")
        federation.sites["site-1"].beat()
        wait_until(lambda: federation.server.life_signs.has_begun("site-1"))
        before = federation.network.count(SERVER, TOPIC_BEAT)
        federation.server.beat()
        assert federation.network.count(SERVER, TOPIC_BEAT) - before == 1, "only to sites that have begun"
    finally:
        hold.set()


def test_every_message_is_a_sign_of_life_and_silence_is_counted() -> None:
    clock = [0.0]
    network = Network()
    FakeCell(network, SERVER).register_request_cb(CHANNEL, TOPIC_BEAT, lambda message: None)
    site = SiteTransport(FakeCell(network, "site-1.job", "site-1"), SERVER, ATTEMPT, clock=lambda: clock[0])
    for _ in range(12):
        clock[0] += 5.0
        assert site.server_silent_s == clock[0]
    state = label_state(Label(ATTEMPT, 9, 0, 0), is_missing=False)
    network.cells[SERVER].fire_and_forget(CHANNEL, TOPIC_STATE, "site-1.job", state)
    wait_until(lambda: site.server_silent_s == 0.0)


def test_signs_of_strangers_do_not_count() -> None:
    federation = Federation()
    for cell_name, client_name in (("site-2.job", "site-1"), ("site-1.other", "site-1"), ("site-9.job", "site-9")):
        forger = FakeCell(federation.network, cell_name, client_name)
        forger.fire_and_forget(CHANNEL, TOPIC_BEAT, SERVER, Message({}, None))
    federation.network.settle()
    assert not any(federation.server.life_signs.has_begun(site) for site in federation.sites)


def test_local_abort_wakes_the_waiting_exchange_and_refuses_later_ones() -> None:
    federation = Federation(query_interval_s=60)
    threading.Timer(0.1, federation.sites["site-1"].abort, ["stopped by the operator"]).start()
    started = time.monotonic()
    results = federation.exchange({"site-1": b"a"}, timeout_s=100)
    assert str(results["site-1"]) == "stopped by the operator" and time.monotonic() - started < 50
    with pytest.raises(JobAborted, match="stopped by the operator"):
        federation.sites["site-1"].exchange(b"b", 1)


def test_server_abort_reaches_waiting_and_idle_sites() -> None:
    federation = Federation(query_interval_s=60)
    threading.Timer(0.1, federation.server.abort_sites, ["site-3: label column is missing"]).start()
    results = federation.exchange({"site-1": b"a", "site-2": b"b"}, timeout_s=100)
    assert {str(error) for error in results.values()} == {"site-3: label column is missing"}
    wait_until(lambda: federation.sites["site-3"].abort_reason is not None)  # before it joins the others with a frame
    with pytest.raises(JobAborted, match="label column is missing"):
        federation.sites["site-3"].exchange(b"c", 1)


def test_what_a_server_says_steers_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(query_interval_s=60)
    federation.server.abort_sites("\x1b[2J\nERROR forged line\u202e")
    wait_until(lambda: federation.sites["site-3"].abort_reason is not None)
    with pytest.raises(JobAborted) as raised:
        federation.sites["site-3"].exchange(b"c", 1)
    assert str(raised.value).isprintable() and "forged line" in str(raised.value)
    stranger = FakeCell(federation.network, "a\x1b[2J\nb" + "x" * 5000, "site-1")
    stranger.fire_and_forget(CHANNEL, TOPIC_ABORT, "site-1.job", Message({}, b"text"))
    wait_until(lambda: any("ignored a message" in record.getMessage() for record in caplog.records))
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 1000 for record in caplog.records)


def test_closed_cell_is_an_abort() -> None:
    federation = Federation()
    federation.cells["site-1"].is_closed = True
    with pytest.raises(JobAborted, match="connection"):
        federation.sites["site-1"].exchange(b"a", 1)


@pytest.mark.parametrize(
    ("cell_name", "client_name"),
    [
        ("site-2.job", "site-1"),  # another site's cell
        ("site-1.job", "site-2"),  # another site's token
        ("site-9.job", "site-9"),  # not in this job
        ("site-1.other", "site-1"),  # another job of the same site
        ("site-1.job", ""),  # no authenticated name at all
    ],
)
def test_server_takes_the_site_from_flare_only(cell_name: str, client_name: str) -> None:
    federation = Federation()
    forger = FakeCell(federation.network, cell_name, client_name)
    for message in pieces(ATTEMPT, 1, b"forged"):
        forger.fire_and_forget(CHANNEL, TOPIC_FRAME, SERVER, message)
    federation.network.settle()
    assert not federation.sink.submissions and not federation.violations


def test_site_ignores_replies_and_aborts_of_other_cells() -> None:
    federation = Federation(("site-1",), query_interval_s=60)
    federation.network.rule = lambda origin, topic, message: 0 if origin == SERVER else 1
    forger = FakeCell(federation.network, "site-2.job", "site-2")

    def forge() -> None:
        forger.fire_and_forget(CHANNEL, TOPIC_ABORT, "site-1.job", Message({}, f"{ATTEMPT}\nforged".encode()))
        for message in pieces(ATTEMPT, 1, b"forged"):
            forger.fire_and_forget(CHANNEL, TOPIC_REPLY, "site-1.job", message)

    threading.Timer(0.05, forge).start()
    results = federation.exchange({"site-1": b"a"}, timeout_s=0.4)
    assert "no reply" in str(results["site-1"])


def test_a_site_that_began_an_attempt_after_its_end_is_told_so_and_no_other_is() -> None:
    federation = Federation(("site-1",))
    cell = federation.cells["site-1"]
    late = SiteTransport(cell, SERVER, "11" * 16, query_interval_s=0.05)
    with pytest.raises(JobAborted, match="had ended before this site took part"):
        late.exchange(b"frame", 60.0)
    present = SiteTransport(cell, SERVER, ATTEMPT)  # to which the answers to late questions come
    cell.fire_and_forget(CHANNEL, TOPIC_QUERY, SERVER, Label("11" * 16, 1, 5, 0).message())
    federation.network.settle()
    assert present.abort_reason is None and present.exchange(b"frame", 60.0) == b"frame"
    assert not federation.violations and federation.sink.submissions == [("site-1", b"frame")]


def test_messages_of_another_attempt_are_ignored() -> None:
    federation = Federation(("site-1",))
    for message in pieces("ff" * 16, 1, b"old"):
        federation.cells["site-1"].fire_and_forget(CHANNEL, TOPIC_FRAME, SERVER, message)
    federation.network.settle()
    assert not federation.sink.submissions
    assert federation.exchange({"site-1": b"new"}) == {"site-1": b"new"}


@pytest.mark.parametrize(
    "label",
    [
        None,
        [],
        [ATTEMPT, 1, 2],
        [1, 1, 1, 0],
        [ATTEMPT, "1", 1, 0],
        [ATTEMPT, True, 1, 0],
        [ATTEMPT, 0, 1, 0],
        [ATTEMPT, 1, -1, 0],
        [ATTEMPT, 1, 1, 2],
        [ATTEMPT, 1, MAX_FRAME_BYTES + 1, 0],
        [ATTEMPT, 1, 10**30, 0],
    ],
)
def test_invalid_labels_are_violations(label: object) -> None:
    federation = Federation()
    federation.cells["site-2"].fire_and_forget(CHANNEL, TOPIC_FRAME, SERVER, Message({"veilboost": label}, b"x"))
    federation.network.settle()
    wait_until(lambda: bool(federation.violations))
    assert [site for site, _ in federation.violations] == ["site-2"] and not federation.sink.submissions


@pytest.mark.parametrize(
    ("label", "payload"),
    [((2, 1, 0), b"x"), ((1, 5, 0), b"four"), ((1, 5, 0), b"sixsix"), ((1, 5, 3), b"xx"), ((1, 5, 0), None)],
)
def test_pieces_that_do_not_fit_are_violations(label: tuple[int, int, int], payload: bytes | None) -> None:
    federation = Federation()
    message = Label(ATTEMPT, *label).message(payload)
    federation.cells["site-1"].fire_and_forget(CHANNEL, TOPIC_FRAME, SERVER, message)
    federation.network.settle()
    wait_until(lambda: bool(federation.violations))
    assert [site for site, _ in federation.violations] == ["site-1"] and not federation.sink.submissions


def test_second_frame_before_the_first_is_answered_is_a_violation() -> None:
    federation = Federation()
    for number in (1, 2):
        for message in pieces(ATTEMPT, number, b"x"):
            federation.cells["site-1"].fire_and_forget(CHANNEL, TOPIC_FRAME, SERVER, message)
        federation.network.settle()
    wait_until(lambda: bool(federation.violations))
    assert federation.violations == [("site-1", "frame 2 while frame 1 is not answered")]
