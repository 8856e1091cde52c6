"""DPBoost's ensemble of ensembles: one ensemble with all of epsilon, or several that share it (its Fig. 3).

Each ensemble has 50 trees of depth 6 on disjoint rows and a part of epsilon; ensembles boost one another. 5-fold cross
validation as in ``bench_dpboost``: RMSE on abalone (regressions start from a mean that is paid for), error and AUC on
a9a. The last line is one JSON object.

Run: python -m tests.bench.dpboost_ensembles [--data abalone a9a] [--folds 5]
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from dp_components.dpboost.ensemble_of_ensembles import DpBoostPlan
from dp_components.dpboost.single_tree import SquaredLoss
from tests.bench.bench_dpboost import fit, load, split

EPSILONS = (1.0, 4.0, 10.0, 40.0, 100.0)
ENSEMBLES = (1, 2, 5, 20)
TREES = 50


def main() -> None:
    """Print a line for each cell, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["abalone", "a9a"])
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--ensembles", nargs="+", type=int, default=list(ENSEMBLES))
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    for name in options.data:
        task = load(name)
        start = 0.05 if isinstance(task.loss, SquaredLoss) else 0.0
        folds = split(task.label.size, 0)[: options.folds]
        for n in options.ensembles:
            for epsilon in EPSILONS:
                plan = DpBoostPlan(epsilon, TREES * n, TREES, start_share=start)
                scores = np.array([fit(task, task.candidates(), plan, *fold) for fold in folds])
                mean, sd = scores.mean(axis=0).round(4).tolist(), scores.std(axis=0, ddof=1).round(4).tolist()
                cell = {"error": mean[0], "sd": sd[0], **({} if np.isnan(mean[1]) else {"auc": mean[1]})}
                found.setdefault(name, {})[f"{n} ensembles, epsilon {epsilon:g}"] = cell
                print(f"{name}: {n} ensembles, epsilon {epsilon:g}: {cell}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
