"""What a terminal shows of a command that takes longer than two seconds: a bar, or the seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

_FIRST_S, _NEXT_S = 2.0, 0.2
_WIDTH = 24
_CLEAR = "\r\x1b[K"


class Waiting:
    """Draws on the error stream of a terminal while a command works; elsewhere, and before two seconds, nothing.

    Calling it says how much is done.
    """

    def __init__(self, command: str, *, is_quiet: bool = False) -> None:
        self._command, self._share, self._is_quiet = command, 0.0, is_quiet
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._is_drawn = False
        self._thread: threading.Thread | None = None
        self._out: Any = None

    def __call__(self, done: int, of: int) -> None:
        """Take how much is done, and of how much."""
        self._share = done / max(of, 1)

    def __enter__(self) -> Self:
        """Begin to wait, where somebody looks on."""
        if sys.stderr.isatty() and not self._is_quiet:
            self._out, sys.stdout = sys.stdout, _Clearing(self, sys.stdout) if sys.stdout.isatty() else sys.stdout
            self._thread = threading.Thread(target=self._draw, args=(time.monotonic(),), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take the bar away."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self.clear()
            sys.stdout = self._out

    def clear(self) -> None:
        """Take the bar away until it is drawn again."""
        with self._lock:
            if self._is_drawn:
                sys.stderr.write(_CLEAR)
                sys.stderr.flush()
            self._is_drawn = False

    def _draw(self, began: float) -> None:
        pause = _FIRST_S
        while not self._is_over.wait(pause):
            pause = _NEXT_S
            n_full = round(self._share * _WIDTH)
            bar = f"[{'#' * n_full}{'.' * (_WIDTH - n_full)}] {self._share:.0%}, " if self._share else ""
            with self._lock:
                sys.stderr.write(f"{_CLEAR}veilboost {self._command}: {bar}{time.monotonic() - began:.0f} s")
                sys.stderr.flush()
                self._is_drawn = True


class _Clearing:
    """Standard output that takes the bar away before anything is written beside it."""

    def __init__(self, waiting: Waiting, out: Any) -> None:
        self._waiting, self._out = waiting, out

    def write(self, text: str) -> int:
        """Write."""
        self._waiting.clear()
        written: int = self._out.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        """Return what else standard output has."""
        return getattr(self._out, name)
