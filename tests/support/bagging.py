"""Sites that bag their own trees: invented rows, and a policy that consents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from nvflare_plugins.kinds.bagging.job import BaggingJob
from tests.support.federation import Parties

POLICY = {"consents": {"share_own_trees": True}}
PARAMS = {"objective": "binary:logistic", "max_depth": 3, "eta": 0.3, "max_bin": 32, "nthread": 1}


def rows(seed: int, n_rows: int) -> pd.DataFrame:
    """Return rows with gaps; sites have other distributions, so that their bins and trees differ."""
    rng = np.random.default_rng(seed)
    values = rng.normal(loc=seed, scale=1 + seed, size=(n_rows, 3)).astype(np.float32)
    label = (values[:, 0] - seed + rng.normal(size=n_rows) > 0).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    return pd.DataFrame({"a": values[:, 0], "b": values[:, 1], "c": values[:, 2], "y": label})


def sites(folder: Path, n_sites: int = 3, **policy: object) -> Parties:
    """Give each site rows of its own."""
    parties = Parties(folder, n_sites, {**POLICY, **policy})
    for number, site in enumerate(parties.sites):
        parties.give(site, "train", rows(number, 120 + 30 * number))
    return parties


def job(**changes: object) -> BaggingJob:
    """Return a short job."""
    document = {"data_set": "train", "label": "y", "params": PARAMS, "num_rounds": 4, **changes}
    return BaggingJob.from_dict(document)


def model(parties: Parties) -> bytes:
    """Return the model, which must be the same bytes at every site."""
    (found,) = {(parties.run_folder(site) / "model.json").read_bytes() for site in parties.sites}
    return found
