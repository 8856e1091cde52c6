"""One thread at a time, on virtual time, in an order that a seed decides.

The parts of a job wait for each other with ``threading`` and ``time``. Here both modules are stood in for: whoever
waits hands over, the seed picks who goes on, and where all wait the clock jumps to what is due next. A run is thus the
same each time, takes no longer than its computations, and may be driven through schedules that a machine hardly ever
makes.

What runs is a task: a chain of calls that waits here at one place at a time. It may change its thread, as XGBoost's
calls do, whose answers come from a thread of gRPC: the caller waits in native code while that thread goes on for it.
"""

from __future__ import annotations

import random
import threading as real_threading
import time as real_time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar


class Stopped(BaseException):
    """The simulation is over: what still waits is left."""


class Deadlock(AssertionError):
    """Every task waits, and nothing is due."""


class WaitsWithMemory(AssertionError):
    """A task waits within a transaction of its site's memory: all other jobs of the site would wait with it."""


class Task:
    """A chain of calls of one owner.

    Attributes:
        owner: the machine that it runs on; what dies or stalls is an owner.
        ready: may go on at once.
        wakes: goes on when this holds.
        due: virtual time at which it goes on by itself.
        gone: its machine has died; it waits for ever.
        holds: (what, whether it is held now) of what nobody may hold while he waits.
    """

    def __init__(self, owner: str, name: str) -> None:
        self.owner, self.name = owner, name
        self.ready, self.done, self.gone = True, False, False
        self.due: float | None = None
        self.wakes: Callable[[], bool] | None = None
        self.turn = real_threading.Lock()  # held by nobody, and released by whoever hands over
        self.turn.acquire()
        self.begins: Callable[[], _Next] | None = None  # what it will run, until its first turn
        self.ended = real_threading.Event()
        self.holds: list[tuple[str, Callable[[], bool]]] = []


