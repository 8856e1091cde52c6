"""Cox regression of three sites beside centralized XGBoost and linear Cox regression, on two sets of patients.

    pip install scikit-survival && python -m tests.bench.bench_cox

Concordance (Harrell's) over five folds: 1 orders every pair of times as they were, 0.5 none. Sites hold rows by turns
and keep the floors that policies have by default; so the linear model and XGBoost see the same folds of pooled rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from nvflare_plugins.pooled.job import HorizontalJob
from tests.support.federation import Federation, succeed

FOLDS, ROUNDS, SITES = 5, 60, 3
LABEL = {"time": "time", "event": "event"}
TREES = {"objective": "survival:cox", "max_depth": 3, "learning_rate": 0.1, "max_bin": 64}


def tables() -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield numeric tables with columns time and event, in an order that is drawn once."""
    from sksurv.datasets import load_gbsg2, load_whas500

    for name, load in (("gbsg2", load_gbsg2), ("whas500", load_whas500)):
        features, label = load()
        numbers = pd.get_dummies(features, drop_first=True).astype(np.float32)
        event, at = label.dtype.names
        frame = numbers.assign(time=label[at].astype(np.float32), event=label[event].astype(np.float32))
        yield name, frame.sample(frac=1, random_state=0).reset_index(drop=True)


def federated(frame: pd.DataFrame, params: dict[str, Any], **fields: Any) -> tuple[xgb.Booster, int]:
    """Return the model of three sites, and the number of bins of times."""
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), SITES)
        federation.give_data("train", frame, [np.arange(len(frame))[i::SITES] for i in range(SITES)])
        for site in federation.sites:
            federation.set_policy(site, min_effective_rows=100, min_rows_per_node=4)
        job = HorizontalJob("train", LABEL, {**params, "eval_metric": []}, ROUNDS, **fields)
        succeed(federation.run(job))
        notes = " ".join(federation.record("site-1").notes)
        return xgb.Booster(model_file=bytearray(federation.model())), int(notes.split("at most ")[1].split()[0])


def central(frame: pd.DataFrame, params: dict[str, Any]) -> xgb.Booster:
    """Return stock XGBoost's model of the pooled rows."""
    label = np.where(frame.event == 1, frame.time, -frame.time)
    return xgb.train({**params, "nthread": 1}, xgb.DMatrix(frame.drop(columns=["time", "event"]), label), ROUNDS)


def linear(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """Return risks by Cox regression with a small ridge."""
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.util import Surv

    names = [name for name in train if name not in ("time", "event")]
    mean, sd = train[names].mean(), train[names].std().replace(0, 1)
    label = Surv.from_arrays(train.event == 1, train.time)
    fitted = CoxPHSurvivalAnalysis(alpha=0.1).fit((train[names] - mean) / sd, label)
    found: np.ndarray = fitted.predict((test[names] - mean) / sd)
    return found


def concordance(test: pd.DataFrame, risk: np.ndarray) -> float:
    """Return Harrell's."""
    from sksurv.metrics import concordance_index_censored

    return float(concordance_index_censored(test.event == 1, test.time, risk)[0])


def measured(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Return the concordance of each way in each fold."""
    found: dict[str, list[float]] = {}
    for fold in range(FOLDS):
        is_test = np.arange(len(frame)) % FOLDS == fold
        train, test = frame[~is_test], frame[is_test]
        matrix = xgb.DMatrix(test.drop(columns=["time", "event"]))
        floor = {**TREES, "min_child_weight": 12.0}  # what the sites' floor of 4 rows makes of it
        started = time.process_time()
        model, n_bins = federated(train, TREES)
        seconds = time.process_time() - started
        coarse, n_coarse = federated(train, TREES, time_bins=8)
        risks = {
            "three sites": model.predict(matrix),
            "three sites, 8 bins of times": coarse.predict(matrix),
            "XGBoost, the same parameters": central(train, floor).predict(matrix),
            "XGBoost, min_child_weight 1": central(train, TREES).predict(matrix),
            "linear Cox regression": linear(train, test),
        }
        for name, risk in risks.items():
            found.setdefault(name, []).append(concordance(test, risk))
        found.setdefault("bins of times", []).append(n_bins)
        found.setdefault("processor seconds of a training", []).append(seconds)
        assert n_coarse <= 8
    return found


def print_table(of_sets: dict[str, dict[str, list[float]]]) -> None:
    """Print the mean and range over the folds of each way, with a column for each set of patients."""
    sys.stdout.write("| | " + " | ".join(of_sets) + " |\n|" + "---|" * (1 + len(of_sets)) + "\n")
    for row in next(iter(of_sets.values())):
        cells = [
            f"{np.mean(one[row]):.3f} ({np.min(one[row]):.3f} to {np.max(one[row]):.3f})" for one in of_sets.values()
        ]
        sys.stdout.write(f"| {row} | " + " | ".join(cells) + " |\n")


def main() -> int:
    """Print a table, and means and ranges as JSON."""
    try:
        import sksurv  # noqa: F401 - of the benchmark alone
    except ImportError:
        sys.stdout.write("scikit-survival is not installed: pip install scikit-survival\n")
        return 1
    of_sets = {name: measured(frame) for name, frame in tables()}
    print_table(of_sets)
    figures = {
        name: {row: [float(f(v)) for f in (np.mean, np.min, np.max)] for row, v in one.items()}
        for name, one in of_sets.items()
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
