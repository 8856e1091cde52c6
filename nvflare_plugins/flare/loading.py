"""A job's process that cannot load what its part needs, or dies before its part begins, says why to the server.

FLARE makes a job's components by their names: one that cannot be imported ends the process, and the others only hear
that it ended. So the first of them (``JobGuard``) loads what the job's own component needs. If that fails, a component
that says why to whoever asks takes its place. A process that dies without a word (a limit that it has from FLARE's
parent process, a library that ends it) leaves a note of how far it had come, which the parent hands on.

This module needs nothing but Python and FLARE.
"""

from __future__ import annotations

import importlib
import logging
import math
import mmap
import os
import resource
import sys
import threading
import traceback
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

AT_SITE, AT_SERVER = "nvflare_plugins.flare.executor", "nvflare_plugins.flare.controller"
NOTE = "veilboost_starts.txt"
LAUNCHED_BY = "VEILBOOST_LAUNCHED_BY"
"""The variable in which FLARE's process tells those of jobs that it starts who it is."""
TOPIC_FAULT = "fault"  # a site's FLARE process to the server: why the job's process there cannot take part
MOST_CHARS = 500
_NEEDED = ("numpy", "pandas", "pyarrow", "xgboost")  # at a site, also where it imports them later
_OURS = ("he_processors", "dp_components", "nvflare_plugins")
_LEAST = {  # limits that are worth a word where they are lower
    "RLIMIT_AS": math.inf,
    "RLIMIT_DATA": math.inf,
    "RLIMIT_FSIZE": math.inf,
    "RLIMIT_NPROC": 4096,
    "RLIMIT_NOFILE": 1024,
    "RLIMIT_STACK": 1 << 20,
}
_THREADS, _FILES, _BYTES = 32, 256, 256 << 20  # what any job takes
_WHY = (  # what libraries say, in small letters -> what it means
    (("allocate memory", "failed to map segment"), "there is not enough memory"),
    (("start new thread", "temporarily unavailable"), "the system gives no more threads or processes"),
    (("too many open files",), "too many files are open"),
    (("cannot open shared object", "library not loaded"), "a library of the system that it needs is missing"),
    (
        ("undefined symbol", "glibc", "elf", "abi", "dtype size", "numpy 1.x", "incompatible", "not found in flat"),
        "its build does not fit this Python, this machine or the packages beside it",
    ),
)
logger = logging.getLogger(__name__)


def end_if_left() -> None:
    """End this process of a job if FLARE's that started it has ended, which starts the job again when it is back.

    FLARE ends the processes of jobs with its own. But it watches the parent that one has when it has been loaded, and
    by then that may be another: such a process would ask for tasks without end.
    """
    if os.environ.get(LAUNCHED_BY, str(os.getppid())) != str(os.getppid()):
        logger.error("FLARE's process ended while this one of a job was being loaded, which ends with it")
        os._exit(JobReturnCode.ABORTED)


def load_fault(module: str) -> str | None:
    """Return why a part of a job cannot be imported, or limits are too low, with what helps; None if all is well.

    Whatever a library raises is taken for a fault; one that ends the process cannot be.
    """
    try:
        for name in (*(_NEEDED if module == AT_SITE else ()), module):
            importlib.import_module(name)
    except Exception as error:
        logger.debug("what cannot be loaded", exc_info=True)
        return f"the job's process cannot load {_package(error)}: {_why(error)}{limits()}"
    try:
        _take_what_any_job_takes()
    except (OSError, RuntimeError, MemoryError) as error:
        return f"the job's process has too little of what any job takes: {_why(error)}{limits()}"
    return None


def limits() -> str:
    """Return which limits of the system stand for this process, and for those that it starts; "" if none does."""
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in _LEAST if hasattr(resource, name)}
    names = [name for name, value in soft.items() if value != resource.RLIM_INFINITY and value < _LEAST[name]]
    return f". Limits that stand there: {', '.join(names)}" if names else ""


