"""FLARE's simulator, whose sites come from one process that has imported what they need.

    python -m nvflare_plugins.flare.simulator JOB_FOLDER -w WORKSPACE -c site-1,site-2 -t 2

It takes what FLARE's own module takes, and is FLARE's but for the start of a site: that is a fork, where FLARE starts
Python anew and imports FLARE, XGBoost and this package once for every site. The process that forks has done nothing but
import: it has no thread, connection, key or random state of ours, and every site is a process of its own as before. A
job that brings code is started FLARE's way, and so is any job where processes cannot be forked.

Security: secrets come from the operating system when they are drawn (he_processors.randomness), so that two forks never
    draw alike. A simulator protects nobody's data: all sites are this user's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.private.fed.app.simulator import simulator, simulator_runner, simulator_worker
from nvflare.private.fed.app.utils import version_check

WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
PRELOADED = (
    "nvflare_plugins.flare.executor",
    "nvflare_plugins.flare.components",
    "nvflare_plugins.pooled.attempt",
    "nvflare.private.fed.simulator.simulator_app_runner",
    "pandas",
    "scipy.special",
    "xgboost",
)
"""What sites import. Importing these starts no thread of Python's."""
_POLL_S = 0.05
_MOST_BYTES = 1 << 20


class Forks:
    """The process that forks sites, seen from the simulator. Made before anything else has started."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _serve(theirs)
            os._exit(0)
        theirs.close()
        self._socket = ours

    def close(self) -> None:
        """End the process, when all sites have ended."""
        self._socket.close()
        os.waitpid(self._pid, 0)

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request. Raises: OSError: the process has gone."""
        with self._lock:
            self._socket.sendall(json.dumps(request).encode())
            answer = self._socket.recv(_MOST_BYTES)
        if not answer:
            raise OSError("the process that forks sites has gone")
        return json.loads(answer)

    def start(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> Site | subprocess.Popen[bytes]:
        """Start what FLARE would start by ``subprocess.Popen``."""
        *python, module = command[:3]
        if python != [sys.executable, "-m"] or module != WORKER or _brings_code(env):
            return subprocess.Popen(command, env=dict(env), **options)
        return Site(self, self.ask({"arguments": list(command[3:]), "environment": dict(env)}))


def _brings_code(env: Mapping[str, str]) -> bool:
    """Tell whether FLARE has put a folder of the job's, which is there, before the modules of this process."""
    known = {str(Path(path).absolute()) for path in sys.path}
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return any(Path(path).is_dir() and str(Path(path).absolute()) not in known for path in given)


class Site:
    """A forked site, as FLARE looks at the process that it has started."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._forks.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises: subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(WORKER, timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:  # it is not reaped, so the number is still its own
            os.kill(self.pid, number)


def _serve(requests: socket.socket) -> None:
    """Fork sites, and say how they have ended, until nobody asks any more. Raises: SystemExit: in a site."""
    while content := requests.recv(_MOST_BYTES):
        request = json.loads(content)
        if "ended" in request:
            found, status = os.waitpid(request["ended"], os.WNOHANG)
            answer: Any = os.waitstatus_to_exitcode(status) if found else None
        else:
            answer = os.fork()
            if answer == 0:
                requests.close()
                _be_site(request["arguments"], request["environment"])
        requests.sendall(json.dumps(answer).encode())


def _be_site(arguments: list[str], environment: dict[str, str]) -> None:
    """Run a site as FLARE's module does. Raises: SystemExit: when it has ended."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()  # from the operating system: forks share NumPy's state, by which a reader of a site's own may draw
    sys.argv = [WORKER, *arguments]
    parsed = simulator_worker.parse_arguments()
    MainProcessMonitor.run(main_func=simulator_worker.main, run_dir=parsed.workspace, args=parsed)
    time.sleep(2)  # as there
    sys.exit(0)


def main() -> int:
    """Run a job in the simulator; return what FLARE's module exits with."""
    version_check()
    parser = argparse.ArgumentParser()
    simulator.define_simulator_parser(parser)
    arguments = parser.parse_args()
    if sys.platform != "linux":
        return int(simulator.run_simulator(arguments) or 0)
    for name in PRELOADED:
        importlib.import_module(name)
    multiprocessing.set_start_method("fork")  # of FLARE's own processes, which newer Pythons would start anew
    # What Python counts are threads of BLAS and Arrow, which wait for work and see to forks by themselves.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    forks = Forks()
    simulator_runner.subprocess = SimpleNamespace(Popen=forks.start, TimeoutExpired=subprocess.TimeoutExpired)
    status = int(simulator.run_simulator(arguments) or 0)
    forks.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
