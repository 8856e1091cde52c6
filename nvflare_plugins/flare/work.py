"""A site's work in a thread of its own: watched, told to stop, and left behind if it never returns.

XGBoost and gRPC wait without end for a thread that the system refuses them (a limit on memory or on processes), and no
Python can wake them. FLARE's own thread therefore only watches. If the work does not return although it was told to
stop, evidence and report are made without it, and the process is left once FLARE had time to hand the report over:
by FLARE, which leaves a process with unfinished threads in its own way, or else by ``Guard``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.signal import Signal

from nvflare_plugins.attempt.job_context import JobResult
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.flare import timeouts
from nvflare_plugins.flare.transport import SiteTransport
from nvflare_plugins.pooled.mediated.communicator import blocked

NO_REASON = (
    "FLARE stopped this site's part, and the server's process of the job did not say why: it has ended there, or was "
    "aborted just then. FLARE's log on the server says which"
)
# Each serves one site and nothing else. A process of any other kind is never left: it may serve several sites.
_PROCESSES_OF_ONE_SITE = (
    "nvflare.private.fed.app.client.worker_process",
    "nvflare.private.fed.app.simulator.simulator_worker",
)

logger = logging.getLogger(__name__)


class Stuck(JobAborted):
    """The work was told to stop and has not returned."""


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:
        raise JobAborted("the system refuses a thread here: raise the limits on processes and memory") from None


class Work:
    """One function, at work in a thread of its own.

    Raises:
        JobAborted: the system refuses the thread.
    """

    def __init__(self, function: Callable[[], JobResult]) -> None:
        self._function = function
        self._outcome: JobResult | None = None
        self._error: BaseException | None = None
        self.done = threading.Event()
        # No daemon: FLARE leaves a process in which such a thread has not ended, and does not wait for it.
        self.thread = threading.Thread(target=self._run, name="veilboost_job", daemon=False)
        _start(self.thread)

    def result(self) -> JobResult:
        """Return the function's result, or raise its error; only when it is done."""
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            raise JobAborted("the job has not ended")
        return self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._function()
        except BaseException as error:  # the edge of the thread: whoever asks for the result gets it
            self._error = error
        finally:
            self.done.set()


class Beats:
    """Sends signs of life from a thread that does nothing else, until stopped or until the connection is closed."""

    def __init__(self, send: Callable[[], None], interval_s: float = timeouts.BEAT_INTERVAL_S) -> None:
        self._send, self._interval_s = send, interval_s
        self._due = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="veilboost_beats", daemon=True)
        _start(self._thread)

    def stop(self) -> None:
        """Send no more; does not wait for one that is on its way."""
        self._stopped = True
        self._due.set()

    def send_now(self) -> None:
        """Send one out of turn."""
        self._due.set()

    def _run(self) -> None:
        with suppress(JobAborted):
            while not self._stopped:
                self._send()
                self._due.wait(self._interval_s)
                self._due.clear()