def _take_what_any_job_takes() -> None:
    """Start threads, open files and map memory, and let go of them. Raises: OSError, RuntimeError."""
    over, threads, files = threading.Event(), [], []
    try:
        for _ in range(_THREADS):
            threads.append(threading.Thread(target=over.wait, daemon=True))
            threads[-1].start()
        with open(os.devnull, "rb") as one:
            for _ in range(_FILES):
                files.append(os.dup(one.fileno()))
        mmap.mmap(-1, _BYTES).close()
    finally:
        over.set()
        for file in files:
            os.close(file)


def _package(error: BaseException) -> str:
    """Return the package that it is about: the one that is not there, or the last that was being imported."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name if error.name.startswith(_OURS) else error.name.partition(".")[0]
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in names]
    return next((one for one in reversed(packages) if one not in sys.stdlib_module_names and one), "it")


def _why(error: BaseException) -> str:
    if type(error).__module__.startswith(_OURS):  # our own words hold no data
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return "it is not installed. Remedy: install VeilBoost again, with all that it needs, for the Python of FLARE"
    if isinstance(error, MemoryError):
        return _WHY[0][1]
    said = f"{error} {error.__cause__ or ''}".lower()
    known = next((means for words, means in _WHY if any(word in said for word in words)), None)
    remedy = "Remedy: install VeilBoost again there, or raise the limits of FLARE's process"
    return f"{known or type(error).__name__}. {remedy}"


# -- in the job's process ---------------------------------------------------------------------------------------------


def load_or_stand_in() -> None:
    """Load the module of this process's own component; where it cannot be, put one that says why in its place."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    at_server = spec is not None and ".server." in spec.name
    module = AT_SERVER if at_server else AT_SITE
    note_step("while it loaded what its part needs")
    fault = load_fault(module)
    note_step("before its connection stood")
    if fault is None:
        return
    logger.error("%s", fault)
    stand_in = ModuleType(module)
    made = type("JobController" if at_server else "JobExecutor", (_MuteController if at_server else _MuteExecutor,), {})
    made.__module__, made.fault = module, fault  # type: ignore[attr-defined]
    setattr(stand_in, made.__name__, made)
    sys.modules[module] = stand_in


class _MuteExecutor(Executor):
    """A site's part where it cannot be loaded: it fails every task, with the reason."""

    fault = ""

    def __init__(self, kind: str = "") -> None:
        super().__init__()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the reason as a site's report."""
        note_step(None)
        self.log_error(fl_ctx, self.fault)
        reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply.update({"status": "failed", "error": self.fault})
        return reply


class _MuteController(Controller):
    """The server's part where it cannot be loaded."""

    fault = ""

    def __init__(self, **named: Any) -> None:
        super().__init__()

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to release."""

    def process_result_of_unknown_task(self, *of_task: Any, **named: Any) -> None:
        """There is no task."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """End the FLARE job with the reason."""
        note_step(None)
        self.system_panic(f"VeilBoost job failed: the server could not go on: {self.fault}", fl_ctx)


# -- what a process leaves that dies before its part begins ------------------------------------------------------------


def note_step(step: str | None, run: Path | None = None) -> None:
    """Note, in a job's folder, how far its process has come; None: its part begins.

    Args:
        run: the folder; None takes that of this process's own command.
    """
    run = _own_run() if run is None else run
    if run is None or not run.is_dir():
        return
    with suppress(OSError):
        if step is None:
            if (run / NOTE).exists():
                (run / NOTE).unlink()
        else:
            (run / NOTE).write_text(step)


def _own_run() -> Path | None:
    """Return the job's folder as FLARE's command for a job's process names it."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("-m", "--workspace")
    parser.add_argument("-n", "--job_id")
    found, _ = parser.parse_known_args()
    return Path(found.workspace, found.job_id) if found.workspace and found.job_id else None


def died_early(run: Path) -> str | None:
    """Return why a job's process has ended before its part began, as far as its note says; None if it began."""
    try:
        step = (run / NOTE).read_text()[:MOST_CHARS]
    except OSError:
        return None
    return f"the job's process ended {step}; the console of FLARE there may say why{limits()}"


if __name__ == "__main__":  # `veilboost site-setup --check` calls it so, with what FLARE's process has
    sys.stdout.write(load_fault(sys.argv[1]) or "")
