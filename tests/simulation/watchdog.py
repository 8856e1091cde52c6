"""Ends a run whose virtual clock stands still while real time passes, and names the places where somebody waits."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tests.simulation import scheduler as of_scheduler
from tests.simulation.scheduler import Scheduler

STANDS_STILL_S = 45
"""Real seconds. The longest computation between two moments of a job takes some, also on a busy machine."""


class StandsStill(AssertionError):
    """Somebody has the turn, and waits for real time, for a lock of the system or for ever."""


@contextmanager
def guarded(scheduler: Scheduler, most_s: int = STANDS_STILL_S, tick_s: float = 1.0) -> Iterator[None]:
    """End a run whose clock stands still for so many ticks, which pass more slowly where the process is starved."""
    is_over = threading.Event()

    def look() -> None:
        last, n_ticks = scheduler.now, 0
        while not is_over.wait(tick_s):
            n_ticks = n_ticks + 1 if scheduler.now == last and not scheduler.stopped else 0
            last = scheduler.now
            if n_ticks * tick_s >= most_s:
                scheduler.failure = scheduler.failure or StandsStill(f"virtual time stands still: {_who_is_at_it()}")
                scheduler.stop()
                return

    threading.Thread(target=look, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _who_is_at_it() -> str:
    """Return the stacks of all threads but those that wait for their turn."""
    own = threading.get_ident()
    at_it = [frame for ident, frame in sys._current_frames().items() if ident != own and not _waits_for_its_turn(frame)]
    return "\n".join("".join(traceback.format_stack(frame)) for frame in at_it)


def _waits_for_its_turn(frame: FrameType) -> bool:
    return frame.f_code.co_filename == of_scheduler.__file__
