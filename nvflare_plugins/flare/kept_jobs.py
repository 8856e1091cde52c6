"""In FLARE's process of a site or server: the process of a job that waits for lost sites is started again if it died.

FLARE starts a job's process once. If it dies, FLARE reports that to the server, which ends the job; and if the whole
machine was gone, FLARE knows nothing of the job when it is back. Here the process is started again, by the command with
which FLARE itself started it, in the folder that FLARE deployed; the server then lets it take part in the job's next
attempt (``on_lost_site="wait"``).

Only what FLARE has started for a job here is ever started again, and only where the job's process has said so in a
note in the job's folder: it does when it takes part in a job that waits, and removes the note when its part is over,
whatever way. After a restart of FLARE's own process so is one that had been started and had no task yet (loading.py):
it may be a job that waits. Each time the deployed folder's signature is checked anew, as it was when it came; a job
that the server no longer runs is ended by FLARE's next heartbeat.

At the server the note says which attempt the process leads, before any site hears of it. The next process leads a later
one. It is started as often as the server's policy says (``restarts``), and never after an operator's abort. When FLARE
itself is started again, it knows of its jobs only that they ran, and would have the sites end them. Those with a note
run again, and any other is called abandoned (FLARE 2.9 itself leaves it running for ever).

FLARE's process of the server also hands the heartbeats of sites' processes on to its jobs, which else hear nothing of a
site before its part begins, be it slow or gone. Not those of a process that was started since the job was: it knows
nothing of the job, or starts that again, which then speaks for itself (presence.py).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, RunProcessKey, SystemComponents, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus
from nvflare.apis.job_launcher_spec import JobHandleSpec
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE
from nvflare.lighter.utils import verify_folder_signature
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.utils.fed_utils import require_signed_jobs

from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.base.checks import is_whole
from nvflare_plugins.base.files import held_by_nobody, write_durably
from nvflare_plugins.evidence.reader import PARTIAL_SUFFIX, end_torn
from nvflare_plugins.flare import timeouts
from nvflare_plugins.flare.attempt import EVIDENCE_FOLDER, RESULT_FOLDER, completed_at, failure_of
from nvflare_plugins.flare.loading import LAUNCHED_BY, TOPIC_FAULT, died_early, note_step
from nvflare_plugins.flare.loading import NOTE as STARTS
from nvflare_plugins.flare.transport import CHANNEL
from nvflare_plugins.site.flare_boundary import JOB_ID
from nvflare_plugins.site.policy import server_policy

NOTE = "veilboost_waits.json"
REASON = "veilboost_reason"  # in what FLARE keeps of a job and shows administrators: why it has failed
TOPIC_LIVES = "lives"  # FLARE's process of the server to that of a job: the site whose heartbeat it had
_RETURNED = "veilboost_returned"  # of a job in FLARE's table: the sites that are back as other clients
_LONGEST_WAIT_S = 7 * 86400.0

logger = logging.getLogger(__name__)


# -- the note, written by the job's process ---------------------------------------------------------------------------


def note_waiting(run: Path, waits_s: float, attempt: str, lead: Lead | None = None) -> None:
    """Say, in a job's folder, that its process is to be started again if it dies, for so many seconds after that.

    Args:
        attempt: in which the process takes part now.
        lead: of the server, whose process leads the attempt.
    """
    if run.is_dir():  # FLARE makes it
        note = {"waits_s": waits_s, "attempt": attempt, **({} if lead is None else asdict(lead))}
        _write(run, note)


@dataclass(frozen=True, slots=True)
class Lead:
    """What the server's process of a job notes of the attempt that it leads.

    Attributes:
        number: of the attempt.
        members: the sites that the job is of by then.
        cells: site -> name of its FLARE process.
        starts: how often the process has been started again.
    """

    number: int
    members: list[str]
    cells: dict[str, str]
    starts: int = 0


def noted_lead(run: Path) -> Lead | None:
    """Return what the server's process of a job has noted; None if it has led no attempt that is to go on."""
    note = _read(run)
    try:
        lead = Lead(**{field.name: note[field.name] for field in fields(Lead)})
        is_among = set(lead.members) <= set(lead.cells)
    except (KeyError, TypeError):
        return None
    is_one = is_whole(lead.number, 1) and is_whole(lead.starts, 0) and isinstance(lead.cells, dict)
    return lead if is_one and isinstance(lead.members, list) and is_among else None


def count_start(run: Path, most: int) -> bool:
    """Note, durably, that the server's process of a job is started again; return whether it may be."""
    lead = noted_lead(run)
    if lead is None or lead.starts >= most:
        return False
    _write(run, {**_read(run), "starts": lead.starts + 1})
    return True


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


