"""Pure epsilon: the preset ``pure`` beside DPBoost, on the same splits, with the same bounds.

AUC of the development tables (prepared as in ``bench_dp``), RMSE on abalone (bounds 1 to 29, declared public). All
train on the pooled rows and protect the adding or removing of one row:

* ``trusted``: ``pure`` with a trusted server;
* ``distributed``: ``pure`` with the shares of three sites, one of which colludes;
* ``dpboost``: DPBoost with its own parameters, 50 trees of depth 6; on abalone its start is paid for. Trusted server;
* ``with_delta``: the default, whose promise is weaker: delta = 1/n. Trusted server.

A result is the mean over ``--repeats`` draws of noise and forest; splits are those of ``bench_dp``, of which none was
used to choose ``pure``. Statistics as there: ``distributed`` against ``dpboost``. The last line is one JSON object.

Run: python -m tests.bench.bench_pure [--sets adult abalone] [--splits 10] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from dp_components.dpboost.ensemble_of_ensembles import DpBoostPlan, SiteData
from dp_components.dpboost.ensemble_of_ensembles import train as train_dpboost
from dp_components.dpboost.single_tree import LogisticLoss, SquaredLoss
from dp_components.events import Release
from dp_components.leaf_weights import TWO_CLASSES, Number, Target
from dp_components.mechanisms import NoiseShares, add_noise
from dp_components.sensitivity import Sensitivity
from dp_components.split_candidates.candidates import FeatureBounds, by_rule, uniform_candidates
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.kinds.private_trees.methods import DEFAULT_2026_12, PURE_2026_11, Method
from nvflare_plugins.kinds.private_trees.noisy_sums import Mechanism
from nvflare_plugins.kinds.private_trees.plan import PrivateTreesPlan, ReleasePlan, Trust
from tests.bench.bench_dpboost import load as load_numbers
from tests.bench.dp_data import SEEDS, TEST_SHARE, Split, load, split
from tests.bench.dp_runs import N_SITES
from tests.bench.dp_statistics import Series, mean_and_sd, verdict
from tests.support.private_simulation import Simulation, Table
from tests.support.private_trees import mu_of

EPSILONS = (1.0, 4.0, 10.0)
SETS = ("credit2", "adult", "bank", "nomao", "higgs_20k", "abalone")
RINGS, N_CANDIDATES = FeatureBounds(1, 29), 32
SHARES = Trust(NoiseShares(N_SITES, 1))


@dataclass(frozen=True)
class Task:
    """One training of one arm. ``seed`` draws the split, ``repeat`` noise and forest."""

    arm: str
    source: str
    seed: int
    epsilon: float
    repeat: int


def is_number(source: str) -> bool:
    return source == "abalone"


@lru_cache(maxsize=8)
def data_of(source: str, seed: int) -> Split:
    """Return a split; of abalone with its rings as they are."""
    if not is_number(source):
        return split(*_load(source), seed)
    rings = load_numbers(source)
    labels = rings.label.astype(np.float32)
    a, b, c, d = train_test_split(rings.columns.T, labels, test_size=TEST_SHARE, random_state=seed)
    train = Table(np.ascontiguousarray(a.T), c)
    bounds = tuple(FeatureBounds(float(x.min()), float(x.max())) for x in train.columns)
    return Split(train, Table(np.ascontiguousarray(b.T), d), bounds)


_load = lru_cache(maxsize=1)(load)


def score(source: str, data: Split, raw: NDArray[np.float64]) -> float:
    """Return the AUC, or minus the RMSE: more is better."""
    if is_number(source):
        return -float(np.sqrt(np.mean((raw - data.test.label) ** 2)))
    return float(roc_auc_score(data.test.label, raw))


def run(task: Task) -> float:
    """Train one model and score it on its test rows."""
    data = data_of(task.source, task.seed)
    return score(task.source, data, ARMS[task.arm](task, data))


def trees(method: Method, trust: Trust, mechanism: Mechanism = add_noise) -> Callable[[Task, Split], NDArray]:
    """Return how a method of private trees trains, and what it answers for the test rows."""

    def train(task: Task, data: Split) -> NDArray:
        target: Target = Number(RINGS) if is_number(task.source) else TWO_CLASSES
        total = task.epsilon if method.is_pure else mu_of(task.epsilon, data.delta)
        releases = ReleasePlan.of(method, data.bounds, total, trust.n_honest, target=target)
        plan = PrivateTreesPlan(method, data.bounds, releases, trust, 1000 * task.seed + task.repeat, (), target)
        return target.start + Simulation(plan, data.train, data.test, mechanism).run()

    return train


def shares(sums: NDArray[np.int64], sensitivity: Sensitivity, multiplier: float) -> Release:
    """Add the shares of all sites; the simulation gives the multiplier of their sum."""
    for _ in range(N_SITES):
        release = add_noise(sums, sensitivity, multiplier / SHARES.noise_factor, OS_RANDOMNESS, SHARES.n_honest)
        sums = release.value
    return release


def dpboost(task: Task, data: Split) -> NDArray:
    """Train DPBoost, and answer for the test rows."""
    loss = SquaredLoss(RINGS) if is_number(task.source) else LogisticLoss()
    plan = DpBoostPlan(task.epsilon, start_share=0.05 if is_number(task.source) else 0.0)
    rows = [f"row {i}" for i in range(data.train.label.size)]
    site = SiteData("site-1", data.train.columns, data.train.label.astype(np.float64), rows)
    cuts = by_rule(uniform_candidates, data.bounds, N_CANDIDATES)
    model = train_dpboost([site], cuts, loss, plan, OS_RANDOMNESS.bytes(32), lambda query, make: make().value)
    return model.predict(data.test.columns)


ARMS: dict[str, Callable[[Task, Split], NDArray]] = {
    "trusted": trees(PURE_2026_11, Trust()),
    "distributed": trees(PURE_2026_11, SHARES, shares),
    "dpboost": dpboost,
    "with_delta": trees(DEFAULT_2026_12, Trust()),
}


def measure(source: str, options: argparse.Namespace, pool: ProcessPoolExecutor) -> dict[str, object]:
    """Return all arms' means and deviations, by epsilon."""
    cells: dict[str, object] = {}
    seeds = SEEDS[: options.splits]
    for epsilon in EPSILONS:
        series = {}
        for arm in ARMS:
            tasks = [Task(arm, source, seed, epsilon, n) for seed in seeds for n in range(options.repeats)]
            found = np.array(list(pool.map(run, tasks, chunksize=options.repeats)))
            means = found.reshape(len(seeds), -1).mean(axis=1)
            series[arm] = Series(means, means)
        outcome, p = verdict(series["distributed"], series["dpboost"])
        shown = {arm: mean_and_sd(np.abs(of.auc)) for arm, of in series.items()}
        cells[f"{epsilon:g}"] = {**shown, "distributed_against_dpboost": outcome, "p": round(p, 5)}
        print(f"{source} {epsilon:g}: {cells[f'{epsilon:g}']}", flush=True)
    return cells


def main() -> None:
    """Print a line for each cell, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="draws of noise and forest per split")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        found = {source: measure(source, options, pool) for source in options.sets}
    print(json.dumps({"tables": found, "splits": options.splits, "repeats": options.repeats}))


if __name__ == "__main__":
    main()
