"""Loading tables: values and types that are accepted, and refusals that never show a value."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.schema import Column, Schema, compare
from nvflare_plugins.data.table import ComparedColumn, Table, load_table
from nvflare_plugins.scoring.columns import PYTHON, matrix_of
from nvflare_plugins.scoring.model import Feature, ScoringError
from nvflare_plugins.xgb.objectives import objective_facts
from tests.support.refusals import refused

SECRET = "8675309"


def csv(tmp_path: Path, text: str, **more: object) -> DataSet:
    path = tmp_path / "data.csv"
    path.write_text(text, encoding="utf-8")
    return DataSet("credit", path, "csv", **more)  # type: ignore[arg-type]


def test_csv_with_missing_values_booleans_and_order(tmp_path: Path) -> None:
    spec = csv(tmp_path, "\ufeffb,y,a,flag\n1.5,0,7,true\n,1,NA,False\n-2e3,1,3,TRUE\n")
    table = load_table(spec, label="y")
    assert table.feature_names == ("b", "a", "flag") and table.feature_types == ("float",) * 3
    expected = np.array([[1.5, 7, 1], [np.nan, np.nan, 0], [-2000, 3, 1]], np.float32)
    np.testing.assert_array_equal(table.features, expected)
    np.testing.assert_array_equal(table.label, [0, 1, 1])
    assert table.features.flags.c_contiguous and table.features.dtype == np.float32 == table.label.dtype
    assert table.n_missing == (1, 1, 0) and table.n_rows == 3 and table.notes == ()
    reordered = load_table(spec, label="y", features=["a", "b"])
    np.testing.assert_array_equal(reordered.features, expected[:, [1, 0]])


def test_csv_and_parquet_and_loader_give_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "x": rng.normal(size=50),
            "n": rng.integers(0, 9, 50),
            "c": rng.choice(["red", "green"], 50),
            "ok": rng.integers(0, 2, 50).astype(bool),
            "y": rng.choice(["no", "yes"], 50),
            "w": rng.gamma(2, size=50),
        }
    )
    frame.loc[::7, "x"] = np.nan
    frame.loc[::5, "c"] = None
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    (tmp_path / "own_loader_module.py").write_text(
        "import pandas\ndef load(spec):\n    return pandas.read_parquet(spec.path)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    more = {"label": "y", "weight": "w", "categories": {"c": ["green", "red"]}, "label_classes": ["no", "yes"]}
    tables = [
        load_table(DataSet("t", tmp_path / "t.csv.gz", "csv"), **more),
        load_table(DataSet("t", tmp_path / "t.parquet", "parquet"), **more),
        load_table(DataSet("t", tmp_path / "t.parquet", "parquet", loader="own_loader_module:load"), **more),
    ]
    for table in tables:
        for mine, first in ((table.features, tables[0].features), (table.label, tables[0].label)):
            np.testing.assert_array_equal(mine, first)
        np.testing.assert_array_equal(table.weight, frame["w"].astype(np.float32))
        assert table.feature_names == ("x", "n", "c", "ok") and table.feature_types == ("float", "float", "c", "float")
    codes = frame["c"].map({"green": 0.0, "red": 1.0}).to_numpy(np.float32)
    np.testing.assert_array_equal(tables[0].features[:, 2], codes)


def test_the_fast_number_path_equals_the_text_path(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    values = np.concatenate([rng.normal(size=200), 10.0 ** rng.uniform(-37, 37, 200), [0.1, 1 / 3, 16777216]])
    frame = pd.DataFrame({"x": values, "y": np.arange(values.size) % 2})
    frame.to_csv(tmp_path / "fast.csv", index=False)
    frame.assign(flag=True).to_csv(tmp_path / "text.csv", index=False)  # "True" sends all columns down the text path
    fast = load_table(DataSet("a", tmp_path / "fast.csv", "csv"), label="y")
    text = load_table(DataSet("a", tmp_path / "text.csv", "csv"), label="y")
    np.testing.assert_array_equal(fast.features[:, 0], text.features[:, 0])
    np.testing.assert_array_equal(fast.features[:, 0], values.astype(np.float32))


def test_categories_may_be_numbers_and_may_look_like_missing(tmp_path: Path) -> None:
    spec = csv(tmp_path, "c,d,y\n3,NA,1\n3.0,x,0\n,null,1\n05,x,0\n")
    table = load_table(spec, label="y", categories={"c": [3, "05"], "d": ["NA", "x"]}, label_classes=[0, 1])
    np.testing.assert_array_equal(table.features, np.array([[0, 0], [0, 1], [np.nan, np.nan], [1, 1]], np.float32))
    np.testing.assert_array_equal(table.label, [1, 0, 1, 0])


def test_unknown_categories_are_refused_or_missing_by_the_jobs_word(tmp_path: Path) -> None:
    spec = csv(tmp_path, f"c,y\na,1\n{SECRET},0\n{SECRET},0\n")
    with refused(r"column 'c' holds values that are not in") as refusal:
        load_table(spec, label="y", categories={"c": ["a"]})
    assert SECRET not in str(refusal.value)
    table = load_table(spec, label="y", categories={"c": ["a"]}, unknown_is_missing=True)
    assert table.n_missing == (2,) and "2 values" in table.notes[0]


def test_unknown_label_classes_are_refused_even_if_unknown_categories_are_missing(tmp_path: Path) -> None:
    spec = csv(tmp_path, "a,y\n1,no\n2,maybe\n")
    with refused("column 'y' holds values that are not in"):
        load_table(spec, label="y", label_classes=["no", "yes"], unknown_is_missing=True)


def test_integers_that_float32_rounds_are_noted(tmp_path: Path) -> None:
    table = load_table(csv(tmp_path, "id,y\n16777217,0\n16777216,1\n"), label="y")
    assert len(table.notes) == 1 and "'id' holds 1 whole numbers" in table.notes[0]
    assert "16777217" not in table.notes[0]


REFUSED = [
    ("a,y\n1,0\n{s},x\n", "column 'y' holds text.*a label: label_classes"),
    ("a,y\n{s}x,0\nu,1\n", "column 'a' holds text"),
    ("a,y\n{s},0\n2,\n", "label column 'y' lacks values"),
    ("a,y\ninf,0\n{s},1\n", "column 'a' holds values that are infinite"),
    ("a,y\n1e39,0\n{s},1\n", "beyond float32"),
    ("a,a,y\n1,{s},0\n", "more than one column named 'a'"),
    ("a,y\n", "no rows"),
    ("", "cannot be read"),
    ("a,y\n1,0\n{s},1,2\n", "cannot be read"),
    ("y\n{s}\n", "no feature columns"),
    ("b<1,y\n{s},0\n", "printable characters"),
    ("y,w\n{s},0\n", "no feature columns"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_refusals_name_the_column_never_a_value(tmp_path: Path, text: str, said: str) -> None:
    weight = "w" if "w" in text.split("\n")[0] else None
    with refused(said) as refusal:
        load_table(csv(tmp_path, text.format(s=SECRET)), label="y", weight=weight)
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize(("weights", "said"), [("-1\n2", "negative"), ("\n3", "lacks values"), ("inf\n1", "infin")])
def test_weights(tmp_path: Path, weights: str, said: str) -> None:
    rows = "\n".join(f"1,0,{w}" for w in weights.split("\n"))
    with refused(said):
        load_table(csv(tmp_path, f"a,y,w\n{rows}\n"), label="y", weight="w")


def test_no_refusal_counts_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal reaches the server: with counts in it, jobs that are wrong on purpose would query one site's rows."""

    def refusals(repeats: int) -> list[str]:
        rows = "a,y,w,t\n" + "1,0,1,x\n" + "7,7,-1,\n" * repeats
        spec = csv(tmp_path, rows)
        texts = []
        for options in (
            {"label": "y", "features": ["a"], "weight": "w"},
            {"label": "y", "features": ["a"], "label_classes": [0]},
            {"label": "y", "features": ["a"], "categories": {"a": [1]}},
            {"label": "y", "features": ["t"]},
        ):
            with pytest.raises(ConfigurationError) as refusal:
                load_table(spec, **options)  # type: ignore[arg-type]
            texts.append(str(refusal.value))
        labels = load_table(spec, label="y", features=["a"]).label
        with pytest.raises(ConfigurationError) as refusal:
            objective_facts({"objective": "binary:logistic"}).check_labels(labels)
        return [*texts, str(refusal.value)]

    with caplog.at_level("INFO"):
        assert refusals(2) == refusals(3)
    assert "3 of 4" in caplog.text  # the site's own log has the count


