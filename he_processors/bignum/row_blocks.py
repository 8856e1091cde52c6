"""Run a function on blocks of rows, on several threads.

The native kernels release the interpreter lock and keep no state, so one call per block of rows is all the
parallelism that they need. Work of several calls on one block (he_processors/elgamal) shares the threads as a whole:
calls inside it run on the thread that they are on.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from he_processors.errors import ConfigurationError

Block = TypeVar("Block")

ENVIRONMENT_VARIABLE = "VEILBOOST_THREADS"

_pools: dict[int, ThreadPoolExecutor] = {}
_here = threading.local()
if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads: it starts its own
    os.register_at_fork(after_in_child=_pools.clear)


def default_threads() -> int:
    """Return the number of threads: the environment variable ``VEILBOOST_THREADS``, or one for each core.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text is None:
        return os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{ENVIRONMENT_VARIABLE} must be a positive number")
    return int(text)


def row_blocks(n_rows: int, threads: int, multiple: int) -> list[slice]:
    """Cut rows into at most ``threads`` blocks of nearly equal size, each but the last a multiple of ``multiple``."""
    n_units = -(-n_rows // multiple)
    n_blocks = max(1, min(threads, n_units))
    bounds = [min(n_rows, n_units * block // n_blocks * multiple) for block in range(n_blocks + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def run_blocks(function: Callable[[Block], object], blocks: list[Block], threads: int) -> None:
    """Call ``function`` on every block, at most ``threads`` at a time; the first error of any of them is raised.

    A function that calls this itself gets its blocks one after the other: its threads are at work already.
    """
    if len(blocks) == 1 or threads == 1 or getattr(_here, "is_shared", False):
        for block in blocks:
            function(block)
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads, "bignum", _share))
    futures = [pool.submit(function, block) for block in blocks]
    wait(futures)  # also after an error: no thread may still write into the caller's arrays
    for future in futures:
        future.result()


def _share() -> None:
    _here.is_shared = True
