"""Values among a party's workers: sums that are added and divided, and whoever waits when one is lost or refuses."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.workers import worker_connection
from nvflare_plugins.workers.workers import Workers, WorkerSilent, collect
from tests.support.workers_here import workers_here

PATIENCE_S = 20.0


def sent(error: Exception | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None) if error is None else future.set_exception(error)
    return future


def joined(n: int) -> list[worker_connection.Peers]:
    """Return the peers of workers that reach one another."""
    found: list[worker_connection.Peers] = []

    def send(to: int, parcel: worker_connection.Parcel) -> Future[Any]:
        found[to].deliver(parcel)
        return sent()

    found += [worker_connection.Peers(number, send) for number in range(n)]
    return found


def scatter(peers: worker_connection.Peers, exchange: int, bounds: list[int], values: np.ndarray) -> Any:
    def add(sums: np.ndarray, slots: slice, others: list[np.ndarray]) -> np.ndarray:
        return sums[slots] + sum(others)

    return worker_connection.reduce_scatter(peers, exchange, bounds, values, lambda sums, slots: sums[slots], add)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 13])
def test_each_worker_ends_with_the_whole_sums_of_its_share(n: int) -> None:
    rng = np.random.default_rng(n)
    peers = joined(n)
    with ThreadPoolExecutor(n) as threads:
        for exchange in range(1, 9):
            bounds = [0, *sorted(rng.integers(0, 12, n - 1).tolist()), 12]  # some have no share
            values = rng.integers(0, 1000, (n, 12))
            shares = [threads.submit(scatter, one, exchange, bounds, values[one.number]) for one in peers]
            for number, share in enumerate(shares):
                expected = values.sum(axis=0)[bounds[number] : bounds[number + 1]]
                found = share.result(PATIENCE_S)
                assert expected.size == 0 if found is None else np.array_equal(found, expected)
    assert not any(one._parcels or one._under_way for one in peers)
    assert all(one.sent_bytes <= 8 * 8 * 12 for one in peers), "no more than what it holds, of eight bytes, eight times"


def test_whoever_waits_and_whoever_comes_to_wait_hears_of_the_end() -> None:
    peers = joined(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(peers[0].receive, 1, 3, 0)
        while peers[0].waits_for() is None:
            time.sleep(0.001)
        assert peers[0].waits_for() == 1
        peers[0].end(3)
        with pytest.raises(worker_connection.ExchangeOver):
            waiting.result(PATIENCE_S)
    peers[1].send(0, 3, 0, b"late")
    with pytest.raises(worker_connection.ExchangeOver):
        peers[0].receive(1, 3, 0)
    peers[1].send(0, 4, 0, b"next")
    assert peers[0].receive(1, 4, 0) == b"next"


def test_a_worker_that_the_site_has_let_go_waits_no_longer() -> None:
    peers = worker_connection.Peers(0, lambda to, parcel: sent())
    peers.end(worker_connection.ALL)
    with pytest.raises(worker_connection.ExchangeOver):
        peers.receive(1, 1, 0)


def test_a_worker_that_cannot_be_reached_is_named_by_whoever_sends() -> None:
    peers = worker_connection.Peers(0, lambda to, parcel: sent(OSError()))
    peers.send(2, 1, 0, b"")
    with pytest.raises(worker_connection.PeerLost) as lost:
        peers.receive(1, 1, 0)
    assert lost.value.number == 2
    peers.send(2, 2, 0, b"")
    with pytest.raises(worker_connection.PeerLost):
        peers.settle(2)


def test_nothing_but_plain_values_goes_from_worker_to_worker() -> None:
    peers = joined(2)
    with pytest.raises(TypeError, match="a Peers does not go to a worker"):
        peers[0].send(1, 1, 0, [peers])


class Exchanging(worker_connection.WorkerPart):
    """Has a share of a sum, unless its worker does something else."""

    def __init__(self, does: str = "adds") -> None:
        self._does = does

    def share(self, exchange: int, bounds: tuple[int, ...], values: np.ndarray) -> Any:
        assert self.peers is not None
        if self._does == "refuses":
            raise ProtocolError("this message is none")
        if self._does == "fails":
            raise KeyError("4711")
        if self._does == "reaches nobody":
            raise worker_connection.PeerLost(0)
        return scatter(self.peers, exchange, list(bounds), values)


PATH = f"{__name__}:Exchanging"


@pytest.fixture
def _tests_stand_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvflare_plugins.workers.worker_connection._PACKAGE", "tests.")


def shares(workers: Workers, *does: str) -> list[Future[Any]]:
    collect([workers.begin(number, PATH, *([one] if one else [])) for number, one in enumerate(does)])
    bounds = tuple(4 * number for number in range(len(does) + 1))
    return workers.together("share", [(bounds, np.full(4 * len(does), n + 1)) for n in range(len(does))])


@pytest.mark.usefixtures("_tests_stand_on_workers")
def test_workers_exchange_one_call_after_the_other() -> None:
    with workers_here(3) as workers:
        for _ in range(3):
            assert [share.tolist() for share in collect(shares(workers, "", "", ""))] == [[6] * 4] * 3


@pytest.mark.usefixtures("_tests_stand_on_workers")
@pytest.mark.parametrize(
    ("does", "error", "words"),
    [
        ("refuses", ProtocolError, "this message is none"),
        ("fails", WorkerFailure, "^worker 2 of this site's cluster failed"),
        ("reaches nobody", WorkerLost, "^worker 0 of this site's cluster was lost, or worker 2 does not reach it"),
    ],
)
def test_what_one_ends_with_ends_it_for_all_who_wait(does: str, error: type[Exception], words: str) -> None:
    with workers_here(5) as workers:
        futures = shares(workers, "", "", does, "", "")
        errors = [future.exception(PATIENCE_S) for future in futures]
        assert type(errors[2]) is error
        for one in errors:
            if one is not None:  # a worker whose share was whole before has it
                assert isinstance(one, error)
        with pytest.raises(error, match=words):
            collect(futures)
        if does == "refuses":
            assert len(collect(shares(workers, *[""] * 5))) == 5, "the next exchange is a new one"


class _Dies:
    def __init__(self, link: Any) -> None:
        self._link = link

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        if function == "call":
            raise WorkerLost("worker 1 of this site's cluster was lost")
        answer: tuple[str, Any, str] = self._link.ask(function, *args)
        return answer


@pytest.mark.usefixtures("_tests_stand_on_workers")
def test_a_lost_worker_is_named_and_nobody_waits_for_it() -> None:
    workers = workers_here(4)
    workers._links[1] = _Dies(workers._links[1])  # type: ignore[index]
    with pytest.raises(WorkerLost, match=r"^worker 1 "), workers:
        futures = shares(workers, *[""] * 4)
        assert all(isinstance(future.exception(PATIENCE_S), WorkerLost) for future in futures[:2])
        collect(futures)
    assert all(future.cancelled() or future.exception(PATIENCE_S) is not None for future in futures)


class _Silent:
    """A desk whose answer never comes in time."""

    def __init__(self, waits_for: int | None) -> None:
        self._other, self.ended = waits_for, threading.Event()

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        raise WorkerSilent.of(0, 2.0)

    def waits_for(self) -> int | None:
        return self._other

    def end_exchange(self, exchange: int) -> None:
        self.ended.set()


def test_of_workers_that_wait_for_one_another_the_one_they_wait_for_is_named() -> None:
    desks = [_Silent(2), _Silent(0), _Silent(3), _Silent(None)]
    workers = Workers(desks, desks)
    with pytest.raises(WorkerLost, match="worker 3 of this site's cluster did not answer within 2 s"):
        workers.together("share", [()] * 4)[1].result(PATIENCE_S)
    assert all(desk.ended.is_set() for desk in desks)
    workers.__exit__(WorkerLost, None, None)
