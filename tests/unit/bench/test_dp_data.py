"""A stranger's file is read, or refused with what to change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.bench.dp_data import SEEDS, load, preparation, set_name, split


def frame(n_rows: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": rng.integers(18, 90, n_rows),
            "split": rng.normal(size=n_rows),
            "outcome": rng.permutation(["no", "yes"] * (n_rows // 2)),
        }
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_of_any_name_and_label_is_read(tmp_path: Path, suffix: str) -> None:
    path, data = tmp_path / f"mine{suffix}", frame()
    data.loc[3, "split"] = np.nan
    data.to_csv(path, index=False) if suffix == ".csv" else data.to_parquet(path)
    features, label = load(str(path), "outcome")
    kept = data.dropna()
    assert features.shape == (59, 2)  # a column called split is a feature here
    assert np.array_equal(label, (kept.outcome == "yes").to_numpy(np.float32))
    assert np.array_equal(features[:, 0], kept.age.to_numpy(np.float32))
    assert set_name(str(path)) == "mine"


def test_a_column_of_text_is_ranked_and_the_others_keep_their_values(tmp_path: Path) -> None:
    path, data = tmp_path / "mine.csv", frame()
    data["town"] = np.where(data.age > 50, "b", "a")
    data.to_csv(path, index=False)
    features, _ = load(str(path), "outcome")
    assert np.array_equal(features[:, 0], data.age.to_numpy(np.float32))
    assert np.array_equal(features[:, 2], (data.age > 50).to_numpy(np.float32))


def test_a_development_set_with_text_is_ranked_whole_as_in_the_paper(tmp_path: Path) -> None:
    path, data = tmp_path / "adult.csv", frame().drop(columns="split")
    data["town"] = np.where(data.age > 50, "a", "b")
    data.to_csv(path, index=False)
    features, _ = load(str(path), "outcome")
    assert sorted(set(features[:, 0])) == list(range(data.age.nunique()))
    assert preparation(str(path), "outcome").endswith("every column is replaced by ranks of values")


def test_dropped_rows_are_counted(tmp_path: Path) -> None:
    path, data = tmp_path / "mine.csv", frame()
    data.loc[:2, "age"], data.loc[2:5, "split"] = np.nan, np.nan
    data.to_csv(path, index=False)
    assert load(str(path), "outcome")[0].shape == (54, 2)
    assert preparation(str(path), "outcome") == "mine: 6 of 60 rows have gaps and are dropped (10.0 %)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.rename(columns={"outcome": "y"}), "no column 'outcome'.*--label.*age, split, y"),
        (lambda d: d.assign(outcome=d.age), "distinct values"),
        (lambda d: d.assign(outcome=1), "1 distinct values"),
        (lambda d: d[["outcome"]], "no column beside the label"),
        (lambda d: d.assign(age=np.inf), "not finite"),
        (lambda d: d.assign(outcome=np.arange(len(d)) < 3), "at least 10 rows of each class"),
        (lambda d: d.assign(age=np.nan), "every row of .* has a gap.*age: 60"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "mine.parquet"
    change(frame()).to_parquet(path)
    with pytest.raises(ValueError, match=message):
        load(str(path), "outcome")


def test_a_missing_file_and_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no"):
        load(str(tmp_path / "none.parquet"))
    (tmp_path / "table.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither \.parquet nor \.csv"):
        load(str(tmp_path / "table.xlsx"))


def test_splits_are_stratified_and_bounds_are_those_of_the_training_rows() -> None:
    assert len(set(SEEDS)) == len(SEEDS) >= 15
    rng = np.random.default_rng(1)
    label = (np.arange(200) % 4 == 0).astype(np.float32)
    data = split(rng.normal(size=(200, 3)).astype(np.float32), label, 1)
    assert (data.train.label.size, data.test.label.size) == (140, 60)
    assert data.test.label.mean() == pytest.approx(0.25)
    assert data.bounds[1].low == data.train.columns[1].min()
    assert data.delta == 1 / 140