class Watch:
    """Waits for the work of a site, and passes on whatever ends it.

    Args:
        beats: the site's signs of life.
        abort_signal: FLARE's.
        say_alive: called with the seconds that the present exchange has waited, or None.
        clock: seconds, for the time that work has to stop.
    """

    def __init__(
        self,
        transport: SiteTransport,
        beats: Beats,
        abort_signal: Signal,
        say_alive: Callable[[float | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._beats = transport, beats
        self._abort_signal, self._say_alive, self._clock = abort_signal, say_alive, clock
        self._parent = os.getppid()
        self._stopped_by_flare_at: float | None = None
        self._stopping_since: float | None = None
        self.has_decided = False  # and not the server, that the work ends
        self.server_is_gone = False
        self.parent_is_gone = False

    def wait(self, work: Work) -> JobResult:
        """Return the work's result.

        Raises:
            Stuck: it was told to stop and has not returned in time.
            BaseException: the work's own.
        """
        while not work.done.wait(timeouts.ABORT_POLL_S):
            self.look(work)
        return work.result()

    @property
    def is_cut_off(self) -> bool:
        """Whether the work was ended because the server, or this site's FLARE process, is gone."""
        return self.server_is_gone or self.parent_is_gone

    def look(self, work: Work) -> None:
        """Look once whether something ends the work. Raises: Stuck."""
        transport = self._transport
        if transport.abort_reason is None:
            reason = self._reason_to_stop(work)
            if reason is None:
                self._say_alive(transport.waiting_s)
                return
            self.has_decided = True
            transport.abort(reason)
        now = self._clock()
        self._stopping_since = now if self._stopping_since is None else self._stopping_since
        grace_s = timeouts.FLARE_STOP_GRACE_S if self._abort_signal.triggered else timeouts.STOP_GRACE_S
        if now - self._stopping_since > grace_s:
            raise Stuck(f"{transport.abort_reason} (and this site's work did not stop within {grace_s:.0f} s)")

    def _reason_to_stop(self, work: Work) -> str | None:
        if self._abort_signal.triggered:
            return self._reason_of_flare()
        if self._transport.server_silent_s > timeouts.SILENCE_LIMIT_S:
            self.server_is_gone = True
            return (
                f"no sign of life from the server for {timeouts.SILENCE_LIMIT_S:.0f} s: its machine, its FLARE process "
                "or the connection to it is gone"
            )
        waits = blocked(work.thread)
        if waits is not None and waits.seconds > timeouts.COMMUNICATOR_S:
            return f"{waits.reason}; XGBoost then did not return within {timeouts.COMMUNICATOR_S:.0f} s"
        return None

    def _reason_of_flare(self) -> str | None:
        """Return why FLARE stops the site, which only the server may know: give it the time to say so."""
        if os.getppid() != self._parent:
            self.parent_is_gone = True
            return "this site's FLARE process has ended, and its job with it"
        if self._stopped_by_flare_at is None:
            self._stopped_by_flare_at = self._clock()
            self._transport.is_stopping = True
            self._beats.send_now()
        if self._clock() - self._stopped_by_flare_at < timeouts.STOP_REASON_S:
            return None
        return NO_REASON


class Guard:
    """Leaves the process some time after work got stuck, should FLARE not have left it by then.

    Its thread exists from the beginning: when it is needed the system may refuse to make one.

    Args:
        run_folder: the job's folder, in which FLARE's parent process looks for the return code.
    """

    def __init__(
        self, run_folder: Path, leave_s: float | None = None, leave: Callable[[Path, int], None] | None = None
    ) -> None:
        self._run_folder, self._leave = run_folder, leave or leave_process
        self._leave_s = timeouts.LEAVE_S if leave_s is None else leave_s
        self._decided = threading.Event()
        self._code: int | None = None
        self._thread = threading.Thread(target=self._run, name="veilboost_guard", daemon=True)
        _start(self._thread)

    def dismiss(self) -> None:
        """The work has returned."""
        self._decided.set()

    def arm(self, code: int) -> None:
        """The work is stuck: leave the process with this return code, where it serves this site alone."""
        self._code = code
        self._decided.set()

    def _run(self) -> None:
        self._decided.wait()
        if self._code is None:
            return
        time.sleep(self._leave_s)
        if serves_one_site():
            self._leave(self._run_folder, self._code)


def serves_one_site() -> bool:
    """Return whether this process is one that FLARE started for a single site's part in a single job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name in _PROCESSES_OF_ONE_SITE


def leave_process(run_folder: Path, code: int) -> None:
    """Write FLARE's file with the return code, unless there is one, and end the process without waiting for threads."""
    logger.error("work that does not return is left behind: this process ends with return code %d", code)
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(run_folder / FLMetaKey.PROCESS_RC_FILE, flags, 0o600)
        os.write(descriptor, str(code).encode())
        os.fsync(descriptor)
    os._exit(code)