def test_a_party_without_the_label_does_not_tell_its_columns_to_who_guesses(tmp_path: Path) -> None:
    spec = csv(tmp_path, "diagnosis,age\n1,0\n")
    with pytest.raises(ConfigurationError) as caught:
        load_table(spec, label=None, features=["diagnoses"])
    assert "diagnosis" not in str(caught.value)


def test_wrong_requests(tmp_path: Path) -> None:
    spec = csv(tmp_path, "age,y\n1,0\n")
    for more, said in (
        ({"label": "y", "features": ["aeg"]}, "did you mean 'age'"),
        ({"label": "y", "features": ["age", "age"]}, "twice"),
        ({"label": "y", "features": ["y"]}, "label"),
        ({"label": "y", "weight": "y"}, "different columns"),
        ({"label": "y", "features": []}, "no feature columns"),
        ({"label": "y", "categories": {"sex": ["m"]}}, "not among the features"),
        ({"label": "y", "categories": {"age": []}}, "at least one"),
        ({"label": "y", "categories": {"age": ["a", "a"]}}, "twice"),
    ):
        with refused(said):
            load_table(spec, **more)  # type: ignore[arg-type]


def test_missing_file_row_limit_dates_and_broken_parquet(tmp_path: Path) -> None:
    with refused("no file at its path.* Policy key: data_sets.a.path") as refusal:
        load_table(DataSet("a", tmp_path / "none.csv", "csv"), label="y")
    assert str(tmp_path) not in str(refusal.value)
    for suffix in ("csv", "parquet"):
        frame = pd.DataFrame({"a": [1, 2, 3], "y": [0, 1, 0]})
        path = tmp_path / f"t.{suffix}"
        frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
        with refused("more rows than this site's max_rows allows"):
            load_table(DataSet("a", path, suffix, max_rows=2), label="y")
    dated = pd.DataFrame({"when": pd.to_datetime(["2020-01-01"]), "y": [1]})
    dated.to_parquet(tmp_path / "d.parquet")
    with refused("'when' holds timestamp"):
        load_table(DataSet("a", tmp_path / "d.parquet", "parquet"), label="y")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no PAR1")
    with refused("cannot be read as parquet"):
        load_table(DataSet("a", tmp_path / "broken.parquet", "parquet"), label="y")
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "two.parquet")
    with refused("more than one column named 'a'"):
        load_table(DataSet("a", tmp_path / "two.parquet", "parquet"), label="y")


