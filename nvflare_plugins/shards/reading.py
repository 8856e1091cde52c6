"""Shards that read their rows themselves: what they have read is compared with what the site's own process reads.

read      digest              of the values that it has read     reply: nothing
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from nvflare_plugins.failures import WorkerFailure
from nvflare_plugins.shards.conversation import READS, TELLS, Ask
from nvflare_plugins.shards.lockstep import Answer

READ = "read"
_TELL_S = 2.0  # between two words on how far a shard is


def telling(ask: Ask, of: int) -> Callable[[int], None]:
    """Return what a shard calls with the rows of each block that it reads: it says now and then how far it is.

    Args:
        of: rows that it reads in all.
    """
    read, last = 0, time.monotonic()

    def note(n_rows: int) -> None:
        nonlocal read, last
        read += n_rows
        if time.monotonic() - last >= _TELL_S:
            last = time.monotonic()
            ask(TELLS, READS, read, of)

    return note


@contextmanager
def comparing(answer: Answer, digests: Callable[[Callable[[int], None]], list[bytes]]) -> Iterator[Answer]:
    """Answer ``READ`` besides.

    Args:
        answer: to all else.
        digests: reads the rows of all shards here, while they read them there; what it is given it calls as it reads,
            which raises once nobody waits for the end: a process would not end before its pass.

    Raises (from the answer):
        WorkerFailure: a shard has read something else; the text has its number.
        VeilBoostError: what ``digests`` raised.
    """
    reader, is_over = ThreadPoolExecutor(1, thread_name_prefix="veilboost_reader"), threading.Event()

    def go_on(n_rows: int = 0) -> None:
        if is_over.is_set():
            raise WorkerFailure("the work on this site's cluster has ended")

    here = reader.submit(digests, go_on)

    def answered(word: str, asked: list[tuple[Any, ...]]) -> Any:
        if word != READ:
            return answer(word, asked)
        for number, ((found,), expected) in enumerate(zip(asked, here.result(), strict=True)):
            if found != expected:
                raise WorkerFailure(
                    f"worker {number} of this site's cluster reads other rows than the site's own process. Policy "
                    "keys: data_sets.<name>.path, cluster.workers_read. Remedy: have it reach the same files."
                )
        return [None] * len(asked)

    try:
        yield answered
    finally:
        is_over.set()
        reader.shutdown(wait=False)  # who has lost a worker does not wait for the end of a pass
