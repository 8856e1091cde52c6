"""Generated tables of the benchmark's shapes, and workspaces of sites that hold a share each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from cryptography.hazmat.primitives import serialization
from numpy.typing import NDArray

from nvflare_plugins.site.policy_values import POLICY_FILE
from nvflare_plugins.xgb.cuts import Cuts, SortedValues, search_quantiles
from tests.support.sessions import Authority, key_number

LABEL, TRAINING, EVALUATION = "label", "training", "evaluation"
_SEED = 20_240_817


@dataclass(frozen=True, slots=True)
class TableShape:
    """Size of a generated table."""

    n_rows: int
    n_features: int
    positive_rate: float


CREDIT_CARD = TableShape(227_845, 28, 0.0017)
EPSILON_20TH = TableShape(20_000, 2_000, 0.5)
FEDERBOOST = TableShape(8_192, 11, 0.5)


def generate(shape: TableShape, seed: int = _SEED) -> pd.DataFrame:
    """Return features of different scales and a label that some of them explain in part."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(shape.n_rows, shape.n_features))
    features[:, -1] = np.exp(features[:, -1] * 1.5 + 3)  # one skewed column, as an amount of money is
    signal = 2.0 * features[:, 0] + features[:, 1] * features[:, 2] + np.abs(features[:, 3])
    signal += rng.normal(size=shape.n_rows)
    label = signal >= np.quantile(signal, 1 - shape.positive_rate)
    names = [f"V{i + 1}" for i in range(shape.n_features)]
    return pd.DataFrame(features.astype(np.float32), columns=names).assign(**{LABEL: label.astype(np.float32)})


def arrays(frame: pd.DataFrame) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return features and label. Shapes: float32[n_rows, n_features], float32[n_rows]."""
    return frame.drop(columns=LABEL).to_numpy(np.float32), frame[LABEL].to_numpy(np.float32)


def agreed_cuts(frame: pd.DataFrame, max_bin: int, min_rows: int) -> Cuts:
    """Return the cuts that the sites will agree on: the same search over all rows at once."""
    return search_quantiles(SortedValues(arrays(frame)[0]), max_bin, min_rows, lambda counts: counts)


def write_shares(frame: pd.DataFrame, folder: Path, name: str, sites: Sequence[str]) -> None:
    """Split a table over the sites, as even as can be, into ``folder/<site>-<name>.parquet``."""
    folder.mkdir(parents=True, exist_ok=True)
    for site, rows in zip(sites, np.array_split(np.arange(len(frame)), len(sites)), strict=True):
        frame.iloc[rows].to_parquet(folder / f"{site}-{name}.parquet", index=False)


def write_policy(workspace: Path, data_sets: Mapping[str, Path], consents: Sequence[str] = ()) -> None:
    """Write a site's policy that allows every profile; sessions stay signed."""
    document = {
        "data_sets": {name: {"path": str(path)} for name, path in data_sets.items()},
        "allowed_profiles": ["plain", "masks", "bfv", "ckks"],
        "consents": dict.fromkeys(("plain_profile", *consents), True),
    }
    (workspace / POLICY_FILE).parent.mkdir(parents=True, exist_ok=True)
    (workspace / POLICY_FILE).write_text(json.dumps(document))


def write_startup_kits(folder: Path, sites: Sequence[str]) -> None:
    """Write the files of startup kits that signed sessions read, one folder per site."""
    authority = Authority()
    pem = serialization.Encoding.PEM
    for number, site in enumerate(sites):
        kit = folder / site
        kit.mkdir(parents=True)
        private = key_number(number).private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (kit / "client.key").write_bytes(private)
        (kit / "client.crt").write_bytes(authority.issue(site, number).public_bytes(pem))
        (kit / "rootCA.pem").write_bytes(authority.root.public_bytes(pem))
        (kit / "fed_client.json").write_text(json.dumps({"servers": [{"name": "bench", "identity": "server1"}]}))