def test_a_failing_loader_tells_its_type_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_loader_module.py").write_text(
        f"def load(spec):\n    raise KeyError('{SECRET}')\ndef none(spec):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for function, said in (("load", "KeyError"), ("none", "DataFrame"), ("absent", "AttributeError")):
        with refused(said) as refusal:
            load_table(DataSet("a", tmp_path, "csv", loader=f"bad_loader_module:{function}"), label="y")
        assert SECRET not in str(refusal.value)


def test_all_missing_and_constant_columns_are_kept(tmp_path: Path) -> None:
    table: Table = load_table(csv(tmp_path, "gap,one,y\n,1,0\n,1,1\n"), label="y")
    assert table.n_missing == (2, 0) and np.isnan(table.features[:, 0]).all()


# -- schemas -----------------------------------------------------------------------------------------------------------


BASE = Schema((Column("age", "float"), Column("sex", "c", ("f", "m")), Column("bmi", "float")), "y", ("no", "yes"), "w")


def test_schema_of_a_table_and_round_trip() -> None:
    table = Table(
        features=np.zeros((2, 3), np.float32),
        feature_names=("age", "sex", "bmi"),
        feature_types=("float", "c", "float"),
        label=np.zeros(2, np.float32),
        label_name="y",
        weight=np.ones(2, np.float32),
        weight_name="w",
        categories={"sex": ("f", "m")},
        label_classes=("no", "yes"),
    )
    assert Schema.of(table) == BASE
    assert Schema.from_bytes(BASE.to_bytes()) == BASE
    compare(BASE, Schema.from_bytes(BASE.to_bytes()), "site-2")


