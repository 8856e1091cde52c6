"""Work that is done in several threads at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

T, R = TypeVar("T"), TypeVar("R")


def answers_in_threads(
    work: Callable[[T], R], each: Iterable[T], of: tuple[type[Exception], ...], timeout_s: float
) -> dict[T, R | Exception]:
    """Call ``work`` as ``in_threads`` does; return for each what it returned or raised. Args: of: what it may raise."""
    found: dict[T, R | Exception] = {}

    def run(one: T) -> None:
        try:
            found[one] = work(one)
        except of as error:
            found[one] = error

    in_threads(run, each, timeout_s)
    return found


def in_threads(work: Callable[[T], object], each: Iterable[T], timeout_s: float | None = None) -> None:
    """Call ``work`` with each of these, in a thread of its own, and wait for all. Args: timeout_s: for each thread."""
    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)


def wait_until(
    holds: Callable[[], object], timeout_s: float = 60.0, why: Callable[[], object] = lambda: "waited too long"
) -> None:
    """Wait for other threads or processes. Args: why: what to say where it never holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(why())
        time.sleep(0.005)