class Scheduler:
    """Runs tasks one at a time; the thread that makes it is the first of them, of the owner ``observer``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.stopped = False
        self.failure: BaseException | None = None
        self.current = Task("observer", "main")
        self.tasks: list[Task] = [self.current]
        self.dead: set[str] = set()
        self.stalled: dict[str, float] = {}
        self.clock_is_off_s: dict[str, float] = {}
        self.hung: set[tuple[str, str]] = set()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.n_events = 0
        self.n_switches = 0
        self._has_done = False

    # -- what tasks do ------------------------------------------------------------------------------------------------

    def spawn(self, function: Callable[[], None], name: str, owner: str | None = None) -> Task:
        """Start a task; it begins when its turn comes."""
        task = Task(owner or self.current.owner, name)

        def run() -> _Next:
            try:
                function()
            except Stopped:
                task.ended.set()
                return None
            except BaseException as error:  # of a test: the run ends with it
                self.failure = self.failure or error
            task.done = True
            task.ended.set()
            try:
                return None if self.stopped else self._go_on(self._choose())
            except BaseException as error:  # of an event or a condition: without a word the run would wait for ever
                self.failure = self.failure or error
                self.stop()
                return None

        task.begins = run
        self.tasks.append(task)
        return task

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Hand over until a condition holds; return whether it does."""
        due = None if timeout_s is None else self.now + timeout_s
        while not until():
            if due is not None and self.now >= due:
                return False
            self.pause(until, due)
        return True

    def pause(self, until: Callable[[], bool] | None = None, due: float | None = None) -> None:
        """Hand over once: until somebody else did something, or the time has come."""
        if self.stopped:
            raise Stopped
        task = self.current
        if task.holds and not task.gone:
            self._require_nothing_held(task)
        task.ready, task.due = until is None and due is None, due
        task.wakes = until
        if self._hand_over(task):
            task.ready, task.due, task.wakes = False, None, None
        else:
            self._await_turn(task)

    def _require_nothing_held(self, task: Task) -> None:
        for what, is_held in task.holds:
            if is_held():
                where = " < ".join(f"{one.name} ({one.lineno})" for one in reversed(traceback.extract_stack(limit=12)))
                self.failure = self.failure or WaitsWithMemory(f"{task.owner} waits while it holds {what}: {where}")

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Have something happen after a time; what happens may not wait."""
        self.n_events += 1
        self.events.append((self.now + delay_s, self.n_events, event))

    # -- who is next --------------------------------------------------------------------------------------------------

    def _hand_over(self, task: Task) -> bool:
        """Let the next task go on; return whether that is this one again."""
        chosen = self._choose()
        if chosen is task:
            return True
        begins = self._go_on(chosen)
        if begins is not None:
            _Carrier.carry(begins)
        return False

    def _choose(self) -> Task | None:
        """Choose the next task; without any the run is over."""
        self.n_switches += 1
        chosen = self._next()
        if chosen is None:
            self.stop()
        else:
            self.current = chosen
        return chosen

    @staticmethod
    def _go_on(task: Task | None) -> _Next:
        """Let a task go on, where it waits for its turn; return what is to be run if this is its first."""
        if task is None:
            return None
        begins, task.begins = task.begins, None
        if begins is None:
            task.turn.release()
        else:
            task.ready, task.due, task.wakes = False, None, None
        return begins

    def _await_turn(self, task: Task) -> None:
        task.turn.acquire()
        if self.stopped:
            raise Stopped
        task.ready, task.due, task.wakes = False, None, None

    def _next(self) -> Task | None:
        while True:
            able, dead, stalled, hung, now = [], self.dead, self.stalled, self.hung, self.now
            all_live = not (dead or stalled or hung)
            for task in self.tasks:  # written out: this is where a run spends its time
                if task.done or task.gone:
                    self._has_done = True
                elif not all_live and (task.owner in dead or task.owner in stalled or (task.owner, task.name) in hung):
                    continue
                elif (
                    task.ready
                    or ((due := task.due) is not None and due <= now)
                    or ((wakes := task.wakes) is not None and wakes())
                ):
                    able.append(task)
            if self._has_done:
                self.tasks, self._has_done = [one for one in self.tasks if not (one.done or one.gone)], False
            if able:
                return able[self.random.randrange(len(able))]
            times = [task.due for task in self.tasks if task.due is not None and self._is_awake(task)]
            times += [time for time, _, _ in self.events] + list(self.stalled.values())
            if not times:
                waiting = ", ".join(f"{task.owner}/{task.name}" for task in self.tasks if task.owner not in self.dead)
                self.failure = self.failure or Deadlock(f"nothing is due, and these wait: {waiting}")
                return None
            self.now = max(self.now, min(times))
            self.stalled = {owner: end for owner, end in self.stalled.items() if end > self.now}
            for event in sorted(one for one in self.events if one[0] <= self.now):
                self.events.remove(event)
                event[2]()

    def _is_awake(self, task: Task) -> bool:
        is_hung = (task.owner, task.name) in self.hung
        return not is_hung and task.owner not in self.dead and task.owner not in self.stalled

    def kill(self, owner: str) -> None:
        """End a machine: none of its tasks ever goes on, also when it is there again."""
        self.dead.add(owner)
        for task in self.tasks:
            task.gone = task.gone or task.owner == owner

    def revive(self, owner: str) -> None:
        """Let a machine run tasks again: new ones."""
        self.dead.discard(owner)

    def stall(self, owner: str, seconds: float) -> None:
        """Stop a machine for a while."""
        self.stalled[owner] = self.now + seconds

    def hang(self, owner: str, name: str) -> None:
        """Let tasks of a machine, those of one name, never go on, while others do."""
        self.hung.add((owner, name))

    def stop(self) -> None:
        """End the run: what still waits is left where it waits."""
        self.stopped = True
        for task in [one for one in self.tasks if not one.gone]:
            if task.begins is not None:
                task.begins = None
                task.ended.set()
                continue
            with suppress(RuntimeError):  # it has its turn
                task.turn.release()


def drain(scheduler: Scheduler, most_s: float = 2.0) -> None:
    """Wait, in real time, for what a stopped run leaves: its tasks end where they waited."""
    until = real_time.monotonic() + most_s
    for task in scheduler.tasks[1:]:
        if not task.gone:
            task.ended.wait(max(0.0, until - real_time.monotonic()))


_Next = Callable[[], Any] | None
"""What a thread that is free runs next, if it is the one that has to: it returns such a thing itself."""


class _Carrier:
    """A thread of the system that runs one task after the other: a job has hundreds of tasks."""

    idle: ClassVar[list[_Carrier]] = []

    def __init__(self) -> None:
        self._given = real_threading.Lock()
        self._given.acquire()
        self._run: _Next = None
        real_threading.Thread(target=self._go_on, name="simulated", daemon=True).start()

    @classmethod
    def carry(cls, run: Callable[[], _Next]) -> None:
        """Run something in a thread of its own."""
        try:
            carrier = cls.idle.pop()
        except IndexError:
            carrier = cls()
        carrier._run = run
        carrier._given.release()

    def _go_on(self) -> None:
        while True:
            self._given.acquire()
            while self._run is not None:
                self._run = self._run()
            self.idle.append(self)
