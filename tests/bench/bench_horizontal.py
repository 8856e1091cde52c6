"""Horizontal training beside centralized XGBoost, XGBoost's own federation, and NVFlare's recipe.

Data: the shape of CreditCard (227,845 rows x 28 features, 0.17 % positive, generated), three sites evenly, depth 5,
256 bins, one thread per site. Figures per round are medians over rounds 2..n of wall-clock seconds, without start-up
and evaluation. What the last line of the output holds, one JSON object:

    identical_to_central   per profile: the model equals centralized XGBoost's with the same cuts (all but leaves equal;
                           leaves within 2e-7 of max(1, |leaf|), for ckks within 1e-6)
    central_s_per_round    one process, one thread, all rows
    native_s_per_round     XGBoost's own tracker and three processes, unprotected
    plain_s_per_round      ours without protection; mediators, frames and evidence as in every profile
    masks_added_s, bfv_added_s, ckks_added_s     what a profile adds to plain
    untagged_added_s       what masks would add without the tags by which sites notice changed sums
    masks_over_untagged    the quotient of what the two add in CPU seconds of all processes (target 1.3): on a machine
                           that does other things too, wall-clock seconds of two lanes differ by more than tags cost
    bytes_per_round        per profile: payload that one site sends and receives
    flare_s_per_round      profile masks in FLARE's simulator
    nvflare_s_per_round    NVFlare's XGBHorizontalRecipe there, unprotected, same data, rounds and evaluation
    masks_over_nvflare     the quotient of the two
    ms_per_collective      ours and NVFlare's: one 16-byte sum over FLARE, from the call of the last site's XGBoost to
                           its answer
    federboost_200_trees_s 200 trees of depth 4 on 8,192 x 11, three sites, masks, through FLARE; training only
    epsilon_20th           the figures down to bytes_per_round on 20,000 rows of 2,000 features, a twentieth of the set
                           Epsilon (8 MB of sums a node), for each profile beside plain in a run of its own
    added_share            in there: the part of a profile's round that is not plain's, in wall-clock seconds

The first seven come from processes that take turns round by round (horizontal_lanes.py), those through FLARE from
jobs run in alternation (horizontal_flare.py). Progress and a table with CPU seconds go to stderr.

Run: make bench-horizontal, or python -m tests.bench.bench_horizontal [--quick] [--only lanes epsilon flare federboost]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

import xgboost as xgb

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
from tests.bench.horizontal_flare import FlareFigures, run_federboost, run_side_by_side
from tests.bench.horizontal_lanes import (
    JOB_ID,
    UNTAGGED,
    Lane,
    Task,
    start_central,
    start_native,
    start_ours,
)
from tests.support.federation import leaf_difference

PROFILES = ("plain", "masks", UNTAGGED, "bfv", "ckks")
PARTS = ("lanes", "epsilon", "flare", "federboost")
SITES = ("site-1", "site-2", "site-3")
PARAMS = {"objective": "binary:logistic", "max_depth": 5, "max_bin": 256, "nthread": 1}
FEDERBOOST_PARAMS = {"objective": "binary:logistic", "max_depth": 4, "max_bin": 256, "nthread": 1}
LEAF_TOLERANCE = {"plain": 2e-7, "masks": 2e-7, UNTAGGED: 2e-7, "bfv": 2e-7, "ckks": 1e-6}
MIN_ROWS_PER_CUT = 10
EVALUATION_SEED = 1  # other rows than those of training
TARGETS = {
    "masks_added_s": 0.02,
    "masks_over_untagged": 1.3,
    "bfv_added_s": 0.35,
    "ckks_added_s": 0.45,
    "masks_over_nvflare": 0.5,
    "federboost_200_trees_s": 21.59,
}


def main() -> None:
    """Measure, print progress and tables on stderr, and the JSON object last."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="veilboost-bench-")) if options.folder is None else options.folder
    results: dict[str, object] = {}
    try:
        if "lanes" in options.only:
            results |= bench_lanes(folder / "lanes", options.rounds or (4 if options.quick else 16), options.profiles)
        if "epsilon" in options.only:
            n_rounds = options.rounds or (3 if options.quick else 5)
            results["epsilon_20th"] = bench_wide(folder / "epsilon", n_rounds, options.profiles)
        if "flare" in options.only:
            rounds, repeats = (4, 1) if options.quick else (16, 2)
            results |= bench_flare(folder / "flare", options.rounds or rounds, options.repeats or repeats)
        if "federboost" in options.only:
            results["federboost_200_trees_s"] = bench_federboost(folder / "federboost", 20 if options.quick else 200)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    _judge(results)
    print(json.dumps(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run these parts")
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES), help="lanes to run")
    parser.add_argument("--quick", action="store_true", help="few rounds, one repetition, 20 trees in place of 200")
    parser.add_argument("--rounds", type=int, help="rounds of each training")
    parser.add_argument("--repeats", type=int, help="how often each job through FLARE runs")
    parser.add_argument("--folder", type=Path, help="keep everything in this new folder")
    return parser.parse_args()


# -- turn by turn, without FLARE ----------------------------------------------------------------------------------


