"""One training after another, round by round: every way to train stands ready, and each takes its turn.

A lane is one way to train: centralized XGBoost, XGBoost's own federated tracker, one site that grows trees by itself
(growth_lanes.py), or one of our profiles with either engine. All lanes' processes are started once, do their first
round, which is part of starting up, and wait; the benchmark then lets each lane do its round k before any does round
k + 1. What else the machine does hits all lanes alike, and a comparison of two lanes is the median over rounds of
comparisons between neighbours in time.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import pandas as pd
import xgboost as xgb

from nvflare_plugins.attempt.job_context import Silent, SiteContext
from nvflare_plugins.attempt.run_folder import MODEL, RunFolder
from nvflare_plugins.kinds.horizontal.site import run_site
from nvflare_plugins.pooled.job import Engine, HorizontalJob
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.cuts import Cuts, reference_table
from tests.bench.horizontal_data import LABEL, TRAINING, arrays
from tests.bench.loopback import (
    DEADLINE_S,
    LoopbackServer,
    SocketTransport,
    connected_pair,
)

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__, "tests.bench.growth_lanes"])  # modules are loaded once, before any thread
JOB_ID = "bench"


@dataclass(frozen=True, slots=True)
class Task:
    """What every lane does.

    Attributes:
        folder: shares of the sites, startup kits and workspaces.
        params: XGBoost's parameters.
    """

    folder: Path
    sites: tuple[str, ...]
    params: dict
    num_rounds: int
    cuts: Cuts

    def share(self, site: str) -> Path:
        """Return the file with a site's rows."""
        return self.folder / "data" / f"{site}-{TRAINING}.parquet"


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one lane. Units: seconds; CPU, user and system: of all processes, the server's part, each site's."""

    wall_s: float
    cpu_s: float
    server_cpu_s: float
    of_processes: tuple[float, ...] = ()


class Lane:
    """The processes of one way to train.

    Each process does its first round, then says when it is ready for the next, waits for the word, and says what CPU
    time it took.
    """

    def __init__(self, name: str):
        self.name = name
        self.turns: list[Turn] = []
        self.peak_bytes = 0
        self._pipes: list[Connection] = []
        self._processes: list = []

    def start(self, target: Callable[..., None], *arguments: object) -> None:
        """Start one process; ``target`` gets a ``Baton`` and the arguments."""
        mine, theirs = _PROCESSES.Pipe()
        process = _PROCESSES.Process(target=_child, args=(target, theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(mine)
        self._processes.append(process)

    def wait_ready(self) -> list[object]:
        """Wait until every process has done a round, or has finished; return what each said.

        Raises: RuntimeError, if a process failed.
        """
        said: dict[Connection, object] = {}
        while len(said) < len(self._pipes):
            for pipe in wait([pipe for pipe in self._pipes if pipe not in said]):
                try:
                    kind, content = pipe.recv()
                except EOFError:
                    kind, content = "failed", "a process ended without a word"
                if kind == "failed":
                    raise RuntimeError(f"lane {self.name}: {content}")
                said[pipe] = content
        return [said[pipe] for pipe in self._pipes]

    def take_turn(self) -> None:
        """Let every process do one round, and keep what it took."""
        started, server_before = time.perf_counter(), time.process_time()
        for pipe in self._pipes:
            pipe.send("go")
        used = self.wait_ready()
        wall_s, server_cpu_s = time.perf_counter() - started, time.process_time() - server_before
        self.turns.append(Turn(wall_s, sum(used) + server_cpu_s, server_cpu_s, tuple(used)))

    def finish(self) -> list[bytes]:
        """Let every process end; return the models, and keep how much memory all processes took, each at its peak."""
        for pipe in self._pipes:
            pipe.send("go")
        models, peaks = zip(*self.wait_ready(), strict=True)
        self.peak_bytes = sum(peaks)
        for process in self._processes:
            process.join(timeout=60)
        return list(models)

    def kill(self) -> None:
        """End whatever still runs."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()


class Baton:
    """A process's end of its lane."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._cpu_before = 0.0
        self._bytes_before = _memory("VmRSS")

    def ready(self) -> None:
        """Say what the last round took (CPU seconds of this process) and wait for the next one's turn."""
        self._pipe.send(("ready", time.process_time() - self._cpu_before))
        self._pipe.recv()
        self._cpu_before = time.process_time()

    def finished(self, model: bytes) -> None:
        """Hand in the model, and how much memory this process took at its peak beside loaded modules."""
        self._pipe.send(("finished", (model, _memory("VmHWM") - self._bytes_before)))

    def failed(self, reason: str) -> None:
        """Say why this process ends."""
        self._pipe.send(("failed", reason))


