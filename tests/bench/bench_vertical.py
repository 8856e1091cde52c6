"""Vertical training beside centralized XGBoost, XGBoost's own column split, and the cost with phe.

Data: the shape of CreditCard (227,845 rows, generated), 10 features at the active and 18 at the passive party, 10 trees
of depth 5, 256 bins, at least 40 fraction bits where nothing else is said. Each party is a process with one thread,
messages go over pipes. What the last line of the output holds, one JSON object; `core` means CPU time, a mean over the
trees:

    paillier_2048, paillier_3072, elgamal, elgamal_32, elgamal_20, elgamal_20_32, plain
        identical_to_central   the merged model equals centralized XGBoost's in every bit of every tree; not promised
                               of elgamal_20, whose gradients have 20 fraction bits
        s_per_tree, core_s_per_tree      wall and CPU seconds of all parties
        stages                 CPU seconds per tree by party and stage
        bytes_to_passive, bytes_to_active          per tree
        peak_mb                largest memory by party, table and XGBoost included
        part_of_paillier_3072  of its core-seconds in the same run
    elgamal_guarded        likewise, 32 bins at most; the guard is a stage of the passive party, its cap on sums is off
    sealed                 likewise, in the preset sealed under Paillier of 3072 bits; "compare" are its circuits
    ..., wall_over_core    wall seconds of the trees after the first, over the core-seconds of both parties
         wall_over_busy    likewise, over the times in which each party worked: what a busy machine stretches, it
                           stretches both
         busy_share, both_busy_share   of that time in which each party worked, and both did
    native_column_split_s_per_tree, native_column_split_core_s_per_tree   XGBoost's own, three processes, unprotected
    plain_over_native      quotient of wall seconds, medians of the trees; plain_over_native_core of CPU seconds
    flare_added_s_per_tree what a job in FLARE's simulator (3 processes, sealed messages, evidence) adds to plain
    phe_core_s_per_tree    what phe of 2048 bits would need for the same tree, from its rates in this run; phe_over_ours
    targets_met            against the project's targets, for the shape and bins above

Run: make bench-vertical, or python -m tests.bench.bench_vertical [--bins 32] [--shape quick] [--only ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from statistics import median

import numpy as np

os.environ.setdefault("VEILBOOST_THREADS", "1")  # core-seconds are compared: one thread for each party

from he_processors.bignum.registry import AUTO, open_backend
from he_processors.curve.registry import open_curve
from he_processors.paillier import generate_paillier_key
from nvflare_plugins.data.declaration import VerticalRules
from tests.bench.flare_jobs import run_in_flare, tables_of_parties
from tests.bench.horizontal_data import CREDIT_CARD, TableShape, arrays, generate
from tests.bench.vertical_parties import VerticalRun, Workload, busy_s, run_central, run_native, run_vertical
from tests.support.vertical_federation import first_difference

SHAPES = {
    "creditcard": (CREDIT_CARD, (10, 18)),
    "balanced": (TableShape(227_845, 28, 0.5), (10, 18)),
    "quick": (TableShape(20_000, 28, 0.01), (10, 18)),
    "higgs_half": (TableShape(5_500_000, 28, 0.5), (10, 18)),  # with ``--rounds 2 --only elgamal``
    "higgs": (TableShape(11_000_000, 28, 0.5), (10, 18)),  # likewise, on a machine of 24 GB
    "higgs_20th": (TableShape(550_000, 28, 0.5), (14, 14)),
    "fate": (TableShape(100_000, 330, 0.5), (30, 300)),
    "epsilon_20th": (TableShape(20_000, 2_000, 0.5), (799, 1_201)),
}
"""Rows, and columns of the active and of the passive party. FATE publishes seconds for its one; those that end in 20th
have a twentieth of the rows of their sets.
"""
PARAMS = {"objective": "binary:logistic", "max_depth": 5, "max_bin": 256, "nthread": 1, "seed": 0}
SCHEMES = {
    "paillier_2048": ("paillier", 2048),
    "paillier_3072": ("paillier", 3072),
    "elgamal": ("elgamal", (40, 64)),
    "elgamal_32": ("elgamal", (40, 32)),
    "elgamal_20": ("elgamal", (20, 64)),
    "elgamal_20_32": ("elgamal", (20, 32)),
}
"""Key of the output -> scheme, and the key's length, or elgamal's fraction bits and bytes of a point."""
COMPARED = "paillier_3072"
# (part of the output, or none for its top level; figure) -> the most it may be; phe_over_ours: the least.
TARGETS = {
    ("paillier_2048", "core_s_per_tree"): 34.0,
    ("paillier_2048", "bytes_to_active"): 3e6,
    ("elgamal", "part_of_paillier_3072"): 1 / 7,
    ("elgamal", "bytes_to_passive"): 75e6,
    ("elgamal", "bytes_to_active"): 24e6,
    ("elgamal_20", "part_of_paillier_3072"): 1 / 12,
    ("", "phe_over_ours"): 60.0,
    ("", "plain_over_native"): 1.2,
}
PARTS = (*SCHEMES, "elgamal_guarded", "sealed", "plain", "native", "flare", "phe")


def main() -> None:
    """Measure; progress and a table go to stderr, the JSON object to stdout at the end."""
    options = _options()
    shape, widths = SHAPES[options.shape]
    features, label = arrays(generate(shape))
    workload = Workload(features, label, widths, {**PARAMS, "max_bin": options.bins}, options.rounds)
    results: dict[str, object] = {
        "rows": shape.n_rows,
        "features": list(widths),
        "bins": options.bins,
        "trees": options.rounds,
        "depth": PARAMS["max_depth"],
        "backend": open_backend(AUTO, (1 << 2047) + 1).name,
        "curve": open_curve().name,
    }
    _say(f"{shape.n_rows:,} rows, {widths[0]} + {widths[1]} features, {options.rounds} trees; centralized XGBoost")
    central = run_central(workload)
    for name, (scheme, size) in {"plain": ("plain", 0), **SCHEMES}.items():
        if name in options.only:
            _say(name)
            run = run_vertical(workload, scheme, size)
            results[name] = {"identical_to_central": _is_equal(run, central), **_figures(run)}
    if "elgamal_guarded" in options.only:
        _say("elgamal_guarded")
        few = min(options.bins, VerticalRules().max_bins)
        fewer = dataclasses.replace(workload, params={**workload.params, "max_bin": few})
        results["elgamal_guarded"] = {"bins": few, **_figures(run_vertical(fewer, "elgamal", (40, 64), guarded=True))}
    if "sealed" in options.only:
        _say("sealed")
        few = min(options.bins, VerticalRules().max_bins)
        fewer = dataclasses.replace(workload, params={**workload.params, "max_bin": few})
        results["sealed"] = {"bins": few, **_figures(run_vertical(fewer, "sealed", 3072))}
    if "native" in options.only:
        wall, cpu = run_native(workload)
        results["native_column_split_s_per_tree"], results["native_column_split_core_s_per_tree"] = wall, cpu
        _say(f"XGBoost's own column split: {wall:.3f} s a tree, {cpu:.3f} core-seconds")
    if {"plain", "native"} <= set(options.only):
        plain = results["plain"]
        results["plain_over_native"] = plain["s_per_tree"] / results["native_column_split_s_per_tree"]
        core_s = results["native_column_split_core_s_per_tree"]
        results["plain_over_native_core"] = plain["core_s_per_tree"] / core_s
    if COMPARED in results:
        for name in SCHEMES:
            if name in results:
                core_s = results[name]["core_s_per_tree"]
                results[name]["part_of_paillier_3072"] = core_s / results[COMPARED]["core_s_per_tree"]
    if "flare" in options.only:
        results |= _flare(workload, results)
    if "phe" in options.only:
        results |= _phe(workload, central, results)
    if (options.shape, options.bins) == ("creditcard", PARAMS["max_bin"]):
        results["targets_met"] = _targets(results)
    print(json.dumps(_rounded(results)))


def _figures(run: VerticalRun) -> dict[str, object]:
    """Return what one training cost, per tree."""
    n = len(run.round_s)
    names = ["active", *(f"passive_{i}" for i in range(1, len(run.parties)))]
    figures = {
        "s_per_tree": median(run.round_s),
        "core_s_per_tree": sum(p.cpu_s for p in run.parties) / n,
        "stages": {
            name: {stage: seconds / n for stage, seconds in p.stages.items()}
            for name, p in zip(names, run.parties, strict=True)
        },
        **_overlap(run),
        "bytes_to_passive": run.bytes_to_passive / n,
        "bytes_to_active": run.bytes_to_active / n,
        "peak_mb": {name: p.peak_mb for name, p in zip(names, run.parties, strict=True)},
        "setup_s": run.setup_s,
    }
    stages = "; ".join(
        f"{name}: " + ", ".join(f"{stage} {seconds:.3g}" for stage, seconds in of_party.items())
        for name, of_party in figures["stages"].items()
    )
    _say(f"  {figures['s_per_tree']:.3g} s, {figures['core_s_per_tree']:.3g} core-seconds a tree ({stages})")
    return figures


def _overlap(run: VerticalRun) -> dict[str, object]:
    """Return how the parties' work lies in time, over the trees after the first one."""
    if len(run.round_ends) < 2:
        return {}
    n, begin, end = len(run.round_ends) - 1, run.round_ends[0], run.round_ends[-1]
    busy = [busy_s(party.spans, begin, end) for party in run.parties]
    core_s = sum(party.cpu_s for party in run.parties) / len(run.round_ends)
    found = {
        "wall_over_core": (end - begin) / n / core_s,
        "wall_over_busy": 1 / sum(float(of_party.mean()) for of_party in busy),
        "busy_share": [float(of_party.mean()) for of_party in busy],
        "both_busy_share": float(np.logical_and.reduce(busy).mean()),
        "load": os.getloadavg()[0],
    }
    _say(f"  {(end - begin) / n:.3g} s a tree after the first: " + json.dumps(_rounded(found)))
    return found


