"""What FLARE runs at a site: one task, in which the whole training happens."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.utils.validation_utils import JOB_NAME_PATTERN

from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.attempt.job_context import CannotGoOn, Job, JobResult, SiteContext, waiting_s
from nvflare_plugins.attempt.late_end import end_late
from nvflare_plugins.attempt.payment import spending_of
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.checks import is_whole
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal, machine_failure, reason_of, time_mends
from nvflare_plugins.base.files import takes_files
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.evidence.format import export_name, is_name
from nvflare_plugins.evidence.log import end_abandoned
from nvflare_plugins.evidence.reader import MAX_ATTEMPTS, end_dead, put_aside, set_aside
from nvflare_plugins.flare import timeouts
from nvflare_plugins.flare.attempt import (
    CANNOT_GO_ON,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    MAX_ERROR_CHARS,
    SiteReport,
)
from nvflare_plugins.flare.controller import LEFT_OUT, REFUSED, TRAIN_TASK
from nvflare_plugins.flare.kept_jobs import is_noted, note_over, note_waiting, noted_attempt
from nvflare_plugins.flare.kinds import kind_of
from nvflare_plugins.flare.loading import note_step
from nvflare_plugins.flare.metrics import MetricsFile, SiteMetrics, metrics_folder
from nvflare_plugins.flare.presence import Ready
from nvflare_plugins.flare.transport import SiteTransport
from nvflare_plugins.flare.work import Beats, Guard, Stuck, Watch, Work
from nvflare_plugins.pages.run_record import RoundRow
from nvflare_plugins.site.certificates import Identity, load_identity
from nvflare_plugins.site.flare_boundary import check_set_up
from nvflare_plugins.site.memory.store import hold_id_form, policy_changes
from nvflare_plugins.site.policy import SitePolicy, note_policy
from nvflare_plugins.site.protocols import Span
from nvflare_plugins.site.runtimes import check_memory_is_kept
from nvflare_plugins.wire.envelope import ATTEMPT_BYTES
from nvflare_plugins.workers.workers import Work as WorkOfWorker

METRICS_EVENT = "fed.analytix_log_stats"  # what FLARE's tracking receivers on the server listen to
MAX_SITES = 1000
LONGEST_NAME = 128
_ATTEMPT = re.compile(f"[0-9a-f]{{{2 * ATTEMPT_BYTES}}}")


class _DiedBefore(JobAborted):
    """The process that took part in this attempt before has died."""


@dataclass(frozen=True, slots=True)
class JobTask:
    """The content of the one task, as the server sent it."""

    job: Job
    sites: tuple[str, ...]
    attempt: str
    server: str
    protocols: Span
    number: int = 1
    pinned: str = ""

    @classmethod
    def from_shareable(cls, data: Shareable, site: str, job_type: type[Job]) -> JobTask:
        """Read the task strictly.

        Raises:
            ProtocolError, ConfigurationError: it is not a job of this kind.
        """
        job, sites, attempt, server = (data.get(name) for name in ("job", "sites", "attempt", "server"))
        if not isinstance(job, dict) or not isinstance(attempt, str) or not isinstance(server, str):
            raise ProtocolError("the server sent a task that is not a VeilBoost task")
        if not isinstance(sites, list) or len(sites) > MAX_SITES or not all(map(is_name, sites)):
            raise ProtocolError(
                "the server sent a task with an unusable list of sites: a name has up to 128 letters, digits and _ . @ "
                "- or blanks"
            )
        if sites != sorted(set(sites)) or site not in sites:
            raise ProtocolError(f"the server's list of sites is not sorted, or lacks {site}")
        if not _ATTEMPT.fullmatch(attempt) or not is_name(server) or server.split(".")[0] != "server":
            raise ProtocolError("the server sent a task with an unusable attempt or address")
        read, number = job_type.from_dict(job), data.get("number", 1)
        most = 1 if waiting_s(read) is None else MAX_ATTEMPTS
        if type(number) is not int or not 1 <= number <= most:
            raise ProtocolError("the server sent a task for an attempt that this job cannot have")
        known = data.get("protocols")
        if not isinstance(known, list) or len(known) != 2 or not all(is_whole(one, 1) for one in known):
            raise ConfigurationError("the server does not say which protocols it speaks: update VeilBoost there first")
        pinned = data.get("pinned", "")
        if not isinstance(pinned, str):
            raise ProtocolError("the server sent a task with an unusable hash of a plugin")
        return cls(read, tuple(sites), attempt, server, Span(*known), number, pinned)


class JobExecutor(Executor):
    """Takes part in a job of any kind at one site.

    What the site allows is in its own policy, nothing in the job's configuration.

    Args:
        kind: name of the job's kind (kinds.py).
    """

    _beats: Beats | None = None
    _ready: Ready | None = None
    _watch: Watch | None = None
    _waits: bool = False  # the job waits for lost sites
    _pause_s: float = 0.0  # how long this process has paused last
    _pauses: Callable[[], bool] | None = None  # it takes no part until this says so
    _stays_kept: bool = False  # this process ends for no reason of the job's, and is to be started again
    _done: Signal | None = None  # FLARE's, of an attempt that has ended well, and whose report is to be sent

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self._parent = os.getppid()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Go on with the signs of life until the server has the site's report, or the run is over."""
        if event_type in (EventType.AFTER_SEND_TASK_RESULT, EventType.END_RUN) and self._beats is not None:
            self._beats.stop()
        if event_type == EventType.START_RUN:
            note_step("before it had its task", _run_folder(fl_ctx))
            cell = fl_ctx.get_engine().get_cell().core_cell
            self._ready = Ready(cell, FQCN.join([FQCN.ROOT_SERVER, fl_ctx.get_job_id()]))
        if self._ready is not None:
            self._say_whether_it_waits(self._ready, event_type, fl_ctx)

    def _say_whether_it_waits(self, ready: Ready, event_type: str, fl_ctx: FLContext) -> None:
        run, is_sent = _run_folder(fl_ctx), event_type == EventType.AFTER_SEND_TASK_RESULT
        if is_sent and self._done is not None and not self._done.triggered:  # else FLARE gave up sending it
            note_over(run)
        is_orphan = os.getppid() != self._parent  # FLARE's own process has ended, and ends this one with it
        if is_orphan and is_noted(run):
            self._stays_kept = True
        if is_sent or event_type == EventType.START_RUN:
            # This process was started again, or the job may go on.
            if (self._pauses is not None or is_noted(run)) and not self._stays_kept:
                ready.waits(self._pauses)
            else:
                ready.end()
        elif event_type == EventType.END_RUN:
            ready.end()
            if not is_orphan:  # else FLARE's next process starts one that had no task yet again
                note_step(None, run)
            if not self._stays_kept:
                note_over(run)
                self._drop_kept(fl_ctx)

    def _drop_kept(self, fl_ctx: FLContext) -> None:
        """Remove what only a further attempt of the job would need."""
        names = kind_of(self.kind).kept
        if not names:
            return
        try:
            workspace = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
            runs = SitePolicy.load(workspace, fl_ctx.get_identity_name()).runs
            for name in names:
                (RunFolder(runs, fl_ctx.get_job_id()).path / name).unlink(missing_ok=True)
        except (VeilBoostError, OSError) as error:
            self.log_warning(fl_ctx, f"what the job has kept for further attempts stays: {error_text(error)}")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run the task and return the site's report; an error becomes text free of data."""
        if task_name != TRAIN_TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        note_step(None, _run_folder(fl_ctx))
        site, job_id = fl_ctx.get_identity_name(), fl_ctx.get_job_id()
        workspace = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
        evidence: Path | None = None
        task: JobTask | None = None
        policy: SitePolicy | None = None
        self._watch = self._pauses = self._done = None
        try:
            _hear_refusal(shareable)
            check_set_up(workspace, site)
            policy = SitePolicy.load(workspace, site)
            check_memory_is_kept(workspace, policy)
            evidence = RunFolder(policy.runs, job_id).evidence / export_name(site)
            if shareable.get(LEFT_OUT) is True:
                return self._left_out(shareable, fl_ctx, evidence, load_identity(policy.workspace, site))
            task = JobTask.from_shareable(shareable, site, kind_of(self.kind).job)
            self._waits = waiting_s(task.job) is not None
            self._note_policy(policy, fl_ctx)
            self._end_dead(policy, fl_ctx)
            outcome = self._run(task, fl_ctx, abort_signal, policy)
            self._note_after_first(policy, fl_ctx)
            report = SiteReport(
                COMPLETED,
                model_hmac=outcome.hmac,
                summary=outcome.summary,
                evidence=_content(evidence),
                earlier=_earlier(evidence),
            )
            self._done = abort_signal
            self.log_info(fl_ctx, f"finished: {outcome.message}")
        except Exception as error:  # the edge of the process: whatever it is, it becomes the site's report
            text = error_text(error)
            if isinstance(error, Stuck) and evidence is not None:
                end_abandoned(evidence, text)
            if isinstance(error, VeilBoostError) or machine_failure(error) is not None:
                self.log_error(
                    fl_ctx, f"the job ended with an error ({type(error).__name__}): {text}{_place(error, workspace)}"
                )
                self.logger.debug("where it happened", exc_info=True)
            else:
                self.log_exception(fl_ctx, f"a defect of VeilBoost or of its set-up, please report it: {text}")
            watch = self._watch
            is_cut_off = isinstance(error, _DiedBefore) or (watch is not None and watch.is_cut_off)
            # Whether the job goes on after an attempt that others have ended, the server alone knows.
            is_own = not isinstance(error, JobAborted) or (watch is not None and watch.has_decided and not is_cut_off)
            if task is not None and policy is not None and self._waits and time_mends(error):
                is_cut_off, is_own = True, False
                self._pause(task.attempt, policy)
            ends = isinstance(error, Stuck) or (watch is not None and watch.is_cut_off)
            self._stays_kept = self._waits and not is_own and ends
            if is_own:
                note_over(_run_folder(fl_ctx))
            status = INTERRUPTED if is_cut_off else CANNOT_GO_ON if isinstance(error, CannotGoOn) else FAILED
            report = SiteReport(status, error=text, evidence=_content(evidence), earlier=_earlier(evidence))
        reply = make_reply(ReturnCode.OK if report.status == COMPLETED else ReturnCode.EXECUTION_EXCEPTION)
        reply.update(report.to_dict())
        return reply

    def _pause(self, attempt: str, policy: SitePolicy) -> None:
        """Take no part until some time has passed, longer each time, and this site's folders take files again."""
        self._pause_s = min(2 * self._pause_s or timeouts.FIRST_PAUSE_S, timeouts.LONGEST_PAUSE_S)
        due, places = time.monotonic() + self._pause_s, (policy.runs, policy.registry, policy.ledgers, policy.workspace)
        self._pauses = lambda: time.monotonic() >= due and all(map(takes_files, places))
        if self._ready is not None:
            self._ready.takes_part(attempt)  # and does not wait for another, whatever it said before

    def _left_out(self, shareable: Shareable, fl_ctx: FLContext, evidence: Path, identity: Identity) -> Shareable:
        """End this site's part in a job that goes on without it; hand in the evidence of the attempts before.

        Raises:
            ProtocolError: the server says so in words that are none.
        """
        number, sites = shareable.get("number"), shareable.get("sites")
        if type(number) is not int or not 1 < number <= MAX_ATTEMPTS or not isinstance(sites, list):
            raise ProtocolError("the server sent a task that is not a VeilBoost task")
        note_over(_run_folder(fl_ctx))
        if evidence.parent.is_dir():
            put_aside(evidence.parent, number, identity.sign if identity.is_signed else None)
        among = printable(", ".join(map(str, sites[:MAX_SITES])))
        text = (
            f"the job goes on without {identity.site}, which was lost, and gives it no model; it goes on with {among}"
        )
        self.log_warning(fl_ctx, text)
        reply = make_reply(ReturnCode.OK)
        reply.update(SiteReport(FAILED, error=text, earlier=_earlier(evidence)).to_dict())
        return reply

    def _note_policy(self, policy: SitePolicy, fl_ctx: FLContext) -> None:
        """Say in the site's log what its policy is, and what has changed in it since the job before."""
        hold_id_form(policy)
        changed = policy_changes(policy)
        note_policy(policy, f"job {fl_ctx.get_job_id()}")
        if changed:
            self.log_warning(fl_ctx, f"the site's policy has changed since the last job here: {', '.join(changed)}")
        self.log_info(fl_ctx, f"the site's policy: {policy.fingerprint()}")

    def _end_dead(self, policy: SitePolicy, fl_ctx: FLContext) -> None:
        """End the evidence of other jobs whose processes were killed here, where no further one does."""
        identity = load_identity(policy.workspace, policy.site)
        signer = identity.sign if identity.is_signed else None
        try:
            ended = end_dead(
                policy.runs, lambda job: is_noted(policy.workspace / job), identity.chain_pem.decode(), signer
            )
        except OSError as error:
            self.log_warning(fl_ctx, f"evidence of earlier jobs has no end yet: {error_text(error)}")
            return
        for job_id in ended:
            self.log_warning(fl_ctx, f"the process of job {job_id} had died here: its evidence now says so")

    def _note_after_first(self, policy: SitePolicy, fl_ctx: FLContext) -> None:
        """Note the policy of a site's first job, which has made the folder of runs; the job has ended well already."""
        try:
            note_policy(policy, f"job {fl_ctx.get_job_id()}")
        except (VeilBoostError, OSError, ValueError) as error:
            self.log_warning(fl_ctx, f"the trail of the policy was not written: {error_text(error)}")

    def _run(self, task: JobTask, fl_ctx: FLContext, abort_signal: Signal, policy: SitePolicy) -> JobResult:
        site, kind = fl_ctx.get_identity_name(), kind_of(self.kind)
        context = SiteContext(
            site,
            task.sites,
            fl_ctx.get_job_id(),
            bytes.fromhex(task.attempt),
            policy.runs,
            policy,
            load_identity(policy.workspace, site),
            task.number,
            job_name(_run_folder(fl_ctx)),
            task.protocols,
            task.pinned,
        )
        waits_s = waiting_s(task.job)
        if waits_s is not None:
            run = _run_folder(fl_ctx)
            if noted_attempt(run) == task.attempt:  # FLARE gives the task of a process that died to the next one
                if (done := self._end_late(task.job, context, abort_signal)) is not None:
                    return done
                raise _DiedBefore("its job process had ended in the middle of this attempt, and another one is there")
            note_waiting(run, waits_s, task.attempt)
            if self._ready is not None:
                self._ready.takes_part(task.attempt)
        transport = SiteTransport(fl_ctx.get_engine().get_cell().core_cell, task.server, task.attempt)
        progress = ProgressLog(lambda text: self.log_info(fl_ctx, text), self._metric_sender(task, site, fl_ctx))
        attempt = "" if task.number == 1 else f" in attempt {task.number} of the job"
        progress.say(f"taking part{attempt} with {', '.join(task.sites)} under profile {task.job.profile}")
        timeout_s = timeouts.site_timeout_s(task.job)
        self._beats = Beats(transport.beat)
        guard = Guard(policy.workspace / fl_ctx.get_job_id())
        watch = self._watch = Watch(transport, self._beats, abort_signal, progress.heartbeat)
        metrics = _metrics(kind.name, task, context)
        counted, shown = metrics.metered(transport), metrics.watched(progress)
        try:
            with metrics.running(lambda: transport.waiting_s):
                part = lambda: kind.run(task.job, context, counted, timeout_s, shown)  # noqa: E731
                return watch.wait(Work(lambda: self._to_the_end(part, task.job, context, abort_signal)))
        except Stuck:
            guard.arm(JobReturnCode.ABORTED if abort_signal.triggered else JobReturnCode.EXCEPTION)
            raise
        finally:
            guard.dismiss()
            if watch.server_is_gone:  # FLARE would try without end to hand the report over
                self.system_panic(f"VeilBoost job failed: {transport.abort_reason}", fl_ctx)

    def _to_the_end(
        self, part: Callable[[], JobResult], job: Job, context: SiteContext, abort_signal: Signal
    ) -> JobResult:
        """Do this site's part; a full disk after all sites had their result, in a job that waits, ends nothing."""
        try:
            return part()
        except OSError as error:
            late = self._end_late(job, context, abort_signal) if self._waits and time_mends(error) else None
            if late is None:
                raise
            return late

    def _end_late(self, job: Job, context: SiteContext, abort_signal: Signal) -> JobResult | None:
        """As ``end_late``, once this site's disk takes it. Raises: VeilBoostError, OSError."""
        while True:
            try:
                return end_late(job, context, kind_of(self.kind).kept)
            except OSError as error:
                if not time_mends(error) or abort_signal.triggered:
                    raise
                self.logger.warning(f"all sites have their result; this one's record waits: {error_text(error)}")
            time.sleep(timeouts.FIRST_PAUSE_S)

    def _metric_sender(self, task: JobTask, site: str, fl_ctx: FLContext) -> Callable[[str, float, int], None] | None:
        """Return a function that streams one metric to the server, at one site only."""
        if not task.job.tracking or site != kind_of(self.kind).metrics_site(task.job, task.sites):
            return None
        engine = fl_ctx.get_engine()

        def send(name: str, value: float, step: int) -> None:
            dxo = create_analytic_dxo(name, value, AnalyticsDataType.SCALAR, global_step=step)
            with engine.new_context() as context:
                send_analytic_dxo(self, dxo, context, METRICS_EVENT, fire_fed_event=True)

        return send


