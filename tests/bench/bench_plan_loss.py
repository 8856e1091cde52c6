"""How far off the score loss is that ``veilboost plan`` expects: fitted on the development sets, tried on others.

Each line of the table is a training of pooled rows without protocol (as much noise as in a job), 70 % of the rows to
train on; what is lost is the share of the way from guessing (AUC 0.5) to XGBoost's AUC (50 trees of depth 4, the same
split). Held out are sets of scikit-learn and generated ones; nothing was fitted to them.

    --out FILE       train, and write the table as CSV (some 40 minutes of one core)
    --fit FILE ...   read such tables: print the constants of ``nvflare_plugins/kinds/private_trees/planner.py`` as the
                     development sets give them, and the error on the others, beside that of one constant

The last line is one JSON object.

Run: python -m tests.bench.bench_plan_loss --out rows.csv && python -m tests.bench.bench_plan_loss --fit rows.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
import xgboost as xgb
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_digits, make_classification, make_friedman1, make_hastie_10_2
from sklearn.metrics import roc_auc_score

from dp_components.bucket_ldp import public_edges, release_buckets, wrong_bucket_rate
from dp_components.dpboost.ensemble_of_ensembles import DpBoostPlan, SiteData, train
from dp_components.dpboost.single_tree import LogisticLoss
from dp_components.mechanisms import NoiseShares
from dp_components.split_candidates.candidates import by_rule, uniform_candidates
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.attempt.plan import lost
from nvflare_plugins.kinds.federboost_vertical.payment import buckets_over_signal
from nvflare_plugins.kinds.federboost_vertical.tables import BucketBlock
from nvflare_plugins.kinds.federboost_vertical.training import check_bucket_parameters, train_on_buckets
from nvflare_plugins.kinds.private_trees.methods import PRESETS
from nvflare_plugins.kinds.private_trees.plan import TRUSTED_SERVER, Trust
from tests.bench.bench_federboost_vertical import public_description
from tests.bench.dp_data import DEVELOPMENT_SETS, SHARED, Arrays, Split, load, split
from tests.bench.dp_runs import in_twin
from tests.support.private_trees import mu_of, plan_with

SEEDS = (1, 4)
Array = NDArray[np.float64]
DISTRIBUTED = Trust(NoiseShares(3, 1))


def _abalone() -> Arrays:
    frame = pd.read_parquet(SHARED / "abalone.parquet")
    frame["Sex"] = pd.Categorical(frame.Sex).codes
    return frame.drop(columns="label").to_numpy(np.float32), (frame.label > 9).to_numpy(np.float32)


def _hastie() -> Arrays:
    values, label = make_hastie_10_2(12_000, random_state=0)
    return values, (label > 0).astype(np.float32)


def _friedman() -> Arrays:
    values, label = make_friedman1(20_000, noise=1.0, random_state=0)
    return values, (label > np.quantile(label, 0.7)).astype(np.float32)


def _linear() -> Arrays:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40_000, 12))
    score = values @ rng.standard_normal(12) + 2 * rng.standard_normal(40_000)
    return values, (score > np.quantile(score, 0.965)).astype(np.float32)


def _pareto() -> Arrays:
    rng = np.random.default_rng(0)
    values = rng.pareto(1.5, (15_000, 10))
    score = np.log1p(values) @ rng.standard_normal(10) + rng.standard_normal(15_000)
    return values, (score > np.median(score)).astype(np.float32)


def _codes() -> Arrays:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 6, (25_000, 15))
    effects = rng.standard_normal((15, 6))
    score = sum(effects[i, values[:, i]] for i in range(15)) + 4 * rng.standard_normal(25_000)
    return values, (score > np.quantile(score, 0.7)).astype(np.float32)


def _digits() -> Arrays:
    values, label = load_digits(return_X_y=True)
    return values, (label < 5).astype(np.float32)


def _clusters() -> Arrays:
    made = make_classification(30_000, 20, n_informative=8, n_clusters_per_class=4, random_state=0)
    return made[0], made[1].astype(np.float32)


HELD_OUT: dict[str, Callable[[], Arrays]] = {
    "abalone": _abalone,
    "breast": lambda: load_breast_cancer(return_X_y=True),
    "digits": _digits,
    "hastie": _hastie,
    "friedman": _friedman,
    "linear": _linear,
    "pareto": _pareto,
    "codes": _codes,
    "clusters": _clusters,
}
PLANS: dict[str, tuple[tuple[str, ...], tuple[float, ...], Trust]] = {
    "default": (("default_2026_12",), (0.1, 0.25, 0.5, 1.0, 4.0), TRUSTED_SERVER),
    "default, distributed": (("default_2026_12",), (0.1, 1.0), DISTRIBUTED),
    "older": (("default_2026_11", "few_rounds"), (0.1, 1.0), TRUSTED_SERVER),
    "published": (("dp_tr_newton", "dp_rf", "dp_ebm_newton", "batch_ih_ebm_25"), (0.1, 0.5, 1.0), TRUSTED_SERVER),
    "greedy": (("feverless", "dp_gbm"), (0.5, 1.0, 4.0), TRUSTED_SERVER),
}
DPBOOST, BUCKETS = (1.0, 4.0, 10.0, 40.0), (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Row:
    """One training. ``noise``: what the plan knows of it (``expected_loss.py``); ``lost``: share of the way."""

    kind: str
    method: str
    source: str
    seed: int
    epsilon: float
    rows: int
    features: int
    positives: float
    noise: float
    auc: float
    without: float

    @property
    def lost(self) -> float:
        return (self.without - self.auc) / (self.without - 0.5)


def measure(kinds: list[str]) -> Iterator[Row]:
    """Train all."""
    for source in (*DEVELOPMENT_SETS, *HELD_OUT):
        features, label = load(source) if source in DEVELOPMENT_SETS else HELD_OUT[source]()
        for seed in SEEDS:
            data = split(np.asarray(features, dtype=np.float32), np.asarray(label, dtype=np.float32), seed)
            without = central(data)
            facts = (data.train.label.size, data.n_features, float(data.train.label.mean()))
            for kind, method, epsilon, noise, auc in _trainings(data, seed, kinds):
                yield Row(kind, method, source, seed, epsilon, *facts, noise, auc, without)


def _trainings(data: Split, seed: int, kinds: list[str]) -> Iterator[tuple[str, str, float, float, float]]:
    for kind in kinds:
        if kind == "dpboost":
            for epsilon in DPBOOST:
                yield kind, kind, epsilon, 1 / epsilon, dpboost(data, epsilon)
        elif kind == "buckets":
            for epsilon in BUCKETS:
                yield kind, kind, epsilon, 1 / epsilon, buckets(data, epsilon)
        else:
            presets, epsilons, trust = PLANS[kind]
            for preset in presets:
                for epsilon in epsilons:
                    method = PRESETS[preset](data.n_features)
                    plan = plan_with(method, data.bounds, mu_of(epsilon, data.delta), trust)
                    noise = plan.leaf_noise[0] / math.sqrt(method.n_trees)
                    yield kind, preset, epsilon, noise, in_twin(method, data, epsilon, trust, seed).auc


def central(data: Split) -> float:
    """Return XGBoost's AUC."""
    booster = xgb.train(
        {"objective": "binary:logistic", "max_depth": 4, "nthread": 1},
        xgb.DMatrix(data.train.columns.T, data.train.label),
        50,
    )
    return float(roc_auc_score(data.test.label, booster.predict(xgb.DMatrix(data.test.columns.T))))


