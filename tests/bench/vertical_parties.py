"""Vertical training with each party in a process of its own, over pipes: trees, cryptography and messages, no FLARE.

A party's process measures what it does by stage, in CPU seconds, and its largest memory. The stages are measured by
wrapping functions of the program from here; the program itself is not changed.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.elgamal.decryption import SmallLogarithms
from he_processors.elgamal.encryption import DigitFormat
from he_processors.paillier import generate_paillier_key
from he_processors.two_party.split_argmax import ActiveLevel
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical import histogram_maker as makers
from nvflare_plugins.kinds.vertical.active_party import LabelledSet, OwnColumns, VerticalSettings, VerticalTraining
from nvflare_plugins.kinds.vertical.guards import Guard
from nvflare_plugins.kinds.vertical.histogram_maker import PairsForm, PointPairs, histogram_maker
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_vertical_parameters
from nvflare_plugins.kinds.vertical.key_owner import (
    ClearGradientOwner,
    PrecomputingKeyOwner,
    elgamal_owner,
    gradient_owner,
    pair_format,
)
from nvflare_plugins.kinds.vertical.messages import from_bytes, place_parties, to_bytes
from nvflare_plugins.kinds.vertical.model import merge, table_from_json, table_to_json
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from nvflare_plugins.kinds.vertical.sealed import SealedPassive, SealedPlan, sealed_plan
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import Memory
from tests.support.clear_maker import ClearHistogramMaker

_SPAWN = multiprocessing.get_context("spawn")
_DEADLINE_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A joined table and how it is divided. Shapes: features: float32[n, sum(widths)]; label: float32[n]."""

    features: NDArray[np.float32]
    label: NDArray[np.float32]
    widths: tuple[int, ...]
    params: dict[str, Any]
    num_rounds: int

    def part(self, party: int) -> NDArray[np.float32]:
        """Return a party's columns; the active party is number 0."""
        start = sum(self.widths[:party])
        return np.ascontiguousarray(self.features[:, start : start + self.widths[party]])


@dataclasses.dataclass(frozen=True, slots=True)
class PartyFigures:
    """What a party used for all trees, without what it does once. Units: CPU seconds, MB.

    Attributes:
        spans: when it worked, one thread as another: (stage, begin, end) by one clock of the machine. Units: seconds.
    """

    cpu_s: float
    stages: dict[str, float]
    peak_mb: float
    spans: list[tuple[str, float, float]]


@dataclasses.dataclass(slots=True)
class VerticalRun:
    """A finished training."""

    model: bytes  # merged into one ordinary model
    round_s: list[float]
    round_ends: list[float]  # by the clock of the spans
    parties: list[PartyFigures]
    bytes_to_passive: int
    bytes_to_active: int
    setup_s: float


def busy_s(spans: Sequence[tuple[str, float, float]], begin: float, end: float) -> NDArray[np.bool_]:
    """Return in which milliseconds of a time a party worked. Shapes: result: bool[milliseconds]."""
    busy = np.zeros(max(round((end - begin) * 1000), 1), dtype=bool)
    for _, first, last in spans:
        busy[max(round((first - begin) * 1000), 0) : max(round((last - begin) * 1000), 0)] = True
    return busy