class ProgressLog:
    """Writes progress that a person can follow: rounds at most once a second, and a sign of life in long silences."""

    def __init__(
        self, log: Callable[[str], None], send_metric: Callable[[str, float, int], None] | None = None
    ) -> None:
        self._log = log
        self._send_metric = send_metric
        self._last_line = time.monotonic()
        self._patience_s = timeouts.HEARTBEAT_S

    def __call__(self, record: RoundRow, n_rounds: int) -> None:
        """Take note of a finished round."""
        if self._send_metric is not None:
            for name, value in record.metrics.items():
                self._send_metric(name, value, record.round)
        is_last = record.round + 1 >= n_rounds
        if is_last or record.round == 0 or time.monotonic() - self._last_line >= 1.0:
            metrics = "".join(f", {name} {value:.5f}" for name, value in record.metrics.items())
            self.say(f"round {record.round + 1} of {n_rounds}: {record.seconds:.2f} s{metrics}")

    def heartbeat(self, waiting_s: float | None) -> None:
        """Say what the site is doing if nothing was written for a while."""
        silent_s = time.monotonic() - self._last_line
        if silent_s < self._patience_s:
            return
        # A job that stays may have nothing to tell for days.
        patience_s = min(2 * self._patience_s, timeouts.LONGEST_SILENCE_S)
        if waiting_s is not None and waiting_s >= timeouts.HEARTBEAT_S / 2:
            self.say(f"waiting for the other sites since {waiting_s:.0f} s")
        else:
            self.say(f"still working; the last line is {silent_s:.0f} s old")
        self._patience_s = patience_s

    def say(self, text: str) -> None:
        """Write one line."""
        self._last_line, self._patience_s = time.monotonic(), timeouts.HEARTBEAT_S
        self._log(text)

    def note_workers(self, work: Sequence[WorkOfWorker]) -> None:
        """Take no note: lines on workers come as others do."""


