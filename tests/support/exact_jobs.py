"""Jobs without differential privacy over a small table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.processors import BUILT_IN
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from tests.support.federation import Federation

SITES = ("site-1", "site-2", "site-3")
FEW_ROWS = {"min_effective_rows": 1, "min_rows_per_node": 0}
BUDGET = {"epsilon": 1.0, "delta": 1e-6, "pure_epsilon": 1.0}


def table(n_rows: int = 90) -> pd.DataFrame:
    rng = np.random.default_rng(7)
    frame = pd.DataFrame({"a": rng.normal(size=n_rows), "b": rng.normal(size=n_rows), "w": 1.0})
    frame["c"] = np.array(["x", "y"])[rng.integers(0, 2, n_rows)]
    return frame.assign(y=(frame.a + frame.b > 0).astype(float), id=[f"p{i}" for i in range(n_rows)])


def job(**changes: object) -> HorizontalJob:
    fields = {
        "data_set": "train",
        "label": "y",
        "params": {"objective": "binary:logistic", "max_depth": 2},
        "num_rounds": 1,
        "profile": "masks",
        "features": ["a", "b"],
        **changes,
    }
    return HorizontalJob.from_dict(fields)


def with_value(column: str, value: object) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.assign(**{column: [*frame[column][:-1], value]})


def federation_of(folder: Path, change: Callable[[pd.DataFrame], pd.DataFrame], **policy: object) -> Federation:
    folder.mkdir(exist_ok=True)
    federation = Federation(folder, policy={"share_data_errors": False, "consents": {}, **FEW_ROWS, **policy})
    federation.give_data("train", table())
    path = federation.workspace("site-1") / "train.parquet"
    change(pd.read_parquet(path)).to_parquet(path, index=False)
    return federation


def texts(outcomes: dict) -> dict[str, str]:
    return {site: str(outcome) for site, outcome in outcomes.items()}


def place_of(folder: Path, site: str = "site-1", **changes: object) -> SiteContext:
    document: dict[str, Any] = {
        "allowed_profiles": [*BUILT_IN, "paillier", "dp_local"],
        "unsigned_sessions": True,
        "registry": "registry",
        "ledgers": "ledgers",
        **changes,
    }
    consents = {"plain_profile": True, "exact_bins": True, **document.pop("consents", {})}
    policy = SitePolicy.from_dict({**document, "consents": consents}, workspace=folder, site=site)
    return SiteContext(site, SITES, "job", bytes(16), folder / "runs", policy, Identity.unsigned(site))
