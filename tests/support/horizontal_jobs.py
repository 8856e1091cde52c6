"""Small horizontal jobs in one process, and tables for them."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from nvflare_plugins.pooled.job import HorizontalJob
from tests.support.federation import Federation, SiteDied, succeed

LABEL_MEAN_TOLERANCE = 2e-7
LOGISTIC = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 32}
BOUNDS = {f"f{i}": [-3.0, 3.0] for i in range(4)}


def table(n_rows: int = 400, n_features: int = 4, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_rows, n_features)).astype(np.float32)
    signal = features[:, 0] + 0.5 * features[:, -1] ** 2 + rng.normal(size=n_rows)
    features[rng.random(features.shape) < 0.05] = np.nan
    return pd.DataFrame(features, columns=[f"f{i}" for i in range(n_features)]).assign(
        y=(signal > 0.4).astype(np.float32)
    )


def job(params: dict | None = None, num_rounds: int = 4, **fields) -> HorizontalJob:
    return HorizontalJob("train", "y", {**LOGISTIC, **(params or {})}, num_rounds, **fields)


def spaced(params: dict | None = None, num_rounds: int = 4, **fields) -> HorizontalJob:
    """Return a job without a search for cuts, which would be a third of a small one."""
    return job(params, num_rounds, **{"cuts": "uniform", "cut_bounds": BOUNDS, **fields})


def federate(folder, frame, training: HorizontalJob, held_out: pd.DataFrame | None = None, **options) -> Federation:
    parts = options.pop("parts", None)
    federation = Federation(folder, **options)
    federation.give_data("train", frame, parts)
    federation.set_registry_keys()
    if held_out is not None:
        federation.give_data("held_out", held_out)
    succeed(federation.run(training))
    return federation


def metrics_of(federation: Federation, name: str) -> list[float]:
    record = json.loads((federation.workspace("site-2") / "runs" / "job" / "run.json").read_text())
    return [row["metrics"][name] for row in record["rounds"]]


def dies_after(site: str, n_rounds: int):
    def on_progress(name: str):
        def progress(record, total):
            if name == site and record.round + 1 == n_rounds:
                raise SiteDied

        return progress

    return on_progress


def lose(federation: Federation, training: HorizontalJob, number: int = 1, **how) -> None:
    """Run an attempt of a job in which a site's process ends."""
    outcomes = federation.run(training, "job", number=number, **how)
    if not any(isinstance(one, SiteDied) for one in outcomes.values()):
        raise AssertionError(outcomes)
