"""Horizontal training beside centralized XGBoost, XGBoost's own federation, and NVFlare's recipe.

Lanes of one group take turns round by round (horizontal_lanes.py): what else the machine does hits all of them alike.
A ratio is the median over rounds of ratios between neighbours in time, in wall-clock and in processor seconds (user and
system, of all processes of the lane, the server's among them). Start-up, binning and the first round are left out.

    growing     one site alone (`own`, `own_2` with two threads) beside centralized XGBoost on the same rows, depth 6;
                on the smaller table also in portable C and in numpy
    sites       three sites, depth 5, one thread each: `central`, all rows in one process; `native`, XGBoost's own
                tracker and three processes, unprotected, where the wheel has it; `plain`, `masks`, `bfv`, `ckks` with
                XGBoost beside a mediator, and `own_plain` to `own_ckks` with trees that the sites grow; `untagged`,
                masks without the tags by which sites notice changed sums
    wide        the same with 2,000 features
    flare       profile masks, and NVFlare's XGBHorizontalRecipe, which protects nothing, in FLARE's simulator
    federboost  200 trees of depth 4 on 8,192 x 11, three sites, masks, through FLARE; training only

The last line is one JSON object. Of each table and lane: medians of wall and cpu seconds a round, the most memory that
all its processes took beside loaded modules (MiB), bytes that one site sends and receives a round and in how many
exchanges, and whether the model is that of `central` (all but leaves equal; leaves within 2e-7 of max(1, |leaf|), for
ckks within 1e-6). `ratios` has what is compared, `missed` what is above its aim; `masks_over_untagged` is the quotient
of what the two add to plain in processor seconds. Tables are generated; the narrow one has the shape of CreditCard
(227,845 x 28, 0.17 % positive), the wide one the columns of Epsilon and a twentieth of its rows.

Run: make bench-horizontal (QUICK=1 for a tenth of the rows), or python -m tests.bench.bench_horizontal [--quick]
     [--only growing sites wide flare federboost]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import xgboost as xgb

from nvflare_plugins.growth._native import NUMPY, variants
from tests.bench.growth_lanes import start_growing
from tests.bench.horizontal_data import (
    CREDIT_CARD,
    EPSILON_20TH,
    EVALUATION,
    FEDERBOOST,
    TRAINING,
    TableShape,
    agreed_cuts,
    generate,
    write_policy,
    write_shares,
    write_startup_kits,
)
from tests.bench.horizontal_lanes import (
    JOB_ID,
    OWN,
    UNTAGGED,
    Lane,
    Task,
    start_central,
    start_native,
    start_ours,
)
from tests.support.federation import leaf_difference

if TYPE_CHECKING:
    from tests.bench.horizontal_flare import FlareFigures

PARTS = ("growing", "sites", "wide", "flare", "federboost")
SITES = ("site-1", "site-2", "site-3")
PARAMS = {"objective": "binary:logistic", "max_depth": 5, "max_bin": 256, "nthread": 1}
ALONE_PARAMS = {**PARAMS, "max_depth": 6, "base_score": 0.5}
FEDERBOOST_PARAMS = {"objective": "binary:logistic", "max_depth": 4, "max_bin": 256, "nthread": 1}
MIN_ROWS_PER_CUT = 10
EVALUATION_SEED = 1  # other rows than those of training
QUICK_PART = 10
ALONE = (TableShape(100_000, 28, 0.5), TableShape(1_000_000, 28, 0.5))
GROUPS = (
    ("native", "own_plain", "plain", "own_masks", "masks", UNTAGGED),
    ("own_bfv", "bfv", "own_ckks", "ckks"),
)
"""Lanes that take turns with one another; all at once need too much memory."""
AIMS: dict[str, dict[str, float]] = {
    "own / central": {"wall": 1.1, "cpu": 1.1},
    "own_2 / central_2": {"wall": 1.1, "cpu": 1.1},
    "own_portable / own": {"cpu": 2.0},
    "own_numpy / own": {},
    "own_plain / native": {"wall": 1.0, "cpu": 1.2},
    "own_plain / central": {"wall": 2.0},
    "own_plain / plain": {"wall": 1.0, "cpu": 1.0},
    "own_masks / own_plain": {"wall": 1.1},
    "own_masks / masks": {"wall": 1.0, "cpu": 1.0},
    "own_bfv / bfv": {"wall": 1.0, "cpu": 1.0},
    "own_ckks / ckks": {"wall": 1.0, "cpu": 1.0},
    "plain / native": {},
}
"""What is compared, and what the quotient is to be at most."""
AIMS_OF_MANY_ROWS = {"own / central": {"wall": 1.0, "cpu": 1.0}, "own_2 / central_2": {"wall": 1.0, "cpu": 1.0}}
AIMS_OF_WIDE = {"own_plain / central": {"wall": 2.5}}
TARGETS = {"masks_over_untagged": 1.3, "masks_over_nvflare": 0.15, "federboost_200_trees_s": 21.59}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print progress and tables on stderr, and the JSON object last."""
    options = _options(arguments)
    folder = Path(tempfile.mkdtemp(prefix="veilboost-bench-")) if options.folder is None else options.folder
    part = QUICK_PART if options.quick else 1
    few, rounds = (options.rounds or n for n in ((5, 5) if options.quick else (6, 16)))
    results: dict[str, object] = {}
    try:
        if "growing" in options.only:
            results["growing"] = [
                bench_alone(folder / f"alone-{number}", rounds, _smaller(shape, part), is_large=number > 0)
                for number, shape in enumerate(ALONE)
            ]
        if "sites" in options.only:
            results["sites"] = bench_sites(folder / "sites", rounds, _smaller(CREDIT_CARD, part), AIMS, options.lanes)
        if "wide" in options.only:
            shape, aims = _smaller(EPSILON_20TH, part), AIMS | AIMS_OF_WIDE
            results["wide"] = bench_sites(folder / "wide", few, shape, aims, options.lanes)
        if "flare" in options.only:
            n_rounds, repeats = (4, 1) if options.quick else (16, 2)
            results |= bench_flare(folder / "flare", options.rounds or n_rounds, options.repeats or repeats)
        if "federboost" in options.only:
            results["federboost_200_trees_s"] = bench_federboost(folder / "federboost", 20 if options.quick else 200)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    _judge(results)
    print(json.dumps(results))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(dict.fromkeys(name for group in GROUPS for name in group))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run these parts")
    parser.add_argument("--lanes", nargs="+", choices=every, default=every, help="lanes to run, beside central")
    parser.add_argument("--quick", action="store_true", help="few rounds on a tenth of the rows, 20 trees for 200")
    parser.add_argument("--rounds", type=int, help="rounds of each training")
    parser.add_argument("--repeats", type=int, help="how often each job through FLARE runs")
    parser.add_argument("--folder", type=Path, help="keep everything in this new folder")
    return parser.parse_args(arguments)


