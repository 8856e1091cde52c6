"""Frames of a site's own loader, read for private jobs: one row decides neither of others nor whether the job ends.

What type pandas gives a column hangs on all of its values: one missing one makes whole numbers fractions, one text
makes a column of dates one of objects.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import load_table
from nvflare_plugins.scoring.columns import PYTHON, matrix_of
from nvflare_plugins.scoring.model import Feature, ScoringError

VALUES: tuple[Any, ...] = (
    1,
    2.5,
    None,
    pd.NaT,
    "1",
    "x",
    True,
    20240101,
    "20240101",
    10**30,
    2**63,
    date(2020, 1, 1),
    datetime(2020, 1, 1, 6, tzinfo=UTC),
    np.datetime64("2020-01-01"),
    timedelta(1),
    b"\xff",
    [1],
    "\ud800",
    pd.Period("2020"),
    pd.Interval(0, 1),
)
READINGS: dict[str, dict[str, Any]] = {
    "number": {"features": ["a"]},
    "date": {"features": ["a"], "dates": {"a": "YYYYMMDD"}},
    "category": {"features": ["a"], "categories": {"a": ["1", "x", "True"]}},
    "label": {"features": ["b"], "label": "a"},
    "class": {"features": ["b"], "label": "a", "label_classes": ["1", "x"]},
}


def frame(values: tuple[Any, ...]) -> pd.DataFrame:
    """Return a frame whose column has the type that pandas finds for it."""
    column = pd.Series([None] * len(values), dtype=object)
    for place, value in enumerate(values):
        column.iat[place] = value
    with contextlib.suppress(UnicodeError):  # then it stays one of objects
        column = column.infer_objects()
    return pd.DataFrame({"a": column, "b": 0.0, "y": 1.0})


def load(monkeypatch: pytest.MonkeyPatch, table: pd.DataFrame, repair: bool = True, **reading: Any) -> np.ndarray:
    module: Any = ModuleType("own_frames")
    module.load = lambda spec: table
    monkeypatch.setitem(sys.modules, "own_frames", module)
    spec = DataSet("t", Path("t.csv"), "csv", loader="own_frames:load", dates=reading.pop("dates", {}))
    loaded = load_table(spec, repair=repair, **{"label": "y", **reading})
    return loaded.label if reading.get("label") == "a" else loaded.features[:, 0]


@pytest.mark.parametrize("reading", READINGS)
def test_no_row_changes_what_another_one_is(reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in VALUES:
        [alone] = load(monkeypatch, frame((value,)), **READINGS[reading])
        for other in (2.5, None, "x", np.datetime64("2020-01-01"), "\ud800", pd.Period("2020")):
            [beside, _] = load(monkeypatch, frame((value, other)), **READINGS[reading])
            np.testing.assert_equal(beside, alone, f"{value!r} beside {other!r}")


def test_dates_of_frames_are_days_whatever_type_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    values = (20240101, None, datetime(2020, 1, 1, 6, tzinfo=UTC), "20200101", date(2020, 1, 1), "x")
    expected = [19723.0, np.nan, 18262.25, 18262.0, 18262.0, np.nan]
    np.testing.assert_array_equal(load(monkeypatch, frame(values), **READINGS["date"]), expected)
    whole = load(monkeypatch, frame((20240101, None)), repair=False, **READINGS["date"])
    np.testing.assert_array_equal(whole, [19723.0, np.nan])


def test_other_jobs_refuse_what_is_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last one ended the process: Arrow follows a null pointer.
    for values in ((1, "x", b"\xff"), ("\ud800",), ([1],), (timedelta(1),), (np.datetime64("2020"), np.float16(1))):
        with pytest.raises(DataRefusal):
            load(monkeypatch, frame(values), repair=False, **READINGS["number"])
    with pytest.raises(DataRefusal):
        load(monkeypatch, frame(([1],)), repair=False, **READINGS["category"])


def test_lists_are_in_no_list_of_categories(tmp_path: Path) -> None:
    """A declared type is public; Arrow's own error for it was taken for a defect."""
    table = pa.table({"a": [[1]], "y": [1.0]})
    pd.DataFrame({"a": [[1]], "y": [1.0]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(ConfigurationError, match=r"column 'a' holds list<.*>: turn it into numbers"):
        load_table(DataSet("t", tmp_path / "t.parquet", "parquet"), label="y", categories={"a": ["1"]}, repair=True)
    with pytest.raises(ScoringError, match="of type list<item: int64>"):
        matrix_of("X", [Feature("a", ("1",))], {"a": table.column("a")}, (), unknown_is_missing=False, remedies=PYTHON)