def _write(run: Path, note: dict[str, Any]) -> None:
    write_durably(run / NOTE, json.dumps(note).encode() + b"\n", 0o600)


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
        may_start: asked before each further start; what it raises is why there is none.
        tell: called with why the process ended before its part began, where it did; at the server with why the job
            has failed, too.
    """

    def __init__(
        self,
        launch: Callable[[], JobHandleSpec],
        run: Path,
        pause_s: float = timeouts.RESTART_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
        may_start: Callable[[], bool] = lambda: True,
        tell: Callable[[str], None] = lambda fault: None,
    ) -> None:
        super().__init__()
        self._tell = tell
        self._launch, self._run, self._pause_s, self._clock = launch, run, pause_s, clock
        self._may_start = may_start
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
        """Return when the process has ended and is not to be started again, also where it cannot be."""
        for step in (self._wait, self._say_of_end, lambda: _end_servers_log(self._run)):
            try:
                step()
            except Exception as error:  # a full disk, a damaged policy: FLARE would hold the job for one that runs
                logger.error("job %s, whose process has ended: %s", self._run.name, _kind_of(error))
                with contextlib.suppress(OSError):
                    note_over(self._run)
        # What FLARE's process held for the job goes now: Python would leave the 256 kB of each closed TLS connection
        # for hundreds of jobs.
        gc.collect()

    def _say_of_end(self) -> None:
        fault = died_early(self._run)
        if fault is not None and not self._terminated.is_set():
            logger.error("job %s: %s", self._run.name, fault)
            self._tell(fault)
        elif reason := failure_of(self._run):
            self._tell(reason)
        note_step(None, self._run)

    def _wait(self) -> None:
        pause_s, gives_up_at = self._pause_s, 0.0
        begun: str | None = ""
        while True:
            self._handle.wait()
            if self._terminated.is_set():
                note_over(self._run)  # the process may have written it again until it ended
                return
            waits_s, now = _waits_s(self._run), self._clock()
            if waits_s is None:
                return
            taken = noted_attempt(self._run)
            if taken != begun:  # since the last time it died it has taken part
                begun, pause_s, gives_up_at = taken, self._pause_s, now + waits_s
            if now >= gives_up_at or not self._may_start():
                logger.error("the process of job %s died, and is not started any more", self._run.name)
                note_over(self._run)
                return
            logger.warning("the process of job %s died: it is started again in %.0f s", self._run.name, pause_s)
            if self._terminated.wait(pause_s):
                return
            pause_s = min(2 * pause_s, timeouts.LONGEST_RESTART_PAUSE_S)
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


def _end_servers_log(run: Path) -> None:
    """End the evidence of a job's process at the server that was killed. Raises: OSError."""
    for partial in held_by_nobody((run / RESULT_FOLDER / EVIDENCE_FOLDER).glob(f"*{PARTIAL_SUFFIX}")):
        end_torn(partial, None)


_flares_launch = ClientProcessJobLauncher.launch_job


def _launch_kept(launcher: ClientProcessJobLauncher, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
    workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    run = Path(workspace.get_run_dir(job_meta["job_id"]))

    def launch() -> JobHandleSpec:
        note_step("before it could load anything", run)
        return _flares_launch(launcher, job_meta, fl_ctx)

    def may_start() -> bool:
        _check_deployed(workspace, run.name, WorkspaceConstants.CLIENT_STARTUP_CONFIG)
        return True

    tell = lambda fault: _tell_server(fl_ctx.get_engine().client.cell.core_cell, run.name, fault)  # noqa: E731
    return KeptJob(launch, run, may_start=may_start, tell=tell)


def _tell_server(cell: Any, job_id: str, fault: str) -> None:
    """Say to the server's process of a job why this site's has ended, until it has heard it."""
    for _ in range(timeouts.FAULT_TRIES):
        message = Message({}, fault.encode())
        reply = cell.send_request(
            CHANNEL, TOPIC_FAULT, FQCN.join([FQCN.ROOT_SERVER, job_id]), message, timeouts.FAULT_ANSWER_S
        )
        if reply.get_header(MessageHeaderKey.RETURN_CODE) == CellReturnCode.OK:
            return
        time.sleep(timeouts.FAULT_ANSWER_S)


_flares_launch_on_server = ServerProcessJobLauncher.launch_job
_flares_abort_on_server = ServerEngine.abort_app_on_server
_flares_sync = FederatedServer._sync_client_jobs
_flares_fail = JobRunner.fail_run


def _launch_kept_on_server(
    launcher: ServerProcessJobLauncher, job_meta: dict[str, Any], fl_ctx: FLContext
) -> JobHandleSpec:
    own, workspace = FLContext(), fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)  # FLARE's holds the next job's later
    for key in (FLContextKey.WORKSPACE_OBJECT, FLContextKey.JOB_PROCESS_ARGS):
        own.set_prop(key, fl_ctx.get_prop(key), private=True, sticky=False)
    run, root = Path(workspace.get_run_dir(job_meta["job_id"])), Path(workspace.get_root_dir())

    def may_start() -> bool:
        _check_deployed(workspace, run.name, WorkspaceConstants.SERVER_STARTUP_CONFIG)
        return count_start(run, server_policy(root).restarts)

    engine = fl_ctx.get_engine()

    def tell(reason: str) -> None:
        with engine.new_context() as context:
            engine.get_component(SystemComponents.JOB_MANAGER).update_meta(run.name, {REASON: reason}, context)

    return KeptJob(lambda: _flares_launch_on_server(launcher, job_meta, own), run, may_start=may_start, tell=tell)


