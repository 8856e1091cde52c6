"""Vertical jobs in one process: data for the parties, and the merged model that they hold together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from nvflare_plugins.attempt.job_context import JobResult
from nvflare_plugins.flare.executor import error_text
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, ActivePart, PassivePart, merge, read_part
from nvflare_plugins.kinds.vertical.site import run_vertical_site
from nvflare_plugins.wire.aggregation import Aggregator
from tests.support.federation import DirectTransport, Listener, Parties, run_in_threads

EXCHANGE_S = 60.0
PARAMS = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 16, "eval_metric": ["logloss", "auc"]}
POLICY = {
    "allowed_profiles": ["plain", "paillier"],
    "consents": {"plain_profile": True, "exact_bins": True, "sealed_splits": True, "recompute_with_changes": True},
}


def table(n_rows: int = 300, n_columns: int = 6, seed: int = 0) -> pd.DataFrame:
    """Return columns c0, c1, ... and the label y."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_rows, n_columns)).astype(np.float32)
    features[rng.random(features.shape) < 0.05] = np.nan
    score = np.nan_to_num(features[:, 0] + features[:, 2] - features[:, n_columns - 1])
    label = (score + rng.normal(size=n_rows) * 0.5 > 0).astype(np.float32)
    return pd.DataFrame(features, columns=[f"c{i}" for i in range(n_columns)]).assign(y=label)


def give_columns(parties: Parties, name: str, frame: pd.DataFrame, widths: Sequence[int], **facts: object) -> None:
    """Split the columns over the sites; the first has the label. A column "id" goes to all of them."""
    columns = [c for c in frame.columns if c not in ("y", "id")]
    start = 0
    for number, (site, width) in enumerate(zip(parties.sites, widths, strict=True)):
        own = columns[start : start + width] + (["y"] if number == 0 else [])
        ids = ["id"] if "id" in frame.columns else []
        parties.give(site, name, frame[[*ids, *own]], **({"id": "id"} if ids else {}), **facts)
        start += width


def federation(folder: Path, n_sites: int = 3, widths: Sequence[int] = (2, 3, 1), n_rows: int = 300) -> Parties:
    """Return parties with a training set "data" and an evaluation set "held"."""
    parties = Parties(folder, n_sites, dict(POLICY))
    frame = table(n_rows + 90, sum(widths))
    give_columns(parties, "data", frame.iloc[:n_rows], widths)
    give_columns(parties, "held", frame.iloc[n_rows:], widths)
    return parties


def job(**changes: object) -> VerticalJob:
    """Return a small job without encryption."""
    fields = {
        "active": "site-1",
        "data_set": "data",
        "label": "y",
        "params": PARAMS,
        "num_rounds": 4,
        "profile": "plain",
        "preset": "exact",
        **changes,
    }
    return VerticalJob.from_dict(fields)


def run(
    parties: Parties, of: VerticalJob, job_id: str = "job", *, deadline_s: float = 0.0, number: int = 1, **hooks: Any
) -> dict[str, JobResult | Exception]:
    """Run the job at all sites; a site that failed has its error in place of an outcome.

    Args: hooks: of ``run_in_threads``.
    """
    attempt = os.urandom(16)
    aggregator = Aggregator(parties.sites, attempt, deadline_s, parties.transfers.append)

    def take_part(site: str, transport: DirectTransport) -> JobResult:
        context = parties.context(site, parties.sites, job_id, attempt, number)
        return run_vertical_site(of, context, transport, EXCHANGE_S, Listener(parties.said.setdefault(site, [])))

    return run_in_threads(aggregator, parties.sites, take_part, reason=error_text, **hooks)


def merged(parties: Parties, job_id: str = "job") -> bytes:
    """Return the ordinary model that the parts of all sites make together."""
    active = read_part(parties.run_folder("site-1", job_id) / ACTIVE_FILE, "site-1", ActivePart).part
    tables, column = [], len(active.columns)
    for party in active.parties:
        path = parties.run_folder(party.site, job_id) / PASSIVE_FILE
        tables.append((column, read_part(path, party.site, PassivePart).part.table))
        column += len(party.aliases)
    return merge(active.booster, len(active.columns), tables)


def central(frame: pd.DataFrame, num_rounds: int, params: dict = PARAMS, **options: object) -> xgb.Booster:
    """Train stock XGBoost on the joined table."""

    def matrix(rows: pd.DataFrame) -> xgb.DMatrix:
        return xgb.DMatrix(rows.drop(columns=[c for c in ("y", "id") if c in rows]).to_numpy(), label=rows.y)

    evals = [(matrix(options.pop("held")), "eval")] if "held" in options else []
    settings = {"tree_method": "hist", "nthread": 1, "seed": 0, **params}
    return xgb.train(settings, matrix(frame), num_rounds, evals=evals, verbose_eval=False, **options)