class StageClock:
    """CPU seconds of this process by stage; stages do not nest in one another's account."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans: list[tuple[str, float, float]] = []
        self._lock = threading.Lock()
        self._here = threading.local()

    def timed(self, stage: str, function: Callable) -> Callable:
        """Return the function with its time added to the stage, without that of stages inside."""

        def call(*arguments: object, **options: object) -> object:
            outer, self._here.inner = getattr(self._here, "inner", 0.0), 0.0
            started, began = time.thread_time(), time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent = time.thread_time() - started
                with self._lock:
                    self.seconds[stage] += spent - self._here.inner
                    self.spans.append((stage, began, time.perf_counter()))
                self._here.inner = outer + spent

        return call


def run_vertical(workload: Workload, scheme: str, size: int | tuple[int, int], guarded: bool = False) -> VerticalRun:
    """Train with one process for each party.

    Args:
        scheme: "paillier", "sealed" (Paillier and the preset sealed), "elgamal" or "plain".
        size: the key's length, or elgamal's fraction bits and bytes of a point.
        guarded: the passive parties count what they give, and keep what their rules do not let go.
    """
    pipes, processes = [], []
    for number in range(1, len(workload.widths)):
        mine, theirs = _SPAWN.Pipe()
        arguments = (
            theirs,
            workload.part(number),
            workload.params.get("max_bin", 256),
            (scheme, size),
            workload.num_rounds,
            guarded,
            sealed_of(workload) if scheme == "sealed" else None,
        )
        process = _SPAWN.Process(target=_passive_process, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    mine, theirs = _SPAWN.Pipe()
    own = dataclasses.replace(workload, features=workload.part(0))  # the others' columns stay out of its memory
    arguments = (theirs, pipes, own, scheme, size, guarded)
    active = _SPAWN.Process(target=_active_process, args=arguments)
    active.start()
    theirs.close()
    for pipe in pipes:
        pipe.close()
    try:
        kind, content = mine.recv()
    except EOFError:
        kind, content = "failed", "the active party's process ended without a word"
    active.join()
    for process in processes:
        process.join(10)
    if kind != "done":
        raise RuntimeError(f"vertical training failed: {content}")
    return content


class _PipeLink:
    """Carries requests to a passive party's process, in order, and counts bytes."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._sender, self._receiver = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.sent = 0
        self.received = 0

    def ask(self, request) -> Future:
        """Send a request without waiting."""
        data = to_bytes(request)
        self.sent += len(data)
        self._sender.submit(self._pipe.send_bytes, data)
        return self._receiver.submit(self._answer)

    def flush(self) -> None:
        """Requests wait for nothing."""

    def call(self, word: str) -> object:
        """Ask the process itself for something."""
        self._sender.submit(self._pipe.send_bytes, word.encode()).result()
        return self._receiver.submit(self._pipe.recv).result()

    def close(self) -> None:
        """End the threads, which would keep the process alive."""
        self._sender.shutdown()
        self._receiver.shutdown()

    def _answer(self):
        data = self._pipe.recv_bytes()
        self.received += len(data)
        if data.startswith(b"failed:"):
            raise JobAborted(data.decode())
        return from_bytes(data) if data else None


def _passive_process(
    pipe: Connection,
    columns: NDArray[np.float32],
    max_bin: int,
    encryption: tuple[str, int | tuple[int, int]],
    num_rounds: int,
    guarded: bool,
    plan: SealedPlan | None,
) -> None:
    scheme, size = encryption
    form = PairsForm(point_bytes=size[1]) if scheme == "elgamal" else PairsForm(is_masked=plan is not None)
    clock = StageClock()
    makers.sum_bins = clock.timed("histogram", makers.sum_bins)
    makers.pack_and_hide = clock.timed("pack", makers.pack_and_hide)
    makers.decode_ciphertexts = clock.timed("receive", makers.decode_ciphertexts)
    PointPairs.take = clock.timed("receive", PointPairs.take)
    makers.plan_level = clock.timed("histogram", makers.plan_level)
    PointPairs.finish = clock.timed("hide", PointPairs.finish)

    if scheme != "plain":
        maker = histogram_maker(from_bytes(pipe.recv_bytes()), len(columns), form=form)
    else:
        maker = ClearHistogramMaker()
        maker.sum_bins = clock.timed("histogram", maker.sum_bins)
    names = [f"x{j}" for j in range(columns.shape[1])]
    guard = _guard(len(columns), scheme, clock) if guarded else None
    noise = None if plan is None else SealedPassive(plan, 1)
    party = PassiveParty([columns.T], names, max_bin, maker, None, guard, most_trees=num_rounds, noise=noise)
    SealedPassive.answer = clock.timed("compare", SealedPassive.answer)
    answer, prepare = clock.timed("other", party.answer), clock.timed("prepare", party.prepare)
    started = 0.0
    while True:
        try:
            while not pipe.poll(0) and prepare():
                pass
            data = pipe.recv_bytes()
        except EOFError:
            return
        if data == b"schema":
            pipe.send(party.schema())
            started = time.process_time()
        elif data == b"finish":
            used = time.process_time() - started
            pipe.send((table_to_json(party.table, party.schema().aliases), _figures(used, clock)))
            return
        else:
            try:
                reply = answer(from_bytes(data))
                pipe.send_bytes(b"" if reply is None else to_bytes(reply))
            except Exception as error:
                pipe.send_bytes(f"failed: {type(error).__name__}: {error}".encode())


