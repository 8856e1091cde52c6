"""Workers that are threads of this process, behind the same pickling as those of a cluster."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from nvflare_plugins.workers.worker_connection import Parcel, PartHost, Peers
from nvflare_plugins.workers.workers import Workers


class _PartHostHere:
    """A part host in this process, behind the same pickling as one elsewhere."""

    def __init__(self) -> None:
        self._host = PartHost()

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        sent = pickle.loads(pickle.dumps(args))  # noqa: S301  # our own bytes
        answer: tuple[str, Any, str] = getattr(self._host, function)(*sent)
        return answer

    def meet(self, number: int, hosts: Sequence[_PartHostHere]) -> None:
        """Have the part host exchange values with others."""

        def send(to: int, parcel: Parcel) -> Future[Any]:
            if (peers := hosts[to]._host.peers) is not None:
                peers.deliver(pickle.loads(pickle.dumps(parcel)))  # noqa: S301  # our own bytes
            sent: Future[Any] = Future()
            sent.set_result(None)
            return sent

        self._host.join(Peers(number, send))

    def end_exchange(self, exchange: int) -> None:
        if self._host.peers is not None:
            self._host.peers.end(exchange)

    def waits_for(self) -> int | None:
        return None if self._host.peers is None else self._host.peers.waits_for()


def workers_here(n_workers: int) -> Workers:
    """Return workers that are threads of this process: for tests, and to see what shards change without a cluster."""
    hosts = [_PartHostHere() for _ in range(n_workers)]
    for number, host in enumerate(hosts):
        host.meet(number, hosts)
    return Workers(list(hosts), hosts)
