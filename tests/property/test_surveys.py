"""Any file: a survey ends with findings, and where it finds no problem the rows can be loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nvflare_plugins.data.declaration import ANSWERS, DECIMALS, ENCODINGS, THOUSANDS, DataSet
from nvflare_plugins.data.table import load_table
from nvflare_plugins.survey.columns import Use
from nvflare_plugins.survey.survey import survey

MARKS = [
    "1",
    "2.5",
    "-3",
    "1e39",
    "inf",
    "nan",
    "NA",
    "?",
    "",
    " ",
    "a",
    "true",
    "1,5",
    "1.234,5",
    "01.02.2020",
    "2020-01-02",
]
MARKS += ['"', '"x', '"a,b"', "ü", "\x00", "99999999999999999999", "'", "0x1", "\u0661"]
CELLS = st.one_of(st.sampled_from(MARKS), st.text(max_size=6))
POOLS = [
    ["1", "2.5", "-3e4"],
    ["1,5", "2"],
    ["1.234,5", "7"],
    ["1,234", "12,345.5"],
    ["?", "1"],
    ["true", "FALSE"],
    ["", "NA"],
]
POOLS += [["<0.5", "1"], ["<0,5", ">7,25"], ["01.02.20", "31.12.99"], ["yes", "no"]]
POOLS += [["01.02.2020", ""], ["1"], ["99999999999999999999"], ["1e38", "1"], ["a", "b"], ["20200102", "20200203"]]
OPTIONS = st.fixed_dictionaries(
    {
        "encoding": st.sampled_from(ENCODINGS),
        "separator": st.sampled_from([",", ";", "\t"]),
        "decimal": st.sampled_from(DECIMALS),
        "thousands": st.sampled_from(["", "", *THOUSANDS]),
        "missing": st.sampled_from([(), ("NA", "?")]),
        "dates": st.sampled_from([{}, {}, {"x": "DD.MM.YYYY"}, {"x": "YYYYMMDD"}]),
        "columns": st.sampled_from([{}, {}, *({"x": answer} for answer in (*ANSWERS, {"a": 1.0, "?": None}))]),
        "rename": st.sampled_from([{}, {}, {"x": "y", "y": "x"}, {"z": "q"}, {"x": "a_"}]),
        "drop_unlabelled": st.booleans(),
    }
).filter(lambda options: options["decimal"] != options["thousands"] and not (options["dates"] and options["columns"]))


def spec_of(folder: str, data: bytes, options: dict) -> DataSet:
    path = Path(folder) / "t.csv"
    path.write_bytes(data)
    return DataSet("t", path, "csv", **options)


@given(st.binary(max_size=200), OPTIONS)
def test_any_bytes_are_surveyed(data: bytes, options: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        survey(spec_of(folder, data, options), Use(label="y"))


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, str]:
    """Return a separator and a text of two columns, most of which is as it should be."""
    separator = draw(st.sampled_from([",", ";", "\t"]))
    pool = st.sampled_from(draw(st.sampled_from(POOLS)))
    odd = draw(st.sampled_from([pool, pool, pool, CELLS]))
    rows = draw(st.lists(st.tuples(st.one_of(pool, pool, odd), st.sampled_from(["0", "1"])), min_size=1, max_size=12))
    lines = [f"x{separator}y", *(f'"{x}"{separator}{y}' if separator in x else f"{x}{separator}{y}" for x, y in rows)]
    if draw(st.integers(0, 9)) == 0:
        lines.append(draw(st.text(max_size=6)))
    return separator, "\n".join([*lines, ""])


N_FINE: list[int] = []


@settings(max_examples=500)
@given(tables(), OPTIONS, st.integers(0, 3))
def check_that_what_is_fine_loads(table: tuple[str, str], options: dict, slip: int) -> None:
    separator, text = table
    if slip:  # else the file is not as the policy says
        options = {**options, "separator": separator}
    data = text.encode(options["encoding"] if slip != 1 else "utf-8", "replace")
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(folder, data, options)
        use = Use(label="y", features=("x",), is_settled=True)
        if survey(spec, use).is_fine:
            N_FINE.append(1)
            load_table(spec, label="y", features=["x"], may_lack_rows=True)


def test_what_a_survey_finds_fine_can_be_loaded() -> None:
    N_FINE.clear()
    check_that_what_is_fine_loads()
    assert len(N_FINE) > 20, "files that are fine must be among the examples"