def _guard(n_rows: int, scheme: str, clock: StageClock) -> Guard:
    """Return a guard of the default rules but for the cap on sums, which would end the giving after some trees."""
    folder = tempfile.TemporaryDirectory(prefix="veilboost-bench-")
    memory = Memory(Path(folder.name), "passive")
    sums_per_set = 4 if scheme == "elgamal" else 2
    guard = Guard(
        VerticalRules(max_sums_per_row=10**6),
        ReleasedSums(memory, "bench"),
        [str(i) for i in range(n_rows)],
        sums_per_set=sums_per_set,
    )
    for method in ("admit_root", "admit", "charge_bits", "is_new"):
        setattr(guard, method, clock.timed("guard", getattr(guard, method)))
    weakref.finalize(guard, folder.cleanup)
    return guard


def _active_process(
    out: Connection, pipes: Sequence[Connection], workload: Workload, scheme: str, size: int, guarded: bool
) -> None:
    try:
        out.send(("done", _train(pipes, workload, scheme, size, guarded)))
    except Exception as error:
        out.send(("failed", f"{type(error).__name__}: {error}"))


def _train(pipes: Sequence[Connection], workload: Workload, scheme: str, size: int, guarded: bool) -> VerticalRun:
    setup_started = time.perf_counter()
    clock = StageClock()
    SmallLogarithms.find = clock.timed("search", SmallLogarithms.find)
    plan = sealed_of(workload) if scheme == "sealed" else None
    owner = _owner(scheme, size, len(workload.label), plan)
    for method in ("ask", "garble", "decide"):
        setattr(ActiveLevel, method, clock.timed("compare", getattr(ActiveLevel, method)))
    for method, stage in (("encrypt", "encrypt"), ("open_sums", "decrypt"), ("fill", "encrypt")):
        if hasattr(owner, method):
            setattr(owner, method, clock.timed(stage, getattr(owner, method)))
    links = [_PipeLink(pipe) for pipe in pipes]
    if scheme != "plain":
        for pipe in pipes:
            pipe.send_bytes(to_bytes(owner.setup))
    introductions = [(f"party-{i + 1}", link.call("schema"), link) for i, link in enumerate(links)]
    parties = place_parties(workload.widths[0], introductions)
    names = [f"f{i}" for i in range(sum(workload.widths))]
    params = check_vertical_parameters(workload.params, names)
    own = LabelledSet("train", workload.features, workload.label)
    settings = VerticalSettings(workload.num_rounds, guarded=guarded, planned=plan, deadline_s=_DEADLINE_S)
    setup_s = time.perf_counter() - setup_started
    ends: list[float] = []
    round_ends: list[float] = []

    def note(*_: object) -> None:
        ends.append(time.process_time() - clock.seconds["encrypt"])
        round_ends.append(time.perf_counter())

    with (
        nullcontext(owner)
        if scheme == "plain"
        else PrecomputingKeyOwner(owner, len(workload.label), workload.num_rounds) as stocked
    ):
        columns = OwnColumns(tuple(names[: workload.widths[0]]))
        result = VerticalTraining(params, [own], parties, stocked, columns, settings).run(note)
    # Bins are made before the first tree: it counts as much as the others on average.
    n = len(ends)
    others = (ends[-1] - ends[0]) * n / (n - 1) if n > 1 else ends[0]
    # Randomisers are made a tree ahead, all those of the first tree within it: what encryption takes is counted whole.
    figures = [_figures(others + clock.seconds["encrypt"], clock)]
    tables = []
    for party, link in zip(parties, links, strict=True):
        table, of_party = link.call("finish")
        tables.append((party.first_column, table_from_json(table)[0]))
        figures.append(of_party)
        link.close()
    return VerticalRun(
        merge(result.model, workload.widths[0], tables),
        [r.seconds for r in result.rounds],
        round_ends,
        figures,
        sum(link.sent for link in links),
        sum(link.received for link in links),
        setup_s,
    )


