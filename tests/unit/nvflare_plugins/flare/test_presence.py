"""Who is there: names of processes, readiness, and tokens of clients that came back."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import CellMessageAuthHeaderKey
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.presence import TOPIC_READY, Presence, Ready
from nvflare_plugins.flare.timeouts import LONGEST_STEP_S, READY_FRESH_S, LifeSigns
from nvflare_plugins.flare.transport import CHANNEL
from tests.support.flare_network import FakeCell, Network
from tests.support.threads import in_threads

CELLS = {"site-1": "site-1.job", "site-2": "site-2.job"}
TOKEN, KNOWN = "a token", "the token that FLARE gave first"
OLD, NEW, ATTEMPT = b"a" * 32, b"b" * 32, "c" * 32


class Server:
    def __init__(self) -> None:
        self.now = 0.0
        self.tokens: list[tuple[str, str]] = []
        cell = FakeCell(Network(), "server.job")
        known = dict.fromkeys(CELLS, KNOWN)
        self.presence = Presence(cell, CELLS, known, lambda *token: self.tokens.append(token), lambda: self.now)
        self._callback = cell.callbacks[CHANNEL, TOPIC_READY]

    def hears(self, site: str, payload: object, token: str | None = None, client: str | None = None) -> None:
        headers = {MessageHeaderKey.ORIGIN: CELLS.get(site, site), CellMessageAuthHeaderKey.CLIENT_NAME: client or site}
        if token is not None:
            headers[CellMessageAuthHeaderKey.TOKEN] = token
        self._callback(Message(headers, payload))


@pytest.fixture
def server() -> Server:
    return Server()


def test_every_site_must_have_said_of_late_that_it_waits(server):
    assert server.presence.absent() == ["site-1", "site-2"]
    server.hears("site-1", OLD)
    server.now = READY_FRESH_S
    server.hears("site-2", OLD)
    assert not server.presence.absent()
    server.now += 0.1
    assert server.presence.absent() == ["site-1"]


def test_a_process_that_says_anything_is_heard(server):
    assert not server.presence.heard()
    server.hears("site-1", OLD, KNOWN)
    assert server.presence.heard() == ["site-1"]
    server.now = READY_FRESH_S + 0.1
    assert not server.presence.heard()


def test_what_was_said_before_an_attempt_does_not_count_after_it(server):
    for site in CELLS:
        server.hears(site, OLD)
    server.presence.begin(ATTEMPT)
    assert server.presence.absent() == ["site-1", "site-2"] and not server.presence.replaced()


@pytest.mark.parametrize("ready_before", [True, False])
def test_another_process_in_an_attempt_is_noticed(server, ready_before):
    if ready_before:
        server.hears("site-1", OLD)
    server.presence.begin(ATTEMPT)
    server.hears("site-1", OLD + b" " + ATTEMPT.encode())
    server.hears("site-1", OLD)  # the same process, done with its part, or a message that was long on its way
    assert not server.presence.replaced()
    server.hears("site-1", NEW)
    assert server.presence.replaced() == ["site-1"]
    server.presence.begin("d" * 32)
    assert not server.presence.replaced()


def test_a_process_in_an_earlier_attempt_takes_no_part_in_this_one(server):
    server.presence.begin(ATTEMPT)
    server.hears("site-1", OLD + b" " + b"e" * 32)
    server.hears("site-1", NEW + b" " + ATTEMPT.encode())
    assert not server.presence.replaced() and server.presence.absent() == ["site-1", "site-2"]


@pytest.mark.parametrize(
    "payload", [None, "text", b"", b"A" * 32, OLD + b"\n", OLD + b" ", OLD + b" x", OLD * 3, b"a" * 31]
)
def test_what_is_no_name_says_nothing(server, payload):
    server.hears("site-1", payload, TOKEN)
    assert server.presence.absent() == ["site-1", "site-2"] and not server.tokens


def test_only_a_site_itself_says_that_it_is_there(server):
    server.hears("site-1", OLD, TOKEN, "site-2")
    server.hears("site-9.job", OLD, TOKEN, "site-1")
    assert server.presence.absent() == ["site-1", "site-2"] and not server.tokens
    server.now = READY_FRESH_S + 1
    server.hears("site-1", OLD, TOKEN)
    assert server.tokens == [("site-1", TOKEN)]


def test_no_other_token_drives_out_a_site_that_is_there(server):
    """An earlier token of a site, whose signature is good for ever, in the hands of somebody else."""
    server.presence.begin(ATTEMPT)
    for _ in range(4):
        server.hears("site-1", OLD + b" " + ATTEMPT.encode(), KNOWN)
        server.hears("site-1", NEW, TOKEN)
        server.now += READY_FRESH_S / 2
    assert not server.tokens and not server.presence.replaced() and "site-1" in server.presence.absent()
    server.now += READY_FRESH_S
    server.hears("site-1", NEW, TOKEN)
    assert server.tokens == [("site-1", TOKEN)] and server.presence.replaced() == ["site-1"]
    server.hears("site-1", OLD, KNOWN)  # a process that was stopped and wakes up finds its place taken
    assert server.tokens == [("site-1", TOKEN)] and server.presence.replaced() == ["site-1"]


def test_flares_process_of_the_job_takes_over_a_token_of_a_site_that_it_knows():
    site, other = Client("site-1", KNOWN), Client("site-2", "another")
    site.set_prop("fqcn", "relay.site-1")
    manager = SimpleNamespace(
        lock=threading.Lock(), clients={KNOWN: site, "another": other}, name_to_clients={"site-1": site}
    )
    controller = JobController({}, kind="horizontal")
    controller._engine = SimpleNamespace(client_manager=manager)
    for name in ("site-1", "site-1", "site-9"):
        controller._take_token(name, TOKEN)
    assert list(manager.clients) == ["another", TOKEN] and manager.clients["another"] is other
    taken = manager.clients[TOKEN]
    assert (taken.name, taken.token, taken.get_prop("fqcn")) == ("site-1", TOKEN, "relay.site-1")
    assert manager.name_to_clients == {"site-1": taken}


def test_a_site_that_pauses_does_not_wait_until_its_pause_is_over(server):
    network, is_over = Network(), threading.Event()
    cell = FakeCell(network, "server.job")
    presence = Presence(cell, {"site-1": "site-1.job"}, {}, lambda *token: None)
    ready = Ready(FakeCell(network, "site-1.job", "site-1"), "server.job", interval_s=0.01)
    ready.waits()
    while presence.absent():
        time.sleep(0.001)
    presence.begin(ATTEMPT)
    ready.takes_part(ATTEMPT)
    ready.waits(is_over.is_set)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline or not presence.absent():
        time.sleep(0.01)
    assert presence.absent() == ["site-1"]
    is_over.set()
    while presence.absent():
        time.sleep(0.001)
    ready.end()


def test_every_site_says_for_whom_the_job_waits(caplog):
    network = Network()
    cells = {"site-1": "site-1.job", "site-2": "site-2.job"}
    presence = Presence(FakeCell(network, "server.job"), cells, {}, lambda *token: None)
    site = FakeCell(network, "site-1.job", "site-1")
    Ready(site, "server.job")
    presence.tell("the job waits for site-2\x1b[2J")
    network.settle()
    assert [r.getMessage() for r in caplog.records] == ["the job waits for site-2?[2J"]
    FakeCell(network, "site-2.job", "site-2").fire_and_forget(CHANNEL, "pause", "site-1.job", Message({}, b"a lie"))
    network.settle()
    assert "a lie" not in caplog.text


def test_a_site_says_what_it_does():
    network = Network()
    heard: list[bytes] = []
    FakeCell(network, "server.job").register_request_cb(CHANNEL, TOPIC_READY, lambda m: heard.append(bytes(m.payload)))
    ready = Ready(FakeCell(network, "site-1.job", "site-1"), "server.job", interval_s=3600.0)
    for number, say in enumerate((ready.waits, lambda: ready.takes_part(ATTEMPT), ready.waits)):
        say()
        while len(heard) <= number:
            time.sleep(0.001)
    ready.end()
    names = {said[:32] for said in heard}
    assert len(names) == 1 and [said[32:] for said in heard] == [b"", b" " + ATTEMPT.encode(), b""]


# -- signs of life -----------------------------------------------------------------------------------------------------


def signs() -> tuple[LifeSigns, list[float]]:
    now = [50.0]
    return LifeSigns(["a", "b"], lambda: now[0]), now


def test_silence_grows_until_a_sign_comes() -> None:
    life, now = signs()
    for second in range(1, 61):
        now[0] += 1.0
        assert life.silent_s("a") == second
    life.heard("a")
    assert life.silent_s("a") == 0.0 and life.silent_s("b") == 60.0
    assert life.has_begun("a") and not life.has_begun("b")


def test_a_pause_of_the_listener_does_not_count() -> None:
    life, now = signs()
    life.heard("a")
    now[0] += 10_000.0
    assert life.silent_s("a") == LONGEST_STEP_S


def test_many_threads_count_each_second_once() -> None:
    life, now = signs()
    for _ in range(20):
        now[0] += 1.0
        in_threads(life.silent_s, ["a"] * 8)
    assert life.silent_s("a") == 20.0
