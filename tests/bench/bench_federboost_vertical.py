"""FederBoost's vertical training: seconds from bucket exchange to model, and AUC on Credit 2, beside the paper.

Speed: 200 trees of 4 layers on 8,192 rows and 11 features at three parties in one process, through the real job: sealed
messages, ledger, evidence, files. Counted from the moment when all parties have agreed to go on (the passive ones then
randomise and send) to the model; the whole job beside it.

AUC: 20 trees of 3 layers, 16 buckets, two thirds of the rows for training, 10 random splits. Every feature belongs to a
passive party and is randomised: the hardest division. Bounds of the features are those of the training rows, and are
taken for public. Four kinds of buckets:

    no_dp           equal counts in the training rows, true buckets         (paper: 0.7765)
    paper           the same edges, buckets randomised at epsilon 4         (paper: 0.7727; the edges are not paid for)
    paid            equal counts paid with 0.4 of the 4, the rest for the buckets: the job's edges_epsilon
    public          equal widths between the bounds, epsilon 4

The last line of the output is one JSON object.

Run: python -m tests.bench.bench_federboost_vertical [credit2.parquet] [--splits 10] [--runs 5]

Reference: FederBoost (Tian et al.), figures 5(b), 5(c) and its comparison of training times.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import xgboost as xgb
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from dp_components.bucket_ldp import (
    Feature,
    PublicValues,
    equal_count_ends,
    paid_edges,
    public_edges,
    release_buckets,
    release_cell_counts,
)
from dp_components.split_candidates.candidates import Candidates, FeatureBounds
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.tables import BucketBlock
from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters, run_site, train_on_buckets
from nvflare_plugins.pages.run_record import RunRecord
from tests.support.federation import Parties, succeed

DATA = Path(__file__).parents[3] / "shared" / "data" / "credit2.parquet"
N_BUCKETS, EPSILON, EDGES_SHARE = 16, 4.0, 0.1
CREDIT2 = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1}
PUBLISHED = {"no_dp": 0.7765, "paper": 0.7727, "seconds": 1.213}
N_ROWS, N_FEATURES, N_TREES, N_LAYERS = 8192, 11, 200, 4
_MOST_PUBLIC_VALUES = 32

Columns = NDArray[np.float32]


def main() -> None:
    """Print both tables and the summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA, help="Parquet file with a column `label`")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--runs", type=int, default=5, help="of the timed training; the fastest counts")
    options = parser.parse_args()
    seconds = speed(options.runs)
    figures = accuracy(pd.read_parquet(options.data).astype(np.float32), options.splits)
    print(json.dumps({**seconds, "auc": figures, "published": PUBLISHED, "splits": options.splits}))


# -- speed ------------------------------------------------------------------------------------------------------------


def speed(n_runs: int) -> dict[str, float]:
    """Time the job. Units: seconds; wall from exchange to model, wall and CPU time of all parties for the whole job."""
    rng = np.random.default_rng(0)
    features = rng.random((N_FEATURES, N_ROWS)).astype(np.float32)
    label = (features[0] + features[4] * features[8] + 0.3 * rng.standard_normal(N_ROWS) > 0.8).astype(np.float32)
    params = {"objective": "binary:logistic", "max_depth": N_LAYERS}
    results = []
    for _ in range(n_runs):
        with tempfile.TemporaryDirectory(prefix="veilboost-federboost-") as folder:
            parties = parties_of(Path(folder), features, label)
            job = BucketJob("toy", "site-1", "label", params=params, num_rounds=N_TREES, epsilon=EPSILON)
            wall, cpu = time.perf_counter(), time.process_time()
            succeed(parties.run(run_site, job))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            round_s = RunRecord.read(parties.run_folder("site-1")).rounds[0].seconds
            results.append((round_s, wall, cpu))
            print(f"exchange to model {round_s:.3f} s, whole job {wall:.3f} s, CPU time of all parties {cpu:.3f} s")
    best = min(results)
    print(f"best: {best[0]:.3f} s from bucket exchange to model; published {PUBLISHED['seconds']} s")
    return dict(zip(("exchange_to_model_s", "whole_job_s", "cpu_s"), (round(s, 3) for s in best), strict=True))