def sealed_of(workload: Workload) -> SealedPlan | None:
    """Return the plan of the preset sealed for a workload."""
    job = VerticalJob(active="a", data_set="d", label="y", preset="sealed", params=workload.params)
    return sealed_plan(job, check_vertical_parameters(workload.params, ["any"]))


def _owner(scheme: str, size: int | tuple[int, int], n_rows: int, plan: SealedPlan | None):
    if scheme == "plain":
        return ClearGradientOwner(pair_format(n_rows))
    if scheme == "elgamal":
        return elgamal_owner(DigitFormat.of(size[0], n_rows, point_bytes=size[1]))
    return gradient_owner(
        generate_paillier_key(size), pair_format(n_rows) if plan is None else plan.pair_format(n_rows)
    )


def _figures(cpu_s: float, clock: StageClock) -> PartyFigures:
    stages = dict(clock.seconds)
    stages["other"] = cpu_s - sum(seconds for stage, seconds in stages.items() if stage != "other")
    return PartyFigures(cpu_s, stages, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, clock.spans)


# -- others on the same data ------------------------------------------------------------------------------------------


def run_central(workload: Workload) -> bytes:
    """Train stock XGBoost on the joined table; return the model."""
    matrix = xgb.DMatrix(workload.features, label=workload.label)
    params = {"tree_method": "hist", **workload.params}
    return bytes(xgb.train(params, matrix, workload.num_rounds).save_raw("json"))


def run_native(workload: Workload, n_processes: int = 3) -> tuple[float, float]:
    """Train with XGBoost's own column split, unprotected: (wall, CPU) seconds of a round, medians over 2..n."""
    from xgboost.federated import run_federated_server

    server = run_federated_server(n_workers=n_processes, port=0, blocking=False, timeout=600)
    address = f"127.0.0.1:{server['dmlc_tracker_port']}"
    columns = np.array_split(np.arange(workload.features.shape[1]), n_processes)
    pipes = []
    for rank, own in enumerate(columns):
        mine, theirs = _SPAWN.Pipe()
        part = np.ascontiguousarray(workload.features[:, own])
        arguments = (theirs, part, workload.label, workload.params, workload.num_rounds, address, rank, n_processes)
        _SPAWN.Process(target=_native_process, args=arguments, daemon=True).start()
        pipes.append(mine)
    times = np.array([pipe.recv() for pipe in pipes])  # process, round, (wall, CPU)
    wall, cpu = times[:, 1:, 0].max(axis=0), times[:, 1:, 1].sum(axis=0)
    return float(np.median(wall)), float(np.median(cpu))


def _native_process(
    out: Connection,
    columns: NDArray[np.float32],
    label: NDArray[np.float32],
    params: dict,
    num_rounds: int,
    address: str,
    rank: int,
    world: int,
) -> None:
    from xgboost.core import DataSplitMode

    with xgb.collective.CommunicatorContext(
        dmlc_communicator="federated",
        federated_server_address=address,
        federated_world_size=world,
        federated_rank=rank,
    ):
        matrix = xgb.DMatrix(columns, label=label, data_split_mode=DataSplitMode.COL)
        booster = xgb.Booster({"tree_method": "hist", **params}, [matrix])
        times = []
        for number in range(num_rounds):
            wall, cpu = time.perf_counter(), time.process_time()
            booster.update(matrix, number)
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    out.send(times)
