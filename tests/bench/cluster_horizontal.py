"""A horizontal round at a site in its own process, over one Dask worker and over two; part of bench_cluster.py.

    python -m tests.bench.cluster_horizontal [--rows 2000000] [--features 28] [--rounds 12]

Three sites in one process under masks, the first of which has nearly all rows; workers are processes of one thread on
this machine, and XGBoost has one thread in the site's process too. The last line is one JSON object. Of a round, all
but the first:

    wall_s           what it takes at the first site, the median; on a busy machine more than it needs
    worker_core_s    CPU seconds of the busiest worker, the mean
    path_core_s      these and those of the process with the three sites and the server, one after the other: what a
                     round takes where each process has a core of its own
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd

from nvflare_plugins.horizontal.job import HorizontalJob
from tests.support.federation import Federation, succeed
from tests.support.local_cluster import local_cluster

SMALL = 2_000  # rows of each of the other sites
TIMEOUT_S = 3600.0


def table(n_rows: int, n_features: int) -> pd.DataFrame:
    """Return rows of numbers, and labels of two classes that several of them decide."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((n_rows, n_features), dtype=np.float32)
    score = features[:, 0] + features[:, 1] * features[:, 2] + rng.standard_normal(n_rows, dtype=np.float32)
    return pd.DataFrame(features, columns=[f"x{i}" for i in range(n_features)]).assign(y=(score > 0).astype(np.float32))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def round_of(folder: Path, frame: pd.DataFrame, n_workers: int, rounds: int) -> tuple[dict[str, float], bytes]:
    """Return what a round takes at the first site, and the model. Args: n_workers: 0 for the site's own process."""
    federation = Federation(folder)
    federation.give_data("train", frame, np.split(np.arange(len(frame)), [len(frame) - 2 * SMALL, len(frame) - SMALL]))
    params = {"objective": "binary:logistic", "max_depth": 6, "max_bin": 256, "nthread": 1}
    job = HorizontalJob("train", "y", params, rounds, profile="masks")
    clocks: list[tuple[float, ...]] = []
    with local_cluster(n_workers) if n_workers else nullcontext() as cluster:
        pids = [] if cluster is None else cluster.pids
        if cluster is not None:
            federation.write_policy("site-1", cluster={"scheduler": cluster.address, "workers": n_workers})

        def watch(site: str) -> Callable[[object, int], None]:
            def note(record: object, total: int) -> None:
                if site == "site-1":
                    clocks.append((cpu_seconds(os.getpid()), *map(cpu_seconds, pids)))

            return note

        succeed(federation.run(job, timeout_s=TIMEOUT_S, on_progress=watch))
    n_rounds = len(clocks) - 1
    own, *of_workers = [(after - before) / n_rounds for before, after in zip(clocks[0], clocks[-1], strict=True)]
    busiest = max(of_workers, default=0.0)
    wall = [row.seconds for row in federation.record("site-1").rounds]
    figures = {"wall_s": statistics.median(wall[1:]), "path_core_s": own + busiest, "worker_core_s": busiest}
    return figures, federation.model()


def measure(n_rows: int, n_features: int, rounds: int) -> dict[str, object]:
    """Return the figures of all three."""
    frame = table(n_rows, n_features)
    found: list[dict[str, float]] = []
    models = []
    for n_workers in (0, 1, 2):
        with tempfile.TemporaryDirectory() as name:
            figures, model = round_of(Path(name), frame, n_workers, rounds)
        found.append(figures)
        models.append(model)
    here, one, two = (figures["path_core_s"] for figures in found)
    return {
        "rows": n_rows,
        "features": n_features,
        "load": os.getloadavg()[0],
        "in_process": found[0],
        "workers_1": found[1],
        "workers_2": found[2],
        "speed_up_2": one / two,
        "overhead_1": one / here - 1,
        "same_model": [model == models[0] for model in models[1:]],
        "targets_met": {"speed_up_2": one / two >= 1.5, "overhead_1": one / here - 1 <= 0.15},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--features", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    print(json.dumps(measure(args.rows, args.features, args.rounds)))


if __name__ == "__main__":
    main()
