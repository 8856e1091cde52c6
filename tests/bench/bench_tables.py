"""Tables larger than memory: what a site holds at most while it trains, in each form, and one far above its limit.

A site trains horizontally (profile masks, 3 rounds of depth 6, 256 bins; under a limit depth 4 and 64 bins) with two
sites of few rows in the same process. Its table lies in a folder of Parquet files of 10,000 rows; values are drawn, a
tenth of them missing in ``missing``. Memory is the process's own (RssAnon, looked at every 5 ms), less what it had
before the job. What the last line of the output holds, one JSON object:

    bytes_per_value   per table (dense, missing) and form (one held file, passes, external): what one value more adds to
                      the largest memory of the whole job, from loading to the model (from a quarter of the rows to all
                      of them; what does not grow with rows, histograms and messages, falls out); a float32 takes 4
    seconds           of the job, likewise
    models_equal      all forms of a table have given the same bytes
    label_owner       the same of a vertical training (2 rounds of depth 6, 256 bins, profile plain), whose party with
                      the label has all columns but one; both in one process: bytes_per_value by form, and seconds
    limited           one large table: bytes of its float32 values, the memory limit of its process (a cgroup's where
                      the machine lets one be made, else the limit of data, prlimit --data), their quotient, seconds,
                      and bytes with the bins in files; and whether bins in memory fit under the limit too (null: no)

Run: make bench-tables, or python -m tests.bench.bench_tables [--quick] [--only forms|label_owner|limited]
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

SHARD_ROWS = 10_000
FEATURES = 128
LARGE_FEATURES = 256
SMALL_ROWS = 3_000
ROWS = 400_000
GROUP = Path("/sys/fs/cgroup/memory")
FORMS = ("file", "passes", "external")
LIMITED = "limited-"
LABEL_OWNER = "label-owner-"


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

    from nvflare_plugins.pooled.job import HorizontalJob
    from tests.support.federation import Federation, succeed

    sites = Federation(folder)
    for site in sites.sites:
        (sites.workspace(site) / "local").mkdir(exist_ok=True)
        own = (
            {"path": "rows.parquet"}
            if site != "site-1" or form == "file"
            else {"path": "rows", "memory": form.removeprefix(LIMITED)}
        )
        sites.set_policy(site, data_sets={"rows": own})
    # Histograms of many columns at once would be most of what a small process holds.
    shape = {"max_bin": 64, "max_depth": 4} if form.startswith(LIMITED) else {"max_bin": 256, "max_depth": 6}
    params = {"objective": "binary:logistic", **shape}
    job = HorizontalJob.from_dict(
        {"data_set": "rows", "label": "label", "params": params, "num_rounds": 3, "profile": "masks"}
    )
    peak, started = Peak(), time.perf_counter()
    succeed(sites.run(job, f"job-{form}-{os.getpid()}", timeout_s=3600.0))
    seconds = time.perf_counter() - started
    model = hashlib.sha256(sites.model(f"job-{form}-{os.getpid()}")).hexdigest()
    print(json.dumps({"seconds": seconds, "before": peak.before, "bytes": peak.most - peak.before, "model": model}))


def train_vertically(folder: Path, form: str) -> None:
    """Run a vertical job in this process and print what it took."""
    import xgboost  # noqa: F401

    from tests.support.federation import Parties, succeed
    from tests.support.vertical_jobs import POLICY, job, merged
    from tests.support.vertical_jobs import run as run_job

    parties = Parties(folder, 2, dict(POLICY))
    n_rows = pq.ParquetDataset(folder / "site-1" / "rows").read(["label"]).num_rows
    parties.give("site-2", "data", pa.table({"z": np.random.default_rng(0).standard_normal(n_rows)}).to_pandas())
    (folder / "site-1" / "local").mkdir(exist_ok=True)
    held = {"path": "rows.parquet" if form == "file" else "rows", "memory": "whole" if form == "file" else form}
    parties.set_policy("site-1", data_sets={"data": held})
    params = {"objective": "binary:logistic", "max_bin": 256, "max_depth": 6}
    peak, started, name = Peak(), time.perf_counter(), f"job-{form}-{os.getpid()}"
    succeed(run_job(parties, job(label="label", params=params, num_rounds=2), name))
    seconds = time.perf_counter() - started
    model = hashlib.sha256(merged(parties, name)).hexdigest()
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


def label_owner(n_rows: int) -> dict[str, Any]:
    """Compare forms at the party with the label of a vertical training."""
    per_value, seconds, models = {}, {}, set()
    with tempfile.TemporaryDirectory() as name:
        for size in (n_rows // 4, n_rows):
            write_sites(Path(name) / str(size), size, FEATURES, False)
        for form in ("file", "passes"):
            small, large = (run(Path(name) / str(size), LABEL_OWNER + form) for size in (n_rows // 4, n_rows))
            if small is None or large is None:
                continue
            per_value[form] = round((large["bytes"] - small["bytes"]) / ((n_rows - n_rows // 4) * FEATURES), 2)
            seconds[form] = round(large["seconds"], 1)
            models.add(large["model"])
    return {"bytes_per_value": per_value, "seconds": seconds, "models_equal": len(models) == 1}


def forms(n_rows: int) -> dict[str, Any]:
    """Compare forms on tables of so many rows and of a quarter of them."""
    figures: dict[str, Any] = {"rows": n_rows, "features": FEATURES, "bytes_per_value": {}, "seconds": {}}
    equal = True
    for kind in ("dense", "missing"):
        per_value, seconds, models = {}, {}, set()
        with tempfile.TemporaryDirectory() as name:
            for size in (n_rows // 4, n_rows):
                write_sites(Path(name) / str(size), size, FEATURES, kind == "missing")
            for form in FORMS:
                small, large = (run(Path(name) / str(size), form) for size in (n_rows // 4, n_rows))
                if small is None or large is None:
                    equal = False
                    continue
                per_value[form] = round((large["bytes"] - small["bytes"]) / ((n_rows - n_rows // 4) * FEATURES), 2)
                seconds[form] = round(large["seconds"], 1)
                models.add(large["model"])
        equal &= len(models) == 1
        figures["bytes_per_value"][kind], figures["seconds"][kind] = per_value, seconds
    return {**figures, "models_equal": equal}


def under_limit(limit: int) -> dict[str, Any]:
    """Train on a table of four times the limit."""
    rows = SHARD_ROWS * -(-4 * limit // (4 * LARGE_FEATURES * SHARD_ROWS))
    with tempfile.TemporaryDirectory() as name:
        write_sites(Path(name), rows, LARGE_FEATURES, False)
        took = {form: run(Path(name), LIMITED + form, limit) for form in ("external", "passes")}
    values = 4 * rows * LARGE_FEATURES
    figures: dict[str, Any] = {
        "limit": "cgroup" if has_groups() else "prlimit --data",
        "rows": rows,
        "features": LARGE_FEATURES,
        "table_bytes": values,
        "limit_bytes": limit,
        "quotient": round(values / limit, 2),
    }
    for form, one in took.items():
        figures[form] = None if one is None else {"seconds": round(one["seconds"], 1), "bytes": one["bytes"]}
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smaller tables")
    parser.add_argument("--train", choices=[head + form for head in ("", LIMITED, LABEL_OWNER) for form in FORMS])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", choices=("forms", "label_owner", "limited"))
    parser.add_argument("--limit-mib", type=int, default=512)
    options = parser.parse_args()
    if options.train:
        if options.train.startswith(LABEL_OWNER):
            train_vertically(options.folder, options.train.removeprefix(LABEL_OWNER))
            return
        train(options.folder, options.train)
        return
    figures: dict[str, Any] = {}
    n_rows = ROWS // 4 if options.quick else ROWS
    if options.only in (None, "forms"):
        figures |= forms(n_rows)
    if options.only in (None, "label_owner"):
        figures["label_owner"] = label_owner(n_rows)
    if options.only in (None, "limited"):
        figures["limited"] = under_limit(options.limit_mib << 20)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
