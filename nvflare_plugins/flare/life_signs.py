"""Who has given a sign of life, and how long the others have been silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

LONGEST_STEP_S = 5.0


class LifeSigns:
    """Counts how long each of the others has been silent.

    Only time in which this process itself was running counts. After a pause (a stopped process, a suspended machine)
    the others' signs lie unread in this process's own buffers: it must read them before it may take anyone for dead.
    So of a longer time between two looks only LONGEST_STEP_S counts; look about once a second.

    Threads: any thread may call any method.
    """

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._silent_s = dict.fromkeys(names, 0.0)
        self._begun: set[str] = set()
        self._looked_at = clock()

    def heard(self, name: str) -> None:
        """Take note of any message of ``name``."""
        with self._lock:
            self._silent_s[name] = 0.0
            self._begun.add(name)

    def has_begun(self, name: str) -> bool:
        """Return whether anything was ever heard of ``name``."""
        return name in self._begun

    def silent_s(self, name: str) -> float:
        """Return for how many seconds nothing was heard of ``name``."""
        with self._lock:
            now = self._clock()
            step = min(now - self._looked_at, LONGEST_STEP_S)
            self._looked_at = now
            for other in self._silent_s:
                self._silent_s[other] += step
            return self._silent_s[name]
