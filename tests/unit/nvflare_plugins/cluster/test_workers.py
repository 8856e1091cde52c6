"""Workers behind the one interface, as threads of this process: order, errors, what may go there."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from he_processors.paillier import generate_paillier_key
from nvflare_plugins.base.errors import WorkerFailure
from nvflare_plugins.workers.worker_connection import REFUSED, PartHost, error_of, require_plain
from nvflare_plugins.workers.workers import TRIAL, Workers, begin, collect, shard_rows
from tests.support.workers_here import workers_here


class _Blocks:
    def __init__(self) -> None:
        self.go_on = threading.Event()

    def ask(self, function: str, *args: object) -> tuple[str, object, str]:
        self.go_on.wait(30)
        return "done", None, ""


class _IsLost:
    def ask(self, function: str, *args: object) -> tuple[str, object, str]:
        raise WorkerFailure("worker 1 of this site's cluster was lost")


def test_values_come_back_in_the_order_of_the_workers() -> None:
    with workers_here(3) as workers:
        begin(workers, TRIAL, [()] * 3)
        assert collect([workers.call(n, "echo", bytes([n])) for n in range(3)]) == [b"\0", b"\1", b"\2"]
        assert [work.calls for work in workers.work] == [2, 2, 2]
        assert all(work.bytes_to > 0 for work in workers.work)


def test_the_first_loss_ends_all_and_nobody_waits_for_the_others() -> None:
    blocked = _Blocks()
    workers = Workers([blocked, _IsLost()])
    futures = [workers.call(number, "echo") for number in range(2)]
    with pytest.raises(WorkerFailure, match="worker 1"):
        collect(futures)
    blocked.go_on.set()
    with pytest.raises(WorkerFailure, match="worker 1"):
        workers.call(0, "echo").result()
    workers.__exit__(WorkerFailure, None, None)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), [PartHost()], np.float64(1.0)])
def test_nothing_but_plain_values_goes_to_a_worker(value: object) -> None:
    with pytest.raises(TypeError):
        require_plain(value)
    with workers_here(1) as workers, pytest.raises(TypeError):
        workers.call(0, "echo", value).result()


def test_keys_stay_in_the_process_whatever_is_asked() -> None:
    key = generate_paillier_key(256, allow_toy_keys=True)
    with workers_here(1) as workers, pytest.raises(TypeError, match="PaillierPrivateKey does not go to a worker"):
        workers.call(0, "echo", key).result()


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "nvflare_plugins.workers.worker_connection:PartHost",
        "nvflare_plugins.workers.worker_connection:nothing",
        "nothing",
    ],
)
def test_only_parts_of_the_package_stand_on_a_worker(path: str) -> None:
    with workers_here(1) as workers, pytest.raises(WorkerFailure, match="worker 0 of this site's cluster failed"):
        workers.begin(0, path).result()


@pytest.mark.parametrize("method", ["_begin", "__init__", "nothing"])
def test_only_public_methods_of_a_part_are_called(method: str) -> None:
    with workers_here(1) as workers:
        workers.begin(0, TRIAL).result()
        with pytest.raises(WorkerFailure, match="worker 0"):
            workers.call(0, method).result()


def test_own_errors_come_back_as_what_they_were_and_others_without_words() -> None:
    assert isinstance(error_of("ConfigurationError", "text"), ConfigurationError)
    assert type(error_of("SystemExit", "text")) is VeilBoostError
    state, kind, words = PartHost._told(lambda: shard_rows(1, 2))
    assert (state, kind) == (REFUSED, "ConfigurationError") and "worker 0" in words

    def reveals() -> None:
        raise ValueError("secret 4711")

    assert "4711" not in str(PartHost._told(reveals))


def test_shards_hold_all_rows_in_order_and_none_is_empty() -> None:
    for n_rows, n_workers in ((1, 1), (7, 3), (100, 64), (64, 64)):
        rows = shard_rows(n_rows, n_workers)
        lengths = [one.stop - one.start for one in rows]
        assert np.array_equal(np.concatenate([np.arange(n_rows)[one] for one in rows]), np.arange(n_rows))
        assert min(lengths) >= 1 and max(lengths) - min(lengths) <= 1
    with pytest.raises(ConfigurationError, match=r"worker 0 would have none.*cluster\.workers"):
        shard_rows(3, 4)
