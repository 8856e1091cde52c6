"""FederBoost's vertical training over buckets, epsilon, parties, delay and bandwidth, as its section 6 varies them.

AUC (its figures 5(b) and 5(c)): two thirds of the rows for training, five random splits, every feature randomised, 20
trees of 3 layers, on higgs_20k 60 of 4. Kinds of buckets as in ``bench_federboost_vertical``. The paper's Credit 1 and
SUSY are not at hand; adult, bank and, of the kind of SUSY, higgs_20k are here in their place.

Time (figures 6(a) and 6(c), tables II and III): the real job on generated rows, all parties and the server in one
process. Wall seconds are those of that process. Exchanges and bytes are counted from its frames, and put on a
simulated link: on paper, nothing is delayed (``simulated_link.Link``). The paper's wide area network is 20 Mbit/s for
each process and 100 ms.

Progress goes to stderr; the last line is one JSON object. --csv and --figures write the same as a table and as SVG.

Run: python -m tests.bench.bench_federboost_sweeps [--splits 5] [--csv FILE.csv] [--figures FOLDER]
Reference: FederBoost (Tian et al.), section 6.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb
from sklearn.metrics import roc_auc_score

from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.tables import BucketBlock
from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters, run_site, train_on_buckets
from nvflare_plugins.pages.run_record import RunRecord
from tests.bench.bench_federboost_vertical import EPSILON, N_BUCKETS, kinds, parties_of
from tests.bench.dp_data import Arrays, load
from tests.bench.rivals_figure import draw
from tests.bench.simulated_link import Exchange, Link, Traffic, totals
from tests.support.federation import succeed

SETS = {"credit2": (20, 3), "adult": (20, 3), "bank": (20, 3), "higgs_20k": (60, 4)}
"""Table -> (trees, layers)."""
BUCKETS = (4, 8, 12, 16, 24, 32, 64)
EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
PUBLISHED = {"credit2": {"no_dp": 0.7765, "paper": 0.7727}}
"""AUC at 16 buckets, epsilon 4."""
PARTIES = (2, 4, 8, 16, 32)
LATENCIES_MS = (0, 10, 50, 100, 200)
MBITS = (20, 100, 1000)
WIDE_AREA = Link(0.1, 20)

Sweep = dict[str, dict[str, dict[str, Any]]]
"""Table -> kind of buckets -> place on the axis -> {"auc": {"mean": ..., "sd": ...}}."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A generated table and the training on it."""

    rows: int
    features: int
    trees: int
    layers: int


TABLE_2 = Shape(8192, 11, 200, 4)
TABLE_3 = Shape(50_000, 15, 32, 4)
PARTY_SHAPES = {"rows of credit2": Shape(20_000, 32, 20, 3), "rows of SUSY": Shape(193_333, 32, 60, 4)}
SUSY = Shape(193_333, 18, 60, 4)


def main() -> None:
    """Run all sweeps, write them if asked to, and print the summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--figures", type=Path, help="folder for federboost_buckets.svg and federboost_epsilon.svg")
    options = parser.parse_args()
    over_buckets, over_epsilon = accuracy(options.sets, options.splits)
    timed = efficiency()
    if options.csv is not None:
        write_csv(options.csv, over_buckets, over_epsilon, timed)
    if options.figures is not None:
        pictures = {"buckets": (over_buckets, BUCKETS), "epsilon": (over_epsilon, EPSILONS)}
        for axis, (sweep, places) in pictures.items():
            (options.figures / f"federboost_{axis}.svg").write_text(draw(sweep, places, "xgboost", axis))
    summary = {"splits": options.splits, "buckets": over_buckets, "epsilon": over_epsilon, **timed}
    print(json.dumps({**summary, "published": PUBLISHED}))


def say(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


# -- accuracy ---------------------------------------------------------------------------------------------------------


def accuracy(sets: Sequence[str], n_splits: int) -> tuple[Sweep, Sweep]:
    """Return AUC over numbers of buckets at epsilon 4, and over epsilons at 16 buckets."""
    places = [*((q, EPSILON) for q in BUCKETS), *((N_BUCKETS, e) for e in EPSILONS)]
    over_buckets: Sweep = {}
    over_epsilon: Sweep = {}
    for name in sets:
        features, label = load(name)
        scores: dict[tuple[int, float], dict[str, list[float]]] = {}
        without = []
        for seed in range(n_splits):
            order = np.random.default_rng(seed).permutation(label.size)
            test, train = np.split(order, [label.size // 3])
            without.append(central(features, label, train, test, *SETS[name]))
            for place in dict.fromkeys(places):
                for kind, auc in of_split((features, label), train, test, place, SETS[name]).items():
                    scores.setdefault(place, {}).setdefault(kind, []).append(auc)
            say(f"{name}: split {seed + 1} of {n_splits}")
        for sweep, axis in ((over_buckets, BUCKETS), (over_epsilon, EPSILONS)):
            at = [(q, EPSILON) for q in axis] if axis is BUCKETS else [(N_BUCKETS, e) for e in axis]
            of_set: dict[str, dict[str, Any]] = {}
            for value, place in zip(axis, at, strict=True):
                for kind, aucs in {**scores[place], "xgboost": without}.items():
                    of_set.setdefault(kind, {})[f"{value:g}"] = {"auc": mean_and_sd(aucs)}
            sweep[name] = of_set
    return over_buckets, over_epsilon


def of_split(
    data: Arrays, train: np.ndarray, test: np.ndarray, place: tuple[int, float], forest: tuple[int, int]
) -> dict[str, float]:
    """Return the AUC of each kind of buckets on the test rows of one split."""
    (features, label), (n_buckets, epsilon), (n_trees, n_layers) = data, place, forest
    columns = np.ascontiguousarray(features[train].T)
    params = {"objective": "binary:logistic", "max_depth": n_layers, "nthread": 1}
    found = {}
    for kind, edges, release in kinds(columns, n_buckets, epsilon):
        block = BucketBlock(tuple(n + 1 for n in edges.counts), release(edges))
        own = np.empty((0, train.size), dtype=np.float32)
        parameters = check_bucket_parameters(params, n_buckets)
        model = train_on_buckets(own, label[train], [block], parameters, n_trees, cores=1)
        true_buckets = xgb.DMatrix(edges.bin_rows(np.ascontiguousarray(features[test].T)).T)
        found[kind] = float(roc_auc_score(label[test], xgb.Booster(model_file=bytearray(model)).predict(true_buckets)))
    return found


def central(
    features: np.ndarray, label: np.ndarray, train: np.ndarray, test: np.ndarray, n_trees: int, n_layers: int
) -> float:
    """Return the AUC of XGBoost on the pooled true values."""
    params = {"objective": "binary:logistic", "max_depth": n_layers, "nthread": 1}
    booster = xgb.train(params, xgb.DMatrix(features[train], label=label[train]), n_trees)
    return float(roc_auc_score(label[test], booster.predict(xgb.DMatrix(features[test]))))


def mean_and_sd(values: Sequence[float]) -> dict[str, float]:
    """Return both, rounded."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": round(float(np.mean(values)), 4), "sd": round(sd, 4)}


