"""Stand-ins for ``threading``, ``time``, ``datetime``, ``fcntl`` and ``sqlite3`` in simulated modules.

They wait at a scheduler.
"""

from __future__ import annotations

import fcntl
import functools
import sqlite3
import sys
import threading as real_threading
import time as real_time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from types import ModuleType
from typing import Any

from he_processors.elgamal.decryption import STEP_S, draw_out
from nvflare_plugins.kinds.vertical.conversation import PendingAnswer
from nvflare_plugins.pooled.mediated import mediator
from tests.simulation.scheduler import Scheduler, Task


class _Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holder: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._scheduler.current
        if self._holder is not task:
            most_s = 0.0 if not blocking else None if timeout < 0 else timeout
            if not self._scheduler.wait(lambda: self._holder is None, most_s):
                return False
            self._holder = task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Condition(_Lock):
    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        due = None if timeout is None else self._scheduler.now + timeout
        while not (found := predicate()):
            if due is not None and self._scheduler.now >= due:
                return found
            self._pause(due)
        return found

    def wait(self, timeout: float | None = None) -> bool:
        due = None if timeout is None else self._scheduler.now + timeout
        self._pause(due)
        return due is None or self._scheduler.now < due

    def notify(self, n: int = 1) -> None:
        self.notify_all()

    def notify_all(self) -> None:
        self._news += 1

    def _pause(self, due: float | None) -> None:
        task, depth, news = self._holder, self._depth, self._news
        self._holder, self._depth = None, 0
        self._scheduler.pause(lambda: self._news != news and self._holder is None, due)
        self._scheduler.wait(lambda: self._holder is None)
        self._holder, self._depth = task, depth

    _news = 0


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_set = scheduler, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait(lambda: self._is_set, timeout)


