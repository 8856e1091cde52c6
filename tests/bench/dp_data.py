"""Data sets and splits of the private-tree benchmarks, prepared as in Maddock et al."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from dp_components.split_candidates.candidates import FeatureBounds
from tests.support.private_simulation import Table

SHARED = Path(__file__).parents[3] / "shared" / "data"
DEVELOPMENT_SETS = ("credit2", "adult", "bank", "nomao", "higgs_20k")
PAPER_SEEDS = (1, 4, 100, 333, 1002)
SEEDS = (*PAPER_SEEDS, *(seed for seed in range(2, 60) if seed != 4))
TEST_SHARE = 0.3
_NO_FEATURES_OF_OURS = ("split", "source")  # columns of the development sets that are no features
_MIN_ROWS_PER_CLASS = 10
_MAX_DISTINCT_SHOWN = 5

Arrays = tuple[NDArray[np.float32], NDArray[np.float32]]


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


def set_name(name_or_path: str) -> str:
    """Return how a data set is called in reports: a development set by its name, also where its path was given."""
    return Path(name_or_path).stem


def is_development_set(name_or_path: str) -> bool:
    """Whether it is one of the project's own sets, wherever its file lies."""
    return set_name(name_or_path) in DEVELOPMENT_SETS


def load(name_or_path: str, label: str = "label") -> Arrays:
    """Read a development set by its name, or a parquet or CSV file, for binary classification.

    Rows with nulls are dropped (``preparation`` says how many), and a column that is not of numbers is replaced by the
    ranks of its values. Of a development set with a ``split`` column the train part is used, and where any of its
    columns is not of numbers every column is replaced by ranks: as in the paper. The larger of the label's two values
    is the positive class.

    Shapes: features: float32[n_rows, n_features]; label: float32[n_rows] of 0 and 1.
    Raises: ValueError, with what to change, if the file cannot be used.
    """
    frame = _usable(name_or_path, label)
    complete = frame.dropna()
    if complete.empty and len(frame):
        gaps = frame.isna().sum().nlargest(_MAX_DISTINCT_SHOWN)
        shown = ", ".join(f"{name}: {count}" for name, count in gaps.items() if count)
        raise ValueError(f"every row of {name_or_path} has a gap; leave out the columns with the most ({shown})")
    features = complete.drop(columns=label)
    if features.shape[1] == 0:
        raise ValueError(f"{name_or_path} has no column beside the label")
    texts = _texts(features)
    for column in features.columns if texts and is_development_set(name_or_path) else texts:
        features[column] = pd.Categorical(features[column]).codes
    values = features.to_numpy(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{name_or_path} has values that are not finite in float32: bounds could not be declared")
    return values, _binary(complete[label], name_or_path, label)


def preparation(name_or_path: str, label: str = "label") -> str:
    """Say what ``load`` does to a file before it is used."""
    frame = _usable(name_or_path, label)
    n_dropped = len(frame) - len(frame.dropna())
    texts = _texts(frame.drop(columns=label))
    ranked = "every column is" if texts and is_development_set(name_or_path) else f"columns {', '.join(texts)} are"
    return (
        f"{set_name(name_or_path)}: {n_dropped} of {len(frame)} rows have gaps and are dropped"
        + (f" ({100 * n_dropped / len(frame):.1f} %)" if n_dropped else "")
        + (f"; {ranked} replaced by ranks of values" if texts else "")
    )


def _texts(features: pd.DataFrame) -> list[str]:
    return [str(name) for name, kind in features.dtypes.items() if not pd.api.types.is_numeric_dtype(kind)]


def _usable(name_or_path: str, label: str) -> pd.DataFrame:
    """Read the rows and columns that count. Raises: ValueError."""
    frame = _read(name_or_path)
    frame.columns = [str(name) for name in frame.columns]
    if label not in frame:
        shown = ", ".join(map(str, frame.columns[:20])) + (", ..." if frame.shape[1] > 20 else "")
        raise ValueError(f"{name_or_path} has no column {label!r}; name the label's column with --label (has: {shown})")
    if is_development_set(name_or_path):
        if "split" in frame:
            frame = frame[frame.split == "train"]
        frame = frame.drop(columns=[c for c in _NO_FEATURES_OF_OURS if c in frame])
    return frame


def _read(name_or_path: str) -> pd.DataFrame:
    path = Path(name_or_path)
    if not path.suffix:
        path = SHARED / f"{name_or_path}.parquet"
    if not path.exists():
        raise ValueError(f"there is no {path}: give parquet or CSV files, as in --sets my.parquet --label outcome")
    if path.suffix not in (".parquet", ".csv"):
        raise ValueError(f"{path} is neither .parquet nor .csv")
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, skipinitialspace=True)


def _binary(column: pd.Series, source: str, label: str) -> NDArray[np.float32]:
    values = sorted(column.unique().tolist())
    if len(values) != 2:
        raise ValueError(
            f"column {label!r} of {source} has {len(values)} distinct values, in rows without nulls; a binary label "
            f"has two (first: {values[:_MAX_DISTINCT_SHOWN]})"
        )
    answer = (column == values[1]).to_numpy(np.float32)
    if min(answer.sum(), answer.size - answer.sum()) < _MIN_ROWS_PER_CLASS:
        raise ValueError(f"column {label!r} of {source} needs at least {_MIN_ROWS_PER_CLASS} rows of each class")
    return answer


def split(features: NDArray[np.float32], label: NDArray[np.float32], seed: int) -> Split:
    """Split stratified by label."""
    a, b, c, d = train_test_split(features, label, test_size=TEST_SHARE, random_state=seed, stratify=label)
    train = Table(np.ascontiguousarray(a.T), c)
    bounds = tuple(FeatureBounds(float(x.min()), float(x.max())) for x in train.columns)
    return Split(train, Table(np.ascontiguousarray(b.T), d), bounds)
