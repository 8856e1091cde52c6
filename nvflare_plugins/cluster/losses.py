"""What is known of why a worker was lost."""

from __future__ import annotations

import contextlib
from typing import Any

_OUT_OF_MEMORY = "worker-restart-memory"  # under which Dask's nanny tells the scheduler that it has ended a worker
_ASK_S = 2.0


def lost(client: Any, number: int, address: str, pid: object) -> str:
    """Return in words that a worker was lost, and that it had too little memory where Dask's nanny says so.

    Args:
        client: of Dask; its scheduler may be gone.
        number: of the worker.
        pid: of its process: the scheduler also tells of those that were at its address before.
    """
    events: Any = ()
    with contextlib.suppress(Exception):  # a scheduler that is gone, or knows of no such thing
        events = client.sync(client.scheduler.events, topic=_OUT_OF_MEMORY, callback_timeout=_ASK_S)
    ended = {(one.get("worker"), one.get("pid")) for _, one in events if isinstance(one, dict)}
    if (address, pid) in ended:
        return (
            f"worker {number} of this site's cluster was lost: it took more memory than it may have, and its nanny "
            "ended it. Remedy: give it more (dask worker --memory-limit), or the cluster more workers (policy key: "
            "cluster.workers)."
        )
    return (
        f"worker {number} of this site's cluster was lost; its log, or its machine's, says why: often it has too "
        "little memory"
    )
