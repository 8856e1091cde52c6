"""A command and all processes below it: seconds, processor seconds, and the most memory that they held at one time."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_EVERY_S = 0.5


@dataclass(frozen=True)
class Usage:
    """What a command used, with the processes below it.

    Attributes:
        cpu_s: of those that ended before the command did, and of the command itself.
        peak_mb: pages that several share count once; looked at twice a second.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float


def watched(command: Sequence[str], log: Path, timeout_s: float, environment: Mapping[str, str] | None = None) -> Usage:
    """Run a command; its output goes to a file.

    Raises:
        RuntimeError: it failed, with the end of its output.
    """
    started, peak, is_over = time.perf_counter(), [0], threading.Event()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def watch() -> None:
        while not is_over.wait(_EVERY_S):
            peak[0] = max(peak[0], _held(process.pid))
            if time.perf_counter() - started > timeout_s:
                for one in _tree(process.pid):
                    with suppress(psutil.Error):
                        one.kill()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        is_over.set()
        watcher.join()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
    return Usage(time.perf_counter() - started, usage.ru_utime + usage.ru_stime, peak[0] / 1e6)


def _tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _held(pid: int) -> int:
    total = 0
    for process in _tree(pid):
        with suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total
