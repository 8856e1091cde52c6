"""NVIDIA's Figures 3 and 4 and FATE, end to end on the CPU: whole jobs, with all processes, messages and reading.

    python -m tests.bench.bench_peers [--shapes creditcard] [--lanes elgamal fate] [--rows 20000] [--trees 10]
    FATE_PYTHON=/path/to/python python -m tests.bench.bench_peers     # a Python with pyfate 2.2 and pandas 2

Trees of depth 5, 256 bins. Vertical jobs have two parties, the first with the label and the fewer columns; horizontal
ones have three sites with a third of the rows each. Ours run in FLARE's simulator, under the preset ``exact``. Tables
are random ones of the sets' shapes but for ``higgs_20k``, which is real; so of the others only costs are said. The
last line is one JSON object:

    machine, depth, cited
    SHAPE/rows, of_rows, data
    SHAPE/lanes/LANE
        trees, wall_s, cpu_s, peak_mb     of the whole job; memory of all parties together
        trees_s, sent_mb                  of the trees alone; by all parties, as FLARE or FATE gets it
    SHAPE/left_out/LANE                   why a lane did not run

``xgboost`` is XGBoost alone on one thread with all columns. ``fate`` is FATE's hetero SecureBoost, two processes by its
own launcher without FATE-Flow, Paillier with 3,072 bits (``fate_1024`` with its default).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from tests.bench import dp_data, record
from tests.bench.flare_jobs import run_in_flare, tables_of_parties
from tests.bench.horizontal_data import TableShape, arrays, generate
from tests.bench.watched import watched

PARAMS = {"objective": "binary:logistic", "max_depth": 5, "max_bin": 256, "nthread": 1, "seed": 0}
TREES, SITES = 10, 3
_TIMEOUT_S = 4 * 3600


@dataclass(frozen=True)
class Shape:
    """A set's rows, those of them that are trained on, and its columns at the two parties of a vertical job."""

    of_rows: int
    rows: int
    widths: tuple[int, int]
    positive: float


SHAPES = {
    "creditcard": Shape(284_807, 284_807, (10, 18), 0.0017),
    "higgs": Shape(11_000_000, 1_000_000, (10, 18), 0.53),
    "epsilon": Shape(400_000, 5_000, (799, 1_201), 0.5),
    "higgs_20k": Shape(20_474, 20_474, (10, 18), 0.53),
}
"""Fewer rows than the set has, where two cores would take hours."""
VERTICAL: dict[str, dict[str, Any]] = {
    "elgamal": {"profile": "elgamal"},
    "elgamal_20_32": {"profile": "elgamal", "fraction_bits": 20, "point_bytes": 32},
    "paillier_3072": {"profile": "paillier"},
}
HORIZONTAL = ("plain", "masks", "bfv", "ckks")
FATE = {"fate": 3072, "fate_1024": 1024}
LANES = ("xgboost", *VERTICAL, *HORIZONTAL, *FATE)
ALL_TREES = {
    "paillier_3072": ("creditcard",),
    "elgamal": ("creditcard", "higgs", "higgs_20k"),
    "elgamal_20_32": ("creditcard", "higgs", "higgs_20k"),
    **dict.fromkeys(FATE, ()),
}
"""Shapes on which a lane grows all trees, where it grows one on the others."""
CITED = {
    "FATE 2, its documentation": "114 s a tree, standalone; 100,000 x (30 + 300), Paillier-1024, 32 cores",
    "SecretFlow SGB, its documentation": "38.9 s for at most 100 rounds; 284,807 x 30, Okamoto-Uchiyama-2048, 32 cores",
    "NVIDIA, its post": "GPU plugin 4.6 to 36 times as fast as the other vertical solution; no seconds",
}


def table(name: str, rows: int | None = None) -> tuple[pd.DataFrame, str]:
    """Return a shape's table, of so many rows at most, and what it is: "random" or "real"."""
    shape = SHAPES[name]
    n = min(shape.rows, rows or shape.rows)
    if name != "higgs_20k":
        return generate(TableShape(n, sum(shape.widths), shape.positive)), "random"
    frame = pd.read_parquet(dp_data.SHARED / f"{name}.parquet").drop(columns="source", errors="ignore")[:n]
    return frame.astype(np.float32), "real"


