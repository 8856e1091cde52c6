"""Accelerated failure time models of three sites beside centralized XGBoost, lifelines and Cox regression.

    pip install lifelines scikit-survival && python -m tests.bench.bench_aft

Concordance over the folds and tables of ``bench_cox``. The trees must be those of XGBoost on the same cuts: anything
else ends the program.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.xgb.parameters import check_parameters
from tests.bench.bench_cox import FOLDS, LABEL, ROUNDS, SITES, concordance, linear, print_table, tables
from tests.support.federation import Federation, central_model, label_facts, leaf_difference, succeed

TREES = {"objective": "survival:aft", "max_depth": 3, "learning_rate": 0.1, "max_bin": 64, "base_score": 1000.0}
"""The base score is a round number of days, which any site could have named beforehand."""


def federated(frame: pd.DataFrame, params: dict[str, Any]) -> tuple[xgb.Booster, float]:
    """Return the model of three sites under the floors of policies, and how far its leaves are from XGBoost's."""
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), SITES)
        parts = [np.arange(len(frame))[i::SITES] for i in range(SITES)]
        federation.give_data("train", frame, parts)
        for site in federation.sites:
            federation.set_policy(site, min_effective_rows=100, min_rows_per_node=4)
        job = HorizontalJob("train", LABEL, {**params, "eval_metric": []}, ROUNDS)
        succeed(federation.run(job))
        parameters = check_parameters({**params, "eval_metric": []}, ["any"], label=LABEL)
        floor = 4 * float(parameters.objective.usual_hessian or 0)  # what the sites' floor of 4 rows makes of it
        pooled = frame.iloc[np.concatenate(parts)]
        reference = central_model(pooled, LABEL, {**params, "min_child_weight": floor}, federation.cuts(), ROUNDS)
        model = federation.model()
        return xgb.Booster(model_file=bytearray(model)), leaf_difference(model, reference)


def by_lifelines(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """Return medians of a Weibull model with a small ridge."""
    from lifelines import WeibullAFTFitter

    names = [name for name in train if name not in LABEL.values()]
    mean, sd = train[names].mean(), train[names].std().replace(0, 1)
    scaled = ((train[names] - mean) / sd).assign(time=train.time.clip(lower=0.5), event=train.event)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = WeibullAFTFitter(penalizer=0.01).fit(scaled, "time", "event")
        return np.asarray(fitted.predict_median((test[names] - mean) / sd), dtype=float)


def measured(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Return the concordance of each way in each fold."""
    found: dict[str, list[float]] = {}
    for fold in range(FOLDS):
        is_test = np.arange(len(frame)) % FOLDS == fold
        train, test = frame[~is_test], frame[is_test]
        rows = test.drop(columns=["time", "event"])
        risks: dict[str, np.ndarray] = {}
        for noise, scale in (("normal", 1.0), ("logistic", 0.7), ("extreme", 1.0)):
            params = {**TREES, "aft_loss_distribution": noise, "aft_loss_distribution_scale": scale}
            started = time.process_time()
            model, difference = federated(train, params)
            found.setdefault("processor seconds of both trainings", []).append(time.process_time() - started)
            if difference:
                raise SystemExit(f"{noise}: the sites' trees are not XGBoost's: {difference}")
            risks[f"three sites, {noise}"] = -model.predict(xgb.DMatrix(rows))
            matrix = xgb.DMatrix(train.drop(columns=["time", "event"]), **label_facts(train, LABEL))
            own = xgb.train({**params, "nthread": 1}, matrix, ROUNDS)
            risks[f"XGBoost, {noise}, its own cuts and `min_child_weight` 1"] = -own.predict(xgb.DMatrix(rows))
        risks["Weibull model (lifelines)"] = -by_lifelines(train, test)
        risks["linear Cox regression"] = linear(train, test)
        for name, risk in risks.items():
            found.setdefault(name, []).append(concordance(test, risk))
    return found


def main() -> int:
    """Print a table of means and ranges."""
    try:
        import lifelines  # noqa: F401 - of the benchmark alone
        import sksurv  # noqa: F401
    except ImportError:
        sys.stdout.write("lifelines or scikit-survival is not installed: pip install lifelines scikit-survival\n")
        return 1
    print_table({name: measured(frame) for name, frame in tables()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
