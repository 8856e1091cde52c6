"""In FLARE's process of a site: the process of a job that waits for lost sites is started again if it died.

FLARE starts a job's process once. If it dies, FLARE reports that to the server, which ends the job; and if the whole
machine was gone, FLARE knows nothing of the job when it is back. Here the process is started again, by the command with
which FLARE itself started it, in the folder that FLARE deployed; the server then lets it take part in the job's next
attempt (``on_lost_site="wait"``).

Only what FLARE has started for a job at this site is ever started again, and only where the job's process has said so
in a note in the job's folder: it does when it takes part in a job that waits, and removes the note when its part is
over, whatever way. After a restart of FLARE's own process the deployed folder's signature is checked anew, as it was
when it came; a job that the server no longer runs is ended by FLARE's next heartbeat.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE
from nvflare.lighter.utils import verify_folder_signature
from nvflare.private.fed.utils.fed_utils import require_signed_jobs

from nvflare_plugins.base.files import write_durably
from nvflare_plugins.flare.timeouts import LONGEST_RESTART_PAUSE_S, RESTART_PAUSE_S

NOTE = "veilboost_waits.json"
_LONGEST_WAIT_S = 7 * 86400.0

logger = logging.getLogger(__name__)


# -- the note, written by the job's process ---------------------------------------------------------------------------


def note_waiting(run: Path, waits_s: float, attempt: str) -> None:
    """Say, in a job's folder, that its process is to be started again if it dies, for so many seconds after that.

    Args:
        attempt: in which the process takes part now.
    """
    if run.is_dir():  # FLARE makes it
        write_durably(run / NOTE, json.dumps({"waits_s": waits_s, "attempt": attempt}).encode() + b"\n", 0o600)


def noted_attempt(run: Path) -> str | None:
    """Return the attempt in which this site took part last, if its part in the job is to go on."""
    attempt = _read(run).get("attempt")
    return attempt if isinstance(attempt, str) else None


def note_over(run: Path) -> None:
    """Say that this site's part in a job is over."""
    (run / NOTE).unlink(missing_ok=True)


def is_noted(run: Path) -> bool:
    """Return whether this site's part in a job is to go on."""
    return (run / NOTE).is_file()


def _waits_s(run: Path) -> float | None:
    """Return for how long a job's process is started again after it died; None if it is not."""
    waits_s = _read(run).get("waits_s")
    if isinstance(waits_s, bool) or not isinstance(waits_s, (int, float)) or not waits_s >= 0:  # as NaN is not
        return None
    return float(min(waits_s, _LONGEST_WAIT_S))  # whole numbers may be too large for a float


def _read(run: Path) -> dict[str, Any]:
    try:
        note = json.loads((run / NOTE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


# -- a process that died ----------------------------------------------------------------------------------------------


class KeptJob(JobHandleSpec):
    """A job's process, started again when it dies as long as its note says so; FLARE sees one process that lives.

    Args:
        launch: starts it.
        run: the job's folder in FLARE's workspace.
    """

    def __init__(
        self,
        launch: Callable[[], JobHandleSpec],
        run: Path,
        pause_s: float = RESTART_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._launch, self._run, self._pause_s, self._clock = launch, run, pause_s, clock
        self._lock = threading.Lock()
        self._terminated = threading.Event()
        self._handle = launch()

    def terminate(self) -> None:
        """End the process, and do not start it again."""
        with self._lock:
            self._terminated.set()
        note_over(self._run)
        self._handle.terminate()

    def poll(self) -> Any:
        """Return FLARE's return code of the last process."""
        return self._handle.poll()

    def wait(self) -> None:
        """Return when the process has ended and is not to be started again."""
        pause_s, gives_up_at, begun = self._pause_s, 0.0, None
        while True:
            self._handle.wait()
            waits_s, now = _waits_s(self._run), self._clock()
            if waits_s is None or self._terminated.is_set():
                return
            taken = _modified(self._run / NOTE)
            if taken != begun:  # since the last time it died it has taken part
                begun, pause_s, gives_up_at = taken, self._pause_s, now + waits_s
            if now >= gives_up_at:
                logger.error("the process of job %s died, and is not started any more", self._run.name)
                note_over(self._run)
                return
            logger.warning("the process of job %s died: it is started again in %.0f s", self._run.name, pause_s)
            if self._terminated.wait(pause_s):
                return
            pause_s = min(2 * pause_s, LONGEST_RESTART_PAUSE_S)
            if not self._start_again():
                return

    def _start_again(self) -> bool:
        with self._lock:
            if self._terminated.is_set():
                return False
            # Of a process that was left in order: FLARE would take its return code for that of the next.
            (self._run / FLMetaKey.PROCESS_RC_FILE).unlink(missing_ok=True)
            self._handle = self._launch()
        return True


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


_flares_launch = ClientProcessJobLauncher.launch_job


def _launch_kept(launcher: ClientProcessJobLauncher, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
    workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    run = Path(workspace.get_run_dir(job_meta["job_id"]))
    return KeptJob(lambda: _flares_launch(launcher, job_meta, fl_ctx), run)


def keep_jobs() -> None:
    """Have FLARE's process of a site start jobs so that they are kept."""
    ClientProcessJobLauncher.launch_job = _launch_kept


# -- a machine that was gone ------------------------------------------------------------------------------------------


def rejoin_jobs(engine: Any, workspace: Workspace) -> list[str]:
    """Start the processes of jobs that waited when FLARE's process of this site ended; return the jobs' ids.

    Args:
        engine: FLARE's client engine, registered at the server.
    """
    joined = []
    for note in sorted(Path(workspace.get_root_dir()).glob(f"*/{NOTE}")):
        job_id = note.parent.name
        try:
            _check_deployed(workspace, job_id)
            meta = json.loads(Path(workspace.get_job_meta_path(job_id)).read_bytes())
            (note.parent / FLMetaKey.PROCESS_RC_FILE).unlink(missing_ok=True)
            engine.start_app(job_id, meta)
        except Exception as error:  # one job must not keep FLARE's process from starting
            logger.error("job %s, which waited for this site, cannot be joined again: %s", job_id, _kind_of(error))
            continue
        logger.info("job %s waits for this site: its process is started again", job_id)
        joined.append(job_id)
    return joined


def _check_deployed(workspace: Workspace, job_id: str) -> None:
    """Check a deployed job's signature again, by the rules under which FLARE deployed it. Raises: ValueError."""
    root = os.path.join(workspace.get_startup_kit_dir(), "rootCA.pem")
    app = workspace.get_app_dir(job_id)  # raises unless this is the id of a job
    if os.path.exists(os.path.join(app, NVFLARE_SIG_FILE)):
        if not os.path.exists(root) or not verify_folder_signature(app, root):
            raise ValueError("its folder does not pass signature verification")
    elif require_signed_jobs(workspace, WorkspaceConstants.CLIENT_STARTUP_CONFIG):
        raise ValueError("its folder is not signed")


def _kind_of(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else type(error).__name__
