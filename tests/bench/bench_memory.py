"""``python -m tests.bench.bench_memory [FOLDER]``: the cost of a site's memory after many jobs, on that disk."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table
from nvflare_plugins.site.memory.registry import Registry, Reservation, Wanted
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy_values import Consents

N_ROWS = 1000
REPEATS = 9
JOBS = ((1, 1), (100, 1), (10_000, 1), (10_000, 10_000), (100_000, 1))
"""How many closed jobs, with how many different parameters."""
ROWS = (10_000, 100_000, 1_000_000)


def milliseconds(action: Callable[[], object]) -> float:
    """Return the median over repeats."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


def reserve(registry: Registry, job_id: str) -> Reservation:
    features = np.random.default_rng(0).normal(size=(N_ROWS, 4)).astype(np.float32)
    table = Table(features, tuple("abcd"), ("float",) * 4, np.zeros(N_ROWS, np.float32), "y")
    spec = DataSet("train", Path("/train.csv"), "csv")
    return registry.reserve(Wanted(table, spec), job_id=job_id, sites=("a", "b"), parameters=b"p")


def after_jobs(folder: Path, n_jobs: int, n_parameters: int) -> dict[str, float]:
    """Return times in a memory of so many closed jobs, with so many different parameters. Units: milliseconds."""
    registry = Registry(Memory(folder, "a"), Consents())
    run = reserve(registry, "first")
    with Memory(folder, "a").transaction() as db:
        terms = ((number, f"p{number}") for number in range(2, n_parameters + 1))
        copied = "INSERT INTO terms SELECT ?, data, sites, ?, draw FROM terms WHERE id = 1"
        db.executemany(copied, terms)
        jobs = ((f"job-{number}", 1 + number % n_parameters) for number in range(n_jobs))
        closed = "INSERT INTO runs (job_id, terms, started, state, trees) VALUES (?, ?, '', 'complete', 9)"
        db.executemany(closed, jobs)
    return {
        "open": milliseconds(lambda: Registry(Memory(folder, "a"), Consents())),
        "reserve": milliseconds(lambda: reserve(registry, "again")),
        "checkpoint": milliseconds(lambda: registry.trees_complete(run, 3)),
    }


def charge(folder: Path, n_rows: int) -> float:
    """Return the time to charge the sums of half of the rows. Units: milliseconds."""
    released = ReleasedSums(Memory(folder, "a"), "train")
    with released.charging() as ledger:
        ledger.enter(np.arange(n_rows, dtype=np.uint64))

    def once() -> None:
        with released.charging() as ledger:
            ledger.sums[: n_rows // 2] += 2
            ledger.share += np.float32(0.01)

    return milliseconds(once)


def main() -> None:
    """Measure, print each case, and all as one JSON object last."""
    place = sys.argv[1] if len(sys.argv) > 1 else None
    results: dict[str, dict] = {"after_jobs": {}, "charge": {}}
    for n_jobs, n_parameters in JOBS:
        with tempfile.TemporaryDirectory(dir=place) as one:
            times = {name: round(of, 1) for name, of in after_jobs(Path(one), n_jobs, n_parameters).items()}
        print(f"{n_jobs:>7} jobs, {n_parameters:>6} parameters:", times)
        results["after_jobs"][f"{n_jobs} jobs, {n_parameters} parameters"] = times
    for n_rows in ROWS:
        with tempfile.TemporaryDirectory(dir=place) as one:
            results["charge"][n_rows] = round(charge(Path(one), n_rows), 1)
        print(f"{n_rows:>9} rows: a charge of sums {results['charge'][n_rows]} ms")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
