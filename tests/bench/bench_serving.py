"""Seconds from a request to its score in a job that stays, three sites in a POC: p50, p95, p99.

    python tests/bench/bench_serving.py [--rows 1000] [--trees 100] [--depth 6] [--batch 1] [--callers 1]

Each row is asked for once, so that every passive party charges it, durably, before it answers. Times are the caller's:
from writing the line to reading the answer. The last line is JSON. With --again the same rows are asked for a second
time, which costs nothing of any limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import numpy as np

from nvflare_plugins.kinds.vertical_inference.score_socket import reachable
from poc_workspace.run_poc import ADMIN, SITES, verify
from tests.support.serving_poc import ServingPoc
from tests.support.threads import in_threads


def ask(path: Path, rows: list[list[int]]) -> list[float]:
    """Ask for batches of rows one after the other; return the seconds of each."""
    times = []
    with reachable(path) as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(name)
        answers = caller.makefile("rb")
        for batch in rows:
            line = json.dumps({"rows": batch}).encode() + b"\n"
            began = time.perf_counter()
            caller.sendall(line)
            answer = json.loads(answers.readline())
            times.append(time.perf_counter() - began)
            if len(answer.get("scores", ())) != len(batch):
                raise RuntimeError(f"not answered: {answer}")
    return times


def measure(path: Path, batches: list[list[int]], n_callers: int) -> tuple[list[float], float]:
    """Share batches among callers; return the seconds of each request, and of all together."""
    times: list[list[float]] = [[] for _ in range(n_callers)]

    def call(place: int) -> None:
        times[place] = ask(path, batches[place::n_callers])

    began = time.perf_counter()
    in_threads(call, range(n_callers))
    return [one for several in times for one in several], time.perf_counter() - began


def evidence_bytes(poc: ServingPoc, job_id: str) -> int:
    """Return the size of the active party's evidence while the job runs."""
    folder = poc.kits / "site-1" / "veilboost_runs" / job_id / "evidence"
    return sum(path.stat().st_size for path in folder.glob("*.partial"))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1, help="rows of a request")
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="veilboost_serving_"))
    poc = ServingPoc(folder / "poc", scenario="vertical")
    poc.n_new = max(args.rows, 200)
    try:
        with poc:
            began = time.perf_counter()
            model = poc.place(args.trees, args.depth)
            trained_s = time.perf_counter() - began
            job_id = poc.serve(model)
            path = poc.socket(job_id)
            rows = list(range(args.rows))
            batches = [rows[start : start + args.batch] for start in range(0, len(rows), args.batch)]
            size = evidence_bytes(poc, job_id)
            times, wall_s = measure(path, batches, args.callers)
            load = os.getloadavg()
            grown = evidence_bytes(poc, job_id) - size
            again = measure(path, batches, args.callers)[0] if args.again else []
            with reachable(path) as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
                caller.connect(name)
                caller.sendall(b'{"stop": true}\n')
                caller.recv(1000)
            status, result = poc.end_of(job_id)
            holds = verify(result, poc.kits / ADMIN / "startup" / "rootCA.pem") == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    told = {
        "rows": args.rows,
        "trees": args.trees,
        "depth": args.depth,
        "batch": args.batch,
        "callers": args.callers,
        "sites": len(SITES),
        "training_s": round(trained_s, 1),
        "rows_per_s": round(args.rows / wall_s, 2),
        **{f"p{q}_s": round(float(np.percentile(times, q)), 4) for q in (50, 95, 99)},
        **{f"again_p{q}_s": round(float(np.percentile(again, q)), 4) for q in (50, 95, 99) if again},
        "longest_s": round(max(times), 4),
        "evidence_bytes_per_row": round(grown / args.rows),
        "status": status,
        "evidence_holds": holds,
        "load": [round(one, 1) for one in load],
        "cores": os.cpu_count(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
