"""Whether a job's process could start at a site or server: tried with what FLARE's process there hands on to it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil

from nvflare_plugins.flare import loading
from nvflare_plugins.site.flare_boundary import GUARD_STARTED

_LONGEST_S = 300.0
_FLARE = "nvflare.private.fed.app."
_RESOURCES = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def start_faults(workspace: Path, *, at_server: bool) -> list[str]:
    """Return why a job's process would not start, in one clause; none if it would.

    A process of its own tries it, with the Python, environment and limits of FLARE's process where that runs on this
    machine, and else with those of the caller.
    """
    found = _flares_process(workspace)
    python, environment, pid = (sys.executable, dict(os.environ), None) if found is None else found
    command = [python, "-P", "-m", loading.__name__, loading.AT_SERVER if at_server else loading.AT_SITE]
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
            preexec_fn=None if pid is None else lambda: _take_limits(pid),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [f"a process like those of jobs cannot be started ({type(error).__name__})"]
    said = done.stdout.strip().splitlines()
    if done.returncode:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        return [f"a process like those of jobs ends by itself ({how}) while it loads what they need"]
    return said[-1:]


def _flares_process(workspace: Path) -> tuple[str, dict[str, str], int] | None:
    """Return Python, environment and number of FLARE's process of a workspace, if it runs here and may be looked at."""
    try:
        process = psutil.Process(int(json.loads((workspace / GUARD_STARTED).read_bytes())["pid"]))
        arguments, environment = process.cmdline(), process.environ()
    except (OSError, ValueError, TypeError, LookupError, psutil.Error):
        return None
    return (arguments[0], environment, process.pid) if any(_FLARE in one for one in arguments) else None


def _take_limits(pid: int) -> None:
    for one in _RESOURCES:
        resource.setrlimit(one, resource.prlimit(pid, one))