def _metrics(kind: str, task: JobTask, context: SiteContext) -> SiteMetrics:
    """Return this site's own numbers of the attempt; nothing is written unless the site's environment says where."""
    labels = (("site", context.site), ("job_id", context.job_id), ("kind", kind), ("profile", task.job.profile))
    policy = context.policy
    return SiteMetrics(
        MetricsFile(metrics_folder(), context.site, context.job_id),
        labels,
        context.number,
        lambda: spending_of(policy, policy.data_sets),
    )


def error_text(error: Exception) -> str:
    """Return what may be told to other parties: our own messages hold no data, those of libraries might."""
    if isinstance(error, JobAborted):
        return str(error)
    if isinstance(error, VeilBoostError):
        text = reason_of(error)
        is_plain = isinstance(error, (ConfigurationError, PolicyRefusal)) or text != str(error)
        return text if is_plain else f"{type(error).__name__}: {text}"
    return machine_failure(error) or f"{reason_of(error)}; see the log of that site"


def _hear_refusal(task: Shareable) -> None:
    """Raise JobAborted: the server says in its task why the job ends before any attempt."""
    if isinstance(reason := task.get(REFUSED), str):
        raise JobAborted(f"the job ends before it began, says the server: {printable(reason, MAX_ERROR_CHARS)}")


