"""What FLARE runs on the server: one task per site, and the aggregation of its frames without any key."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import CellMessageAuthHeaderKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.private.fed.simulator.simulator_const import SimulatorConstants

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.job_context import Job, attempts_of, goes_on_without, waiting_s
from nvflare_plugins.base.checks import checked_sites, shown
from nvflare_plugins.base.errors import machine_failure, reason_of, time_mends
from nvflare_plugins.evidence.format import is_name
from nvflare_plugins.flare import timeouts
from nvflare_plugins.flare.attempt import FAILED, RESULT_FOLDER, ServedJob, ServerAttempt, note_refusal
from nvflare_plugins.flare.kept_jobs import (
    TOPIC_LIVES,
    Lead,
    note_over,
    note_waiting,
    noted_attempt,
    noted_lead,
)
from nvflare_plugins.flare.kinds import kind_of
from nvflare_plugins.flare.loading import MOST_CHARS, TOPIC_FAULT, note_step
from nvflare_plugins.flare.metrics import MetricsFile, ServerMetrics, metrics_folder
from nvflare_plugins.flare.presence import Presence
from nvflare_plugins.flare.transport import CHANNEL
from nvflare_plugins.pooled.processors import check_plugin
from nvflare_plugins.site.flare_boundary import check_set_up, check_tracking
from nvflare_plugins.site.policy import hash_pinned_by_server, load_adder
from nvflare_plugins.site.protocols import PROTOCOLS
from nvflare_plugins.wire.aggregation import OpenSum
from nvflare_plugins.wire.profiles import SCHEME, plugin_of

TRAIN_TASK = "veilboost_train"
LEFT_OUT = "left_out"
"""In a task for a site that is back and that the job goes on without."""
REFUSED = "refused"
"""In a task by which all sites hear why there is no attempt."""
NOT_SIMULATED = (
    "FLARE's simulator starts no site's process again, so that nobody is waited for. Remedy: run the job anew; in a "
    "POC or in production it goes on"
)
RESTARTED = "the server's process of this job had ended, and another one leads the job now"
NOISE_IS_GONE = (
    "the server's process of this job had ended, and with it what it knew of noise that it had drawn: it draws none "
    "again for what it has answered. Remedy: submit the job anew"
)
_FOR_EVER_S = 30 * 86400.0


class JobController(Controller):
    """Runs one job of any kind over the sites that FLARE gives it.

    Args:
        job: the job (``to_dict()`` of its class).
        sites: sites that must take part; None means every site that FLARE assigned to the job.
        min_clients: fewest sites that must take part.
        kind: name of the job's kind (kinds.py).
    """

    def __init__(
        self,
        job: dict[str, Any],
        sites: list[str] | None = None,
        min_clients: int = 3,
        task_check_period: float = 0.2,
        kind: str = "",
    ) -> None:
        super().__init__(task_check_period=task_check_period)
        self.kind = kind
        self.job = job
        self.sites = sites
        self.min_clients = min_clients
        self._attempt: ServerAttempt | None = None
        self._pinned = ""
        self._parent = os.getppid()

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare: everything happens in control_flow."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to release: control_flow has finished the attempt."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Ignore it: it belongs to a task that has already ended."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """End the job when a site of it has gone."""
        attempt = self._attempt
        if event_type == EventType.CLIENT_DISCONNECTED and attempt is not None:
            name = fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME)
            if name in attempt.missing:
                attempt.lose([str(name)], f"{name} has gone: its job process no longer answers")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the attempt; a failure ends the FLARE job with one clear reason."""
        note_step(None, self._run_folder(fl_ctx))
        try:
            check_set_up(Path(self._engine.get_workspace().get_root_dir()), "the server")
            check_tracking(self._engine.run_manager.components.values())
            job = kind_of(self.kind).job.from_dict(self.job)
            clients = self._wait_for_sites(abort_signal)
            self._check_can_be_fewer(job, len(clients))
            self._be_patient(_FOR_EVER_S if goes_on_without(job) else waiting_s(job))
            reason = self._run(job, clients, abort_signal, fl_ctx) if clients else "aborted before it began"
        except Exception as error:  # the edge of the process: FLARE would end the job without saying why
            reason = reason_of(error)
            if machine_failure(error) is not None:
                reason = f"the server could not go on: {reason}"
            elif not isinstance(error, VeilBoostError):
                self.log_exception(fl_ctx, f"a defect of VeilBoost or of its set-up, please report it: {reason}")
            if self._attempt is not None:
                self._attempt.abandon(reason)
            else:
                self._refuse(reason, abort_signal, fl_ctx)
        note_over(self._run_folder(fl_ctx))
        if reason is not None:
            self.system_panic(f"VeilBoost job failed: {reason}", fl_ctx)

    def _refuse(self, reason: str, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Say why the job ends before any attempt: in the summary, and to the sites that are there or come soon."""
        try:
            with contextlib.suppress(OSError):  # a full disk keeps no site from hearing why
                note_refusal(self._run_folder(fl_ctx) / RESULT_FOLDER, fl_ctx.get_job_id(), reason)
            data, deaf = Shareable(), {client.name for client in self._engine.get_clients()}
            data[REFUSED] = reason
            on_result = lambda client_task, fl_ctx: deaf.discard(client_task.client.name)  # noqa: E731
            task = Task(name=TRAIN_TASK, data=data, result_received_cb=on_result)
            self.broadcast(task=task, fl_ctx=fl_ctx, targets=sorted(deaf), min_responses=0)
            deadline = time.monotonic() + timeouts.START_TIMEOUT_S
            while deaf and not abort_signal.triggered and time.monotonic() < deadline:
                time.sleep(self._task_check_period)
            self.cancel_task(task)
        except Exception as error:  # the job's end and its reason stay
            self.log_warning(fl_ctx, f"not all can be told why the job is refused: {type(error).__name__}")

    def _run_folder(self, fl_ctx: FLContext) -> Path:
        return Path(self._engine.get_workspace().get_run_dir(fl_ctx.get_job_id()))

    def _check_can_be_fewer(self, job: Job, n_sites: int) -> None:
        """Refuse a job that is to go on without a site, and never could. Raises: ConfigurationError."""
        least = max(2, self.min_clients)
        if goes_on_without(job) and 0 < n_sites <= least:
            raise ConfigurationError(
                f"on_lost_site='continue' could never go on: the job has {n_sites} sites, and {least} must be left. "
                "Remedy: min_clients, the fewest sites that may be left, at least 2 and below the number of sites; or "
                "on_lost_site='wait'"
            )

    def _be_patient(self, waits_s: float | None) -> None:
        """Have FLARE end the job for want of sites no sooner than the job itself does."""
        if waits_s is not None and self.communicator is not None:
            self.communicator._dead_client_grace = waits_s + timeouts.SILENCE_LIMIT_S

    def _wait_for_sites(self, abort_signal: Signal) -> list[Client]:
        """Return the clients that take part, by name; none if the job was aborted meanwhile.

        Raises:
            ConfigurationError: they are not there in time, or are not named as a list.
        """
        named = checked_sites(self.sites)
        deadline = time.monotonic() + timeouts.START_TIMEOUT_S
        while not abort_signal.triggered:
            clients = {client.name: client for client in self._engine.get_clients()}
            wanted = named or sorted(clients)
            missing = [name for name in wanted if name not in clients]
            if not missing and len(wanted) >= self.min_clients:
                return [clients[name] for name in wanted]
            if time.monotonic() > deadline:
                enough = f"{len(wanted)} of the {self.min_clients} that min_clients asks for"
                what = f"missing: {', '.join(missing)}" if missing else enough
                raise ConfigurationError(
                    f"the job's sites were not there within {timeouts.START_TIMEOUT_S:.0f} s ({what})"
                )
            time.sleep(0.5)
        return []

    def _open_plugin(self, job: Job) -> OpenSum | None:
        """Return what adds messages of the job's plugin, where this server pins it.

        Raises:
            PolicyRefusal, ConfigurationError: it does not pin a plugin that it has to, or other files are installed.
        """
        name, workspace = plugin_of(job.profile), Path(self._engine.get_workspace().get_root_dir())
        if name is not None and SCHEME.fullmatch(job.profile):
            self._pinned = hash_pinned_by_server(workspace, name)
            return None
        loaded = None if name is None else load_adder(workspace, name)
        return None if loaded is None or name is None else check_plugin(loaded, name).add

    def _run(self, job: Job, clients: list[Client], abort_signal: Signal, fl_ctx: FLContext) -> str | None:
        job_id, waits_s = fl_ctx.get_job_id(), waiting_s(job)
        _check_names(clients)
        site_cells = {client.name: f"{client.get_fqcn()}.{job_id}" for client in clients}
        self._hear_of_sites(clients)
        patience = None if waits_s is None else _Patience(self._presence(clients, site_cells), waits_s)
        workspace = Path(self._engine.get_workspace().get_root_dir())
        standing = _Standing(self._run_folder(fl_ctx), clients, patience)
        on_sum = kind_of(self.kind).answer_sum(job, len(clients), workspace)
        served = ServedJob(
            job_id,
            job.profile,
            folder=self._run_folder(fl_ctx) / RESULT_FOLDER,
            deadline_s=timeouts.exchange_deadline_s(job),
            transfer_s=None if job.deadline_s else timeouts.transfer_s,
            on_sum=on_sum,
            metrics=self._metrics(job, job_id),
            open_plugin=self._open_plugin(job),
            before=standing.before(RESTARTED if on_sum is None else NOISE_IS_GONE),
            waits_s=None if job_id == SimulatorConstants.JOB_NAME else waits_s,
        )
        taking_part = standing.members
        while True:
            cells = {site: site_cells[site] for site in taking_part}
            attempt, task = self._begin(job, served, standing, cells, fl_ctx)
            tell_left_out = partial(self._tell_left_out, attempt, set(site_cells) - set(taking_part), patience, fl_ctx)
            self._supervise(attempt, task, standing, abort_signal, tell_left_out)
            reason = self._finish(attempt, patience, abort_signal)
            # Without sites that it still waits for; or it went on, and goes on from the next state beside.
            is_tried = attempt.cannot_go_on and (taking_part != standing.members or attempt.has_summed)
            if patience is None or reason is None or not (attempt.lost or is_tried):
                self.log_info(fl_ctx, "all sites ended with the same result" if reason is None else "the job failed")
                return reason
            self.log_warning(fl_ctx, f"attempt {attempt.number} has ended, and the job waits: {reason}")
            if job_id == SimulatorConstants.JOB_NAME:
                return attempt.was_the_last(NOT_SIMULATED)
            standing.look(attempt)
            may_go_on = goes_on_without(job) and not is_tried
            ends = _why_the_last(attempt, attempts_of(job)) or self._wait_for_return(
                attempt, standing, patience, abort_signal, may_go_on=may_go_on
            )
            if isinstance(ends, str):
                return attempt.was_the_last(ends)
            taking_part = ends
            if taking_part != standing.members:
                missing = sorted(set(standing.members) - set(taking_part))
                self.log_warning(fl_ctx, f"the job tries to go on without {', '.join(missing)}")

    def _hear_of_sites(self, clients: list[Client]) -> None:
        self._site_of_parent = {client.get_fqcn(): client.name for client in clients}
        cell = self._engine.get_cell().core_cell
        cell.register_request_cb(CHANNEL, TOPIC_FAULT, self._on_fault)
        cell.register_request_cb(CHANNEL, TOPIC_LIVES, self._on_life)

    def _finish(self, attempt: ServerAttempt, patience: _Patience | None, abort_signal: Signal) -> str | None:
        """Finish an attempt; where the job waits, once this server's disk takes what it leaves. Raises: OSError."""
        pause = None
        while True:
            try:
                return attempt.finish()
            except OSError as error:
                if patience is None or not time_mends(error) or abort_signal.triggered:
                    raise
                pause = pause or _Pause(self, patience)
                if pause.is_over:
                    raise
                pause.tell(["the server"], reason_of(error))
            time.sleep(timeouts.EXPIRE_POLL_S)

    def _presence(self, clients: list[Client], site_cells: Mapping[str, str]) -> Presence:
        tokens = {client.name: client.token for client in clients}
        return Presence(self._engine.get_cell().core_cell, site_cells, tokens, self._take_token)

    def _begin(
        self, job: Job, served: ServedJob, standing: _Standing, taking_part: Mapping[str, str], fl_ctx: FLContext
    ) -> tuple[ServerAttempt, Task | None]:
        """Begin the next attempt; before any site hears of it, it is noted that it was begun."""
        cell = self._engine.get_cell().core_cell
        without, number = standing.sites - set(taking_part), standing.take_number()
        attempt = ServerAttempt(served, cell=cell, site_cells=taking_part, number=number, without=without)
        self._attempt = attempt
        if served.before is not None and served.on_sum is not None:
            attempt.fail(NOISE_IS_GONE)
            return attempt, None
        standing.begin(attempt)
        self.log_info(fl_ctx, f"running with {', '.join(attempt.sites)} under profile {job.profile}")
        task = self._task(job, attempt, cell.get_fqcn())
        if standing.patience is not None:
            standing.patience.presence.begin(attempt.attempt)
        self.broadcast(task=task, fl_ctx=fl_ctx, targets=list(attempt.sites), min_responses=0)
        return attempt, task

    def _metrics(self, job: Job, job_id: str) -> ServerMetrics:
        labels = (("job_id", job_id), ("kind", kind_of(self.kind).name), ("profile", job.profile))
        return ServerMetrics(MetricsFile(metrics_folder(), "server", job_id), labels)

    def _wait_for_return(
        self, attempt: ServerAttempt, standing: _Standing, patience: _Patience, abort_signal: Signal, *, may_go_on: bool
    ) -> str | list[str]:
        """Wait until a process of every site is there for the next attempt.

        Args:
            standing: of the job.
            may_go_on: without those that are lost, if enough are left.

        Returns:
            The sites of the next attempt, or why the job ends instead.
        """
        members, pause, waits_s = standing.members, _Pause(self, patience), patience.waits_s
        began, reminded = time.monotonic(), float("-inf")
        while True:
            now = time.monotonic()
            absent = [site for site in patience.presence.absent() if site in members]
            left = [site for site in members if site not in absent]
            if not absent:
                return members
            patience_s = timeouts.GO_ON_AFTER_S if set(absent) <= set(attempt.lost) else timeouts.GIVE_UP_AFTER_S
            if may_go_on and len(left) >= max(2, self.min_clients) and now - began > min(patience_s, waits_s):
                return left
            if abort_signal.triggered:
                self._end_with_parent(standing)
                return "aborted while it waited for them"
            pause.tell(absent, attempt.reason or "")
            if pause.is_over:
                return f"not back within lost_site_deadline_s ({waits_s:g} s): {', '.join(absent)}"
            if now - reminded > timeouts.REMIND_INTERVAL_S:
                attempt.remind()
                reminded = now
            time.sleep(min(timeouts.EXPIRE_POLL_S, self._task_check_period))

    def _on_life(self, message: Message) -> None:
        """Take from this server's own FLARE process that it had a heartbeat of a site's."""
        attempt, payload = self._attempt, message.payload
        if message.get_header(MessageHeaderKey.ORIGIN) != FQCN.ROOT_SERVER or attempt is None:
            return
        site = bytes(payload).decode("utf-8", "replace") if isinstance(payload, (bytes, bytearray, memoryview)) else ""
        if site in attempt.sites:
            attempt.lives(site)

    def _on_fault(self, message: Message) -> Message:
        """Take from a site's FLARE process why the job's process there could not begin: its part has failed."""
        site = self._site_of_parent.get(message.get_header(MessageHeaderKey.ORIGIN))
        is_site = site is not None and message.get_header(CellMessageAuthHeaderKey.CLIENT_NAME) == site
        payload, attempt = message.payload, self._attempt
        if site is None or not is_site or not isinstance(payload, (bytes, bytearray, memoryview)):
            return make_reply(CellReturnCode.INVALID_REQUEST)
        if attempt is None:
            return make_reply(CellReturnCode.SERVICE_UNAVAILABLE)
        if site in attempt.missing:
            text = bytes(payload[: 2 * MOST_CHARS]).decode("utf-8", "replace")
            attempt.add_report(site, {"status": FAILED, "error": text})
        return make_reply(CellReturnCode.OK)

    def _tell_left_out(
        self, attempt: ServerAttempt, sites: set[str], patience: _Patience | None, fl_ctx: FLContext
    ) -> None:
        """Tell each site that an attempt goes on without, once it is back and rounds are trained without it.

        It hands in its evidence and is done.
        """

        def on_result(client_task: ClientTask, fl_ctx: FLContext) -> None:
            attempt.add_left_out(client_task.client.name, _report_of(client_task.result))

        if patience is None or not attempt.has_trained:
            return
        for site in sorted(filter(patience.presence.is_ready, sites)):
            sites.discard(site)
            self.log_info(fl_ctx, f"{site} is back and is told that the job goes on without it")
            data = Shareable()
            data.update({LEFT_OUT: True, "sites": attempt.sites, "number": attempt.number})
            task = Task(name=TRAIN_TASK, data=data, result_received_cb=on_result)
            self.broadcast(task=task, fl_ctx=fl_ctx, targets=[site], min_responses=0)

    def _take_token(self, site: str, token: str) -> None:
        """Let FLARE's process for the job know a site that came back as a new client; FLARE has checked the token."""
        manager = self._engine.client_manager
        with manager.lock:
            before = [known for known, client in manager.clients.items() if client.name == site]
            if token in before or not before:
                return
            client = Client(site, token)
            client.props = dict(manager.clients[before[-1]].props)
            for known in before:
                del manager.clients[known]
            manager.clients[token] = manager.name_to_clients[site] = client
        self.logger.info("%s is back as a new client", site)

    def _task(self, job: Job, attempt: ServerAttempt, server: str) -> Task:
        data = Shareable()
        data.update({"job": job.stated(), "sites": attempt.sites, "attempt": attempt.attempt, "server": server})
        data.update({"number": attempt.number, "protocols": list(PROTOCOLS[job.KIND]), "pinned": self._pinned})

        def on_result(client_task: ClientTask, fl_ctx: FLContext) -> None:
            attempt.add_report(client_task.client.name, _report_of(client_task.result))

        return Task(name=TRAIN_TASK, data=data, result_received_cb=on_result)

    def _supervise(
        self,
        attempt: ServerAttempt,
        task: Task | None,
        standing: _Standing,
        abort_signal: Signal,
        tell_left_out: Callable[[], None],
    ) -> None:
        """Return when every site that is not gone has reported, or some time after a failure at the latest.

        A site whose process still starts then is to hear why, too; where the job waits, it would else not be heard of.
        """
        presence = None if standing.patience is None else standing.patience.presence
        start_s = timeouts.START_TIMEOUT_S if presence is None else timeouts.START_SILENCE_S
        give_up_at, started_by = float("inf"), time.monotonic() + start_s
        while attempt.awaited:
            heard, replaced = ([], []) if presence is None else (presence.heard(), presence.replaced())
            for site in heard:
                attempt.lives(site)
            attempt.poll()
            replaced = [site for site in replaced if site in attempt.sites]
            tell_left_out()
            standing.look(attempt)
            if replaced:
                attempt.lose(replaced, f"{', '.join(replaced)}: its job process had ended, and another one is there")
            if abort_signal.triggered:
                self._end_with_parent(standing)
                attempt.stop()
                break
            now = time.monotonic()
            if attempt.reason is not None and (give_up_at == float("inf") or (attempt.starting and now < started_by)):
                give_up_at = now + timeouts.ABORT_GRACE_S
            if now > give_up_at:
                break
            time.sleep(min(timeouts.EXPIRE_POLL_S, self._task_check_period))
        if task is not None:
            self.cancel_task(task)

    def _end_with_parent(self, standing: _Standing) -> None:
        """End here and now where FLARE's process of the server has: that is started again, and starts this one again.

        It reaches nobody any more, and must not call its own end that of the job.
        """
        if standing.patience is not None and os.getppid() != self._parent:
            self.logger.error("FLARE's process of this server has ended: the job goes on when that is started again")
            os._exit(JobReturnCode.ABORTED)


def _check_names(clients: list[Client]) -> None:
    unusable = [client.name for client in clients if not is_name(client.name)]
    if unusable:
        raise ConfigurationError(
            f"a site is called {shown(unusable[0])}: a name has up to 128 letters, digits and _ . @ - or blanks. "
            "Provision it under another name"
        )


@dataclass(frozen=True, slots=True)
class _Patience:
    """How a job waits for lost sites. Attributes: presence: of the sites' processes; waits_s: at most."""

    presence: Presence
    waits_s: float


class _Pause:
    """A time in which a job waits: a line a minute, here and at all sites, says for whom and until when."""

    def __init__(self, controller: JobController, patience: _Patience) -> None:
        self._controller, self._presence, waits_s = controller, patience.presence, patience.waits_s
        self._ends, self._until = time.monotonic() + waits_s, datetime.now(UTC) + timedelta(seconds=min(waits_s, 1e8))
        self._said = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether it has lasted as long as it may."""
        return time.monotonic() > self._ends

    def tell(self, absent: Iterable[str], why: str) -> None:
        """Say so, if the last line is a minute old."""
        now = time.monotonic()
        if now - self._said < timeouts.PAUSE_LINE_S:
            return
        self._said = now
        text = f"the job waits for {', '.join(absent)}, until {self._until:%Y-%m-%d %H:%M:%S} UTC by the server's clock"
        self._controller.logger.warning("%s: %s", text, why)
        self._presence.tell(f"{text}: {why}")


def _why_the_last(attempt: ServerAttempt, most: int) -> str | None:
    if attempt.has_completed:
        return "other sites had finished by then: their results are whole, and there is nothing to go on with"
    if attempt.number >= most:
        return f"this was attempt {attempt.number}, the last that a job has (most_attempts)"
    return None


class _Standing:
    """Where a job stands: the attempt that is led, and the sites that the job is of by now.

    Of a job that waits for lost sites it is noted, for the process that takes this one's place should it die.
    """

    def __init__(self, run: Path, clients: list[Client], patience: _Patience | None) -> None:
        self._run, self.patience = run, patience
        cells = {client.name: client.get_fqcn() for client in clients}
        lead = None if patience is None else noted_lead(run)
        self._lead, self._attempt = lead or Lead(0, sorted(cells), cells), noted_attempt(run)
        self.sites = set(cells)

    @property
    def number(self) -> int:
        """Of the attempt that was begun last; 0 if none was."""
        return self._lead.number

    @property
    def members(self) -> list[str]:
        """The sites that the job is of by now."""
        return self._lead.members

    def before(self, why: str) -> tuple[str, str] | None:
        """Return the attempt that another process has led, and why that has ended; None if there was none."""
        return (self._attempt or "", why) if self.number else None

    def take_number(self) -> int:
        """Return the number of the next attempt; no process takes it again, whose log would be in the way."""
        self._note(replace(self._lead, number=self.number + 1))
        return self.number

    def begin(self, attempt: ServerAttempt) -> None:
        """An attempt begins; before any site hears of it."""
        self._attempt = attempt.attempt
        self._note(self._lead)

    def look(self, attempt: ServerAttempt) -> None:
        """Once an attempt got a sum, the sites that it runs without are no part of the job any more."""
        if attempt.has_summed and attempt.sites != self.members:
            self._note(replace(self._lead, members=attempt.sites))

    def _note(self, lead: Lead) -> None:
        self._lead = lead
        if self.patience is not None and self._attempt is not None:
            note_waiting(self._run, self.patience.waits_s, self._attempt, lead)


def _report_of(result: Shareable) -> dict[str, Any]:
    """Return the site's report; a site that could not even run the task gives FLARE's return code instead."""
    if "status" in result:
        return dict(result)
    code = result.get_return_code(ReturnCode.OK)
    if code == ReturnCode.TASK_ABORTED:
        return {"status": FAILED, "error": "an operator, or FLARE there, aborted its task"}
    return {"status": FAILED, "error": f"FLARE could not run the task there ({code}); see that site's log"}
