"""Tables larger than memory: what a site holds at most while it trains, in each form, and one far above its limit.

A site trains horizontally (profile masks, 3 rounds of depth 6, 256 bins) with two sites of few rows in the same
process. Its table lies in a folder of Parquet files of 50,000 rows; values are drawn, a tenth of them missing in
``missing``. Memory is the process's own (RssAnon, looked at every 5 ms), less what it had before the job. What the last
line of the output holds, one JSON object:

    bytes_per_value   per table (dense, missing) and form (one held file, passes, external): the largest memory of the
                      whole job, from loading to the model, over rows x features; a held float32 takes 4
    seconds           of the job, likewise
    models_equal      all forms of a table have given the same bytes
    limited           one large table: bytes of its float32 values, the memory limit of its process (a cgroup's where
                      the machine lets one be made, else the limit of data, prlimit --data), their quotient, seconds,
                      and bytes with the bins in files; and whether bins in memory fit under the limit too (null: no)

Run: python -m tests.bench.bench_tables [--quick]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SHARD_ROWS = 50_000
FEATURES = 128
LARGE_FEATURES = 512
SMALL_ROWS = 3_000
GROUP = Path("/sys/fs/cgroup/memory")
FORMS = ("file", "passes", "external")


def shard(number: int, n_rows: int, n_features: int, has_missing: bool) -> pa.Table:
    """Return the rows of one file."""
    rng = np.random.default_rng((number, n_features))
    values = rng.standard_normal((n_rows, n_features), dtype=np.float32)
    label = (values[:, 0] + values[:, 1] * values[:, 2] + rng.standard_normal(n_rows) > 0).astype(np.float32)
    if has_missing:
        values[rng.random(values.shape, dtype=np.float32) < 0.1] = np.nan
    return pa.table({**{f"x{i}": values[:, i] for i in range(n_features)}, "label": label})


def write_sites(folder: Path, n_rows: int, n_features: int, has_missing: bool) -> None:
    """Write the first site's table as a folder and, if it is small, as one file; and two small ones."""
    (folder / "site-1" / "rows").mkdir(parents=True)
    for number, first in enumerate(range(0, n_rows, SHARD_ROWS)):
        part = shard(number, min(SHARD_ROWS, n_rows - first), n_features, has_missing)
        pq.write_table(part, folder / "site-1" / "rows" / f"{number:04}.parquet")
    if n_features == FEATURES:
        pq.write_table(pq.read_table(folder / "site-1" / "rows"), folder / "site-1" / "rows.parquet")
    for number in (2, 3):
        (folder / f"site-{number}").mkdir()
        part = shard(10_000 + number, SMALL_ROWS, n_features, has_missing)
        pq.write_table(part, folder / f"site-{number}" / "rows.parquet")


def anonymous_bytes() -> int:
    """Return the memory that is this process's own, without pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Peak:
    """The largest memory since it was made."""

    def __init__(self) -> None:
        self.before = self.most = anonymous_bytes()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, anonymous_bytes())
            time.sleep(0.005)


def train(folder: Path, form: str) -> None:
    """Run the job in this process and print what it took."""
    import xgboost  # noqa: F401  (not part of what the job takes)

    from nvflare_plugins.horizontal.job import HorizontalJob
    from tests.support.federation import Federation, succeed

    sites = Federation(folder)
    for site in sites.sites:
        (sites.workspace(site) / "local").mkdir(exist_ok=True)
        own = {"path": "rows.parquet"} if site != "site-1" or form == "file" else {"path": "rows", "memory": form}
        sites.write_policy(site, data_sets={"rows": own})
    params = {"objective": "binary:logistic", "max_bin": 256, "max_depth": 6}
    job = HorizontalJob.from_dict(
        {"data_set": "rows", "label": "label", "params": params, "num_rounds": 3, "profile": "masks"}
    )
    peak, started = Peak(), time.perf_counter()
    succeed(sites.run(job, f"job-{form}-{os.getpid()}", timeout_s=3600.0))
    seconds = time.perf_counter() - started
    model = hashlib.sha256(sites.model(f"job-{form}-{os.getpid()}")).hexdigest()
    print(json.dumps({"seconds": seconds, "before": peak.before, "bytes": peak.most - peak.before, "model": model}))


def run(folder: Path, form: str, limit: int | None = None) -> dict[str, Any] | None:
    """Run the job in a process of its own. Returns: what it took, None if the limit ended it."""
    command = [sys.executable, "-m", "tests.bench.bench_tables", "--train", form, "--folder", str(folder)]
    group = GROUP / f"bench-tables-{os.getpid()}"
    is_group = limit is not None and has_groups()
    if is_group:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))

    def begin() -> None:
        if is_group:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        elif limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    environment = {**os.environ, "MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=begin, env=environment, check=False)
    if is_group:
        group.rmdir()
    print(form, limit, done.returncode, done.stdout.decode().strip()[-300:], file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def has_groups() -> bool:
    """Tell whether this user may limit a group of processes."""
    probe = GROUP / f"bench-tables-probe-{os.getpid()}"
    try:
        probe.mkdir()
        (probe / "memory.limit_in_bytes").write_text(str(1 << 30))
        probe.rmdir()
    except OSError:
        return False
    return True


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smaller tables")
    parser.add_argument("--train", choices=FORMS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--limit-mib", type=int, default=512)
    options = parser.parse_args()
    if options.train:
        train(options.folder, options.train)
        return
    n_rows = 60_000 if options.quick else 400_000
    figures: dict[str, Any] = {"rows": n_rows, "features": FEATURES, "bytes_per_value": {}, "seconds": {}}
    equal = True
    with tempfile.TemporaryDirectory() as name:
        for kind in ("dense", "missing"):
            write_sites(Path(name) / kind, n_rows, FEATURES, kind == "missing")
            found = {form: run(Path(name) / kind, form) for form in FORMS}
            took = {form: one for form, one in found.items() if one is not None}
            equal &= len({one["model"] for one in took.values()}) == 1 and len(took) == len(FORMS)
            cells = n_rows * FEATURES
            figures["bytes_per_value"][kind] = {form: round(one["bytes"] / cells, 2) for form, one in took.items()}
            figures["seconds"][kind] = {form: round(one["seconds"], 1) for form, one in took.items()}
    figures["models_equal"] = equal
    limit = options.limit_mib << 20
    large_rows = SHARD_ROWS * max(1, -(-4 * limit // (4 * LARGE_FEATURES * SHARD_ROWS)))
    with tempfile.TemporaryDirectory() as name:
        write_sites(Path(name), large_rows, LARGE_FEATURES, False)
        limited = run(Path(name), "external", limit)
        held = run(Path(name), "passes", limit)
    values = 4 * large_rows * LARGE_FEATURES
    figures["limited"] = {
        "limit": "cgroup" if has_groups() else "prlimit --data",
        "rows": large_rows,
        "features": LARGE_FEATURES,
        "table_bytes": values,
        "limit_bytes": limit,
        "quotient": round(values / limit, 2),
        "external": None if limited is None else {"seconds": round(limited["seconds"], 1), "bytes": limited["bytes"]},
        "passes": None if held is None else {"seconds": round(held["seconds"], 1), "bytes": held["bytes"]},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
