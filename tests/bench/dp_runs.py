"""Single trainings of the private-tree benchmark, and many of them in several processes."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import TracebackType

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from dp_components.accounting import compose
from dp_components.leaf_weights import CLIPPED_AT, LeafQuery
from nvflare_plugins.kinds.private_trees.methods import Method
from nvflare_plugins.kinds.private_trees.plan import TRUSTED_SERVER, Trust
from nvflare_plugins.xgb.continuation import recalibrated
from tests.bench.dp_data import Split, load, split
from tests.bench.dp_published import float_gaussian, run_published
from tests.bench.dp_statistics import Scored, Series, calibration_error, reliability
from tests.support.private_simulation import Simulation
from tests.support.private_trees import mu_of, plan_with, split_rows, train_in_process

N_SITES = 3


class Lane(Enum):
    """How a model is trained."""

    PROTOCOL = "protocol, three sites in process"
    TWIN = "pooled rows, no protocol"
    PUBLISHED = "pooled rows with the published accounting"


@dataclass(frozen=True)
class Run:
    """One training. ``seed`` draws the split, ``repeat`` noise and forest."""

    source: str
    label: str
    seed: int
    repeat: int
    epsilon: float
    method: Method
    lane: Lane
    trust: Trust = TRUSTED_SERVER


def execute(run: Run) -> Scored:
    """Train one model and score it on its test rows."""
    data = _split(run.source, run.label, run.seed)
    structure = 1000 * run.seed + run.repeat
    if run.lane is Lane.PROTOCOL:
        return through_protocol(run.method, data, run.epsilon, run.trust, structure)
    if run.lane is Lane.TWIN:
        return in_twin(run.method, data, run.epsilon, run.trust, structure)
    started = time.process_time()
    raw = run_published(run.method, data, run.epsilon, run.seed, run.repeat)
    return _score(data, raw, run.method, seconds=time.process_time() - started)


@lru_cache(maxsize=64)
def _split(source: str, label: str, seed: int) -> Split:
    return split(*_load(source, label), seed)


@lru_cache(maxsize=1)
def _load(source: str, label: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return load(source, label)


def _score(data: Split, raw: NDArray[np.float32], method: Method, **more: float) -> Scored:
    p = 1.0 / (1.0 + np.exp(-raw.astype(np.float64)))
    if method.query is LeafQuery.CLIPPED:
        p = recalibrated(p.astype(np.float32), CLIPPED_AT).astype(np.float64)
    label = data.test.label
    calibrated = {"calibration": calibration_error(label, p), "reliability": reliability(label, p)}
    return Scored(roc_auc_score(label, raw), log_loss(label, p), **calibrated, **more)  # type: ignore[arg-type]


def through_protocol(method: Method, data: Split, epsilon: float, trust: Trust, structure_seed: int) -> Scored:
    """Train with three sites in process: masks, the server, noise of the operating system."""
    plan = plan_with(method, data.bounds, mu_of(epsilon, data.delta), trust, structure_seed)
    started, seen = time.process_time(), []
    model = train_in_process(plan, split_rows(data.train.columns, data.train.label, N_SITES), seen=seen)[0]
    raw = xgb.Booster(model_file=bytearray(model)).predict(
        xgb.DMatrix(data.test.columns.T, nthread=1), output_margin=True
    )
    seconds = time.process_time() - started
    spent = compose(plan.releases.events).epsilon(data.delta)
    return _score(data, raw, method, seconds=seconds, epsilon=spent, messages=len({t.frame.counter for t in seen}))


def in_twin(method: Method, data: Split, epsilon: float, trust: Trust, structure_seed: int) -> Scored:
    """Train on the pooled rows: models equal those of the protocol for equal noise."""
    plan = plan_with(method, data.bounds, mu_of(epsilon, data.delta), trust, structure_seed)
    mechanism = float_gaussian(structure_seed, round(1000 * epsilon), round(1000 * trust.noise_factor))
    started = time.process_time()
    raw = Simulation(plan, data.train, data.test, mechanism).run()
    return _score(data, raw, method, seconds=time.process_time() - started)


@dataclass(frozen=True)
class Draws:
    """The repetitions of every cell: one result per split, the mean over its repeats."""

    source: str
    label: str
    seeds: Sequence[int]
    repeats: int


class Runner:
    """Executes trainings in several processes; use as a context manager. CPU times are each process's own."""

    def __init__(self, n_jobs: int):
        # Fresh processes: gRPC and XGBoost do not survive a fork with threads.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(n_jobs, context, gc.freeze) if n_jobs > 1 else None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def scores(
        self, draws: Draws, epsilon: float, method: Method, lane: Lane, trust: Trust = TRUSTED_SERVER
    ) -> list[list[Scored]]:
        """Train one method on all splits, with all repeats; one list per split."""
        runs = [
            Run(draws.source, draws.label, seed, repeat, epsilon, method, lane, trust)
            for seed in draws.seeds
            for repeat in range(draws.repeats)
        ]
        scored = list(map(execute, runs) if self._pool is None else self._pool.map(execute, runs))
        return [scored[i : i + draws.repeats] for i in range(0, len(scored), draws.repeats)]

    def series(self, draws: Draws, epsilon: float, method: Method, lane: Lane, trust: Trust = TRUSTED_SERVER) -> Series:
        """Train one method on all splits; one result per split."""
        return Series.of(self.scores(draws, epsilon, method, lane, trust))