def dpboost(data: Split, epsilon: float) -> float:
    """Return DPBoost's AUC with its own parameters."""
    cuts = by_rule(uniform_candidates, data.bounds, 32)
    parts = np.array_split(np.arange(data.train.label.size), 3)
    sites = [
        SiteData(f"site-{i}", data.train.columns[:, part], data.train.label[part].astype(float), [f"{r}" for r in part])
        for i, part in enumerate(parts)
    ]
    model = train(
        sites, cuts, LogisticLoss(), DpBoostPlan(epsilon), OS_RANDOMNESS.bytes(32), lambda query, make: make().value
    )
    return float(roc_auc_score(data.test.label, model.predict(data.test.columns)))


def buckets(data: Split, epsilon: float) -> float:
    """Return the AUC on 16 public buckets of every column, randomised at epsilon for a value; 20 trees of depth 4."""
    edges = public_edges([public_description(column) for column in data.train.columns], 16)
    ids = release_buckets(data.train.columns, edges, epsilon).value.T.astype(np.uint8)
    block = BucketBlock(tuple(n + 1 for n in edges.counts), ids)
    parameters = check_bucket_parameters({"objective": "binary:logistic", "max_depth": 4, "nthread": 1}, 16)
    own = np.empty((0, data.train.label.size), dtype=np.float32)
    model = xgb.Booster(model_file=bytearray(train_on_buckets(own, data.train.label, [block], parameters, 20, cores=1)))
    return float(roc_auc_score(data.test.label, model.predict(xgb.DMatrix(edges.bin_rows(data.test.columns).T))))


