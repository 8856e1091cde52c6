"""The other workers of a party, as one that Dask runs reaches them: from worker to worker, past scheduler and site."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from nvflare_plugins.cluster.peers import Parcel, Peers


def dask_peers(number: int, desks: Sequence[tuple[str, str]]) -> Peers:
    """Return the peers of this worker. To be called where Dask runs a method of its desk.

    Args:
        desks: of all workers in order, this one too: the worker's address, and Dask's key of its desk.
    """
    from distributed import get_worker
    from distributed.protocol.serialize import to_serialize

    worker: Any = get_worker()
    loop, own = worker.loop.asyncio_loop, desks[number][1]

    async def deliver(to: int, parcel: Parcel) -> None:
        address, key = desks[to]
        answer = await worker.rpc(address).actor_execute(function="deliver", actor=key, args=[to_serialize(parcel)])
        if answer["status"] != "OK":
            raise OSError("the desk of another worker is gone")

    def send(to: int, parcel: Parcel) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(deliver(to, parcel), loop)

    return Peers(number, send, lambda: own in worker.state.actors)
