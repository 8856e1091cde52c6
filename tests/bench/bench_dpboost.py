"""DPBoost beside its authors' code: abalone (RMSE) and a9a (error, AUC), epsilon 1 to 10, 5-fold cross-validation.

Setting of the paper: 50 trees of depth 6 in one ensemble, eta 0.1, lambda 0.1; with the slides' baselines PARA (equal
shares of rows) and SEQ (every tree on all rows, with 1/50 of epsilon), and, for the regression, with a start that is
paid for with 5 % of epsilon (``start_share``). Three sites in one process through the components that the job runs. NP
is XGBoost with as many trees, without privacy.

The authors' code (figures of a run of it) is not private, although it counts itself as such: its candidates are
quantiles of the data without empty bins, it grows the leaf with the best exact gain first, starts regressions from the
exact mean of the labels, and draws subsets whose sizes depend on the number of rows. Ours pays for all of that or does
without: public candidates (32 equal widths), complete trees, start at 0 or paid for, rows assigned one by one by a
keyed hash. Bounds of features and label are those of the data and are taken for public, as in the other benchmarks.

The last line of the output is one JSON object.

Run: python -m tests.bench.bench_dpboost [--repeats 1] [--seq-folds 1] [--data abalone a9a]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import xgboost as xgb
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from dp_components.dpboost.ensemble_of_ensembles import DpBoostPlan, SiteData, train
from dp_components.dpboost.single_tree import LogisticLoss, Loss, SquaredLoss
from dp_components.events import Release
from dp_components.split_candidates.candidates import Candidates, FeatureBounds, by_rule, uniform_candidates
from he_processors.randomness import OS_RANDOMNESS
from tests.bench.dp_data import SHARED
from tests.support.dpboost_baselines import para, seq

EPSILONS = (1, 2, 4, 6, 8, 10)
N_FOLDS, N_SITES, N_CANDIDATES = 5, 3, 32
PLANS: dict[str, Callable[[float], DpBoostPlan]] = {
    "dpboost": DpBoostPlan,
    "with_start": lambda epsilon: DpBoostPlan(epsilon, start_share=0.05),
    "para": para,
    "seq": seq,
}
AUTHORS = {
    "abalone": (9.68, 4.96, 3.28, 2.99, 2.74, 2.72),
    "a9a": (0.257, 0.208, 0.183, 0.176, 0.174, 0.174),
}
AUTHORS_AUC = {"a9a": (0.673, 0.763, 0.845, 0.854, 0.867, 0.870)}


@dataclass(frozen=True)
class Task:
    """One data set. Shapes: columns: float32[n_features, n_rows]; label: float64[n_rows]."""

    name: str
    columns: NDArray[np.float32]
    label: NDArray[np.float64]
    loss: Loss
    objective: str

    def candidates(self) -> Candidates:
        """Equal widths between public bounds; a feature of two values has one candidate."""

        def rule(bounds: FeatureBounds, n: int) -> NDArray[np.float64]:
            return np.zeros(1) if is_binary[bounds] else uniform_candidates(bounds, n)

        bounds = [FeatureBounds(float(x.min()), float(x.max())) for x in self.columns]
        is_binary = {b: (b.low, b.high) == (0, 1) and self.name == "a9a" for b in bounds}
        return by_rule(rule, bounds, N_CANDIDATES)

    def score(self, predicted: NDArray[np.float64], rows: NDArray[np.intp]) -> tuple[float, float]:
        """RMSE of a regression (and nothing else); share of wrong classes, and AUC, of a classification."""
        if isinstance(self.loss, SquaredLoss):
            return float(np.sqrt(np.mean((predicted - self.label[rows]) ** 2))), float("nan")
        wrong = float(np.mean((predicted > 0.5) != self.label[rows]))
        return wrong, float(roc_auc_score(self.label[rows], predicted))


def main() -> None:
    """Print one table per data set, and the summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="repeats of the cross-validation")
    parser.add_argument("--seq-folds", type=int, default=1, help="folds for SEQ, whose trees use all rows")
    parser.add_argument("--data", nargs="+", choices=tuple(AUTHORS), default=list(AUTHORS))
    options = parser.parse_args()
    started = time.process_time()
    summary = {name: measure(load(name), options.repeats, options.seq_folds) for name in options.data}
    settings = {"epsilon": EPSILONS, "cpu_s": round(time.process_time() - started, 1)}
    print(json.dumps({**summary, **settings}))


