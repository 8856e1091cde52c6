"""What is known of why a worker was lost."""

from __future__ import annotations

import ssl
import time
from typing import Any

from nvflare_plugins.cluster.dask_messages import DaskConnection, NoAnswer

_OUT_OF_MEMORY = "worker-restart-memory"  # under which Dask's nanny tells the scheduler that it has ended a worker
_ASK_S = 2.0


def lost(scheduler: str, context: ssl.SSLContext | None, number: int, address: str, pid: object) -> str:
    """Return in words that a worker was lost, and that it had too little memory where Dask's nanny says so.

    Args:
        scheduler, context: its address and what this site shows to it; it may be gone.
        number: of the worker.
        pid: of its process: the scheduler also tells of those that were at its address before.
    """
    try:
        with DaskConnection(scheduler, context, time.monotonic() + _ASK_S) as connection:
            events = connection.ask("events", topic=_OUT_OF_MEMORY)
    except NoAnswer:
        events = ()
    except OSError:
        return f"the scheduler of this site's cluster was lost while worker {number} worked; its log says why"
    if (address, pid) in _ended(events):
        return (
            f"worker {number} of this site's cluster was lost: it took more memory than it may have, and its nanny "
            "ended it. Remedy: give it more (dask worker --memory-limit), or the cluster more workers (policy key: "
            "cluster.workers)."
        )
    return (
        f"worker {number} of this site's cluster was lost; its log, or its machine's, says why: often it has too "
        "little memory"
    )


def _ended(events: Any) -> set[tuple[str, int]]:
    """Return the addresses and processes that a nanny has ended. Args: events: (time, event), as a scheduler tells."""
    found = set()
    for event in events if isinstance(events, tuple) else ():
        match event:
            case (_, {"worker": str(address), "pid": int(pid)}):
                found.add((address, pid))
    return found