class _Thread:
    def __init__(
        self,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
        *,
        scheduler: Scheduler,
    ) -> None:
        self._scheduler, self.name, self.daemon = scheduler, name, daemon
        self._run = lambda: target(*args, **(kwargs or {})) if target is not None else None
        self._task: Task | None = None
        self.ident: int | None = None

    def start(self) -> None:
        self._task = self._scheduler.spawn(self._run, self.name)

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task is not None:
            self._scheduler.wait(lambda: task.done, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


class _Pool:
    """A pool of threads, in which every call is a task."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_open = scheduler, True

    def submit(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._is_open:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._scheduler.spawn(lambda: function(*arguments) and None, "pool")

    def shutdown(self, wait: bool = True) -> None:
        self._is_open = False

    def __enter__(self) -> _Daemons:
        """Return real threads: what is computed in a block is waited for there, and waits for no other site."""
        return _Daemons()

    def __exit__(self, *_: object) -> None:
        """End the block; its threads end by themselves."""


class _Daemons(futures.Executor):
    """Threads of gRPC that no process waits for at its end: those in which a dead machine's calls wait never end."""

    def __init__(self, *_: object) -> None:
        """Take as many as there are calls."""

    def submit(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(function(*arguments, **named))
            except BaseException as error:  # as an executor's own threads do
                future.set_exception(error)

        real_threading.Thread(target=run, name="mediator", daemon=True).start()
        return future


class _Module(ModuleType):
    """A module of which some names are other things."""

    def __init__(self, original: ModuleType, **names: object) -> None:
        super().__init__(original.__name__)
        self._original = original
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


NOT_SIMULATED = (
    "nvflare_plugins.pooled.mediated.communicator",
    "nvflare_plugins.pooled.mediated.mediator",
)
"""They wait for XGBoost, not for another site."""


SIMULATED = ("nvflare_plugins.", "dp_components.")
EPOCH = datetime(2026, 3, 1, tzinfo=UTC)
"""The time by all clocks when virtual time begins."""


def _clock_of(scheduler: Scheduler) -> type[datetime]:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            seconds = scheduler.now + scheduler.clock_is_off_s.get(scheduler.current.owner, 0.0)
            return (EPOCH + timedelta(seconds=seconds)).astimezone(tz)

    return Clock


def _flock_of(scheduler: Scheduler) -> Callable[[Any, int], None]:
    def flock(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_NB or not operation & (fcntl.LOCK_EX | fcntl.LOCK_SH):
            fcntl.flock(file, operation)
            return
        while True:
            try:
                fcntl.flock(file, operation | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                scheduler.wait(lambda: False, 0.01)

    return flock


def _connect_of(scheduler: Scheduler) -> Callable[..., sqlite3.Connection]:
    """Return what opens databases whose locks are waited for in virtual time, and held by nobody who waits."""

    class Connection(sqlite3.Connection):
        waits_s: float
        task: Task
        entry: tuple[str, Callable[[], bool]]

        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            due = scheduler.now + self.waits_s
            while True:
                try:
                    return super().execute(*arguments)
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or scheduler.now >= due:
                        raise
                scheduler.wait(lambda: False, 0.05)

        def close(self) -> None:
            self.task.holds.remove(self.entry)
            super().close()

    def connect(name: str, timeout: float = 5.0, **options: Any) -> sqlite3.Connection:
        db = sqlite3.connect(name, timeout=0.0, factory=Connection, **options)
        db.waits_s, db.task, db.entry = timeout, scheduler.current, ("its memory", lambda: db.in_transaction)
        db.task.holds.append(db.entry)
        return db

    return connect


@contextmanager
def simulated(scheduler: Scheduler) -> Iterator[None]:
    """Let all of nvflare_plugins wait through a scheduler."""
    threads = _Module(
        real_threading,
        Lock=lambda: _Lock(scheduler),
        RLock=lambda: _Lock(scheduler),
        Condition=lambda lock=None: _Condition(scheduler),
        Event=lambda: _Event(scheduler),
        Thread=lambda *args, **kwargs: _Thread(*args, **kwargs, scheduler=scheduler),
    )
    clock = _Module(
        real_time,
        monotonic=lambda: scheduler.now,
        perf_counter=lambda: scheduler.now,
        sleep=lambda seconds: scheduler.wait(lambda: False, seconds) and None,
    )
    files = _Module(fcntl, flock=_flock_of(scheduler))
    databases = _Module(sqlite3, connect=_connect_of(scheduler))
    stand_ins = {
        id(sqlite3): databases,
        id(real_threading): threads,
        id(real_time): clock,
        id(fcntl): files,
        id(real_threading.RLock): lambda: _Lock(scheduler),
        id(datetime): _clock_of(scheduler),
    }
    names, functions = _places(tuple(name for name in sys.modules if name.startswith(SIMULATED)))
    defaults: list[tuple[Any, str, Any]] = []
    replaced: list[tuple[Any, str, object]] = []
    for module, attribute in names:
        found = getattr(module, attribute)
        replaced.append((module, attribute, found))
        setattr(module, attribute, stand_ins.get(id(found), lambda *args: _Pool(scheduler)))
    for function, kind in functions:
        defaults.append((function, kind, getattr(function, kind)))
        setattr(function, kind, _with_clock(getattr(function, kind), clock.monotonic))
    defaults.append((draw_out, "__defaults__", draw_out.__defaults__))
    draw_out.__defaults__ = (STEP_S, clock.perf_counter, clock.sleep)
    replaced.append((mediator, "futures", mediator.futures))
    mediator.futures = _Module(futures, ThreadPoolExecutor=_Daemons)
    make_answer = PendingAnswer.__init__

    def make(answer: PendingAnswer, *arguments: Any) -> None:
        make_answer(answer, *arguments)
        answer._condition = _Condition(scheduler)  # the one in which whoever waits for a future waits

    replaced.append((PendingAnswer, "__init__", make_answer))
    PendingAnswer.__init__ = make
    try:
        yield
    finally:
        for place, attribute, found in (*replaced, *defaults):
            setattr(place, attribute, found)


@functools.lru_cache(maxsize=1)
def _places(modules: tuple[str, ...]) -> tuple[list[tuple[ModuleType, str]], list[tuple[Any, str]]]:
    """Return what modules know of what is stood in for: their own names of it, and defaults of their functions."""
    known = {id(one) for one in (real_threading, real_time, fcntl, sqlite3, real_threading.RLock, datetime)}
    names, functions = [], []
    for module in (sys.modules[name] for name in modules if name not in NOT_SIMULATED):
        attributes = ("threading", "time", "fcntl", "sqlite3", "RLock", "datetime")
        names += [(module, one) for one in attributes if id(getattr(module, one, None)) in known]
        names += [(module, "ThreadPoolExecutor")] if getattr(module, "ThreadPoolExecutor", None) is not None else []
        for function in _functions(module):
            for kind in ("__defaults__", "__kwdefaults__"):
                found = getattr(function, kind)
                if _with_clock(found, real_time.perf_counter) != found:
                    functions.append((function, kind))
    return names, functions


def _functions(module: ModuleType) -> list[Any]:
    """Return the constructors of a module's classes: they have the clock among their defaults."""
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    return [one.__init__ for one in own if "__init__" in vars(one) and hasattr(one.__init__, "__defaults__")]


def _with_clock(defaults: Any, clock: Callable[[], float]) -> Any:
    """Return default arguments with the virtual clock for the real one."""
    if isinstance(defaults, tuple):
        return tuple(clock if one is real_time.monotonic else one for one in defaults)
    if isinstance(defaults, dict):
        return {name: clock if one is real_time.monotonic else one for name, one in defaults.items()}
    return defaults
