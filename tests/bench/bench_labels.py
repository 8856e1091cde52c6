"""Private regression and several classes beside XGBoost without privacy.

    python -m tests.bench.bench_labels                       abalone, digits, wine and generated sets, 10 splits
    python -m tests.bench.bench_labels --sets abalone --splits 5

Our models go through the real protocol: three sites in threads, masks, noise of the operating system. Seventy per cent
of the rows train, thirty are scored; delta is one over the training rows and features' bounds are those of the training
rows, declared public, as in bench_dp.py. Bounds of labels are round numbers (``SETS``). Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import pandas as pd
import xgboost as xgb
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes, load_digits, load_wine, make_classification, make_friedman1

from dp_components.leaf_weights import Number, SeveralClasses, Target
from dp_components.mechanisms import NoiseShares
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.kinds.private_trees.methods import DEFAULT_2026_12, Method, dp_rf, dp_tr_newton, feverless
from nvflare_plugins.kinds.private_trees.plan import TRUSTED_SERVER, PrivateTreesPlan, ReleasePlan, Trust
from tests.bench.dp_data import SEEDS, SHARED
from tests.support.private_trees import mu_of, split_rows, train_in_process

EPSILONS = (0.1, 0.5, 1.0)
Rows = tuple[NDArray[np.float32], NDArray[np.float32]]


def abalone() -> Rows:
    """Return eight features and the number of rings."""
    frame = pd.read_parquet(SHARED / "abalone.parquet")
    frame["Sex"] = pd.Categorical(frame.Sex).codes
    return frame.drop(columns="label").to_numpy(np.float32), frame.label.to_numpy(np.float32)


def _generated(n_classes: int, **shape: object) -> Rows:
    return make_classification(20_000, random_state=1, n_classes=n_classes, **shape)  # type: ignore[return-value]


SETS: dict[str, tuple[Callable[[], Rows], Target]] = {
    "abalone": (abalone, Number(FeatureBounds(0, 30))),
    "abalone, bounds to 100": (abalone, Number(FeatureBounds(0, 100))),
    "diabetes": (lambda: load_diabetes(return_X_y=True), Number(FeatureBounds(0, 400))),
    "friedman1": (lambda: make_friedman1(20_000, noise=1.0, random_state=2), Number(FeatureBounds(0, 30))),
    "digits": (lambda: load_digits(return_X_y=True), SeveralClasses(10)),
    "wine": (lambda: load_wine(return_X_y=True), SeveralClasses(3)),
    "generated, 3 classes": (partial(_generated, 3, n_features=15, n_informative=6), SeveralClasses(3)),
    "generated, 6 classes": (partial(_generated, 6, n_features=20, n_informative=10), SeveralClasses(6)),
    "generated, 5 uneven classes": (
        partial(_generated, 5, n_features=12, n_informative=8, weights=[0.6, 0.25, 0.1, 0.04, 0.01]),
        SeveralClasses(5),
    ),
}
DISTRIBUTED = Trust(NoiseShares(3, 1))
ARMS: dict[str, tuple[Method, Trust]] = {
    "trusted server": (DEFAULT_2026_12, TRUSTED_SERVER),
    "distributed noise": (DEFAULT_2026_12, DISTRIBUTED),
    "DP-TR Newton, trusted": (dp_tr_newton(), TRUSTED_SERVER),
    "DP-RF, trusted": (dp_rf(), TRUSTED_SERVER),
    "FEVERLESS, trusted": (feverless(), TRUSTED_SERVER),
}
NONE, CONSTANT = "XGBoost without privacy", "one answer for all"


def score(scores: NDArray[np.float32], label: NDArray[np.float32], target: Target) -> tuple[float, ...]:
    """Return RMSE, answers within the public bounds; or merror and mlogloss."""
    if isinstance(target, Number):
        answers = np.clip(scores, target.bounds.low, target.bounds.high)
        return (float(np.sqrt(np.mean((answers - label) ** 2))),)
    of_label = scores[np.arange(label.size), label.astype(int)]
    return float(np.mean(scores.argmax(axis=1) != label)), float(-np.log(np.maximum(of_label, 1e-15)).mean())


def run(task: tuple[str, str, float, int]) -> tuple[float, ...]:
    """Train one model on one split, and score it."""
    name, arm, epsilon, seed = task
    load, target = SETS[name]
    values, label = (np.asarray(part, dtype=np.float32) for part in load())
    order = np.random.default_rng(seed).permutation(label.size)
    train, test = np.split(order, [int(0.7 * label.size)])
    if arm == CONSTANT:
        counts = np.bincount(label[train].astype(int)) / train.size if isinstance(target, SeveralClasses) else 0.0
        answer = counts if isinstance(target, SeveralClasses) else label[train].mean()
        shape = (test.size, target.n_outputs) if isinstance(target, SeveralClasses) else (test.size,)
        return score(np.broadcast_to(answer, shape), label[test], target)
    if arm == NONE:
        is_number = isinstance(target, Number)
        objective = {"objective": "reg:squarederror" if is_number else "multi:softprob", "nthread": 1, "max_depth": 4}
        parameters = objective | {"eta": 0.1} | ({} if is_number else {"num_class": target.n_outputs})
        booster = xgb.train(parameters, xgb.DMatrix(values[train], label[train]), 100)
        return score(booster.predict(xgb.DMatrix(values[test])), label[test], target)
    method, trust = ARMS[arm]
    low, high = values[train].min(axis=0), values[train].max(axis=0)
    bounds = tuple(FeatureBounds(float(a), float(max(b, a + 1e-3))) for a, b in zip(low, high, strict=True))
    mu = mu_of(epsilon, 1 / train.size)
    releases = ReleasePlan.of(method, bounds, mu, trust.n_honest, target=target)
    plan = PrivateTreesPlan(method, bounds, releases, trust, seed, (), target)
    parts = split_rows(np.ascontiguousarray(np.clip(values[train], low, high).T), label[train], 3)
    booster = xgb.Booster(model_file=bytearray(train_in_process(plan, parts)[0]))
    return score(booster.predict(xgb.DMatrix(values[test])), label[test], target)


def main() -> None:
    """Print one table, and its figures as one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS), metavar="SET")
    parser.add_argument("--splits", type=int, default=10)
    arguments = parser.parse_args()
    seeds = SEEDS[: arguments.splits]
    columns = [*ARMS, NONE, CONSTANT]
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    print(f"| | epsilon | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        for name in arguments.sets:
            for epsilon in EPSILONS:
                cells, means = [], results.setdefault(name, {}).setdefault(f"{epsilon:g}", {})
                for arm in columns:
                    found = np.array(list(pool.map(run, [(name, arm, epsilon, seed) for seed in seeds])))
                    spread = found.std(axis=0, ddof=1) if len(seeds) > 1 else np.zeros(found.shape[1])
                    means[arm] = [round(float(mean), 4) for mean in found.mean(0)]
                    cells.append(" / ".join(f"{m:.3f} ({s:.3f})" for m, s in zip(found.mean(0), spread, strict=True)))
                print(f"| {name} | {epsilon:g} | {' | '.join(cells)} |", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
