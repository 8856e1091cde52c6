"""A trial of a horizontal tuning at a site in its own process, over one Dask worker and over two.

    python -m tests.bench.cluster_tuning [--rows 1000000] [--features 28] [--rounds 10] [--trials 3] [--folds 3]

Sites, workers and threads are those of cluster_horizontal.py. The last line is one JSON object. Of a trial, all but the
first, which comes with loading, the search of cut points and all bins:

    worker_core_s    CPU seconds of the busiest worker, the mean
    path_core_s      these and those of the process with the three sites and the server, one after the other: what a
                     trial takes where each process has a core of its own
    wall_s           what it takes, the median; on a busy machine more than it needs
    job_core_s       path_core_s of all up to the end of the last trial
    worker_mib       most that a worker has held, programs included
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nvflare_plugins.tuning.job import TuningJob
from nvflare_plugins.tuning.site import run_tuning_site
from tests.bench.cluster_horizontal import SMALL, cpu_seconds, table
from tests.support import parties as support
from tests.support.local_cluster import local_cluster
from tests.support.parties import Parties, succeed

POLICY = {"consents": {"tuning": 10_000}}
TIMEOUT_S = 3600.0


class Clocks(list[str]):
    """Lines of the first site's log; notes the clocks when a trial is done."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__()
        self._pids = [os.getpid(), *pids]
        self.read: list[tuple[float, ...]] = []
        self.note()

    def note(self) -> None:
        """Read all clocks: wall, then CPU of this process and of each worker."""
        self.read.append((time.perf_counter(), *map(cpu_seconds, self._pids)))

    def append(self, line: str) -> None:
        """Take a line."""
        super().append(line)
        if line.startswith("trial "):
            self.note()


def tuning_of(folder: Path, frame: pd.DataFrame, n_workers: int, job: TuningJob) -> tuple[dict[str, float], Any]:
    """Return what a trial takes at the first site, and the scores. Args: n_workers: 0 for the site's own process."""
    sites = Parties(folder, 3, POLICY)
    parts = np.split(np.arange(len(frame)), [len(frame) - 2 * SMALL, len(frame) - SMALL])
    for number, (site, rows) in enumerate(zip(sites.sites, parts, strict=True)):
        sites.give(site, "train", frame.iloc[rows])
        registry = sites.workspace(site) / "veilboost_registry" / site
        registry.mkdir(mode=0o700, parents=True)
        (registry / "key").write_bytes(bytes([number]) * 32)  # the same folds for any number of workers
    with local_cluster(n_workers) if n_workers else nullcontext() as cluster:
        pids = [] if cluster is None else cluster.pids
        if cluster is not None:
            sites.set_policy("site-1", cluster={"scheduler": cluster.address, "workers": n_workers})
        clocks = Clocks(pids)
        sites.said["site-1"] = clocks
        succeed(sites.run(run_tuning_site, job))
        peak = max(map(_peak_mib, pids), default=0.0)
    trials = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(clocks.read)]
    wall, own, *of_workers = np.array(trials[1:]).T
    busiest = max((float(one.mean()) for one in of_workers), default=0.0)
    of_job = np.array(trials).sum(axis=0)[1:]
    figures = {
        "worker_core_s": busiest,
        "path_core_s": float(own.mean()) + busiest,
        "wall_s": statistics.median(wall),
        "job_core_s": float(of_job[0] + max(of_job[1:], default=0.0)),
        "worker_mib": peak,
    }
    document = json.loads((sites.run_folder("site-1") / "tuning.json").read_text())
    return {name: round(value, 3) for name, value in figures.items()}, [one["folds"] for one in document["trials"]]


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(n_rows: int, n_features: int, job: TuningJob) -> dict[str, object]:
    """Return the figures of all three."""
    frame, found, scores = table(n_rows, n_features), [], []
    for n_workers in (0, 1, 2):
        with tempfile.TemporaryDirectory() as name:
            figures, own = tuning_of(Path(name), frame, n_workers, job)
        found.append(figures)
        scores.append(own)
    here, one, two = (figures["path_core_s"] for figures in found)
    return {
        "rows": n_rows,
        "features": n_features,
        "load": os.getloadavg()[0],
        "in_process": found[0],
        "workers_1": found[1],
        "workers_2": found[2],
        "speed_up_2": round(one / two, 2),
        "overhead_1": round(one / here - 1, 3),
        "same_scores": [own == scores[0] for own in scores[1:]],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rows", 1_000_000), ("features", 28), ("rounds", 10), ("trials", 3), ("folds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    support.TIMEOUT_S = TIMEOUT_S
    params = {"objective": "binary:logistic", "max_depth": 6, "max_bin": 256, "nthread": 1, "eval_metric": "logloss"}
    trials = [{"eta": 0.1 * (number + 1)} for number in range(args.trials)]
    fields = {"data_set": "train", "label": "y", "params": params, "trials": trials, "profile": "masks"}
    job = TuningJob.from_dict({**fields, "folds": args.folds, "num_rounds": args.rounds})
    print(json.dumps(measure(args.rows, args.features, job)))


if __name__ == "__main__":
    main()
