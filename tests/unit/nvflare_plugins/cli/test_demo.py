"""The demo reads what a user may bring, and refuses early what it cannot learn from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.demo import as_matrix, load, make_job, split, task_of, write_sites
from nvflare_plugins.cli.main import main
from nvflare_plugins.cli.options import Options


def given(path, label="y", names=None):
    return Options(data=path, label=label, names=names, format=None)


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
    frame = pd.DataFrame({"x": np.arange(60) / 2, "colour": ["red", "blue", None] * 20, "y": ["no", "yes"] * 30})
    frame.to_csv(path, index=False)
    data = split(*load(given(path)))
    write_sites(data, tmp_path / "data")
    files = list((tmp_path / "data").glob("site-*.parquet"))
    assert len(files) == 6 and all(file.stat().st_mode & 0o077 == 0 for file in files)
    job = make_job(data, "masks", 2)
    assert job.categories == {"colour": ["blue", "red"]}
    assert job.label_classes == ["no", "yes"]
    rows = as_matrix(tmp_path / "data", "training", job)
    assert set(rows.label) == {0.0, 1.0}
    codes = rows.features[:, 1]
    assert set(codes[~np.isnan(codes)]) == {0.0, 1.0}
    assert np.isnan(codes).sum() == data.train.colour.isna().sum()


def test_a_file_is_read_as_it_is_written(tmp_path, capsys):
    rows = [f"{n / 4};{n % 7};{('ja', 'nein')[n % 2]};01.0{n % 9 + 1}.2020".replace(".", ",", 1) for n in range(90)]
    text = "Größe;Stufe;krank;Tag\n" + "\n".join(rows)
    (tmp_path / "mine.txt").write_bytes(text.encode("cp1252"))
    frame, _ = load(given(tmp_path / "mine.txt", "krank"))
    assert list(frame) == ["Größe", "Stufe", "krank"] and frame["Größe"][3] == 0.75 and frame["krank"][1] == "nein"
    shown = capsys.readouterr().out
    assert '"separator": ";"' in shown and "windows-1252" in shown and 'check` says why): ["Tag"]' in shown
    (tmp_path / "bare.data").write_text("\n".join(f"{n / 4},{n % 5},{n % 2}" for n in range(90)))
    frame, _ = load(given(tmp_path / "bare.data", names=["a", "b", "y"]))
    assert len(frame) == 90 and frame["a"][0] == 0, "the first line is a row"


def test_wrong_files_and_labels_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="LABEL="):
        load(given(tmp_path / "a.csv", None))
    with pytest.raises(ConfigurationError, match=r"there is no file .*a\.csv: give another one \(DATA="):
        load(given(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("PAR1,y\n1,2\n")
    with pytest.raises(ConfigurationError, match="cannot be read as parquet"):
        load(given(tmp_path / "a.parquet"))
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ConfigurationError, match="no column 'z'"):
        load(given(tmp_path / "a.csv", "z"))
    (tmp_path / "a.csv").write_text("1,2,0\n3,4,1\n")
    with pytest.raises(ConfigurationError, match=r"looks like a row: name the 3 columns .*--names"):
        load(given(tmp_path / "a.csv"))


@pytest.mark.sim
@pytest.mark.slow
def test_the_demo_runs_to_its_summary(tmp_path, capsys):
    assert main(["demo", "--rounds", "2", "--runs", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Path(told["model"]).is_file() and Path(told["report"]).is_file() and len(told["scores"]) == 2
