"""Data sets and splits of the private-tree benchmarks, prepared as in Maddock et al."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.private_trees.simulation import Table

SHARED = Path(__file__).parents[3] / "shared" / "data"
PAPER_SEEDS = (1, 4, 100, 333, 1002)
SEEDS = (*PAPER_SEEDS, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12)
_NOT_FEATURES = ("label", "split", "source")


@dataclass(frozen=True)
class Split:
    """Seventy per cent to train on, thirty to score; bounds from the training rows, declared public."""

    train: Table
    test: Table
    bounds: tuple[FeatureBounds, ...]

    @property
    def delta(self) -> float:
        """1/n, declared public, as in the paper."""
        return 1.0 / self.train.label.size

    @property
    def n_features(self) -> int:
        return self.train.columns.shape[0]


def load(name_or_path: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Read a parquet file with a column ``label``.

    Rows with nulls are dropped, of a file with a ``split`` column the train part is used, and where any column is
    text every column is replaced by the rank of its value: all as in the paper.

    Shapes: features: float32[n_rows, n_features]; label: float32[n_rows].
    """
    path = Path(name_or_path)
    frame = pd.read_parquet(path if path.suffix else SHARED / f"{name_or_path}.parquet")
    if "split" in frame:
        frame = frame[frame.split == "train"]
    frame = frame.dropna()
    features = frame.drop(columns=[c for c in _NOT_FEATURES if c in frame])
    if any(not pd.api.types.is_numeric_dtype(t) for t in features.dtypes):
        features = features.apply(lambda column: pd.Categorical(column).codes)
    return features.to_numpy(np.float32), frame.label.to_numpy(np.float32)


def split(features: NDArray[np.float32], label: NDArray[np.float32], seed: int) -> Split:
    """Split stratified by label."""
    a, b, c, d = train_test_split(features, label, test_size=0.3, random_state=seed, stratify=label)
    train = Table(np.ascontiguousarray(a.T), c)
    bounds = tuple(FeatureBounds(float(x.min()), float(x.max())) for x in train.columns)
    return Split(train, Table(np.ascontiguousarray(b.T), d), bounds)