def _abort_on_server(engine: ServerEngine, job_id: str, *args: Any, **kwargs: Any) -> str:
    """Note first that the job is over: whoever dies now does not bring it back."""
    note_over(Path(engine.args.workspace) / job_id)
    return str(_flares_abort_on_server(engine, job_id, *args, **kwargs))


def _sync_kept(server: FederatedServer, request: Any, token: str) -> list[str]:
    """Let no site end a job that is about to run again here, and know a site again that is back as another client.

    FLARE waits up to a quarter of an hour for each site's process to leave a job that all have completed. One that was
    started again in the meantime, as the site could not know, is not waited for: FLARE ends it.
    """
    ended = _flares_sync(server, request, token)
    client, clients = server.client_manager.clients.get(token), server.client_manager.clients
    for job_id, job in list(server.engine.run_processes.items()):
        known, returned = job.get(RunProcessKey.PARTICIPANTS), job.setdefault(_RETURNED, set())
        if client and known is not clients and client.name in {one.name for one in known.values()}:
            others = {key: one for key, one in known.items() if one.name != client.name}
            job[RunProcessKey.PARTICIPANTS] = {**others, token: client}
            returned |= set() if token in known else {client.name}
            if client.name not in returned:
                _hand_on(server.cell.core_cell, job_id, client.name)
    root, runner = Path(server.engine.args.workspace), server.engine.job_runner
    for job_id in runner.get_client_outcome_jobs(client.name) if client else ():
        since = completed_at(root / job_id)
        if since is not None and time.time() - since > timeouts.LEAVE_S:
            runner.resolve_client_outcome(job_id, client.name)
    return [job_id for job_id in ended if not (JOB_ID.fullmatch(job_id) and is_noted(root / job_id))]


def _fail_unless_completed(runner: JobRunner, job_id: str, process_return_code: int, fl_ctx: FLContext) -> str:
    """Let no end of a site's process, or of FLARE's there, undo a job that all its sites have completed before."""
    run = Path(fl_ctx.get_engine().args.workspace) / job_id
    return "" if completed_at(run) is not None else str(_flares_fail(runner, job_id, process_return_code, fl_ctx))


def _hand_on(cell: Any, job_id: str, site: str) -> None:
    """Say to the process of a job that a site was heard of."""
    with contextlib.suppress(RuntimeError):  # the cell is closed
        message = Message({}, site.encode())
        cell.fire_and_forget(CHANNEL, TOPIC_LIVES, FQCN.join([FQCN.ROOT_SERVER, job_id]), message, optional=True)


def keep_jobs() -> None:
    """Have FLARE's process of a site or server start jobs so that they are kept."""
    os.environ[LAUNCHED_BY] = str(os.getpid())
    ClientProcessJobLauncher.launch_job = _launch_kept
    ServerProcessJobLauncher.launch_job = _launch_kept_on_server
    ServerEngine.abort_app_on_server = _abort_on_server
    JobRunner.fail_run = _fail_unless_completed


def keep_sites() -> None:
    """Have FLARE's process of a server leave sites their jobs from the first heartbeat on."""
    FederatedServer._sync_client_jobs = _sync_kept


# -- a machine that was gone ------------------------------------------------------------------------------------------