def _is_equal(run: VerticalRun, central: bytes) -> bool:
    difference = first_difference(run.model, central)
    _say(f"  {'identical to centralized' if not difference else 'differs: ' + difference}")
    return not difference


def _flare(workload: Workload, results: dict[str, object]) -> dict[str, object]:
    run = run_in_flare(
        "vertical",
        {
            "params": workload.params,
            "num_rounds": workload.num_rounds,
            "profile": "plain",
            "preset": "exact",
            "checkpoint_every": 0,
        },
        tables_of_parties([workload.part(number) for number in range(len(workload.widths))], workload.label),
    )
    seconds = median(run.rounds_s[1:] or run.rounds_s)
    _say(f"plain in FLARE's simulator: {seconds:.3f} s a tree")
    added = {"flare_plain_s_per_tree": seconds}
    if "plain" in results:
        added["flare_added_s_per_tree"] = seconds - results["plain"]["s_per_tree"]
    return added


def _phe(workload: Workload, central: bytes, results: dict[str, object]) -> dict[str, object]:
    """Price the same trees with phe: encrypt each row, add the rows of every built node, decrypt every bin."""
    from tests.bench.he_peers import measure_phe

    rates = measure_phe(generate_paillier_key(2048))
    if rates is None:
        return {"phe_core_s_per_tree": None}
    n_rows, n_foreign = len(workload.label), sum(workload.widths[1:])
    rows, nodes = _built(central, n_rows)
    n_trees = workload.num_rounds
    seconds = (
        n_rows / rates["encrypt_per_s"]
        + rows / n_trees * n_foreign / rates["add_per_s"]
        + nodes / n_trees * n_foreign * workload.params["max_bin"] / rates["decrypt_per_s"]
    )
    _say(f"phe, gradient pairs packed: {seconds:,.0f} core-seconds a tree")
    ours = results.get("paillier_2048")
    return {"phe_core_s_per_tree": seconds, "phe_over_ours": seconds / ours["core_s_per_tree"] if ours else None}