def parties_of(folder: Path, features: Columns, label: Columns, n_parties: int = 3) -> Parties:
    """Deal the features out; the first party has the label too, and no budget: nothing protects what it has."""
    policy = {"unsigned_sessions": True, "data_sets": {}, "allowed_profiles": ["dp_local"]}
    parties = Parties(folder, n_parties, policy)
    ids = [f"row {i:07d}" for i in range(label.size)]
    budget = {"epsilon": 5.0, "delta": 1e-6, "pure_epsilon": 4.5}
    for site, columns in zip(parties.sites, np.array_split(np.arange(len(features)), n_parties), strict=True):
        frame = pd.DataFrame({"id": ids, **{f"x{i}": features[i] for i in columns}})
        if site == parties.sites[0]:
            parties.give(site, "toy", frame.assign(label=label), id="id")
            continue
        parties.give(site, "toy", frame, id="id", privacy=budget)
        parties.give_input(site, "bucket_features.json", {f"x{i}": {"low": 0, "high": 1} for i in columns})
    return parties


# -- accuracy ---------------------------------------------------------------------------------------------------------


def accuracy(frame: pd.DataFrame, n_splits: int) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation of the AUC on the test rows for each kind of buckets."""
    columns, label = frame.drop(columns="label").to_numpy().T, frame.label.to_numpy()
    scores: dict[str, list[float]] = {}
    for seed in range(n_splits):
        order = np.random.default_rng(seed).permutation(label.size)
        test, train = np.split(order, [label.size // 3])
        for name, edges, release in kinds(columns[:, train]):
            block = BucketBlock(tuple(n + 1 for n in edges.counts), release(edges))
            parameters = check_bucket_parameters(CREDIT2, N_BUCKETS)
            own = np.empty((0, train.size), dtype=np.float32)
            model = train_on_buckets(own, label[train], [block], parameters, 20, cores=2)
            true_buckets = xgb.DMatrix(edges.bin_rows(columns[:, test]).T)
            predicted = xgb.Booster(model_file=bytearray(model)).predict(true_buckets)
            scores.setdefault(name, []).append(roc_auc_score(label[test], predicted))
        central = xgb.train(CREDIT2, xgb.DMatrix(columns[:, train].T, label=label[train]), 20)
        scores.setdefault("xgboost", []).append(
            roc_auc_score(label[test], central.predict(xgb.DMatrix(columns[:, test].T)))
        )
    figures = {}
    for name, values in scores.items():
        figures[name] = {"mean": round(float(np.mean(values)), 4), "sd": round(float(np.std(values, ddof=1)), 4)}
        paper = f"   paper {PUBLISHED[name]:.4f}" if name in PUBLISHED else ""
        print(f"{name:<8} AUC {figures[name]['mean']:.4f} (sd {figures[name]['sd']:.4f}){paper}")
    return figures


def kinds(
    train: Columns, n_buckets: int = N_BUCKETS, epsilon: float = EPSILON
) -> list[tuple[str, Candidates, Callable[[Candidates], NDArray[np.uint8]]]]:
    """Return name, edges and release of each kind of buckets. Shapes: train: float32[n_features, n_rows]."""
    features = [public_description(column) for column in train]
    of_data = Candidates(tuple(equal_count_edges(column, n_buckets) for column in train))
    for_edges = EDGES_SHARE * epsilon
    counts = release_cell_counts(train, features, n_buckets, for_edges).value
    paid = paid_edges(counts, for_edges, features, n_buckets)

    def randomised(epsilon: float) -> Callable[[Candidates], NDArray[np.uint8]]:
        return lambda edges: release_buckets(train, edges, epsilon).value.T.astype(np.uint8)

    return [
        ("no_dp", of_data, lambda edges: edges.bin_rows(train)),
        ("paper", of_data, randomised(epsilon)),
        ("paid", paid, randomised(epsilon - for_edges)),
        ("public", public_edges(features, n_buckets), randomised(epsilon)),
    ]


def public_description(column: Columns) -> Feature:
    """Take the training rows' bounds, or the few values of a code list, for public."""
    values = np.unique(column)
    if values.size <= _MOST_PUBLIC_VALUES:
        return PublicValues(tuple(map(float, values)))
    return FeatureBounds(float(values[0]), float(values[-1]))


def equal_count_edges(column: Columns, n_buckets: int) -> Columns:
    """Return the last value of each bucket but the last, buckets being whole values of about equal counts."""
    values, counts = np.unique(column, return_counts=True)
    return values[equal_count_ends(counts, n_buckets)]


if __name__ == "__main__":
    main()
