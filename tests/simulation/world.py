"""Jobs in one simulated world: server, sites, FLARE's messages and disks, and what befalls them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from nvflare.apis.event_type import EventType
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils.class_utils import instantiate_class

from nvflare_plugins.flare import timeouts
from nvflare_plugins.flare.attempt import RESULT_FOLDER
from nvflare_plugins.flare.controller import TRAIN_TASK
from nvflare_plugins.flare.kept_jobs import count_start, is_noted, note_waiting, noted_attempt, noted_lead
from nvflare_plugins.flare.transport import CHANNEL
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.site.setup import set_up
from tests.simulation.disk import Disks, Fault
from tests.simulation.prepared import described
from tests.simulation.scheduler import Scheduler, Stopped, drain
from tests.simulation.stand_ins import simulated
from tests.simulation.watchdog import guarded
from tests.support.federation import Parties
from tests.support.flare_job import Finished, _Context
from tests.support.flare_network import FakeCell, Network

SERVER = "server"
ABANDONED = "abandoned: its server had died before any site heard of it, or too often"
LONGEST_S = 7200.0
"""Virtual time within which every job must be over, whatever befalls it."""

RESTART_S, MOST_STARTS = 1.0, 10
"""After how long a process that ended for no reason of the job's is started again, and how often the server's is."""

POLL_S = 1.0
"""How often controller and sites look whether something ends the job. They do so five times as often; most of a long
silence would be spent on it."""


@dataclass(frozen=True)
class Delivery:
    """A message on its way.

    Attributes:
        number: of the messages between these two ends, from 1 on.
        seconds: virtual time since the world began.
        label: what the transport says of the piece: attempt, number of the frame, its size, where the piece belongs.
    """

    job_id: str
    origin: str
    target: str
    topic: str
    payload: bytes | None
    number: int
    seconds: float
    label: tuple[object, ...] = ()


Fate = Callable[[Delivery], list[tuple[float, bytes | None]]]
"""What becomes of a message: for each copy that arrives, the delay and the payload."""

ToSite = Callable[[str, dict[str, Any]], dict[str, Any]]
"""(site, document) -> what takes its place."""


def as_it_is(site: str, document: dict[str, Any]) -> dict[str, Any]:
    """Change nothing."""
    return document


@dataclass(frozen=True)
class Loss:
    """A site's process, or the server's, or its machine, that dies.

    Attributes:
        n_sent: it dies with the message that it sends after so many.
        back_after_s: it is there again after so long; None if never.
        loses_power: the machine does.
        is_old: the server comes back with a note of an earlier attempt, as from a backup.
    """

    site: str
    n_sent: int
    back_after_s: float | None
    loses_power: bool
    is_old: bool = False


@dataclass
class Machines:
    """What a run does to machines.

    Attributes:
        losses: in the order in which they come.
        disk: what befalls changes of disks.
        events: (virtual time, what happens then).
        loses_power: of a machine that dies; else its process was killed, and the disk has all that was written.
        terms: what the server tells each site of the job.
        report: what a site hands in at its end.
    """

    disk: Fault = lambda owner, count: None
    events: list[tuple[float, Callable[[World], None]]] = field(default_factory=list)
    loses_power: bool = False
    terms: ToSite = as_it_is
    report: ToSite = as_it_is
    losses: list[Loss] = field(default_factory=list)


@dataclass(frozen=True)
class Submission:
    """A job, and when it is submitted, in virtual seconds."""

    job_id: str
    recipe: JobRecipe
    starts_s: float = 0.0


@dataclass
class Outcome(Finished):
    """How a job ended.

    Attributes:
        dead: machines that were gone at the end, with the virtual time since the world began at which they died.
        left: folders of dead machines as they were when they died.
        messages: all that were sent, in order.
        heard: origin and target of every message of the job that arrived.
        started, seconds: virtual time since the world began at which the job began, and that it took.
        forgotten: attempts of which the server's log is gone: it came back as it was before them.
        hasty: sites with which an attempt began while their disk was full, as they had said.
    """

    dead: dict[str, float] = field(default_factory=dict)
    left: dict[str, Path] = field(default_factory=dict)
    messages: list[Delivery] = field(default_factory=list)
    heard: set[tuple[str, str]] = field(default_factory=set)
    started: float = 0.0
    seconds: float = 0.0
    is_over: bool = True
    forgotten: set[str] = field(default_factory=set)
    hasty: set[str] = field(default_factory=set)


@dataclass
class _Running:
    """A job that goes on."""

    submission: Submission
    signal: Signal = field(default_factory=Signal)
    said: list[str] = field(default_factory=list)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    started: float = 0.0
    is_broadcast: bool = False
    waits: bool = False  # for sites that are lost
    is_controlled: bool = True  # until the server's part is over
    tasks: dict[str, Any] = field(default_factory=dict)
    process: Callable[[str], None] = lambda site: None
    control: Callable[[], None] = lambda: None
    attempts: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)
    hasty: set[str] = field(default_factory=set)
    is_led: bool = True  # or will be again: the server's machine is there, or comes back


class World:
    """Machines on one network; use as a context, and run jobs in it."""

    def __init__(self, seed: int, parties: Parties, fate: Fate, machines: Machines) -> None:
        self.scheduler = Scheduler(seed)
        self.parties, self.fate, self.machines = parties, fate, machines
        self.everybody = (SERVER, *parties.sites)
        self.messages: list[Delivery] = []
        self.left: dict[str, Path] = {}
        self.died: dict[str, float] = {}
        self.heard: set[tuple[str, str, str]] = set()
        self.lives = dict.fromkeys(self.everybody, 0)  # how often each has died
        self.running: list[_Running] = []
        self.began = self.scheduler.now
        self.disks = Disks(self.root, lambda: self._owner(), self._fault, self._die, self._pass)
        self._wire = _Wire(self)
        self._dice = random.Random(f"power {seed}")
        self._n_between: dict[tuple[str, str], int] = {}
        self.n_sent = dict.fromkeys(self.everybody, 0)

    @property
    def seconds(self) -> float:
        """Virtual time since the world began."""
        return self.scheduler.now - self.began

    def root(self, owner: str) -> Path:
        """Folder of a machine."""
        return self.parties.folder / SERVER if owner == SERVER else self.parties.workspace(owner)

    @contextmanager
    def __call__(self) -> Iterator[World]:
        """Let the world go on; nothing of it is left behind, but for the tasks of machines that died."""
        set_up(self.root(SERVER))  # the sites are
        for owner in self.everybody:
            self.disks.begin(owner)
        with (
            guarded(self.scheduler),
            simulated(self.scheduler),
            self.disks.at_work(),
            patch.object(timeouts, "ABORT_POLL_S", POLL_S),
        ):
            for moment, event in self.machines.events:
                self.scheduler.at(moment, lambda event=event: event(self))
            try:
                yield self
            finally:
                self.scheduler.stop()
                drain(self.scheduler)
        if self.scheduler.failure is not None:
            raise self.scheduler.failure

    # -- machines -----------------------------------------------------------------------------------------------------

    def kill(self, owner: str) -> None:
        """End a machine here and now, and keep what is left on its disk."""
        if owner in self.scheduler.dead:
            return
        left = self.parties.folder / "left" / f"{owner}-{self.lives[owner]}"
        self.left[owner] = Path(shutil.copytree(self.root(owner), left))
        if self.machines.loses_power:
            self.disks.of[owner].lose_power(left, self._dice)
        self.died[owner] = self.seconds
        self.lives[owner] += 1
        for job in self.running:
            job.gone.add(owner)
            if owner == SERVER:
                job.tasks.clear()
                job.is_led = False
        self.scheduler.kill(owner)

    def restart(self, owner: str) -> None:
        """Start a machine that died, with the disk that it left."""
        root = self.root(owner)
        shutil.rmtree(root)
        shutil.copytree(self.left.pop(owner), root)
        del self.died[owner]
        self.scheduler.revive(owner)
        self.disks.begin(owner)

    def come_back(self, owner: str, *, is_old: bool = False) -> None:
        """Start a machine that died, and on it the jobs that wait for it, as FLARE's process there does."""
        if owner not in self.scheduler.dead:
            return
        self.restart(owner)
        if owner == SERVER:
            for job in self.running:
                run = self.root(SERVER) / job.submission.job_id
                if is_old and (lead := noted_lead(run)) is not None:
                    older = replace(lead, number=max(1, lead.number - 1))
                    note_waiting(run, 60.0, noted_attempt(run) or "", older)
                    shutil.rmtree(run / RESULT_FOLDER, ignore_errors=True)
                    job.forgotten |= job.attempts
                    (run / RESULT_FOLDER).mkdir()
                if job.is_led and count_start(run, MOST_STARTS):
                    job.gone.discard(SERVER)
                    job.control()
                elif job.is_controlled:
                    job.is_led = False
                    job.said.append(ABANDONED)
            return
        for job in self.running:
            is_kept = job.waits and job.is_controlled and is_noted(self.root(owner) / job.submission.job_id)
            if is_kept and SERVER not in self.scheduler.dead:
                job.gone.discard(owner)
                self.scheduler.spawn(lambda job=job: job.process(owner), "executor", owner)

    def _is_due(self, owner: str) -> Loss | None:
        """Return what befalls a machine now that it has sent another message."""
        self.n_sent[owner] += 1
        for loss in self.machines.losses:
            if loss.site == owner and self.n_sent[owner] >= loss.n_sent:
                self.machines.losses.remove(loss)
                return loss
        return None

    def _lose(self, loss: Loss) -> None:
        self.machines.loses_power = loss.loses_power
        self.kill(loss.site)
        if loss.back_after_s is not None:
            self.scheduler.at(loss.back_after_s, lambda: self.come_back(loss.site, is_old=loss.is_old))
        for job in self.running if loss.site == SERVER and loss.back_after_s is not None else ():
            left = self.left[SERVER] / job.submission.job_id
            job.is_led = job.is_controlled and noted_lead(left) is not None
        self.scheduler.pause(lambda: False)

    def abort(self) -> None:
        """Let an operator end all jobs that go on."""
        for job in self.running:
            job.signal.trigger(True)

    def _owner(self) -> str | None:
        owner = self.scheduler.current.owner
        return None if self.scheduler.stopped or owner in self.scheduler.dead else owner

    def _fault(self, owner: str, number: int) -> str | float | None:
        return self.machines.disk(owner, number)

    def _die(self, owner: str) -> None:
        self.kill(owner)
        self.scheduler.pause(lambda: False)

    def _pass(self, seconds: float) -> None:
        self.scheduler.wait(lambda: False, seconds)

    # -- network ------------------------------------------------------------------------------------------------------

    def send(self, origin: str, target: str, topic: str, message: Message, deliver: Callable[[Message], None]) -> None:
        """Give a message to the network, which decides what arrives, and when."""
        (source, job_id), (goal, _) = origin.split(".", 1), target.split(".", 1)
        ends = (source, goal)
        self._n_between[ends] = self._n_between.get(ends, 0) + 1
        payload = None if message.payload is None else bytes(message.payload)
        label = tuple(message.headers.get("veilboost") or ())
        sent = Delivery(job_id, *ends, topic, payload, self._n_between[ends], self.seconds, label)
        self.messages.append(sent)
        life = self.lives[goal]
        for delay_s, content in self.fate(sent):
            copy = Message(dict(message.headers), content)
            self.scheduler.at(delay_s, lambda copy=copy: self._arrive(sent, life, deliver, copy))
        loss = self._is_due(source)
        if loss is not None:
            self._lose(loss)
        self.scheduler.pause()  # others may go on before the sender does

    def _arrive(self, sent: Delivery, life: int, deliver: Callable[[Message], None], message: Message) -> None:
        if sent.target not in self.scheduler.dead and life == self.lives[sent.target]:
            self.heard.add((sent.job_id, sent.origin, sent.target))
            self.scheduler.spawn(lambda: deliver(message), "delivery", sent.target)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def run(self, submissions: Sequence[Submission]) -> list[Outcome]:
        """Run jobs from their exported folders, side by side, until each is over wherever a machine is alive."""
        scheduler, first = self.scheduler, len(self.messages)
        jobs = [_Running(one, gone=set(scheduler.dead)) for one in submissions]
        self.running = jobs
        for job in jobs:
            scheduler.at(job.submission.starts_s, lambda job=job: self._start(job))
        everybody, seconds = set(self.everybody), dict.fromkeys(range(len(jobs)), LONGEST_S)

        def over() -> bool:
            are_over = True
            for number, job in enumerate(jobs):
                if len(job.ended) + len(job.gone) < len(everybody) or not everybody <= job.ended | job.gone:
                    are_over = False
                elif seconds[number] == LONGEST_S:
                    seconds[number] = self.seconds - job.started
            return are_over

        try:
            is_over = scheduler.wait(over, LONGEST_S)
        except Stopped:
            is_over = False
        return [
            Outcome(
                self.parties,
                self.root(SERVER),
                job.said[0] if job.said else None,
                job.reports,
                job_id=job.submission.job_id,
                dead=dict(self.died),
                left=dict(self.left),
                messages=[sent for sent in self.messages[first:] if sent.job_id == job.submission.job_id],
                heard={tuple(ends) for of, *ends in self.heard if of == job.submission.job_id},
                started=job.started,
                seconds=seconds[number],
                is_over=is_over,
                forgotten=job.forgotten,
                hasty=job.hasty,
            )
            for number, job in enumerate(jobs)
        ]

    def _start(self, job: _Running) -> None:
        job.started, job_id, sites = self.seconds, job.submission.job_id, self.parties.sites
        if SERVER in self.scheduler.dead:  # nobody takes the job: there is none
            job.ended |= set(self.everybody)
            job.said.append(f"{SERVER} is not there to take the job")
            return
        server, executor = described(job.submission.recipe)
        clients = [SimpleNamespace(name=site, token=site, get_fqcn=lambda site=site: site) for site in sites]
        cell = FakeCell(self._wire, f"{SERVER}.{job_id}")
        context = _Context(SERVER, self.root(SERVER), cell, job_id, get_clients=lambda: clients)

        job.waits = server["args"]["job"].get("on_lost_site", "stop") != "stop"
        job.process = lambda site: self._process(job, site, executor, context)
        if job.waits:  # FLARE makes it
            (self.root(SERVER) / job_id).mkdir(exist_ok=True)

        def broadcast(task: Any, targets: Sequence[str], **_: Any) -> None:
            is_first, job.is_broadcast = not job.is_broadcast, True
            job.attempts.add(task.data.get("attempt", ""))
            full = [site for site in targets if self.disks.of[site].room is not None and not self.lives[site]]
            job.hasty |= {site for site in full if "disk is full" in job.reports.get(site, {}).get("error", "")}
            job.tasks.update(dict.fromkeys(targets, task))
            for site in sites if is_first else ():
                if site not in self.scheduler.dead:
                    if job.waits:  # FLARE makes it
                        (self.root(site) / job_id).mkdir(exist_ok=True)
                    self.scheduler.spawn(lambda site=site: job.process(site), "executor", site)

        def control() -> None:
            controller = instantiate_class(server["path"], server["args"])
            controller._engine, controller._task_check_period = context.engine, POLL_S
            controller.broadcast, controller.cancel_task = broadcast, lambda task: None
            controller.system_panic = lambda reason, fl_ctx: job.said.append(reason)
            controller.control_flow(job.signal, context)
            job.is_controlled = False
            job.ended.add(SERVER)
            if not job.is_broadcast:  # no site ever heard of it
                job.ended |= set(sites)

        job.control = lambda: self.scheduler.spawn(control, "controller", SERVER)
        job.control()

    def _process(self, job: _Running, site: str, executor: dict[str, Any], at_server: Any) -> None:
        """Be a site's process of a job: take what task there is, and where the job waits for lost sites the next."""
        component = instantiate_class(executor["path"], executor["args"])
        cell = FakeCell(self._wire, f"{site}.{job.submission.job_id}", site)
        own, done = _Context(site, self.root(site), cell, job.submission.job_id), None
        if job.waits:
            component.handle_event(EventType.START_RUN, own)
        while True:
            is_new = lambda: job.tasks.get(site, done) is not done  # noqa: B023, E731
            self.scheduler.wait(lambda: is_new() or not job.is_controlled or not job.is_led)  # noqa: B023
            if not is_new() or not job.is_controlled:  # with the job the server's tasks are gone
                break
            done = job.tasks[site]
            self._take(job, site, component, own, done, at_server)
            if not job.waits:
                break
            if component._stays_kept:  # its process ends, and another one is started in its place
                component.handle_event(EventType.END_RUN, own)
                self._start_again(job, site, self.lives[site])
                return
        if job.waits:
            component.handle_event(EventType.END_RUN, own)
        job.ended.add(site)

    def _start_again(self, job: _Running, site: str, life: int) -> None:
        def again() -> None:
            if life == self.lives[site]:
                self.scheduler.spawn(lambda: job.process(site), "executor", site)

        self.scheduler.at(RESTART_S, again)

    def _take(self, job: _Running, site: str, component: Any, own: Any, task: Any, at_server: Any) -> None:
        scheduler = self.scheduler
        told = self.machines.terms(site, json.loads(json.dumps(task.data)))
        reply = component.execute(TRAIN_TASK, Shareable(told), own, job.signal)
        job.reports[site] = dict(reply)
        changed = Shareable(self.machines.report(site, dict(reply)))
        client_task = SimpleNamespace(client=SimpleNamespace(name=site), result=changed)
        lives = dict(self.lives)

        def handed_over() -> None:
            if self.lives[site] != lives[site] or site in scheduler.dead:
                return
            if self.lives[SERVER] == lives[SERVER] and SERVER not in scheduler.dead:
                scheduler.spawn(lambda: task.result_received_cb(client_task, at_server), "report", SERVER)
            sent = EventType.AFTER_SEND_TASK_RESULT
            scheduler.spawn(lambda: component.handle_event(sent, own), "sent", site)

        # FLARE hands reports over by itself, and tries until they are there, or the process dies that has them.
        scheduler.at(0.1, handed_over)


class _Wire(Network):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def deliver(self, origin: str, target: str, topic: str, message: Message) -> None:
        callback = self.cells[target].callbacks.get((CHANNEL, topic)) if target in self.cells else None
        if callback is not None:  # whoever is not there yet hears nothing
            self._world.send(origin, target, topic, message, callback)
