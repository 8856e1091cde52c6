"""Jobs that draw rows, and centralized training on the rows that they drew."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.data.table import load_table
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.row_floors import RowDraws
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.xgb.cuts import reference_table
from tests.support.federation import Federation
from tests.support.horizontal_jobs import table

STRICT = {"min_effective_rows": 100, "min_rows_per_node": 4, "consents": {"exact_leaves": True}}


def names(cases: dict, *slow: str) -> list:
    """Return the cases' names; some run with the slow tests only."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in cases]


def weighted(n_rows: int = 400) -> pd.DataFrame:
    return table(n_rows).assign(w=np.random.default_rng(2).uniform(0.2, 1.0, n_rows).astype(np.float32))


def draws_of(federation: Federation, training: HorizontalJob, data: str = "train") -> Callable[[int], np.ndarray]:
    """Return which of all rows, in the order of the sites, a round took: what only all sites together know."""
    fraction, sites = training.params["subsample"], []
    for site in federation.sites:
        policy = SitePolicy.load(federation.workspace(site), site)
        rows = load_table(
            policy.data_set(data), label=training.label, weight=training.weight, features=training.features
        )
        secret = Registry.open(policy).secret("row sampling", repr(fraction), *federation.sites)
        sites.append(RowDraws(secret, rows, fraction))
    return lambda number: np.concatenate([site.of_round(number) for site in sites])


def train_centrally(frame: pd.DataFrame, training: HorizontalJob, federation: Federation, job_id: str = "job"):
    """Train stock XGBoost on the pooled rows, whose weights are those of the drawn rows in each round."""
    features = frame.drop(columns=["y", *filter(None, [training.weight])])
    params = {**training.params, "tree_method": "hist", "nthread": 1}
    fraction, of_round = params.pop("subsample"), draws_of(federation, training)
    reference = xgb.QuantileDMatrix(reference_table(federation.cuts(job_id), {}), max_bin=params["max_bin"])
    true = np.ones(len(frame), np.float32) if training.weight is None else frame[training.weight].to_numpy()
    rows = xgb.QuantileDMatrix(features.to_numpy(np.float32), label=frame.y, ref=reference, max_bin=params["max_bin"])
    if training.weight is not None:
        rows.set_weight(true)
    if "base_score" not in params:
        estimate = xgb.train({**params, "booster": "gbtree"}, rows, 1)
        score = json.loads(estimate.save_config())["learner"]["learner_model_param"]["base_score"]
        params["base_score"] = json.loads(score) if score.startswith("[") else float(score)
    booster = xgb.Booster(params, [rows])
    shares = []
    for number in range(training.num_rounds):
        drawn = of_round(number)
        shares.append(drawn.mean())
        rows.set_weight(true * drawn)
        booster.update(rows, number)
    assert abs(np.mean(shares) - fraction) < 0.1
    booster.feature_names = list(features.columns)
    return booster
