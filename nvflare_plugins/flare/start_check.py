"""Whether a job's process could start at a site or server: tried with what FLARE's process there hands on to it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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
    pid = _flares_process(workspace)
    python, environment = (sys.executable, dict(os.environ)) if pid is None else _of_process(pid)
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


def _flares_process(workspace: Path) -> int | None:
    """Return the number of FLARE's process of a workspace, if it runs here and may be looked at."""
    try:
        pid = int(json.loads((workspace / GUARD_STARTED).read_bytes())["pid"])
        is_flares = _FLARE in Path(f"/proc/{pid}/cmdline").read_text() and os.access(f"/proc/{pid}/environ", os.R_OK)
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return pid if is_flares else None


def _of_process(pid: int) -> tuple[str, Mapping[str, str]]:
    """Return the Python and the environment of a process."""
    entries = Path(f"/proc/{pid}/environ").read_text(errors="surrogateescape").split("\0")
    environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0], environment


def _take_limits(pid: int) -> None:
    for one in _RESOURCES:
        resource.setrlimit(one, resource.prlimit(pid, one))