# -- time -------------------------------------------------------------------------------------------------------------


def efficiency() -> dict[str, Any]:
    """Return the tables' seconds, those over parties, and those over delay and bandwidth."""
    tables = {"table_2": run_job(TABLE_2, 3)[0], "table_3": run_job(TABLE_3, 3)[0]}
    over_parties: dict[str, dict[int, Any]] = {}
    for name, shape in PARTY_SHAPES.items():
        over_parties[name] = {n: run_job(shape, n)[0] for n in PARTIES}
    measured, exchanges = run_job(SUSY, 2)
    links = [
        {"latency_ms": ms, "mbit": mbit, "link_s": round(Link(ms / 1000, mbit).seconds(exchanges), 1)}
        for ms in LATENCIES_MS
        for mbit in MBITS
    ]
    return {**tables, "parties": over_parties, "susy": measured, "links": links}


def run_job(shape: Shape, n_parties: int) -> tuple[dict[str, Any], list[Exchange]]:
    """Train once through the protocol. Units: wall and CPU seconds of all parties together in one process."""
    rng = np.random.default_rng(0)
    columns = rng.random((shape.features, shape.rows)).astype(np.float32)
    score = columns[0] + columns[4] * columns[8] + 0.3 * rng.standard_normal(shape.rows)
    params = {"objective": "binary:logistic", "max_depth": shape.layers, "nthread": 1}
    with tempfile.TemporaryDirectory(prefix="veilboost-federboost-") as folder:
        parties = parties_of(Path(folder), columns, (score > 0.8).astype(np.float32), n_parties)
        job = BucketJob("toy", parties.sites[0], "label", params=params, num_rounds=shape.trees, epsilon=EPSILON)
        traffic = Traffic()
        wall, cpu = time.perf_counter(), time.process_time()
        succeed(parties.run(run_site, job, carry=traffic.of))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        training_s = RunRecord.read(parties.run_folder(parties.sites[0])).rounds[0].seconds
    exchanges = traffic.exchanges
    found = {
        "exchange_to_model_s": round(training_s, 3),
        "whole_job_s": round(wall, 2),
        "core_s": round(cpu, 2),
        **totals(exchanges),
        "wide_area_link_s": round(WIDE_AREA.seconds(exchanges), 1),
    }
    say(f"{shape} at {n_parties} parties: {found}")
    return found, exchanges


# -- files ------------------------------------------------------------------------------------------------------------


def write_csv(path: Path, over_buckets: Sweep, over_epsilon: Sweep, timed: dict[str, Any]) -> None:
    """Write every figure as a line: what is varied, on what, where, of what, value, standard deviation."""
    lines: list[tuple[Any, ...]] = []
    for axis, sweep in (("buckets", over_buckets), ("epsilon", over_epsilon)):
        for name, of_set in sweep.items():
            for kind, of_kind in of_set.items():
                lines += [
                    (axis, name, at, f"AUC {kind}", f["auc"]["mean"], f["auc"]["sd"]) for at, f in of_kind.items()
                ]
    for shape, of_shape in timed["parties"].items():
        for n, figures in of_shape.items():
            lines += [("parties", shape, n, what, value, "") for what, value in figures.items()]
    for table in ("table_2", "table_3", "susy"):
        lines += [("table", table, "", what, value, "") for what, value in timed[table].items()]
    for link in timed["links"]:
        at = f"{link['latency_ms']} ms, {link['mbit']} Mbit/s"
        lines.append(("link", "susy, 2 parties", at, "link_s", link["link_s"], ""))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("sweep", "on", "at", "what", "value", "sd"))
        writer.writerows(lines)


if __name__ == "__main__":
    main()
