"""Runs every benchmark: in a quick shape, so that none of them is dead when somebody needs its figures, or in full.

    make bench-smoke                                     all of them in the quick shape, minutes
    make bench-all DATA=folder                           all of them in full, days; figures are kept in measured.json
    python -m tests.bench.smoke --only bench_tags        one or several; --full for the figures

Each program runs in a process of its own. Its last line has to be one JSON object with numbers of JSON, and it has to
hold the keys named here: a configuration that has not run leaves its key out. The figures themselves mean nothing
in these shapes. A program that needs what is not installed is left out, and said.

The last line is one JSON object: seconds of each program, processor seconds of all, what was left out, what failed.
Exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pandas as pd

from he_processors.histogram.planner import BinLayout
from nvflare_plugins.base.files import write_atomically
from tests.bench import record
from tests.bench.dp_data import SHARED

TABLE = "TABLE"
"""Stands for the path of a small table with a column ``label``."""
DATA = "DATA"
"""Stands for a folder with small tables that are called as those of the project are."""
LIMIT_S = 300
"""How long one program may take in its quick shape."""


@dataclass(frozen=True)
class Program:
    """One benchmark: its arguments in the quick shape, keys of its last line, and what it needs beside the tests.

    A key ``a/b`` is the key ``b`` of the object under ``a``. ``constants`` take the place of the module's own,
    or of another's (``module.NAME``); a function makes one from the module. In full there are no arguments and no other
    constants.
    """

    name: str
    arguments: tuple[str, ...]
    keys: tuple[str, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None


def _program(line: str, keys: str, needs: str | None = None, **constants: Any) -> Program:
    name, *arguments = line.split()
    return Program(name, tuple(arguments), tuple(keys.split()), constants, needs)


_SWEEPS = {
    "BUCKETS": (4,),
    "EPSILONS": (4.0,),
    "PARTIES": (2,),
    "LATENCIES_MS": (0,),
    "MBITS": (100,),
    "SETS": {"bank": (3, 2)},
}
_SHAPES = {"ROWS": 300, "FEATURES": 4, "DEPTH": 2, "DEPTHS": (2,), "FEATURE_COUNTS": (4,), "ROW_COUNTS": (200,)}


def _one_small_tree(module: ModuleType) -> dict[str, Any]:
    """Return the breast table alone, with two trees."""
    return {"breast": (module.TABLES["breast"][0], 2, 2, (0,))}


def _one_held_out(module: ModuleType) -> dict[str, Any]:
    """Return one table that is not of the project."""
    return {"breast": module.HELD_OUT["breast"]}


def _few_bins(module: ModuleType) -> BinLayout:
    """Return as many features as in full, with fewer bins to open."""
    return BinLayout((8,) * 18)


def _few_trees(module: ModuleType) -> dict[str, Any]:
    """Return two ways to train, of the fewest trees."""
    return {name: module.VARIANTS[name] for name in ("exact_few_trees", "guarded_few_trees")}


PROGRAMS = (
    _program("bench_alignment --sizes 100", "curve alignments openmined_party_s"),
    _program("bench_alignment --proofs 100", "with_proofs_over_without"),
    _program("bench_cluster --only elgamal --rows 2000", "elgamal", "distributed", REPEATS=1, CURVE=(1, 2)),
    _program("bench_cox", "gbsg2 whas500", "sksurv", FOLDS=2, ROUNDS=2),
    _program("bench_aft", "gbsg2 whas500", "lifelines", FOLDS=2, ROUNDS=2),
    _program("bench_cuda", "is_available reason"),
    _program("bench_curve --scale 0.0005 --runs 1 --backends portable", "portable/operations_per_s"),
    _program("bench_dp --sets TABLE --splits 2 --repeats 1 --jobs 1 --twin", "auc log_loss", EPSILONS=(1.0,)),
    _program("bench_dp_rivals --sets TABLE --splits 2", "splits tables/table", EPSILONS=(1.0,)),
    _program(
        "bench_dpboost --data abalone",
        "abalone/dpboost epsilon",
        EPSILONS=(10,),
        AUTHORS={"abalone": (2.64,)},
        N_FOLDS=2,
    ),
    _program("bench_federboost_sweeps --sets bank --splits 1", "buckets epsilon published", **_SWEEPS),
    _program("bench_federboost_vertical DATA/credit2.parquet --splits 2 --runs 1", "auc/paid published", N_TREES=5),
    _program(
        "bench_he --quick --cases paillier-2048 --backends portable",
        "paillier-2048/portable/encrypt_per_s",
        **{
            "ROUND_ROWS": 3000,
            "he_ours._ROWS": {"portable": 60},
            "he_peers._N_ADD_ROWS": 60,
            "he_round.LAYOUT": _few_bins,
            "he_round.N_BINS": 8,
        },
    ),
    _program("bench_horizontal --quick --only sites --rounds 2 --lanes own_plain own_masks", "sites/lanes/own_masks"),
    _program("bench_labels --sets diabetes --splits 1", "diabetes/1", EPSILONS=(1.0,)),
    _program("bench_load --sites 3 4", "measured/3"),
    _program("bench_memory", "after_jobs charge", JOBS=((1, 1),), ROWS=(1000,)),
    _program(
        "bench_noised DATA --tables credit2", "credit2/exact", ROUNDS=3, OWN_ROUNDS=2, DIVISIONS=1, EPSILONS=(1.0,)
    ),
    _program(
        "bench_papers --only maddock/4 secureboost/2 federboost/figure-5 dpboost/table-3 --splits 1 --repeats 1 "
        "--jobs 1 --keep DATA/papers.json",
        "tables cpu_s",
    ),
    _program(
        "bench_peers --shapes creditcard higgs_20k --rows 400 --trees 1 --lanes xgboost fate",
        "creditcard/lanes/xgboost higgs_20k/left_out/fate cited",
    ),
    _program(
        "bench_plan_loss --kinds buckets --out DATA/loss.csv --fit DATA/loss.csv",
        "",
        SEEDS=(1,),
        BUCKETS=(4.0, 8.0),
        HELD_OUT=_one_held_out,
        DEVELOPMENT_SETS=("bank", "credit2"),
    ),
    _program("bench_pure --sets abalone --splits 2 --repeats 1 --jobs 1", "tables/abalone/4", EPSILONS=(4.0,)),
    _program("bench_serving --rows 20 --trees 3 --depth 2", "p95_s evidence_holds"),
    _program(
        "bench_tables --quick --only forms",
        "bytes_per_value/dense/passes models_equal",
        ROWS=8000,
        FEATURES=4,
        FORMS=("passes",),
    ),
    _program("bench_sealed --candidates 5 --rows 400 --depth 3", "wall_s differing"),
    _program("bench_tags --rounds 2", "masks_over_untagged"),
    _program(
        "bench_vertical --shape quick --only elgamal_20_32 --rounds 1 --bins 16", "elgamal_20_32/identical_to_central"
    ),
    _program("bin_attack_rates DATA", "breast/exact breast/curve", TABLES=_one_small_tree),
    _program("cluster_horizontal --rows 20000 --features 4 --rounds 2 --workers 0 1", "", "distributed"),
    _program("cluster_tuning --rows 20000 --features 4 --rounds 2 --trials 2 --folds 2", "same_scores", "distributed"),
    _program("dp_speed", "ratio protocol", N_ROWS=600, N_TEST_ROWS=200, _TIMES=1),
    _program("dpboost_ensembles --data abalone --folds 2 --ensembles 1", "abalone", EPSILONS=(10.0,), TREES=3),
    _program("federboost_credit2 DATA/credit2.parquet", "federation_auc", N_REPEATS=2, N_TREES=2),
    _program("membership_inference TABLE --rows 40 --models 8", ""),
    _program("noised_attack_rates DATA --tables generated --repetitions 1 --epsilons 1", ""),
    _program("reconstruction TABLE --rows 60 --features 3 --trees 2", ""),
    _program("secureboost_credit2 DATA/credit2.parquet", "published", N_REPEATS=2, VARIANTS=_few_trees),
    _program("vertical_memory --rows 200 --features 4 --depth 2 --blocks 1 --key-bits 2048", "peak_mb_by_level"),
    _program("vertical_scalability --key-bits 2048", "rows features", **_SHAPES),
)
"""Every program of this folder that measures."""


class NoFigures(Exception):
    """What a program printed last is not what it should be."""


def figures(output: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the object of the last line.

    Raises:
        NoFigures: the last line is no JSON object, holds a number that is none, or lacks a key.
    """
    lines = output.splitlines()
    try:
        found = json.loads(lines[-1] if lines else "", parse_constant=_refuse)
    except ValueError as error:
        raise NoFigures(f"the last line is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise NoFigures("the last line is no JSON object")
    for key in keys:
        inner: Any = found
        for part in key.split("/"):
            if not isinstance(inner, dict) or part not in inner:
                raise NoFigures(f"the last line lacks {key}")
            inner = inner[part]
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def run(program: Program, table: Path, data: Path, lanes: Path | None = None) -> dict[str, Any]:
    """Run one program in a process of its own; return its figures.

    Args:
        lanes: runs it in full, and writes there which folders of ours it has loaded.

    Raises:
        NoFigures: it failed, took too long, or its last line is wrong.
    """
    command = [sys.executable, "-m", "tests.bench.smoke", "--one", str(PROGRAMS.index(program)), str(table), str(data)]
    command += [] if lanes is None else ["--lanes", str(lanes)]
    try:
        limit_s = LIMIT_S if lanes is None else None
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise NoFigures(f"it took more than {LIMIT_S} s") from None
    if done.returncode:
        raise NoFigures(f"exit code {done.returncode}: {' '.join(done.stderr.split()[-30:])}")
    return figures(done.stdout, program.keys if lanes is None else ())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_here(program: Program, table: str, data: str, lanes: Path | None = None) -> None:
    """Run one program in this process: with constants and arguments of the quick shape, or in full (``run``)."""
    from tests.bench import dp_data

    dp_data.SHARED = Path(data)  # before the program takes it from there
    module = importlib.import_module(f"tests.bench.{program.name}")
    for name, value in program.constants.items() if lanes is None else ():
        place, _, constant = name.rpartition(".")
        owner = importlib.import_module(f"tests.bench.{place}") if place else module
        if not hasattr(owner, constant):
            raise AttributeError(f"{owner.__name__} has no {constant}")
        setattr(owner, constant, value(module) if callable(value) else value)
    arguments = program.arguments if lanes is None else ()
    sys.argv = [program.name, *(a.replace(TABLE, table).replace(DATA, data) for a in arguments)]
    module.main()
    if lanes is not None:
        lanes.write_text(json.dumps(record.lanes()))


def small_table(seed: int, n_columns: int = 6, n_rows: int = 600) -> pd.DataFrame:
    """Return columns of numbers and a label of two classes."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(rng.normal(size=(n_rows, n_columns)), columns=[f"x{column}" for column in range(n_columns)])
    table["label"] = (table.x0 + 0.5 * table.x1 * table.x2 + rng.normal(size=n_rows) > 0).astype(int)
    return table


def write_tables(folder: Path) -> None:
    """Write small tables under the names and with the particular columns of those of the project."""
    for seed, (name, n_columns) in enumerate((("credit2", 23), ("bank", 16), ("higgs_20k", 28), ("nomao", 30))):
        small_table(seed, n_columns).to_parquet(folder / f"{name}.parquet", index=False)
    halves = np.where(np.arange(600) % 2, "train", "test")
    for seed, (name, n_columns) in enumerate((("adult", 14), ("a9a", 20), ("breast", 30))):
        small_table(seed, n_columns).assign(split=halves).to_parquet(folder / f"{name}.parquet", index=False)
    rings = small_table(9, 7).assign(Sex="F", label=1 + np.arange(600) % 29)
    rings.to_parquet(folder / "abalone.parquet", index=False)


def keep(program: Program, data: Path) -> None:
    """Run one program in full, and keep its figures in the record. Raises: NoFigures."""
    with tempfile.TemporaryDirectory() as name:
        lanes, began = Path(name) / "lanes.json", _cpu_s()
        origin = record.origin()  # the load is that before the run
        found = run(program, data, data, lanes)
        folders = json.loads(lanes.read_text())
    used = {"cpu_s": round(_cpu_s() - began), "lanes": folders, "sha256": record.hash_of(folders)}
    kept = {**record.kept(), program.name: {"figures": found, **origin, **used}}
    write_atomically(record.KEPT, (json.dumps(kept, indent=1, sort_keys=True) + "\n").encode())


def main() -> int:
    """Run them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [program.name for program in PROGRAMS]
    parser.add_argument("--only", nargs="+", choices=sorted(set(names)), default=names, metavar="NAME")
    parser.add_argument("--full", action="store_true", help="in full, one after another, and keep the figures")
    parser.add_argument("--data", type=Path, default=SHARED, help="folder with the tables of the full runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="quick ones side by side")
    parser.add_argument("--one", nargs=3, metavar=("NUMBER", "TABLE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--lanes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_here(PROGRAMS[int(options.one[0])], *options.one[1:], options.lanes)
        return 0
    said: dict[str, dict[str, Any]] = {"seconds": {}, "left_out": {}, "failed": {}}

    def one(program: Program) -> None:
        told, began = " ".join((program.name, *(() if options.full else program.arguments))), time.monotonic()
        if program.needs is not None and importlib.util.find_spec(program.needs) is None:
            what, found = "left_out", f"{program.needs} is not installed"
        else:
            try:
                keep(program, options.data) if options.full else run(program, table, data)
                what, found = "seconds", round(time.monotonic() - began, 1)
            except NoFigures as error:
                what, found = "failed", str(error)
        said[what][told] = found
        print(f"{told}: {what.replace('_', ' ')} {found}", file=sys.stderr, flush=True)

    chosen = [program for program in PROGRAMS if program.name in options.only]
    if options.full:  # each once
        chosen = list({program.name: program for program in chosen}.values())
    with tempfile.TemporaryDirectory() as name:
        table, data = Path(name) / "table.parquet", Path(name) / "data"
        data.mkdir()
        small_table(0).to_parquet(table, index=False)
        write_tables(data)
        with ThreadPoolExecutor(1 if options.full else options.jobs) as pool:
            list(pool.map(one, chosen))
    print(json.dumps({**said, "cpu_s": round(_cpu_s())}))
    return 1 if said["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
