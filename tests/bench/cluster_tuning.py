"""A trial of a horizontal tuning at a site in its own process, over one Dask worker and over two.

    python -m tests.bench.cluster_tuning [--rows 1000000] [--features 28] [--rounds 10] [--trials 6] [--folds 3]

Sites, workers, threads and turns are those of cluster_horizontal.py, and so are the figures in the JSON object at the
end, of a trial in the place of a round. The first trial, which comes with loading, folds, the search of cut points and
all bins, is apart:

    first_core_s    CPU seconds of the first site's process up to its end, and of its busiest worker, programs included
    worker_mib      most that a worker has held, programs included
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nvflare_plugins.attempt.job_context import Silent, SiteContext
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.kinds.tuning.result import FILE_NAME
from nvflare_plugins.kinds.tuning.site import run_tuning_site
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from tests.bench.cluster_horizontal import Way, cpu_seconds, table
from tests.bench.horizontal_lanes import Baton
from tests.bench.loopback import DEADLINE_S, SocketTransport
from tests.support.federation import Federation


class _Passing(Silent):
    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def say(self, text: str) -> None:
        if text.startswith("trial "):
            self._baton.ready()


def _take_part(
    baton: Baton,
    folder: Path,
    sites: Sequence[str],
    site: str,
    job: dict[str, Any],
    end: socket.socket,
    attempt: bytes,
) -> None:
    workspace = folder / site
    policy = SitePolicy.load(workspace, site)
    context = SiteContext(site, tuple(sites), "job", attempt, workspace / "runs", policy, Identity.unsigned(site))
    run_tuning_site(TuningJob.from_dict(job), context, SocketTransport(end), DEADLINE_S, _Passing(baton))
    found = json.loads((workspace / "runs" / "job" / FILE_NAME).read_text())
    baton.finished(json.dumps([trial["folds"] for trial in found["trials"]]).encode())


class TuningWay(Way):
    """One way to tune, its processes waiting between trials; it ends with all scores."""

    take_part = staticmethod(_take_part)

    def prepare(self, federation: Federation) -> None:
        """Have the sites consent, and draw the same folds in every way."""
        for site in federation.sites:
            federation.set_policy(site, consents={"tuning": 10_000})
        federation.set_registry_keys()

    def wait_ready(self) -> None:
        """Wait until the first trial is done."""
        site = self.lane.wait_ready()[0]
        self._first = float(str(site)) + max(map(cpu_seconds, self._workers), default=0.0)

    def peaks(self) -> dict[str, float]:
        """Return ``first_core_s`` and ``worker_mib``; while the workers are there."""
        return {"first_core_s": self._first, "worker_mib": max(map(_peak_mib, self._workers), default=0.0)}


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(n_rows: int, n_features: int, job: dict[str, Any]) -> dict[str, object]:
    """Return the figures of all three ways."""
    frame = table(n_rows, n_features)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = [TuningWay(stack, folder / f"{number}", frame, number, job) for number in (0, 1, 2)]
        del frame
        for way in ways:
            way.wait_ready()
        for _ in job["trials"][1:]:
            for way in ways:
                way.take_turn()
        peaks = [way.peaks() for way in ways]
        scores = [way.finish() for way in ways]
    here, one, two = ({**way.figures(), **peak} for way, peak in zip(ways, peaks, strict=True))
    return {
        "rows": n_rows,
        "features": n_features,
        "trials": len(job["trials"]) - 1,
        "load": os.getloadavg()[0],
        "in_process": here,
        "workers_1": one,
        "workers_2": two,
        "speed_up_2": one["path_core_s"] / two["path_core_s"],
        "overhead_1": one["path_core_s"] / here["path_core_s"] - 1,
        "same_scores": len(set(scores)) == 1,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rows", 1_000_000), ("features", 28), ("rounds", 10), ("trials", 6), ("folds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    params = {"objective": "binary:logistic", "max_depth": 6, "max_bin": 256, "nthread": 1, "eval_metric": "logloss"}
    trials = [{"eta": round(0.05 * (number + 1), 2)} for number in range(args.trials)]
    fields = {"data_set": "train", "label": "y", "params": params, "trials": trials, "profile": "masks"}
    print(json.dumps(measure(args.rows, args.features, {**fields, "folds": args.folds, "num_rounds": args.rounds})))


if __name__ == "__main__":
    main()
