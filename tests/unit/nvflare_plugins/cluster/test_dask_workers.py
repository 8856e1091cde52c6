"""A real scheduler with real worker processes: what is checked, what is lost, what is left behind."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.cluster.dask_workers import _find, open_workers
from nvflare_plugins.cluster.workers import TRIAL, begin, collect
from nvflare_plugins.data_sets.cluster_declaration import Cluster
from nvflare_plugins.failures import WorkerFailure
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
    client = SimpleNamespace(
        wait_for_workers=lambda *_, **__: None,
        scheduler_info=lambda **_: {"workers": {"tcp://127.0.0.1:9000": {"name": "0"}, address: {"name": "1"}}},
    )
    assert _find(client, Cluster("tcp://127.0.0.1:1", 1), 1.0) == ["tcp://127.0.0.1:9000"]
    with pytest.raises(ConfigurationError, match=r"worker 1 .* is not on this machine's loopback"):
        _find(client, Cluster("tcp://127.0.0.1:1", 2), 1.0)


def test_without_dask_the_policy_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(ConfigurationError, match=r"install the extra `cluster`"):
        open_workers(Cluster("tcp://127.0.0.1:1", 1))