def bench_lanes(folder: Path, num_rounds: int, profiles: list[str], shape: TableShape = CREDIT_CARD) -> dict:
    """Measure centralized, native and our profiles, round by round."""
    _say(f"{shape.n_rows:,} x {shape.n_features}, {len(SITES)} sites, {num_rounds} rounds: preparing")
    task = _prepare(folder, num_rounds, profiles, shape)
    lanes, servers = [start_central(task), start_native(task)], []
    try:
        for profile in profiles:
            lane, server = start_ours(task, profile)
            lanes.append(lane)
            servers.append(server)
        for lane in lanes:
            lane.wait_ready()
            _say(f"{lane.name} is ready")
        for number in range(2, num_rounds + 1):
            shift = number % len(lanes)  # no lane always follows the same one
            for lane in lanes[shift:] + lanes[:shift]:
                lane.take_turn()
            _say(f"round {number} of {num_rounds}: " + ", ".join(f"{x.name} {x.turns[-1].wall_s:.3f}" for x in lanes))
        models = {lane.name: lane.finish() for lane in lanes}
        for server in servers:
            server.close()
    finally:
        for lane in lanes:
            lane.kill()
    _table(lanes)
    return _lane_figures(task, {lane.name: lane for lane in lanes}, models, profiles)


def bench_wide(folder: Path, num_rounds: int, profiles: list[str]) -> dict[str, dict]:
    """Measure each profile beside plain on many features; one after the other, for all at once need 20 GB."""
    results: dict[str, dict] = {}
    for profile in profiles:
        if profile != "plain":
            figures = bench_lanes(folder / profile, num_rounds, ["plain", profile], EPSILON_20TH)
            added = figures[f"{profile}_added_s"]
            share = added / (figures["plain_s_per_round"] + added)
            results[profile] = figures | {"added_share": _rounded(share)}
    return results


def _prepare(folder: Path, num_rounds: int, profiles: list[str], shape: TableShape) -> Task:
    frame = generate(shape)
    task = Task(folder, SITES, PARAMS, num_rounds, agreed_cuts(frame, PARAMS["max_bin"], MIN_ROWS_PER_CUT))
    write_shares(frame, folder / "data", TRAINING, SITES)
    write_startup_kits(folder / "kits", SITES)
    for profile in profiles:
        for site in SITES:
            write_policy(folder / profile / site, {TRAINING: task.share(site)})
    return task


def _lane_figures(task: Task, lanes: dict[str, Lane], models: dict[str, list[bytes]], profiles: list[str]) -> dict:
    central = xgb.Booster(model_file=bytearray(models["central"][0]))
    figures: dict[str, object] = {
        "identical_to_central": {
            profile: len(set(models[profile])) == 1
            and leaf_difference(models[profile][0], central) <= LEAF_TOLERANCE[profile]
            for profile in profiles
        }
    }
    for name in ("central", "native", "plain"):
        if name in lanes:
            figures[f"{name}_s_per_round"] = _rounded(median(turn.wall_s for turn in lanes[name].turns))
    for name in ("masks", UNTAGGED, "bfv", "ckks"):
        if name in lanes and "plain" in lanes:
            pairs = zip(lanes[name].turns, lanes["plain"].turns, strict=True)
            figures[f"{name}_added_s"] = _rounded(median(a.wall_s - b.wall_s for a, b in pairs))
    if {"plain", "masks", UNTAGGED} <= set(lanes):
        with_tags, without = (_added_cpu_s(lanes, name) for name in ("masks", UNTAGGED))
        _say(f"CPU seconds beyond plain: {with_tags:.4f} with tags, {without:.4f} without")
        figures["masks_over_untagged"] = _rounded(with_tags / without)
    figures["bytes_per_round"] = {profile: _bytes_per_round(task, profile) for profile in profiles}
    return figures


def _added_cpu_s(lanes: dict[str, Lane], name: str) -> float:
    """Return the median over rounds of the CPU seconds that all processes of a lane take beyond those of plain."""
    return median(a.cpu_s - b.cpu_s for a, b in zip(lanes[name].turns, lanes["plain"].turns, strict=True))


def _bytes_per_round(task: Task, profile: str) -> int:
    document = json.loads((task.folder / profile / SITES[0] / "runs" / JOB_ID / "run.json").read_text())
    rows = [row for row in document["traffic"] if row["kind"] in ("HISTOGRAM", "ROOT_SUM")]
    return sum(row["bytes_out"] + row["bytes_in"] for row in rows) // task.num_rounds


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
        "ms_per_collective": {"ours": _rounded(ours.ms_per_collective), "nvflare": _rounded(theirs.ms_per_collective)},
    }


def bench_federboost(folder: Path, num_rounds: int) -> float:
    """Return the seconds of training many small trees through FLARE."""
    write_shares(generate(FEDERBOOST), folder / "data", TRAINING, SITES)
    seconds = run_federboost(folder, SITES, FEDERBOOST_PARAMS, num_rounds, _say)
    return _rounded(seconds)


def _flare_table(figures: dict[str, FlareFigures]) -> None:
    for name, figure in figures.items():
        _say(
            f"  {name:<8} {figure.s_per_round:.3f} s per round, {figure.evaluation_s:.3f} s evaluation, "
            f"{figure.ms_per_collective:.1f} ms per collective, {figure.cpu_s_per_round:.3f} CPU s per round"
        )


def _judge(results: dict) -> None:
    """Say on stderr which targets were met."""
    if results.get("plain_s_per_round") and results.get("native_s_per_round"):
        ratio = results["plain_s_per_round"] / results["native_s_per_round"]
        _say(f"plain / native = {ratio:.2f} (target 1.3): {'met' if ratio <= 1.3 else 'MISSED'}")
    for name, target in TARGETS.items():
        if name in results:
            _say(f"{name} = {results[name]} (target {target}): {'met' if results[name] <= target else 'MISSED'}")


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