# -- the fit ----------------------------------------------------------------------------------------------------------

FITTED = {
    "OURS": ("default", "default, distributed", "older"),
    "PUBLISHED": ("published",),
    "greedy": ("greedy",),
    "DPBoost": ("dpboost",),
    "BUCKETS": ("buckets",),
}
"""Name of the constants -> kinds. Greedy trees and DPBoost are not estimated, as their errors say."""


def noise_over_signal(table: pd.DataFrame, name: str) -> Array:
    """Return x of each training; DPBoost's is 1 / epsilon."""
    if name == "BUCKETS":
        wrong = [wrong_bucket_rate(16, epsilon) for epsilon in table.epsilon]
        return np.array([buckets_over_signal((1 - w * 16 / 15) ** 2) for w in wrong])
    if name == "DPBoost":
        return 1 / table.epsilon.to_numpy()
    spread = np.sqrt(table.positives * (1 - table.positives))
    return (table.noise * 2**4 / (table.rows * spread)).to_numpy()


def fit(table: pd.DataFrame, name: str) -> dict[str, float]:
    """Return constants and errors of one kind; ``table`` holds means over splits."""
    x, y, is_development = noise_over_signal(table, name), table.lost.to_numpy(), table.is_development.to_numpy()

    def predicted(a: float, power: float) -> Array:
        return np.array([lost(a, power, value) for value in x])

    def distance(parameters: Array) -> float:
        return float(np.abs(predicted(math.exp(parameters[0]), parameters[1]) - y)[is_development].sum())

    start = [math.log(0.2) - 0.5 * math.log(np.median(x)), 0.5]
    of_log_a, power = minimize(distance, start, method="Nelder-Mead", options={"maxiter": 4000}).x
    typical = math.exp(of_log_a)
    share = np.clip(y, 1e-4, 0.999)
    seldom = math.exp(np.quantile((np.log(share / (1 - share)) - power * np.log(x))[is_development], 0.9))
    held_out = ~is_development
    return {
        "typical": typical,
        "seldom": seldom,
        "power": float(power),
        "least_x": float(x.min()),
        "largest_x": float(x.max()),
        "error": float(np.abs(predicted(typical, power) - y)[held_out].mean()),
        "error_of_a_constant": float(np.abs(np.median(y[is_development]) - y)[held_out].mean()),
        "within": float((y <= predicted(seldom, power))[held_out].mean()),
    }


def fit_all(paths: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Return the fits of all kinds that the tables hold."""
    table = pd.concat([pd.read_csv(path) for path in paths])
    table["lost"] = (table.without - table.auc) / (table.without - 0.5)
    table = table.groupby(["kind", "method", "source", "epsilon"]).mean(numeric_only=True).reset_index()
    table["is_development"] = table.source.isin(DEVELOPMENT_SETS)
    of_kinds = {name: table[table.kind.isin(kinds)] for name, kinds in FITTED.items()}
    return {name: fit(of_kind, name) for name, of_kind in of_kinds.items() if len(of_kind)}


def main() -> None:
    """Train, or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*PLANS, "dpboost", "buckets"]
    parser.add_argument("--kinds", nargs="+", default=every, choices=every)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fit", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([f.name for f in fields(Row)])
            for row in measure(options.kinds):
                writer.writerow(astuple(row))
                file.flush()
                print(f"{row.source} {row.method} {row.epsilon:g}: {row.lost:.3f}", file=sys.stderr, flush=True)
    fits = fit_all(options.fit) if options.fit else {}
    for name, figures in fits.items():
        print(name, ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    print(json.dumps(fits))


if __name__ == "__main__":
    main()