def columns(*changed: Column) -> tuple[Column, ...]:
    by_name = {column.name: column for column in changed}
    return tuple(by_name.get(column.name, column) for column in BASE.columns)


DIFFERENCES = [
    (replace(BASE, columns=(Column("age2", "float"), *BASE.columns[1:])), "'age2' where this site has 'age'"),
    (replace(BASE, columns=BASE.columns[::-1]), "order differs"),
    (replace(BASE, columns=BASE.columns[:2]), "only this site has column 'bmi'"),
    (replace(BASE, columns=(*BASE.columns, Column("hb", "float"))), "only site-2 has column 'hb'"),
    (replace(BASE, columns=columns(Column("sex", "float"))), "'sex' as numbers, this site as categories"),
    (replace(BASE, columns=columns(Column("sex", "c", ("f", "x")))), "category 'x' at place 2 where this site has 'm'"),
    (replace(BASE, columns=columns(Column("sex", "c", ("f", "m", "x")))), "'sex': site-2 has a category list of 3"),
    (replace(BASE, label="z"), "label 'z'"),
    (replace(BASE, label_classes=("yes", "no")), "label class 'yes' at place 1"),
    (replace(BASE, label_classes=None), "label class list of 0"),
    (replace(BASE, weight=None), "no row weights where this site has weights 'w'"),
]


@pytest.mark.parametrize(("theirs", "said"), DIFFERENCES)
def test_the_first_difference_is_named(theirs: Schema, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        compare(BASE, theirs, "site-2")
    with pytest.raises(ConfigurationError):
        compare(theirs, BASE, "site-1")
    assert theirs.to_bytes() != BASE.to_bytes()


# -- values of which nothing is kept but how they compare --------------------------------------------------------------


_NUMBER = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 1e-45, -1e-45, float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)]),
)


@given(st.lists(st.one_of(_NUMBER, st.just(np.nan)), max_size=30), st.lists(_NUMBER, max_size=300))
def test_stand_ins_compare_as_the_values_do(values: list[float], numbers: list[float]) -> None:
    column, known = np.array(values, dtype=np.float32), np.unique(np.array(numbers, dtype=np.float32))
    compared = ComparedColumn.compare(column, known)
    found = compared.of(slice(None))
    assert found.dtype == np.float32 and compared.places.itemsize == (1 if known.size < 255 else 2)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(column))
    for number in known:
        np.testing.assert_array_equal(found < number, column < number)
    is_known = np.isin(column, known)
    np.testing.assert_array_equal(found[is_known], column[is_known])
    some = np.arange(len(column)) % 2 == 1
    np.testing.assert_array_equal(compared.of(some), found[some])


# -- frames of a loader ------------------------------------------------------------------------------------------------
# What type pandas gives a column hangs on all of its values: one missing one makes whole numbers fractions, one text
# makes a column of dates one of objects.


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
