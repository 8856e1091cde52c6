"""FLARE's simulator in processes that end with whoever started them.

FLARE starts a simulated job's processes in sessions of their own, so that no signal to a group reaches all of them.
All of them inherit a mark in their environment, by which they are found and ended.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

MARK = "VEILBOOST_SIMULATION"
_POLL_S = 0.3
_TAIL_BYTES = 8192
_ROUND = re.compile(r"round (\d+) of (\d+): .*?s((?:, [\w@.-]+ [\w.+-]+)*)$")
_STEP = re.compile(r"JobExecutor - INFO - .*?(taking part|agreed on|training with|finished)")


def end_all(mark: str, wait_s: float = 10.0) -> None:
    """End all processes of a simulation but this one, and wait until they are gone."""
    until = time.monotonic() + wait_s
    while (found := _marked(mark)) and time.monotonic() < until:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_over = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
            if not is_over and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def run_watched(command: Sequence[str], log: Path, show: Callable[[], None]) -> int:
    """Run Python with a simulation, and return its exit code; no process of it outlives this call or this process.

    Args:
        log: file that takes what it prints.
        show: called some times a second.

    Raises:
        KeyboardInterrupt: after all of its processes have ended.
    """
    mark = secrets.token_hex(16)
    watched = [sys.executable, "-m", __spec__.name, str(os.getpid()), *command]
    environment = {**os.environ, MARK: mark}
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                watched, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        while process.poll() is None:
            show()
            time.sleep(_POLL_S)
        show()
        return process.returncode
    finally:  # also when interrupted: the cell is over only when nothing runs any more
        end_all(mark)


def progress_line(workspace: Path, sites: Sequence[str]) -> str:
    """Return how far each site is, by the lines that it writes into its own log."""
    parts, metrics = [], ""
    for site in sites:
        step, said = _step_of(workspace / site)
        parts.append(f"{site} {step}")
        metrics = metrics or said
    return " · ".join(parts) + metrics


def _step_of(folder: Path) -> tuple[str, str]:
    step, metrics = "starting", ""
    for log in (*folder.glob("log.txt"), *folder.glob("simulate_job/log.txt")):
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            for line in file.read().decode("utf-8", "replace").splitlines():
                if found := _ROUND.search(line):
                    step, metrics = f"{found[1]}/{found[2]}", found[3]
                elif found := _STEP.search(line):
                    step = {"finished": "done"}.get(found[1], found[1])
    return step, metrics


class Progress:
    """One line that is written over and over: in a notebook, in a terminal; nothing where neither shows it."""

    def __init__(self, text: Callable[[], str], stream: Any = None) -> None:
        self._text, self._stream, self._width, self._begin = text, stream or sys.stderr, 0, time.monotonic()
        self._cell: Any = None
        if stream is None and "ipykernel" in sys.modules:
            from IPython.display import display

            self._cell = display({"text/plain": ""}, raw=True, display_id=True)

    def show(self) -> None:
        """Write the line anew."""
        line = f"{time.monotonic() - self._begin:4.0f} s  {self._text()}"
        if self._cell is not None:
            self._cell.update({"text/plain": line}, raw=True)
        elif bool(getattr(self._stream, "isatty", bool)()):
            self._stream.write("\r" + line.ljust(self._width))
            self._stream.flush()
            self._width = len(line)

    def end(self) -> None:
        """Leave the line as it is."""
        if self._width:
            self._stream.write("\n")


def _watch(parent: int, command: Sequence[str]) -> int:
    """Run Python with these arguments until it ends or the parent has gone; end all that it has started then."""
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL)
    while process.poll() is None and os.getppid() == parent:
        time.sleep(_POLL_S)
    end_all(os.environ[MARK])
    return process.wait()


if __name__ == "__main__":
    sys.exit(_watch(int(sys.argv[1]), sys.argv[2:]))
