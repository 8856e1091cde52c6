"""The demo reads what a user may bring, and refuses early what it cannot learn from."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.demo import columns, labels, load, make_job, split, task_of, write_sites


@pytest.mark.parametrize(
    ("values", "objective", "classes"),
    [
        ([0, 1, 1, 0], "binary:logistic", None),
        (["no", "yes"], "binary:logistic", ["no", "yes"]),
        ([1, 2, 1], "binary:logistic", [1, 2]),
        ([0, 1, 2], "multi:softprob", None),
        (["a", "b", "c"], "multi:softprob", ["a", "b", "c"]),
        (list(np.linspace(0, 1, 50)), "reg:squarederror", None),
    ],
)
def test_the_label_decides_the_task(values, objective, classes):
    task = task_of(pd.Series(values))
    assert task.params["objective"] == objective
    assert task.label_classes == classes


@pytest.mark.parametrize("values", [[1, 1], [1, None], [str(i) for i in range(30)]])
def test_labels_without_a_task_are_refused(values):
    with pytest.raises(ConfigurationError):
        task_of(pd.Series(values))


def test_a_csv_of_the_user_becomes_three_sites(tmp_path):
    path = tmp_path / "mine.csv"
    frame = pd.DataFrame({"x": np.arange(60.0), "colour": ["red", "blue", None] * 20, "y": ["no", "yes"] * 30})
    frame.to_csv(path, index=False)
    data = split(*load(path, "y"))
    write_sites(data, tmp_path / "data")
    files = list((tmp_path / "data").glob("site-*.parquet"))
    assert len(files) == 6 and all(file.stat().st_mode & 0o077 == 0 for file in files)
    job = make_job(data, "masks", 2)
    assert job.categories == {"colour": ["blue", "red"]}
    assert job.label_classes == ["no", "yes"]
    assert set(labels(data.train, data)) == {0.0, 1.0}
    codes = columns(data.train, data)[:, 1]
    assert set(codes[~np.isnan(codes)]) == {0.0, 1.0}
    assert np.isnan(codes).sum() == data.train.colour.isna().sum()


def test_wrong_files_and_labels_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="LABEL="):
        load(tmp_path / "a.csv", None)
    with pytest.raises(ConfigurationError, match=r"there is no file .*a\.csv: give another one \(DATA="):
        load(tmp_path / "a.csv", "y")
    (tmp_path / "a.parquet").write_text("x,y\n1,2\n")
    with pytest.raises(ConfigurationError, match="cannot read"):
        load(tmp_path / "a.parquet", "y")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ConfigurationError, match="no column 'z'"):
        load(tmp_path / "a.csv", "z")