def rejoin_jobs(engine: Any, workspace: Workspace) -> list[str]:
    """Start the processes of jobs that waited, or began, when FLARE's process of this site ended; return their ids.

    Args:
        engine: FLARE's client engine, registered at the server.
    """
    joined, root = [], Path(workspace.get_root_dir())
    for run in sorted({note.parent for name in (NOTE, STARTS) for note in root.glob(f"*/{name}")}):
        job_id = run.name
        try:
            _check_deployed(workspace, job_id, WorkspaceConstants.CLIENT_STARTUP_CONFIG)
            meta = json.loads(Path(workspace.get_job_meta_path(job_id)).read_bytes())
            (run / FLMetaKey.PROCESS_RC_FILE).unlink(missing_ok=True)
            if not is_noted(run):
                note_waiting(run, 0.0, "")  # the process says that it is ready, and what the job is, once it has a task
            engine.start_app(job_id, meta)
        except Exception as error:  # one job must not keep FLARE's process from starting
            logger.error("job %s, which waited for this site, cannot be joined again: %s", job_id, _kind_of(error))
            continue
        logger.info("job %s waits for this site: its process is started again", job_id)
        joined.append(job_id)
    return joined


def _check_deployed(workspace: Workspace, job_id: str, configuration: str) -> None:
    """Check a deployed job's signature again, by the rules under which FLARE deployed it. Raises: ValueError."""
    root = os.path.join(workspace.get_startup_kit_dir(), "rootCA.pem")
    app = workspace.get_app_dir(job_id)  # raises unless this is the id of a job
    if os.path.exists(os.path.join(app, NVFLARE_SIG_FILE)):
        if not os.path.exists(root) or not verify_folder_signature(app, root):
            raise ValueError("its folder does not pass signature verification")
    elif require_signed_jobs(workspace, configuration):
        raise ValueError("its folder is not signed")


def restore_jobs_soon(engine: Any, workspace: Workspace) -> None:
    """Restore jobs in a thread of its own, once FLARE can sign what a job's process shows it: after its start."""

    def restore() -> None:
        while _context_of(engine).get_prop(FLContextKey.SECURE_MODE) is None:
            time.sleep(timeouts.EXPIRE_POLL_S)
        restore_jobs(engine, workspace)

    threading.Thread(target=restore, name="veilboost_restore", daemon=True).start()


def _context_of(engine: Any) -> FLContext:
    with engine.new_context() as fl_ctx:
        return fl_ctx


def restore_jobs(engine: Any, workspace: Workspace) -> list[str]:
    """Start the processes of jobs that ran when FLARE's process of the server ended; return the jobs' ids.

    Those that do not wait for lost sites are called abandoned.

    Args:
        engine: FLARE's server engine.
    """
    restored, runner = [], engine.job_runner
    manager, runner.scheduler = (engine.get_component(name) for name in _OF_JOBS)
    with engine.new_context() as fl_ctx:
        for job in manager.get_jobs_by_status([RunStatus.RUNNING, RunStatus.DISPATCHED], fl_ctx):
            run = Path(workspace.get_run_dir(job.job_id))
            try:
                runner.restore_running_job(job.job_id, _clients(run, workspace), None, fl_ctx)
                if job.job_id not in runner.running_jobs:
                    raise ValueError("FLARE did not start its process")
            except Exception as error:  # one job must not keep the others from going on
                logger.error("job %s ran when this server's process ended, and ends: %s", job.job_id, _kind_of(error))
                try:
                    note_over(run)
                    manager.set_status(job.job_id, RunStatus.ABANDONED, fl_ctx)
                    _end_servers_log(run)
                except Exception as full:
                    logger.error("job %s cannot be called abandoned: %s", job.job_id, _kind_of(full))
                continue
            logger.info("job %s ran when this server's process ended: it goes on", job.job_id)
            restored.append(job.job_id)
    return restored


_OF_JOBS = (SystemComponents.JOB_MANAGER, SystemComponents.JOB_SCHEDULER)


def _clients(run: Path, workspace: Workspace) -> dict[str, Client]:
    """Return the sites of a job that goes on, as FLARE knows clients; tokens come with their heartbeats.

    Raises:
        ValueError: it does not go on.
    """
    lead = noted_lead(run)
    if lead is None:
        raise ValueError("it does not wait for lost sites (on_lost_site), or had not begun. Submit it again")
    _check_deployed(workspace, run.name, WorkspaceConstants.SERVER_STARTUP_CONFIG)
    if not count_start(run, server_policy(Path(workspace.get_root_dir())).restarts):
        raise ValueError("its process has been started again as often as this server's policy allows (restarts)")
    (run / FLMetaKey.PROCESS_RC_FILE).unlink(missing_ok=True)
    clients = {}
    for name, cell in lead.cells.items():
        client = Client(name, OS_RANDOMNESS.bytes(16).hex())
        client.set_fqcn(cell)
        clients[client.token] = client
    return clients


def _kind_of(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else type(error).__name__
