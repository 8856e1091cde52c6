"""A job of any kind in one simulated world: server, sites, FLARE's messages and disks, and what befalls them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils.class_utils import instantiate_class

from nvflare_plugins.flare.controller import TRAIN_TASK
from nvflare_plugins.flare.transport import CHANNEL
from nvflare_plugins.recipes.job_recipe import JobRecipe
from nvflare_plugins.site.setup import set_up
from tests.simulation.scheduler import Scheduler, Stopped, simulated
from tests.support.flare_job import JOB_ID, Finished, _Context, components
from tests.support.flare_network import FakeCell, Network
from tests.support.parties import Parties

SERVER = "server"
LONGEST_S = 7200.0
"""Virtual time within which every run must be over, whatever befalls it."""


@dataclass(frozen=True)
class Delivery:
    """A message on its way.

    Attributes:
        number: of the messages between these two ends, from 1 on.
        seconds: virtual time since the job began.
        label: what the transport says of the piece: attempt, number of the frame, its size, where the piece belongs.
    """

    origin: str
    target: str
    topic: str
    payload: bytes | None
    number: int
    seconds: float
    label: tuple[object, ...] = ()


Fate = Callable[[Delivery], list[tuple[float, bytes | None]]]
"""What becomes of a message: for each copy that arrives, the delay and the payload."""


@dataclass
class Machines:
    """What a run does to machines.

    Attributes:
        disk: called before each change of a disk that must last, with the owner and how many there were; returns
            "die", "full" or nothing.
        events: (virtual time, what happens then).
    """

    disk: Callable[[str, int], str | None] = lambda owner, count: None
    events: list[tuple[float, Callable[[World], None]]] = field(default_factory=list)


@dataclass
class Outcome(Finished):
    """How a run ended.

    Attributes:
        dead: machines that were gone at the end, with the virtual time since the job began at which they died.
        left: folders of dead machines as they were when they died.
        messages: all that were sent, in order.
        heard: origin and target of every message that arrived.
        seconds: virtual time that the run took.
    """

    dead: dict[str, float] = field(default_factory=dict)
    left: dict[str, Path] = field(default_factory=dict)
    messages: list[Delivery] = field(default_factory=list)
    heard: set[tuple[str, str]] = field(default_factory=set)
    seconds: float = 0.0
    is_over: bool = True


class World:
    """One run of one job."""

    def __init__(self, seed: int, parties: Parties, fate: Fate, machines: Machines) -> None:
        self.scheduler = Scheduler(seed)
        self.parties, self.fate, self.machines = parties, fate, machines
        self.signal = Signal()
        self.messages: list[Delivery] = []
        self.left: dict[str, Path] = {}
        self.died: dict[str, float] = {}
        self.heard: set[tuple[str, str]] = set()
        self.n_changes: dict[str, int] = {}
        self.began = self.scheduler.now
        self._n_between: dict[tuple[str, str], int] = {}

    def root(self, owner: str) -> Path:
        """Folder of a machine."""
        return self.parties.folder / SERVER if owner == SERVER else self.parties.workspace(owner)

    def kill(self, owner: str) -> None:
        """End a machine here and now; its disk stays as it is."""
        if owner in self.scheduler.dead:
            return
        self.left[owner] = Path(shutil.copytree(self.root(owner), self.parties.folder / "left" / owner))
        self.died[owner] = self.scheduler.now - self.began
        self.scheduler.kill(owner)

    def send(self, origin: str, target: str, topic: str, message: Message, deliver: Callable[[Message], None]) -> None:
        """Give a message to the network, which decides what arrives, and when."""
        ends = (origin.split(".")[0], target.split(".")[0])
        self._n_between[ends] = self._n_between.get(ends, 0) + 1
        payload = None if message.payload is None else bytes(message.payload)
        label = tuple(message.headers.get("veilboost") or ())
        sent = Delivery(*ends, topic, payload, self._n_between[ends], self.scheduler.now - self.began, label)
        self.messages.append(sent)
        for delay_s, content in self.fate(sent):
            copy = Message(dict(message.headers), content)
            self.scheduler.at(delay_s, lambda copy=copy: self._arrive(ends, deliver, copy))
        self.scheduler.pause()  # others may go on before the sender does

    def _arrive(self, ends: tuple[str, str], deliver: Callable[[Message], None], message: Message) -> None:
        if ends[1] not in self.scheduler.dead:
            self.heard.add(ends)
            self.scheduler.spawn(lambda: deliver(message), "delivery", ends[1])

    @contextmanager
    def disks(self) -> Iterator[None]:
        """Let changes that must last be moments at which a machine may die or find its disk full."""
        fsync, replace = os.fsync, os.replace

        def change(operation: Callable[..., None]) -> Callable[..., None]:
            def changed(*arguments: Any, **named: Any) -> None:
                owner = self.scheduler.current.owner
                self.n_changes[owner] = self.n_changes.get(owner, 0) + 1
                fault = None if self.scheduler.stopped else self.machines.disk(owner, self.n_changes[owner])
                if fault == "die":
                    self.kill(owner)
                    self.scheduler.pause(lambda: False)
                if fault == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if operation is replace:
                    operation(*arguments, **named)

            return changed

        os.fsync, os.replace = change(fsync), change(replace)
        try:
            yield
        finally:
            os.fsync, os.replace = fsync, replace


class _Wire(Network):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def deliver(self, origin: str, target: str, topic: str, message: Message) -> None:
        callback = self.cells[target].callbacks.get((CHANNEL, topic)) if target in self.cells else None
        if callback is not None:  # whoever is not there yet hears nothing
            self._world.send(origin, target, topic, message, callback)


def run_job(recipe: JobRecipe, parties: Parties, seed: int, fate: Fate, machines: Machines | None = None) -> Outcome:
    """Run a recipe's job from its exported folder in a world of its own."""
    world = World(seed, parties, fate, machines or Machines())
    controller, executor = components(recipe, parties.folder / "exported")
    server = world.root(SERVER)
    for root in (server, *map(world.root, parties.sites)):
        set_up(root)
    scheduler, signal = world.scheduler, world.signal
    said: list[str] = []
    reports: dict[str, dict[str, Any]] = {}
    ended: set[str] = set()
    with simulated(scheduler), world.disks():
        wire = _Wire(world)
        clients = [SimpleNamespace(name=site, get_fqcn=lambda site=site: site) for site in parties.sites]
        context = _Context(SERVER, server, FakeCell(wire, f"{SERVER}.{JOB_ID}"), get_clients=lambda: clients)

        def at_site(site: str, task: Any) -> None:
            component = instantiate_class(executor["path"], executor["args"])
            own = _Context(site, world.root(site), FakeCell(wire, f"{site}.{JOB_ID}", site))
            reply = component.execute(TRAIN_TASK, Shareable(json.loads(json.dumps(task.data))), own, signal)
            reports[site] = dict(reply)
            client_task = SimpleNamespace(client=SimpleNamespace(name=site), result=reply)
            # FLARE hands reports over by itself, and tries until they are there.
            scheduler.at(0.1, lambda: _handed_over(client_task, task, component, own))
            ended.add(site)

        def _handed_over(client_task: Any, task: Any, component: Any, own: Any) -> None:
            site = client_task.client.name
            if SERVER not in scheduler.dead:
                scheduler.spawn(lambda: task.result_received_cb(client_task, context), "report", SERVER)
            scheduler.spawn(lambda: component.handle_event(EventType.AFTER_SEND_TASK_RESULT, own), "sent", site)

        def broadcast(task: Any, **_: Any) -> None:
            for site in parties.sites:
                scheduler.spawn(lambda site=site: at_site(site, task), "executor", site)

        def control() -> None:
            controller.control_flow(signal, context)
            ended.add(SERVER)

        controller._engine = context.engine
        controller.broadcast, controller.cancel_task = broadcast, lambda task: None
        controller.system_panic = lambda reason, fl_ctx: said.append(reason)
        for moment, event in world.machines.events:
            scheduler.at(moment, lambda event=event: event(world))
        scheduler.spawn(control, "controller", SERVER)
        everybody = {SERVER, *parties.sites}
        try:
            is_over = scheduler.wait(lambda: everybody <= ended | scheduler.dead, LONGEST_S)
        except Stopped:
            is_over = False
        seconds = scheduler.now - world.began
        scheduler.stop()
        if scheduler.failure is not None:
            raise scheduler.failure
    return Outcome(
        parties,
        server,
        said[0] if said else None,
        reports,
        dead=world.died,
        left=world.left,
        messages=world.messages,
        heard=world.heard,
        seconds=seconds,
        is_over=is_over,
    )
