"""A real scheduler with real worker processes: what is checked, what is lost, what is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from he_processors.histogram.planner import BinLayout
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.data.declaration import Cluster, ClusterSecurity
from nvflare_plugins.kinds.vertical.histogram_maker import CLEAR_CODE, histogram_maker
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner, pair_format
from nvflare_plugins.kinds.vertical.messages import TrainingSetup
from nvflare_plugins.workers.dask_connection import DaskPartHost, _ended, _taken
from nvflare_plugins.workers.dask_workers import _choose, open_workers
from nvflare_plugins.workers.workers import TRIAL, begin, collect
from tests.support.local_cluster import local_cluster, stall

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")


def test_a_worker_answers_and_its_loss_is_named() -> None:
    with local_cluster(1) as cluster, open_workers(Cluster(cluster.address, 1, deadline_s=20)) as workers:
        begin(workers, TRIAL, [()])
        assert collect([workers.call(0, "echo", b"one")]) == [b"one"]
        os.kill(cluster.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerFailure, match="worker 0 of this site's cluster was lost"):
            workers.call(0, "echo", b"two").result()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_add_among_themselves_and_one_that_is_lost_meanwhile_is_named(how: signal.Signals) -> None:
    n_rows, layout = 600, BinLayout((3, 2))
    pairs = pair_format(n_rows)
    setup = TrainingSetup(CLEAR_CODE, pairs.fraction_bits, n_rows, b"")
    codes = np.random.default_rng(1).integers(0, 3, (2, n_rows)).astype(np.uint8)
    owner, nodes = ClearGradientOwner(pairs), [np.arange(n_rows, dtype=np.int32)]
    with local_cluster(3) as cluster, open_workers(Cluster(cluster.address, 3, deadline_s=20)) as workers:
        makers = [
            histogram_maker(setup, n_rows, workers, allow_clear=True),
            histogram_maker(setup, n_rows, allow_clear=True),
        ]
        for maker in makers:
            maker.hold(codes)
            maker.begin_tree(n_rows)
            maker.add_gradients(owner.encrypt(np.arange(n_rows), np.arange(n_rows)))
        there, here = (maker.sum_bins(codes, layout, nodes, np.arange(2)) for maker in makers)
        assert there == here
        assert sum(work.bytes_to_others for work in workers.work) > 0
        os.kill(cluster.pids[2], how)
        with pytest.raises(WorkerLost, match=r"worker 2 of this site's cluster (was lost|did not answer)"):
            makers[0].sum_bins(codes, layout, nodes, np.arange(2))
        with open_workers(Cluster(cluster.address, 2, deadline_s=20)) as others:  # no worker is left waiting
            begin(others, TRIAL, [()] * 2)
            assert collect([others.call(n, "echo", b"") for n in range(2)]) == [b"", b""]


@pytest.mark.slow
def test_a_stalled_worker_is_named_when_its_time_is_up() -> None:
    with local_cluster(2) as cluster, open_workers(Cluster(cluster.address, 2, deadline_s=2)) as workers:
        stall(cluster.pids[1])
        with pytest.raises(WorkerFailure, match=r"worker 1 .* did not answer within 2 s"):
            collect([workers.call(number, "echo", b"") for number in range(2)])


@pytest.mark.slow
def test_a_worker_that_is_stalled_from_the_first_is_named() -> None:
    with local_cluster(2) as cluster:
        with open_workers(Cluster(cluster.address, 2)):
            pass  # the scheduler knows both, and both run
        stall(cluster.pids[1])
        with pytest.raises(WorkerFailure, match=r"worker 1 .* did not answer within 3 s"):
            open_workers(Cluster(cluster.address, 2), find_s=3)


@pytest.mark.slow
def test_a_lost_scheduler_ends_the_work() -> None:
    with local_cluster(1) as cluster, open_workers(Cluster(cluster.address, 1, deadline_s=60)) as workers:
        os.kill(cluster.scheduler_pid, signal.SIGKILL)
        until = time.monotonic() + 60
        with pytest.raises(WorkerFailure, match=r"scheduler|worker 0"):
            while time.monotonic() < until:
                workers.call(0, "echo", b"").result()


@pytest.mark.slow
def test_too_few_workers_many_threads_and_spilling_are_refused() -> None:
    with local_cluster(1) as cluster, pytest.raises(ConfigurationError, match="asks for 2 workers, and the scheduler"):
        open_workers(Cluster(cluster.address, 2), find_s=1.0)
    with local_cluster(1, threads=2) as cluster, pytest.raises(ConfigurationError, match="--nthreads 1"):
        open_workers(Cluster(cluster.address, 1))
    with local_cluster(1, spills=True) as cluster, pytest.raises(ConfigurationError, match=r"worker 0.*SPILL=False"):
        open_workers(Cluster(cluster.address, 1))


def test_a_scheduler_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="scheduler that the policy names cannot be reached"):
        open_workers(Cluster("tcp://127.0.0.1:1", 1), find_s=0.2)


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:9000", "tcp://127.0.0.1.evil.org:9000", "ucx://127.0.0.1:9000"])
def test_a_worker_elsewhere_is_refused_without_tls(address: str) -> None:
    """The scheduler is believed in who its workers are, not in where private values may go in clear."""
    known = {"tcp://127.0.0.1:9000": {"name": "0"}, address: {"name": "1"}}
    assert _choose(known, Cluster("tcp://127.0.0.1:1", 1)) == ["tcp://127.0.0.1:9000"]
    with pytest.raises(ConfigurationError, match=r"worker 1 .* is not on this machine's loopback"):
        _choose(known, Cluster("tcp://127.0.0.1:1", 2))


@pytest.mark.parametrize(
    "address", ["wss://10.0.0.7:9000", "tcp://10.0.0.7:9000", "tls://[x", "tls://h:1/../x", "tls://"]
)
def test_a_worker_without_tls_is_refused_where_certificates_are_named(address: str, tmp_path: Path) -> None:
    """Dask has other ways of encrypted messages, which no line can be made of."""
    security = ClusterSecurity(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    with pytest.raises(ConfigurationError, match=r"worker 0 .* is not reached by tls://"):
        _choose({address: {}}, Cluster("tls://10.0.0.6:1", 1, security=security))


@pytest.mark.parametrize(("address", "pid", "is_told"), [("a", 7, True), ("a", 8, False), ("b", 7, False)])
def test_a_worker_is_not_said_to_have_had_the_end_of_the_one_before_it(address: str, pid: int, is_told: bool) -> None:
    """Where ports are fixed, an address outlives its worker, and so does what the scheduler knows of it."""
    events = ((0.0, {"worker": "a", "pid": 7, "rss": 1}), (1.0, {"worker": "a", "pid": 6, "rss": 1}), (2.0, "?"))
    assert ((address, pid) in _ended(events)) == is_told


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system gives up no connection by itself")
def test_the_system_does_not_give_a_line_up_before_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
        stream = SimpleNamespace(
            socket=end, writing=lambda: False, io_loop=SimpleNamespace(remove_handler=lambda removed: None)
        )
        taken = _taken(SimpleNamespace(stream=stream, abort=lambda: stream.socket.close()))
        assert taken is end and taken.fileno() >= 0
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def at_worker(dask_worker: Any) -> tuple[int, list[str]]:
    gc.collect()
    desks = sum(isinstance(one, DaskPartHost) for one in gc.get_objects())
    return desks, [one.name for one in threading.enumerate() if one.name.startswith("veilboost")]


@pytest.mark.slow
def test_nothing_of_a_job_stays_at_a_worker_and_none_is_called_lost_that_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from distributed import Client

    with local_cluster(1) as cluster, Client(cluster.address, set_as_default=False) as watching:
        where = Cluster(cluster.address, 1, deadline_s=60)
        for number in range(3):
            with contextlib.suppress(KeyError), open_workers(where) as workers:
                begin(workers, TRIAL, [()])
                if number:
                    workers.call(0, "echo", bytes(50_000_000))
                    raise KeyError("what else may happen")
        until = time.monotonic() + 60
        while (left := next(iter(watching.run(at_worker).values()))) != (0, []) and time.monotonic() < until:
            time.sleep(0.05)
        assert left == (0, [])
        assert "is lost" not in caplog.text


def test_without_dask_the_policy_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(ConfigurationError, match=r"install the extra `cluster`"):
        open_workers(Cluster("tcp://127.0.0.1:1", 1))


@pytest.mark.slow
def test_a_worker_that_takes_too_much_memory_is_named_with_that() -> None:
    options = ("--memory-limit", "500MB")
    with local_cluster(2, nanny=True, worker_options=options) as cluster:
        with open_workers(Cluster(cluster.address, 2, deadline_s=60)) as workers:
            begin(workers, TRIAL, [()] * 2)
            with pytest.raises(WorkerLost, match=r"worker 1 .* was lost: it took more memory than it may .*Remedy"):
                workers.call(1, "echo", bytes(700_000_000)).result()
        with open_workers(Cluster(cluster.address, 2, deadline_s=60)) as workers:  # the nanny has started another one
            begin(workers, TRIAL, [()] * 2)
            assert collect([workers.call(number, "echo", b"here") for number in range(2)]) == [b"here"] * 2


@pytest.mark.slow
def test_a_worker_that_may_have_no_more_memory_is_named_and_memory_is_hinted_at() -> None:
    """As under the limits of a machine, which the scheduler hears nothing of."""
    with local_cluster(1) as cluster, open_workers(Cluster(cluster.address, 1, deadline_s=60)) as workers:
        begin(workers, TRIAL, [()])
        status = Path(f"/proc/{cluster.pids[0]}/status").read_text()
        most = 1024 * int(re.search(r"VmData:\s+(\d+) kB", status)[1]) + 300_000_000  # type: ignore[index]
        resource.prlimit(cluster.pids[0], resource.RLIMIT_DATA, (most, most))
        with pytest.raises(WorkerLost, match=r"worker 0 .* was lost; .* too little memory"):
            workers.call(0, "echo", bytes(700_000_000)).result()


@pytest.mark.slow
def test_two_jobs_share_a_clusters_workers_and_neither_waits_for_the_end_of_the_other() -> None:
    where = {"deadline_s": 60.0}
    with local_cluster(2) as cluster, open_workers(Cluster(cluster.address, 2, **where)) as one:
        begin(one, TRIAL, [()] * 2)
        with open_workers(Cluster(cluster.address, 2, **where)) as other:
            begin(other, TRIAL, [()] * 2)
            for _ in range(20):
                asked = [
                    (jobs.call(n, "echo", word), word) for jobs, word in ((one, b"1"), (other, b"2")) for n in (0, 1)
                ]
                assert all(future.result(60) == word for future, word in asked)
        assert collect([one.call(n, "echo", b"on") for n in (0, 1)]) == [b"on"] * 2, "the end of one is not the other's"


@pytest.mark.slow
def test_workers_with_names_of_all_kinds() -> None:
    names = ("Größe 1", "weiß ä", "\u6771\u4eac 3")
    with local_cluster(3, names=names) as cluster, open_workers(Cluster(cluster.address, 3, deadline_s=60)) as workers:
        begin(workers, TRIAL, [()] * 3)
        assert collect([workers.call(number, "echo", b"") for number in range(3)]) == [b""] * 3