def _built(model: bytes, n_rows: int) -> tuple[float, int]:
    """Return rows and number of the nodes whose histograms are built, over all trees: root, and each smaller child.

    Rows are not in a model; a level's smaller children hold at most half of all rows, which is what phe is charged.
    """
    rows, nodes = 0.0, 0
    for tree in json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]:
        left, right = tree["left_children"], tree["right_children"]
        levels = _levels(left, right, 0)
        rows += n_rows * (1 + 0.5 * (levels - 1)) if levels else 0.0
        nodes += 1 + sum(1 for node in left if node != -1 and (left[node] != -1 or right[node] != -1))
    return rows, nodes


def _levels(left: list[int], right: list[int], node: int) -> int:
    """Return the number of levels with splits below and at a node."""
    if left[node] == -1:
        return 0
    return 1 + max(_levels(left, right, left[node]), _levels(left, right, right[node]))


def _targets(results: dict[str, object]) -> dict[str, bool]:
    met = {}
    for (part, name), target in TARGETS.items():
        value = (results.get(part, {}) if part else results).get(name)
        if value is not None:
            met[f"{part} {name}".strip()] = bool(value >= target if name == "phe_over_ours" else value <= target)
    return met


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bins", type=int, default=PARAMS["max_bin"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="creditcard", help="quick: to see that it runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