def _memory(name: str) -> int:
    """Return what the system says of this process's memory: VmRSS now, VmHWM at most (``ru_maxrss`` is of parents too).

    Units: bytes.
    """
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _child(target: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    baton = Baton(pipe)
    try:
        target(baton, *arguments)
    except Exception as error:  # the edge of the process
        baton.failed(f"{type(error).__name__}: {error}")


# -- centralized, and XGBoost's own federation --------------------------------------------------------------------


def start_central(task: Task, threads: int = 1) -> Lane:
    """One process with all rows."""
    lane = Lane("central" if threads == 1 else f"central_{threads}")
    task = replace(task, params={**task.params, "nthread": threads})
    lane.start(_train_stock, task, task.sites, None)
    return lane


def start_native(task: Task) -> Lane:
    """One process per site, unprotected, beside XGBoost's tracker in this process."""
    from xgboost.federated import run_federated_server

    server = run_federated_server(n_workers=len(task.sites), port=0, blocking=False, timeout=int(DEADLINE_S))
    address = f"127.0.0.1:{server['dmlc_tracker_port']}"
    lane = Lane("native")
    for rank, site in enumerate(task.sites):
        communicator = {
            "dmlc_communicator": "federated",
            "federated_server_address": address,
            "federated_world_size": len(task.sites),
            "federated_rank": rank,
        }
        lane.start(_train_stock, task, (site,), communicator)
    return lane


def _train_stock(baton: Baton, task: Task, sites: Sequence[str], communicator: dict | None) -> None:
    frame = pd.concat([pd.read_parquet(task.share(site)) for site in sites])
    features, label = arrays(frame)
    max_bin = task.params["max_bin"]
    common = {"max_bin": max_bin, "feature_names": [str(name) for name in frame.columns.drop(LABEL)]}
    reference = xgb.QuantileDMatrix(reference_table(task.cuts, {}), **common)
    matrix = xgb.QuantileDMatrix(features, label=label, ref=reference, **common)
    if communicator is None:
        _boost(baton, task, matrix)
    else:
        with xgb.collective.CommunicatorContext(**communicator):
            _boost(baton, task, matrix)


def _boost(baton: Baton, task: Task, matrix: xgb.QuantileDMatrix) -> None:
    booster = xgb.Booster({"tree_method": "hist", **task.params}, [matrix])
    for number in range(task.num_rounds):
        booster.update(matrix, number)
        baton.ready()
    baton.finished(bytes(booster.save_raw("json")))


# -- ours ---------------------------------------------------------------------------------------------------------


UNTAGGED = "untagged"
"""A lane: `masks` without the tags of sums, to see what these cost."""
OWN = "own_"
"""Lanes in which the sites grow the trees: this and a profile. In all others XGBoost does, beside a mediator."""


def start_ours(task: Task, name: str) -> tuple[Lane, LoopbackServer]:
    """One process per site, sessions signed, evidence kept at the sites and at the server.

    Args:
        name: a profile, ``UNTAGGED``, or a profile behind ``OWN``.
    """
    lane = Lane(name)
    pairs = [connected_pair() for _ in task.sites]
    ends, folder = [pair[0] for pair in pairs], task.folder / name / "server"
    server = LoopbackServer(task.sites, ends, JOB_ID, name.removeprefix(OWN), folder)
    for site, (_, end) in zip(task.sites, pairs, strict=True):
        lane.start(_take_part, task, name, site, end, server.attempt)
        end.close()
    return lane, server


def _leave_tags_out() -> None:
    """Let the sums of this process go without tags."""
    prepare = ProtectedSums.__init__

    def prepare_without(self: ProtectedSums, *arguments: object, **options: object) -> None:
        prepare(self, *arguments, **options)  # type: ignore[arg-type]
        self._is_tagged = False

    ProtectedSums.__init__ = prepare_without  # type: ignore[method-assign]


class _Passing(Silent):
    """Passes the baton on after each round."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def __call__(self, record: object, n_rounds: int) -> None:
        self._baton.ready()


def _take_part(baton: Baton, task: Task, name: str, site: str, end: socket.socket, attempt: bytes) -> None:
    os.environ["VEILBOOST_THREADS"] = str(task.params["nthread"])
    workspace, profile = task.folder / name / site, name.removeprefix(OWN)
    if profile == UNTAGGED:
        profile = "masks"
        _leave_tags_out()
    engine = Engine.OWN if name.startswith(OWN) else Engine.XGBOOST
    job = HorizontalJob(TRAINING, LABEL, task.params, task.num_rounds, profile, engine=engine.value)
    policy = SitePolicy.load(workspace, site)
    identity = Identity.load(task.folder / "kits" / site)
    context = SiteContext(site, task.sites, JOB_ID, attempt, workspace / "runs", policy, identity)
    run_site(job, context, SocketTransport(end), DEADLINE_S, _Passing(baton))
    folder = RunFolder(context.runs, JOB_ID)
    found = folder.read_cuts()
    if found is None or not all(map(np.array_equal, found.of_feature, task.cuts.of_feature)):
        raise RuntimeError("the sites agreed on other cuts than the search over all rows finds")
    baton.finished((workspace / "runs" / JOB_ID / MODEL).read_bytes())
