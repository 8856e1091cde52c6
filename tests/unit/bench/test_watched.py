"""What a command used counts the processes below it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.watched import watched

_CHILD = "import time; held = b'x' * 90_000_000; [0 for _ in iter(lambda: time.process_time() < 0.5, False)]; {end}"
_PARENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"


def _run(folder: Path, end: str, timeout_s: float = 600.0):
    command = [sys.executable, "-c", _PARENT, _CHILD.format(end=end)]
    return watched(command, folder / "log", timeout_s)


def test_memory_and_time_of_a_child_count(tmp_path: Path) -> None:
    used = _run(tmp_path, "time.sleep(2)")
    assert used.peak_mb > 90 and used.cpu_s >= 0.5 and used.wall_s > 2


def test_a_failure_is_told_with_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 1(.|\n)*ValueError: gone"):
        _run(tmp_path, "raise ValueError('gone')")


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code -9"):
        _run(tmp_path, "time.sleep(100)", timeout_s=1.0)