def measure(
    name: str, lanes: Sequence[str], rows: int | None = None, trees: int = TREES, fate: str = ""
) -> dict[str, Any]:
    """Run some lanes on one shape.

    Args:
        fate: a Python that has pyfate, or none.
    """
    frame, data = table(name, rows)
    found: dict[str, Any] = {"rows": len(frame), "of_rows": SHAPES[name].of_rows, "data": data}
    found |= {"lanes": {}, "left_out": {}}
    for lane in lanes:
        n_trees = trees if name in ALL_TREES.get(lane, SHAPES) else min(trees, 1)
        try:
            if lane in FATE and not fate:
                raise _LeftOut("FATE_PYTHON names no Python with pyfate")
            one = _run(lane, frame, SHAPES[name].widths, n_trees, fate)
        except _LeftOut as reason:
            found["left_out"][lane] = str(reason)
            continue
        found["lanes"][lane] = {"trees": n_trees, **one, "load": round(os.getloadavg()[0], 1)}
        print(f"{name}, {lane}: {json.dumps(found['lanes'][lane])}", file=sys.stderr, flush=True)
    return found


class _LeftOut(Exception):
    """A lane cannot run here."""


def _run(lane: str, frame: pd.DataFrame, widths: tuple[int, int], trees: int, fate: str) -> dict[str, Any]:
    features, label = arrays(frame)
    if lane in FATE:
        return _in_fate(features, label, widths, trees, FATE[lane], fate)
    if lane == "xgboost":
        return _alone(frame, trees)
    fields: dict[str, Any] = {"params": PARAMS, "num_rounds": trees, "profile": lane}
    if lane in VERTICAL:
        tables = tables_of_parties(np.split(features, [widths[0]], axis=1), label)
        run = run_in_flare("vertical", fields | VERTICAL[lane] | {"preset": "exact", "checkpoint_every": 0}, tables)
    else:
        tables = [frame.iloc[rows] for rows in np.array_split(np.arange(len(frame)), SITES)]
        run = run_in_flare("horizontal", fields, tables)
    return {**_of(run.whole), "trees_s": round(sum(run.rounds_s), 2), "sent_mb": round(run.sent_bytes / 1e6, 1)}


def _of(whole: Any) -> dict[str, float]:
    return {"wall_s": round(whole.wall_s, 1), "cpu_s": round(whole.cpu_s, 1), "peak_mb": round(whole.peak_mb)}


def _alone(frame: pd.DataFrame, trees: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="veilboost-peers-") as name:
        path = Path(name) / "table.parquet"
        frame.to_parquet(path)
        command = [sys.executable, "-m", "tests.bench.bench_peers", "--alone", str(path), "--trees", str(trees)]
        whole = watched(command, Path(name) / "log", _TIMEOUT_S)
        return {**_of(whole), "trees_s": float((Path(name) / "log").read_text().split()[-1]), "sent_mb": 0.0}


def _train_alone(path: str, trees: int) -> None:
    features, label = arrays(pd.read_parquet(path))
    matrix, began = xgb.DMatrix(features, label=label), time.perf_counter()
    xgb.train({**PARAMS, "tree_method": "hist"}, matrix, trees)
    print(round(time.perf_counter() - began, 2))


def _in_fate(
    features: np.ndarray, label: np.ndarray, widths: tuple[int, int], trees: int, bits: int, python: str
) -> dict[str, Any]:
    memory = Path("/dev/shm")  # noqa: S108 - FATE's engine keeps tables in files: those of memory are its best case
    folder = Path(tempfile.mkdtemp(prefix="veilboost-fate-", dir=memory if memory.is_dir() else None))
    try:
        np.save(folder / "guest.npy", np.column_stack([label, features[:, : widths[0]]]))
        np.save(folder / "host.npy", features[:, widths[0] :])
        job = {"trees": trees, "depth": PARAMS["max_depth"], "bins": PARAMS["max_bin"], "key_bits": bits}
        (folder / "job.json").write_text(json.dumps(job | {"partitions": os.cpu_count()}))
        command = [python, str(Path(__file__).with_name("fate_lane.py")), "--parties", "guest:9999", "host:10000"]
        one_thread = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "VEILBOOST_FATE": str(folder)}
        whole = watched(
            [*command, "--data_dir", str(folder / "data"), "--log_level", "INFO"],
            folder / "log",
            _TIMEOUT_S,
            {**os.environ, **one_thread},
        )
        guest, host = (json.loads((folder / f"{role}.json").read_text()) for role in ("guest", "host"))
        sent = round((guest["bytes"] + host["bytes"]) / 1e6, 1)
        return {**_of(whole), "trees_s": round(guest["training_s"], 2), "sent_mb": sent, "losses": guest["losses"]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure; progress goes to stderr, the JSON object to stdout at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument("--rows", type=int, help="of each table at most")
    parser.add_argument("--trees", type=int, default=TREES)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        _train_alone(options.alone, options.trees)
        return
    machine, fate = record.origin()["machine"], os.environ.get("FATE_PYTHON", "")
    found = {name: measure(name, options.lanes, options.rows, options.trees, fate) for name in options.shapes}
    print(json.dumps({"machine": machine, "depth": PARAMS["max_depth"], **found, "cited": CITED}))


if __name__ == "__main__":
    main()