def _smaller(shape: TableShape, part: int) -> TableShape:
    return replace(shape, n_rows=shape.n_rows // part)


# -- turn by turn, without FLARE ----------------------------------------------------------------------------------


def bench_alone(folder: Path, num_rounds: int, shape: TableShape, is_large: bool) -> dict[str, object]:
    """Measure the growing of one site beside centralized training of the same rows."""
    task = _prepare(folder, num_rounds, (), shape, ALONE_PARAMS, SITES[:1])
    starts: list[Callable[[], Lane]] = [
        lambda: start_central(task),
        lambda: start_growing(task),
        lambda: start_central(task, 2),
        lambda: start_growing(task, 2),
    ]
    if not is_large:
        slower = dict.fromkeys([*variants()[1:][-2:-1], NUMPY])
        starts += [lambda variant=variant: start_growing(task, 1, variant) for variant in slower]
    lanes: list[Lane] = []
    try:
        lanes += [start() for start in starts]
        models = _take_turns(task, lanes)
    finally:
        for lane in lanes:
            lane.kill()
    return _figures(shape, task, lanes, models, AIMS | AIMS_OF_MANY_ROWS if is_large else AIMS)


def bench_sites(
    folder: Path, num_rounds: int, shape: TableShape, aims: dict[str, dict[str, float]], chosen: Sequence[str]
) -> dict[str, object]:
    """Measure three sites in every way to train that this wheel has, group by group."""
    figures: dict[str, object] = {}
    for number, group in enumerate(GROUPS):
        names = [name for name in group if name in chosen and (name.startswith(OWN) or _is_federated())]
        if not names:
            continue
        profiles = [name for name in names if name != "native"]
        task = _prepare(folder / str(number), num_rounds, profiles, shape, PARAMS, SITES)
        lanes, servers = [start_central(task)], []
        try:
            if "native" in names:
                lanes.append(start_native(task))
            for name in profiles:
                lane, server = start_ours(task, name)
                lanes.append(lane)
                servers.append(server)
            models = _take_turns(task, lanes)
            for server in servers:
                server.close()
        finally:
            for lane in lanes:
                lane.kill()
        figures = _merged(figures, _figures(shape, task, lanes, models, aims))
    return figures


def _is_federated() -> bool:
    """Return whether this wheel of XGBoost trains with others."""
    return bool(xgb.build_info().get("USE_FEDERATED"))


def _prepare(
    folder: Path, num_rounds: int, names: Sequence[str], shape: TableShape, params: dict, sites: tuple[str, ...]
) -> Task:
    _say(f"{_name(shape)}, sites {len(sites)}, rounds {num_rounds}: preparing")
    frame = generate(shape)
    task = Task(folder, sites, params, num_rounds, agreed_cuts(frame, params["max_bin"], MIN_ROWS_PER_CUT))
    write_shares(frame, folder / "data", TRAINING, sites)
    write_startup_kits(folder / "kits", sites)
    for name in names:
        for site in sites:
            write_policy(folder / name / site, {TRAINING: task.share(site)})
    return task


def _take_turns(task: Task, lanes: list[Lane]) -> dict[str, list[bytes]]:
    """Let all lanes train, round by round; return the models of each."""
    for lane in lanes:
        lane.wait_ready()
        _say(f"{lane.name} is ready")
    for number in range(2, task.num_rounds + 1):
        shift = number % len(lanes)  # no lane always follows the same one
        for lane in lanes[shift:] + lanes[:shift]:
            lane.take_turn()
        _say(f"round {number} of {task.num_rounds}: " + ", ".join(f"{x.name} {x.turns[-1].wall_s:.3f}" for x in lanes))
    models = {lane.name: lane.finish() for lane in lanes}
    _table(lanes)
    return models


def _figures(
    shape: TableShape,
    task: Task,
    lanes: list[Lane],
    models: dict[str, list[bytes]],
    aims: dict[str, dict[str, float]],
) -> dict[str, object]:
    central, by_name = xgb.Booster(model_file=bytearray(models["central"][0])), {lane.name: lane for lane in lanes}
    of_lanes = {
        name: {
            "wall_s": _rounded(median(turn.wall_s for turn in lane.turns)),
            "cpu_s": _rounded(median(turn.cpu_s for turn in lane.turns)),
            "peak_mib": lane.peak_bytes >> 20,
            "identical_to_central": len(set(models[name])) == 1
            and leaf_difference(models[name][0], central) <= (1e-6 if "ckks" in name else 2e-7),
            **_messages(task, name),
        }
        for name, lane in by_name.items()
    }
    pairs = {name: name.split(" / ") for name in aims}
    ratios = {name: _ratios(*(by_name[one] for one in pair)) for name, pair in pairs.items() if {*pair} <= {*by_name}}
    missed = {
        f"{name}, {kind}": value
        for name, of_pair in ratios.items()
        for kind, value in of_pair.items()
        if value > aims[name].get(kind, float("inf"))
    }
    figures = {"table": _name(shape), "lanes": of_lanes, "ratios": ratios, "missed": missed}
    if {"plain", "masks", UNTAGGED} <= set(by_name):
        with_tags, without = (_added_cpu_s(by_name, name) for name in ("masks", UNTAGGED))
        figures["masks_over_untagged"] = _rounded(with_tags / without)
    return figures


def _ratios(one: Lane, other: Lane) -> dict[str, float]:
    """Return the medians over rounds of the quotients of two lanes."""
    pairs = list(zip(one.turns, other.turns, strict=True))
    wall, cpu = median(a.wall_s / b.wall_s for a, b in pairs), median(a.cpu_s / b.cpu_s for a, b in pairs)
    return {"wall": _rounded(wall), "cpu": _rounded(cpu)}


def _merged(one: dict, other: dict) -> dict:
    """Return the figures of two groups; what both have is the first one's."""
    return {k: {**other[k], **one.get(k, {})} if isinstance(other[k], dict) else other[k] for k in other} | {
        k: v for k, v in one.items() if k not in other
    }


def _added_cpu_s(lanes: dict[str, Lane], name: str) -> float:
    """Return the median over rounds of the CPU seconds that all processes of a lane take beyond those of plain."""
    return median(a.cpu_s - b.cpu_s for a, b in zip(lanes[name].turns, lanes["plain"].turns, strict=True))


def _messages(task: Task, name: str) -> dict[str, float]:
    """Return payload bytes and exchanges of one site a round; nothing of a lane that is none of ours."""
    path = task.folder / name / SITES[0] / "runs" / JOB_ID / "run.json"
    if not path.exists():
        return {}
    kinds = ("HISTOGRAM", "HISTOGRAM_METRIC", "ROOT_SUM")
    rows = [row for row in json.loads(path.read_text())["traffic"] if row["kind"] in kinds]
    n_bytes, n_exchanges = sum(row["bytes_out"] + row["bytes_in"] for row in rows), sum(row["messages"] for row in rows)
    return {"bytes": n_bytes // task.num_rounds, "exchanges": _rounded(n_exchanges / task.num_rounds)}


def _table(lanes: list[Lane]) -> None:
    _say("medians over rounds 2..n, seconds:   wall  (quartiles)      CPU of all processes   of it server")
    for lane in lanes:
        walls = sorted(turn.wall_s for turn in lane.turns)
        quartiles = f"({walls[len(walls) // 4]:.3f}-{walls[-1 - len(walls) // 4]:.3f})"
        cpu, server = (median(getattr(turn, key) for turn in lane.turns) for key in ("cpu_s", "server_cpu_s"))
        _say(f"  {lane.name:<8} {median(walls):>32.3f}  {quartiles:<16} {cpu:>12.3f} {server:>24.3f}")


# -- through FLARE ------------------------------------------------------------------------------------------------


def bench_flare(folder: Path, num_rounds: int, repeats: int, shape: TableShape = CREDIT_CARD) -> dict:
    """Measure profile masks and NVFlare's recipe in FLARE's simulator, in alternation."""
    from tests.bench.horizontal_flare import run_side_by_side  # FLARE, which no lane is to load

    others = TableShape(shape.n_rows // 4, shape.n_features, shape.positive_rate)
    write_shares(generate(shape), folder / "data", TRAINING, SITES)
    write_shares(generate(others, EVALUATION_SEED), folder / "data", EVALUATION, SITES)
    params = {**PARAMS, "eval_metric": "auc"}
    ours, theirs = run_side_by_side(folder, SITES, params, num_rounds, repeats, _say)
    _flare_table({"ours": ours, "nvflare": theirs})
    return {
        "flare_s_per_round": _rounded(ours.s_per_round),
        "nvflare_s_per_round": _rounded(theirs.s_per_round),
        "masks_over_nvflare": _rounded(ours.s_per_round / theirs.s_per_round),
    }


def bench_federboost(folder: Path, num_rounds: int) -> float:
    """Return the seconds of training many small trees through FLARE."""
    from tests.bench.horizontal_flare import run_federboost

    write_shares(generate(FEDERBOOST), folder / "data", TRAINING, SITES)
    seconds = run_federboost(folder, SITES, FEDERBOOST_PARAMS, num_rounds, _say)
    return _rounded(seconds)


def _flare_table(figures: dict[str, FlareFigures]) -> None:
    for name, figure in figures.items():
        _say(
            f"  {name:<8} {figure.s_per_round:.3f} s per round, {figure.evaluation_s:.3f} s evaluation beside it, "
            f"{figure.cpu_s_per_round:.3f} CPU s per round"
        )


def _judge(results: dict) -> None:
    """Say on stderr which targets were met."""
    for part in (*results.get("growing", ()), results.get("sites"), results.get("wide")):
        for name, value in part["missed"].items() if part else ():
            _say(f"{part['table']}: {name} = {value}: MISSED")
    for name, target in TARGETS.items():
        value = results.get(name, results.get("sites", {}).get(name))
        if value is not None:
            _say(f"{name} = {value} (target {target}): {'met' if value <= target else 'MISSED'}")


def _name(shape: TableShape) -> str:
    return f"{shape.n_rows:,} x {shape.n_features:,}"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
