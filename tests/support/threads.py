"""Work that is done in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def in_threads(work: Callable[[T], object], each: Iterable[T], timeout_s: float | None = None) -> None:
    """Call ``work`` with each of these, in a thread of its own, and wait for all. Args: timeout_s: for each thread."""
    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
