"""A horizontal round at a site in its own process, over one Dask worker and over two; part of bench_cluster.py.

    python -m tests.bench.cluster_horizontal [--rows 2000000] [--features 28] [--rounds 40] [--workers 0 1 2]

Three sites under masks, a process each, the first of which has nearly all rows; the server is this process. Workers are
processes of one thread on this machine, and XGBoost has one thread in the site's process too. The three ways to train
stand ready at once and take their turns round by round (horizontal_lanes.py), so that what else the machine does hits
all alike. The last line is one JSON object. Of a round, all but the first, means (and medians, as ``median_...``):

    wall_s           what it takes; on a machine with too few cores more than it needs
    site_core_s      CPU seconds of the first site's process
    worker_core_s    of its busiest worker
    path_core_s      both, one after the other: what a round takes the site where each process has a core of its own
    others_core_s    of the two other sites' processes and the server's
    all_path_core_s  as path_core_s, with the others in line too, as if none of them worked while this site does
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nvflare_plugins.attempt.job_context import Silent, SiteContext
from nvflare_plugins.attempt.run_folder import MODEL
from nvflare_plugins.kinds.horizontal.site import run_site
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from tests.bench.horizontal_lanes import Baton, Lane
from tests.bench.loopback import DEADLINE_S, LoopbackServer, SocketTransport, connected_pair
from tests.support.federation import Federation
from tests.support.local_cluster import local_cluster

SMALL = 2_000  # rows of each of the other sites


def table(n_rows: int, n_features: int) -> pd.DataFrame:
    """Return rows of numbers, and labels of two classes that several of them decide."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((n_rows, n_features), dtype=np.float32)
    score = features[:, 0] + features[:, 1] * features[:, 2] + rng.standard_normal(n_rows, dtype=np.float32)
    return pd.DataFrame(features, columns=[f"x{i}" for i in range(n_features)]).assign(y=(score > 0).astype(np.float32))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used, by its clock."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) returns under Linux


class _Passing(Silent):
    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def __call__(self, record: object, n_rounds: int) -> None:
        self._baton.ready()


def _take_part(
    baton: Baton, folder: Path, sites: Sequence[str], site: str, rounds: int, end: socket.socket, attempt: bytes
) -> None:
    params = {"objective": "binary:logistic", "max_depth": 6, "max_bin": 256, "nthread": 1}
    job = HorizontalJob("train", "y", params, rounds, profile="masks")
    workspace = folder / site
    policy = SitePolicy.load(workspace, site)
    context = SiteContext(site, tuple(sites), "job", attempt, workspace / "runs", policy, Identity.unsigned(site))
    run_site(job, context, SocketTransport(end), DEADLINE_S, _Passing(baton))
    baton.finished((workspace / "runs" / "job" / MODEL).read_bytes())


class Way:
    """One way to train, its processes waiting between rounds."""

    take_part = staticmethod(_take_part)

    def __init__(self, stack: ExitStack, folder: Path, frame: pd.DataFrame, n_workers: int, rounds: Any) -> None:
        """Start it. Args: n_workers: 0 for the site's own process; rounds: for ``take_part``."""
        federation = Federation(folder)
        ends = [len(frame) - 2 * SMALL, len(frame) - SMALL]
        federation.give_data("train", frame, np.split(np.arange(len(frame)), ends))
        self.prepare(federation)
        self._workers: list[int] = []
        if n_workers:
            cluster = stack.enter_context(local_cluster(n_workers))
            federation.set_policy("site-1", cluster={"scheduler": cluster.address, "workers": n_workers})
            self._workers = cluster.pids
        sites = federation.sites
        pairs = [connected_pair() for _ in sites]
        self._server = LoopbackServer(sites, [pair[0] for pair in pairs], "job", "masks", folder / "server")
        self.lane = Lane(f"{n_workers} workers")
        stack.callback(self.lane.kill)
        for site, (_, end) in zip(sites, pairs, strict=True):
            self.lane.start(self.take_part, folder, sites, site, rounds, end, self._server.attempt)
            end.close()
        self._of_workers: list[list[float]] = []

    def prepare(self, federation: Federation) -> None:
        """Set up what a job needs besides its rows."""

    def take_turn(self) -> None:
        """Do one round."""
        before = [cpu_seconds(pid) for pid in self._workers]
        self.lane.take_turn()
        after = [cpu_seconds(pid) for pid in self._workers]
        self._of_workers.append([b - a for a, b in zip(before, after, strict=True)])

    def finish(self) -> bytes:
        """End it; return the model, the same at all sites."""
        model, *others = self.lane.finish()
        self._server.close()
        if any(one != model for one in others):
            raise RuntimeError("the sites' models differ")
        return model

    def figures(self) -> dict[str, float]:
        """Return the means and medians over rounds."""
        means = self._over_rounds(statistics.mean)
        return means | {f"median_{name}": value for name, value in self._over_rounds(statistics.median).items()}

    def _over_rounds(self, middle: Callable[[Iterable[float]], float]) -> dict[str, float]:
        turns = self.lane.turns
        site = middle([turn.of_processes[0] for turn in turns])
        others = middle([turn.cpu_s - turn.of_processes[0] for turn in turns])
        busiest = max(map(middle, zip(*self._of_workers, strict=True)), default=0.0)
        return {
            "wall_s": middle([turn.wall_s for turn in turns]),
            "site_core_s": site,
            "worker_core_s": busiest,
            "path_core_s": site + busiest,
            "others_core_s": others,
            "all_path_core_s": site + busiest + others,
        }


def measure(n_rows: int, n_features: int, rounds: int, workers: Sequence[int] = (0, 1, 2)) -> dict[str, object]:
    """Return the figures of all ways. Args: workers: of each; 0 is one of them."""
    frame = table(n_rows, n_features)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = {number: Way(stack, folder / f"{number}", frame, number, rounds) for number in workers}
        del frame
        for way in ways.values():
            way.lane.wait_ready()
        for _ in range(rounds - 1):
            for way in ways.values():
                way.take_turn()
        models = {number: way.finish() for number, way in ways.items()}
        found = {number: way.figures() for number, way in ways.items()}

    def over(above: int, below: int, name: str) -> float | None:
        return found[above][name] / found[below][name] if {above, below} <= set(found) else None

    speed_up, overhead = over(1, 2, "path_core_s"), over(1, 0, "path_core_s")
    return {
        "rows": n_rows,
        "features": n_features,
        "rounds": rounds - 1,
        "load": os.getloadavg()[0],
        **{"in_process" if not number else f"workers_{number}": found[number] for number in found},
        "speed_up_2": speed_up,
        "overhead_1": None if overhead is None else overhead - 1,
        "median_speed_up_2": over(1, 2, "median_path_core_s"),
        "median_overhead_1": None if overhead is None else (over(1, 0, "median_path_core_s") or 0.0) - 1,
        "speed_up_2_all_in_line": over(1, 2, "all_path_core_s"),
        "speed_up_2_wall": over(1, 2, "wall_s"),
        "same_model": len(set(models.values())) == 1,
        "targets_met": {
            "speed_up_2": speed_up is not None and speed_up >= 1.5,
            "overhead_1": overhead is not None and overhead <= 1.15,
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--features", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print(json.dumps(measure(args.rows, args.features, args.rounds, args.workers)))


if __name__ == "__main__":
    main()