def _place(error: Exception, workspace: Path) -> str:
    """Return, for this site's own log, where a file stands that could not be used; never its name."""
    name = error.filename if isinstance(error, OSError) else None
    if not isinstance(name, (str, bytes)):
        return ""
    inside = Path(os.fsdecode(name)).absolute().is_relative_to(workspace.absolute())
    return f" (a file {'in' if inside else 'outside of'} this site's workspace)"


def _run_folder(fl_ctx: FLContext) -> Path:
    """Return the job's folder in FLARE's workspace."""
    return Path(fl_ctx.get_engine().get_workspace().get_root_dir()) / str(fl_ctx.get_job_id())


def is_job_name(name: str) -> bool:
    """Tell whether FLARE takes a name for a job's, and a file system for a folder's."""
    return re.fullmatch(JOB_NAME_PATTERN, name) is not None and len(name) <= LONGEST_NAME


def job_name(run: Path) -> str:
    """Return the name in the job's metadata, which FLARE puts beside the app; "" for what it would take for none."""
    try:
        name = json.loads((run / WorkspaceConstants.JOB_META_FILE).read_bytes())["name"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return ""
    return name if isinstance(name, str) and is_job_name(name) else ""


def _earlier(evidence: Path | None) -> dict[int, bytes]:
    """Return this site's evidence of attempts that ended before, by the number of the attempt after them."""
    if evidence is None or not evidence.parent.parent.is_dir():
        return {}
    return {number: _content(path) for number, paths in set_aside(evidence.parent.parent).items() for path in paths[:1]}


def _content(evidence: Path | None) -> bytes:
    """Return the site's finished evidence log, if there is one that can be read."""
    try:
        return evidence.read_bytes() if evidence is not None and evidence.is_file() else b""
    except (OSError, MemoryError):
        return b""