def load(name: str) -> Task:
    """Read a data set; categories become the rank of their value, as in the other benchmarks."""
    frame = pd.read_parquet(SHARED / f"{name}.parquet")
    label = frame.label.to_numpy(np.float64)
    features = frame.drop(columns=[c for c in ("label", "split") if c in frame])
    for column in features:
        if not pd.api.types.is_numeric_dtype(features[column]):
            features[column] = pd.Categorical(features[column]).codes
    columns = np.ascontiguousarray(features.to_numpy(np.float32).T)
    if name == "abalone":
        return Task(name, columns, label, SquaredLoss(FeatureBounds(1, 29)), "reg:squarederror")
    return Task(name, columns, label, LogisticLoss(), "binary:logistic")


def measure(task: Task, n_repeats: int, n_seq_folds: int) -> dict[str, object]:
    """Return mean and standard deviation per method and epsilon."""
    cuts, is_regression = task.candidates(), isinstance(task.loss, SquaredLoss)
    plans = {name: plan for name, plan in PLANS.items() if name != "with_start" or is_regression}
    print(f"\n{task.name}: {'RMSE' if is_regression else 'error'}, mean (sd) over the folds")
    folds = [fold for repeat in range(n_repeats) for fold in split(task.label.size, repeat)]
    plain = np.mean([task.score(non_private(task, rows, test), test) for rows, test in folds], axis=0)
    print(f"NP (XGBoost without privacy) {plain[0]:.3f}")
    print("epsilon  " + "".join(f"{name:<16}" for name in plans) + "authors' code (not private)")
    scores: dict[str, list[NDArray[np.float64]]] = {name: [] for name in plans}
    for epsilon, authors in zip(EPSILONS, AUTHORS[task.name], strict=True):
        for name, plan_of in plans.items():
            used = folds[:n_seq_folds] if name == "seq" else folds
            scores[name].append(np.array([fit(task, cuts, plan_of(float(epsilon)), *fold) for fold in used]))
        cells = (f"{np.mean(found[-1][:, 0]):.3f} ({np.std(found[-1][:, 0]):.3f})" for found in scores.values())
        print(f"{epsilon:<9}" + "".join(f"{cell:<16}" for cell in cells) + f"{authors:.3f}", flush=True)
    figures: dict[str, object] = {"np": round(float(plain[0]), 4), "authors_code": AUTHORS[task.name]}
    for name, found in scores.items():
        figures[name] = [round(float(np.mean(of_epsilon[:, 0])), 4) for of_epsilon in found]
        figures[f"{name}_sd"] = [round(float(np.std(of_epsilon[:, 0])), 4) for of_epsilon in found]
        if not is_regression:
            figures[f"{name}_auc"] = [round(float(np.mean(of_epsilon[:, 1])), 4) for of_epsilon in found]
    if not is_regression:
        print(f"AUC: dpboost {figures['dpboost_auc']}, authors' code {AUTHORS_AUC[task.name]}, NP {plain[1]:.3f}")
        figures |= {"authors_code_auc": AUTHORS_AUC[task.name], "np_auc": round(float(plain[1]), 4)}
    return figures


def split(n_rows: int, repeat: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Return (training rows, test rows) of each fold."""
    parts = np.array_split(np.random.default_rng(repeat).permutation(n_rows), N_FOLDS)
    return [(np.concatenate(parts[:i] + parts[i + 1 :]), parts[i]) for i in range(N_FOLDS)]


def fit(
    task: Task, cuts: Candidates, plan: DpBoostPlan, rows: NDArray[np.intp], test: NDArray[np.intp]
) -> tuple[float, float]:
    """Train over three sites and score the fold's test rows."""
    sites = [
        SiteData(f"site-{i}", task.columns[:, part], task.label[part], [f"row {row}" for row in part])
        for i, part in enumerate(np.array_split(rows, N_SITES))
    ]
    model = train(sites, cuts, task.loss, plan, OS_RANDOMNESS.bytes(32), _not_charged)
    return task.score(model.predict(task.columns[:, test]), test)


def non_private(task: Task, rows: NDArray[np.intp], test: NDArray[np.intp]) -> NDArray[np.float64]:
    """Predict with plain XGBoost of the same size."""
    matrix = xgb.DMatrix(task.columns[:, rows].T, label=task.label[rows])
    params = {"objective": task.objective, "max_depth": 6, "eta": 0.1, "lambda": 0.1, "nthread": 1}
    return xgb.train(params, matrix, 50).predict(xgb.DMatrix(task.columns[:, test].T)).astype(np.float64)


def _not_charged(query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
    return make().value


if __name__ == "__main__":
    main()
