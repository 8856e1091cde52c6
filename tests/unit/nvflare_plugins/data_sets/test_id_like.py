"""What is taken for an id, and what is not; a job says so in its site's own log."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import are_ids, load_table

RNG = np.random.default_rng(5)
IDS = {
    "row numbers": np.arange(100.0),
    "with gaps": np.append(np.arange(100.0) * 7 + 10**6, [np.nan] * 20),
    "beyond float64": (2**53 + np.arange(100)).astype(np.float64),
    "nearly all different": np.append(np.arange(190.0), np.zeros(10)),
}
NONE = {
    "measurements": RNG.normal(size=1000),
    "late fractions": np.append(np.arange(2000.0), 0.5),
    "counts": RNG.poisson(3, 1000).astype(np.float64),
    "years": RNG.integers(1930, 2010, 1000).astype(np.float64),
    "few rows": np.arange(49.0),
    "nothing": np.full(100, np.nan),
    "no rows": np.empty(0),
}


@pytest.mark.parametrize("name", [*IDS, *NONE])
def test_ids_and_others(name: str) -> None:
    assert are_ids({**IDS, **NONE}[name], "x") == (name in IDS)


def test_a_name_says_a_lot() -> None:
    visits = np.repeat(np.arange(100.0), 4)
    for name in ("patient_id", "PatientId", "ID", "case-nr", "MRN"):
        assert are_ids(visits, name)
    for name in ("x", "width", "idle", "paid", "monkey"):
        assert not are_ids(visits, name)


@pytest.mark.parametrize("repair", [False, True])
def test_a_job_warns_in_the_sites_log_of_features_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, repair: bool
) -> None:
    rows = "".join(f"{700_000 + row},{row / 7},{row},{row % 2}\n" for row in range(100))
    (tmp_path / "t.csv").write_text("patient,x,w,y\n" + rows)
    spec = DataSet("t", tmp_path / "t.csv", "csv")
    with caplog.at_level(logging.WARNING):
        load_table(spec, label="y", weight="w", features=["x"], repair=repair)
        assert caplog.text == ""
        table = load_table(spec, label="y", weight="w", repair=repair)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING, "FLARE sends errors to the server"
    assert "'patient' of data set 't' looks like an id" in record.getMessage() and "7000" not in record.getMessage()
    assert table.notes == ()


def test_dates_are_no_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = "".join(f"{1900 + row}-01-02,{row % 2}\n" for row in range(100))
    (tmp_path / "t.csv").write_text("born,y\n" + rows)
    load_table(DataSet("t", tmp_path / "t.csv", "csv", dates={"born": "YYYY-MM-DD"}), label="y")
    assert caplog.text == ""
