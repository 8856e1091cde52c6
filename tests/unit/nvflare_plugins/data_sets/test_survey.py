"""A survey finds all problems at once, shows no value of a row, and drafts what then can be loaded."""

from __future__ import annotations

import dataclasses
import gzip
import os
import zipfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import load_table, passes_of, plain_reading
from nvflare_plugins.scoring.model import Feature
from nvflare_plugins.scoring.rows import RowReader
from nvflare_plugins.survey.columns import IdShape, Use, rounded_bounds
from nvflare_plugins.survey.survey import survey
from tests.support.surveyed import ROWS, SECRET, as_drafted, finding, hospital, kinds, labels, lines, numbers, written

REAL = Path(os.environ.get("VEILBOOST_DATA", Path(__file__).parents[5] / "shared" / "data"))


def test_numbers_of_any_length_are_looked_at(tmp_path: Path) -> None:
    """Python reads no whole number of more than 4,300 digits, and XGBoost reads none of them as it stands."""
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{'9' * n},{n}\n" for n in (16, 17, 400, 5000)))
    found = survey(DataSet("t", tmp_path / "t.csv", "csv"), Use())
    [finding] = [one for one in found.findings if one.kind == "large_integers"]
    assert (finding.column, finding.count, finding.first_row) == ("a", 4, 1)
    assert str(2**53) not in finding.text and "999" not in finding.text


def test_a_good_file_is_fine(tmp_path: Path) -> None:
    text = lines(numbers(), ["red", "green"] * (ROWS // 2), labels(), header="x,c,y", end="\r\n")
    for data in (text, "\ufeff" + text):
        spec = written(tmp_path, data)
        found = survey(spec, Use(label="y"))
        assert found.findings == () and found.is_fine and found.n_rows == ROWS
        assert found.draft.features == ("x", "c") and set(found.draft.categories["c"]) == {"red", "green"}
        assert found.draft.label_classes is None and found.draft.options == {}
        assert as_drafted(spec, found).n_rows == ROWS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_everything_that_an_option_mends_is_found_at_once(tmp_path: Path, encoding: str) -> None:
    spec = written(tmp_path, hospital().encode(encoding))
    found = survey(spec, Use(label="y"))
    expected = ["separator", "name", "number_format", "dates", "missing", "label_missing"]
    assert kinds(found) == (expected if encoding == "utf-8" else ["encoding", *expected])
    assert dict(found.draft.options) == {
        **({} if encoding == "utf-8" else {"encoding": "utf-16" if encoding == "utf-16" else "windows-1252"}),
        "separator": ";",
        "decimal": ",",
        "thousands": ".",
        "dates": {"geb.": "DD.MM.YYYY"},
        "columns": {"Fall-Nr": "id"},
        "missing": [*DataSet("a", spec.path, "csv").missing, "?"],
        "rename": {"Wert [mg]": "Wert _mg_"},
        "drop_unlabelled": True,
    }
    missing = finding(found, "missing")
    assert (missing.column, missing.count, missing.first_row) == ("Wert _mg_", 3, 8)
    assert finding(found, "label_missing").first_row == 5
    assert finding(found, "id").column == "Fall-Nr" and not finding(found, "id").is_problem
    assert found.draft.features == ("Größe", "Betrag", "Wert _mg_", "Geschlecht") and found.draft.dates == ("geb.",)
    assert found.draft.label_classes == ("gesund", "krank")
    table = as_drafted(spec, found)
    assert table.n_rows == ROWS - 1 and table.n_missing == (0, 0, 3, 0)
    assert table.features[0, 1] == 1100
    # As the policy then says it, nothing is left to mend.
    again = dataclasses.replace(spec, **{k: tuple(v) if k == "missing" else v for k, v in found.draft.options.items()})
    assert survey(again, Use(label="y")).is_fine


FILES: dict[str, tuple[bytes, str, int | None, int | None]] = {
    "empty": (b"", "empty", None, None),
    "nothing but line ends": (b"\n\r\n", "empty", None, None),
    "a header only": (b"x,y\n", "no_rows", None, None),
    "a spreadsheet": (b"PK\x03\x04 and more", "not_text", None, None),
    "a Parquet file by another name": (b"PAR1 and more", "not_text", None, None),
    "two columns of one name": (b"x,x,y\n1,2,0\n3,4,1\n", "repeated_name", 2, None),
    "no names": (b"1.5,2,0\n3.5,4,1\n", "header", None, None),
    "a row with a field more": (b"x,y\n1,0\n2,1,1\n3,0\n4\n", "uneven_rows", 2, 2),
    "an open quotation mark": (b'x,c,y\n1,a,0\n2,"b,1\n3,c,0\n4,d",1\n5,e,0\n', "open_quote", 1, 2),
    "a quotation mark that never ends": (b'x,c,y\n1,a,0\n2,"b,1\n' + b"3,c,0\n" * 900_000, "open_quote", 1, 2),
    "infinite values": (b"x,y\n1,0\ninf,1\n1e39,0\n-1e38,1\n", "infinite", 3, 2),
    "text among numbers": (b"x,y\n" + b"1.5,0\n" * 30 + b"abc,1\n", "text_among_numbers", 1, 31),
    "a name with what cannot be seen": ("x\u200d,y\n1,0\n".encode(), "name", None, None),
    "bytes that are no text": (b"x,c,y\n1,\xff\xfe,0\n", "encoding", 1, 1),
    "half a character of UTF-8": (b"x,c,y\n1,a,0\n2,\xc3,1\n", "encoding", 1, 2),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_no_option_or_another_mends(tmp_path: Path, name: str) -> None:
    data, kind, count, first_row = FILES[name]
    found = survey(written(tmp_path, data), Use(label="y"))
    one = finding(found, kind)
    assert one.is_problem and (one.count, one.first_row) == (count, first_row)


def test_packed_files(tmp_path: Path) -> None:
    packed = gzip.compress(lines(numbers(), labels(), header="x,y").encode())
    assert survey(written(tmp_path, packed, "table.csv.gz"), Use(label="y")).is_fine
    assert "gzip" in finding(survey(written(tmp_path, packed), Use()), "not_text").text
    assert kinds(survey(DataSet("a", tmp_path / "none.csv", "csv"), Use())) == ["no_file"]
    assert kinds(survey(written(tmp_path, b"PAR1 no", "t.parquet"), Use())) == ["unreadable"]


def test_names_that_may_be_values_are_not_shown(tmp_path: Path) -> None:
    found = survey(written(tmp_path, f"{SECRET},1,2\n5,6,7\n"), Use(label="y"))
    assert "header" in kinds(found) and SECRET not in repr(found) and found.draft.features == ()


def test_names_that_would_become_one_are_not_suggested(tmp_path: Path) -> None:
    text = lines(numbers(), numbers(1), numbers(2), labels(), header="a[,a],a<,y")
    found = survey(written(tmp_path, text), Use(label="y"))
    assert kinds(found) == ["name"] * 3 and found.draft.options == {"rename": {"a[": "a_"}}


def test_columns_that_no_job_can_name_are_in_no_draft(tmp_path: Path) -> None:
    text = lines(numbers(), numbers(1), numbers(2), numbers(3), numbers(4), labels(), header=",,a,a,b,y")
    found = survey(written(tmp_path, text), Use(label="y"))
    assert kinds(found) == ["no_name", "repeated_name"] and found.draft.features == ("b",)
    assert "Policy key" not in finding(found, "no_name").text and found.draft.options == {}
    one = survey(written(tmp_path, lines(numbers(), numbers(1), labels(), header=",b,y")), Use(label="y"))
    assert one.is_fine and one.draft.features == ("unnamed", "b")


def test_names_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    composed, decomposed = "Gr\u00f6\u00dfe", "Gro\u0308\u00dfe"
    spec = written(tmp_path, lines(numbers(), labels(), header=f"{decomposed},y"))
    found = survey(spec, Use(label="y", features=(composed,)))
    assert finding(found, "name").options == {"rename": {decomposed: composed}}
    assert found.draft.features == (composed,) and as_drafted(spec, found).feature_names == (composed,)
    with pytest.raises(ConfigurationError, match="looks alike"):
        load_table(spec, label="y", features=[composed])
    with pytest.raises(ConfigurationError, match="did you mean 'y'"):
        load_table(spec, label="yy")


def test_emoji_and_long_names_and_quoted_separators(tmp_path: Path) -> None:
    name = "n" * 200
    text = lines([f'"{n},{n}"' for n in "ab" * (ROWS // 2)], numbers(), labels(), header=f'"🫀,x",{name},y')
    spec = written(tmp_path, text)
    found = survey(spec, Use(label="y"))
    assert found.is_fine and found.draft.features == ("🫀,x", name) and set(found.draft.categories) == {"🫀,x"}
    assert as_drafted(spec, found).n_rows == ROWS


def test_numbers_of_all_sizes_and_ids_beyond_float64(tmp_path: Path) -> None:
    large = [str(2**60 + 1001 * row) for row in range(ROWS)]
    sizes = ["1e9" if row % 2 else "1e-9" for row in range(ROWS)]
    flags = ["TRUE" if row % 3 else "false" for row in range(ROWS)]
    found = survey(written(tmp_path, lines(large, sizes, flags, labels(), header="nr,s,b,y")), Use(label="y"))
    assert found.is_fine and finding(found, "large_integers").count == ROWS and finding(found, "id").column == "nr"
    assert found.draft.features == ("s", "b") and found.draft.feature_bounds["b"] == (0.0, 1.0)


@pytest.mark.parametrize("decimal_sign", [".", ","])
def test_very_many_numbers_are_read_alike(tmp_path: Path, decimal_sign: str) -> None:
    """Columns of very many texts are not looked at text by text, and must be found to be the same."""
    values = np.random.default_rng(3).normal(size=6000).round(6)
    texts = [repr(value).replace(".", decimal_sign) for value in values.tolist()]
    ids = [str(2**53 + 3 * row) for row in range(6000)]
    gaps = ["" if row % 3 == 0 else text for row, text in enumerate(texts)]
    text = lines(texts, gaps, ids, ["0", "1"] * 3000, header="x;gaps;nr;y", separator=";")
    spec = written(tmp_path, text)
    found = survey(spec, Use(label="y"))
    assert kinds(found) == ["separator", *([] if decimal_sign == "." else ["number_format"])]
    assert finding(found, "id").column == "nr" and found.draft.features == ("x", "gaps")
    table = as_drafted(spec, found)
    np.testing.assert_array_equal(table.features[:, 0], values.astype(np.float32))
    assert table.n_missing == (0, 2000)
    fractions = [f"{row / 7:.4f}" for row in range(6000)]
    commas = [text.replace(".", ",") for text in texts]
    mixed = written(tmp_path, lines(commas, fractions, header="x;y", separator=";"))
    assert "number_format" not in kinds(survey(mixed, Use(label="y"))), "no format reads both columns"


def test_columns_that_teach_nothing(tmp_path: Path) -> None:
    free = [f"report {SECRET}{row}" for row in range(ROWS)]
    rare = ["a"] * 25 + ["b"] * 30 + [f"{SECRET}-{row // 3}" for row in range(5)]
    text = lines(["7"] * ROWS, [""] * ROWS, free, ["x"] * ROWS, rare, labels(), header="one,none,free,same,rare,y")
    found = survey(written(tmp_path, text), Use(label="y"))
    notes = [(one.kind, one.column) for one in found.findings]
    assert notes == [("constant", "one"), ("no_values", "none"), ("id", "free"), ("constant", "same")]
    assert found.draft.features == ("rare",) and found.draft.categories == {"rare": ("b", "a")}
    assert SECRET not in repr(found), "a text that few rows have is not shown"
    many = [f"code {row % 290}" for row in range(900)]
    found = survey(written(tmp_path, lines(many, ["1", "0"] * 450, header="c,y")), Use(label="y"))
    assert finding(found, "categories").count == 290 and found.draft.features == ()


def test_a_table_without_a_column_to_train_on_is_said_to_be_one(tmp_path: Path) -> None:
    alone = written(tmp_path, lines(labels(), header="y"))
    assert kinds(survey(alone, Use(label="y")), problems_only=False) == ["no_features"]
    assert survey(alone, Use()).findings == () and survey(alone, Use(label="y")).is_fine
    other = written(tmp_path, lines(["7"] * ROWS, labels(), header="one,y"))
    assert kinds(survey(other, Use(label="y")), problems_only=False) == ["constant", "no_features"]


def test_words_may_be_categories_and_marks_are_not(tmp_path: Path) -> None:
    text = lines(["?", "unknown", "a"] * 20, ["unknown", "1.5", "2.5"] * 20, labels(), header="c,x,y")
    found = survey(written(tmp_path, text), Use(label="y"))
    missing = {(one.column, one.is_problem, tuple(one.options.get("missing", ())[-1:])) for one in found.findings}
    assert missing == {("c", True, ("?",)), ("c", False, ()), ("x", True, ("unknown",))}
    assert set(found.draft.categories["c"]) == {"a", "unknown"}


def test_dates_that_can_be_read_in_two_ways_are_not_chosen(tmp_path: Path) -> None:
    unclear = ["01/02/2020", "03/03/2021", "05/04/2022"] * 20
    found = survey(written(tmp_path, lines(unclear, labels(), header="d,y")), Use(label="y"))
    assert "MM/DD/YYYY or DD/MM/YYYY" in finding(found, "dates").text
    assert found.draft.options == {} and found.draft.features == ()
    compact = ["20200131", "19991231", "20240229"] * 20
    found = survey(written(tmp_path, lines(compact, labels(), header="d,y")), Use(label="y"))
    assert found.is_fine and "YYYYMMDD" in finding(found, "dates").text


def test_labels(tmp_path: Path) -> None:
    spec = written(tmp_path, lines(numbers(), ["yes"] * 57 + ["no", "maybe", ""], header="x,y"))
    assert finding(survey(spec, Use(label="z")), "no_such_column").column == "z"
    found = survey(spec, Use(label="y", label_classes=("no", "yes"), is_settled=True))
    assert kinds(found) == ["label_class", "label_missing"] and finding(found, "label_class").first_row == 59
    assert "label_text" in kinds(survey(spec, Use(label="y", is_settled=True)))
    one = written(tmp_path, lines(numbers(), ["1"] * ROWS, header="x,y"))
    assert finding(survey(one, Use(label="y")), "one_class").is_problem is False
    wrong = written(tmp_path, lines(numbers(), [*["1"] * 58, "2", "0"], header="x,y"))
    found = survey(wrong, Use(label="y", accepts=lambda label: np.isin(label, (0, 1)), is_settled=True))
    assert (finding(found, "label_value").count, finding(found, "label_value").first_row) == (1, 59)
    free = written(tmp_path, lines(numbers(), [f"t{row}" for row in range(ROWS)], header="x,y"))
    assert kinds(survey(free, Use(label="y"))) == ["label_text"]


def test_what_a_job_settles(tmp_path: Path) -> None:
    text = lines([str(row) for row in range(ROWS)], ["a", "b"] * 30, ["1", ""] * 30, labels(), header="id,c,w,y")
    spec = written(tmp_path, text, id="id")
    job = Use(label="y", weight="w", features=("c",), categories={"c": ("a",)}, is_settled=True)
    found = survey(spec, job)
    problems = [(one.kind, one.count) for one in found.findings if one.is_problem]
    assert problems == [("category", ROWS // 2), ("weight", ROWS // 2)]
    job = Use(label="y", features=("id", "c", "age"), is_settled=True)
    found = survey(dataclasses.replace(spec, id=None), job)
    assert [(one.kind, one.column) for one in found.findings if one.is_problem] == [
        ("no_such_column", "age"),
        ("id", "id"),
        ("no_list", "c"),
    ]
    again = written(tmp_path, lines(["p1", "p1", "", "p2"], ["1"] * 4, header="id,y"), id="id")
    found = survey(again, Use(features=()))
    assert finding(found, "id_missing").first_row == 3 and finding(found, "id_repeated").first_row == 2


def test_queries_of_a_ranking(tmp_path: Path) -> None:
    searches = [str(row // 4) for row in range(ROWS)]
    weights = [str(row // 4 + (row == 9)) for row in range(ROWS)]
    text = lines(searches, [*searches[:-1], ""], weights, labels(), header="q,gap,w,y")
    spec = written(tmp_path, text)
    for query, weight, expected in (("q", None, []), ("q", "w", ["query_weight"]), ("gap", None, ["query_missing"])):
        job = Use(label="y", query=query, weight=weight, features=(), is_settled=True)
        assert [one.kind for one in survey(spec, job).findings if one.is_problem] == expected


def test_parquet_with_every_type(tmp_path: Path) -> None:
    n = 40
    columns = {
        "day": pa.array(pd.date_range("2020-01-01", periods=n).date),
        "money": pa.array([Decimal("1.25") * row for row in range(n)]),
        "level": pa.array(["low", "high"] * 20).dictionary_encode(),
        "flag": pa.array([True, False] * 20),
        "nested": pa.array([[1]] * n),
        "comma": pa.array(["1,5", "2,5"] * 20),
        "nothing": pa.nulls(n),
        "y": pa.array([0, 1] * 20),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    spec = DataSet("table", tmp_path / "t.parquet", "parquet")
    found = survey(spec, Use(label="y"))
    assert kinds(found) == ["number_format", "dates"]
    assert {(one.kind, one.column) for one in found.findings if not one.is_problem} == {
        ("type", "nested"),
        ("no_values", "nothing"),
    }
    assert found.draft.features == ("money", "level", "flag", "comma") and found.draft.dates == ("day",)
    assert as_drafted(spec, found).n_rows == n


@pytest.mark.parametrize("low", [0.0, 0.3, 17.0, -3.2, -1e9, 1e-9, 123456.0])
@pytest.mark.parametrize("width", [0.0, 1e-9, 0.7, 1.0, 82.0, 1e12])
def test_bounds_are_round_and_hold_all_values(low: float, width: float) -> None:
    below, above = rounded_bounds(np.array([low, low + width, np.nan]))
    if low == 0 and width in (0, 1):  # nothing lies between
        assert (below, above) == (0, 1)
        return
    assert below <= low and low + width < above and (below < low or below == 0)
    shown = max(width, 1e-3 * abs(low), 1e-3 * abs(low + width), 1e-30)
    assert low - below <= 0.2001 * shown or below == 0
    assert above - low - width <= 0.2001 * shown, "no wider than needed"
    assert rounded_bounds(np.array([np.nan])) is None


def test_bounds_that_many_rows_share_are_theirs() -> None:
    values = np.repeat([1.0, 7.0, 5.0, 9.0], [10, 3, 20, 9])
    assert rounded_bounds(values) == (1.0, 9.5) and rounded_bounds(np.repeat([0.0, 1.0], [90, 1])) == (0.0, 1.0)
    assert rounded_bounds(np.repeat([1.0, 5.0], [9, 50]))[0] < 1 and rounded_bounds(np.repeat([1.0, 5.0], 10)) == (1, 5)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real data sets are not here")
@pytest.mark.parametrize("name", ["adult", "bank", "credit2", "abalone"])
def test_real_sets_written_by_a_spreadsheet(tmp_path: Path, name: str) -> None:
    frame = pd.read_parquet(REAL / f"{name}.parquet").sample(3000, random_state=0)
    frame.insert(0, "patient", np.arange(len(frame)) + 5_000_000)
    frame.to_csv(tmp_path / "t.csv", index=False, sep=";", decimal=",", encoding="utf-16")
    spec = DataSet("table", tmp_path / "t.csv", "csv")
    found = survey(spec, Use(label="label"))
    assert set(kinds(found)) <= {"encoding", "separator", "number_format"}
    assert finding(found, "id", "patient").count == 3000 and "patient" not in found.draft.features
    draft = dataclasses.replace(
        found.draft, features=[n for n in found.draft.features if n not in found.draft.categories]
    )
    numbers_alone = dataclasses.replace(found, draft=dataclasses.replace(draft, categories={}))
    table = as_drafted(spec, numbers_alone, "label")
    expected = frame[list(table.feature_names)].to_numpy(np.float32)
    np.testing.assert_array_equal(table.features, expected)


# -- what the policy answers ------------------------------------------------------------------------------------------


def test_values_below_a_limit_are_said_and_never_categories(tmp_path: Path) -> None:
    for share in (10, 3, 2):
        values = ["<0,5" if row % share == 0 else f"{row},25" for row in range(ROWS)]
        spec = written(tmp_path, lines(values, labels(), header="crp;y", separator=";"))
        found = survey(spec, Use(label="y"))
        limits = finding(found, "limits")
        assert limits.is_problem and limits.count == values.count("<0,5") and "half of x" in limits.text
        assert found.draft.options["columns"] == {"crp": "limits"} and found.draft.options["decimal"] == ","
        assert found.draft.features == ("crp",) and not found.draft.categories
        assert as_drafted(spec, found).features[:2, 0].tolist() == [0.25, 1.25]
        with pytest.raises(DataRefusal) as refused:
            load_table(dataclasses.replace(spec, separator=";", decimal=","), label="y")
        assert "limit" in refused.value.reason and "data_sets.table.columns" in refused.value.reason


@pytest.mark.parametrize(
    "texts",
    [
        [f"{row}.5" if row % 2 else f"about {row % 4}" for row in range(200)],
        ["<5" if row % 3 else "none seen" if row % 2 else "7" for row in range(200)],
        ["1,234" if row % 2 else "2,500" for row in range(200)],
        ["01.02.2020" if row % 2 else "2020-02-01" for row in range(200)],
        ["3 Mar 2020" if row % 2 else "4. Mai 2020" for row in range(200)],
        ["01.02.20" if row % 3 else "2 weeks ago" for row in range(200)],
    ],
    ids=[
        "text among numbers",
        "text among limits",
        "thousands or thousandths",
        "two patterns",
        "months",
        "short years",
    ],
)
def test_what_seems_to_be_measured_or_dated_is_asked_and_never_categories(tmp_path: Path, texts: list[str]) -> None:
    spec = written(tmp_path, "x;y\n" + "".join(f"{text};{row % 2}\n" for row, text in enumerate(texts)), separator=";")
    found = survey(spec, Use(label="y"))
    assert not found.is_fine and not found.draft.features and not found.draft.categories and not found.draft.options
    assert all("Policy key" in one.text for one in found.findings if one.is_problem)
    answered = survey(dataclasses.replace(spec, columns={"x": "categories"}), Use(label="y"))
    assert answered.draft.features == ("x",) and answered.draft.categories["x"]


def test_years_of_two_digits_are_asked_and_follow_from_the_first_year(tmp_path: Path) -> None:
    days = [f"{1 + row % 28:02d}.03.{row % 100:02d}" for row in range(120)]
    spec = written(tmp_path, "born,y\n" + "".join(f"{day},{row % 2}\n" for row, day in enumerate(days)))
    found = survey(spec, Use(label="y"))
    asked = finding(found, "dates")
    assert asked.is_problem and "DD.MM.YY from 1930" in asked.text and not asked.options
    assert not found.draft.features and not found.draft.categories and not found.draft.options
    for first, (low, high) in ((1930, (1930, 2029)), (1925, (1925, 2024)), (2000, (2000, 2099))):
        dated = dataclasses.replace(spec, dates={"born": f"DD.MM.YY from {first}"})
        years = 1970 + load_table(dated, label="y").features[:, 0] / 365.25
        assert low <= years.min() < low + 2 and high < years.max() < high + 1
    for wrong in ("DD.MM.YY", "DD.MM.YYYY from 1930", "DD.MM.YY from 30", "DD.MM.YY from 9999"):
        with pytest.raises(ConfigurationError, match=r"DD\.MM\.YY from 1930"):
            dataclasses.replace(spec, dates={"born": wrong})


def test_a_measurement_of_many_values_is_asked_once(tmp_path: Path) -> None:
    spec = written(tmp_path, lines([str(7919 * row) for row in range(ROWS)], labels(), header="steps,y"))
    asked = finding(survey(spec, Use(label="y")), "id")
    assert "Policy key: columns" in asked.text
    measured = survey(dataclasses.replace(spec, columns={"steps": "measurement"}), Use(label="y"))
    assert measured.findings == () and measured.draft.features == ("steps",)
    named = dataclasses.replace(spec, columns={"steps": "id"})
    found = survey(named, Use(label="y"))
    assert not found.draft.features and kinds(found, problems_only=False) == ["no_features"]
    with pytest.raises(ConfigurationError, match=r"answers is an id.*Policy key: data_sets\.table\.columns"):
        load_table(named, label="y", features=["steps"])
    with pytest.raises(ConfigurationError, match="no feature columns"):
        load_table(named, label="y")


def test_answers_are_applied_wherever_a_table_is_read(tmp_path: Path) -> None:
    answers = {"smokes": "yes/no", "sex": {"m": 0, "w": 1.5, "999": None}, "code": {"2": 7}}
    frame = pd.DataFrame({"smokes": ["Ja", "nein"] * 30, "sex": ["m", "w", "999"] * 20, "code": [1, 2] * 30})
    frame = frame.assign(y=[0, 1] * 30)
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    wanted = [[1.0, 0.0, 1.0], [0.0, 1.5, 7.0], [1.0, np.nan, 1.0]]
    specs = [
        DataSet("t", tmp_path / "t.csv", "csv", columns=answers),
        DataSet("t", tmp_path / "t.parquet", "parquet", columns=answers),
        DataSet("t", tmp_path / "t.parquet", "parquet", columns=answers, memory="passes"),
    ]
    for spec in specs:
        found = survey(spec, Use(label="y"))
        assert found.is_fine and found.draft.features == ("smokes", "sex", "code") and not found.draft.categories
        for repair in (False, True):
            table = load_table(spec, label="y", repair=repair, takes_passes=True)
            np.testing.assert_array_equal(table.held_features()[:3], np.array(wanted, np.float32))
        features = [Feature(name) for name in found.draft.features]
        np.testing.assert_array_equal(
            RowReader(spec, features, ignored=["y"]).read().values[:3], np.array(wanted, np.float32)
        )
        if table.passes is not None:  # as a worker of a cluster reads them
            assert passes_of(plain_reading(table.passes, slice(0, 3))).loader.spec.columns == answers
        with pytest.raises(ConfigurationError, match=r"leave the list out\. Policy key: data_sets\.t\.columns"):
            load_table(spec, label="y", categories={"smokes": ["Ja", "nein"]}, takes_passes=True)
        wrong = dataclasses.replace(spec, columns={"sex": "yes/no"})
        assert finding(survey(wrong, Use(label="y")), "text_among_numbers").is_problem
        with pytest.raises(DataRefusal) as refused:
            load_table(wrong, label="y", features=["sex"], takes_passes=True)
        assert "data_sets.t.columns" in refused.value.reason and "999" not in refused.value.reason
        with pytest.raises(ConfigurationError, match=r"data_sets\.t\.columns"):
            load_table(dataclasses.replace(spec, columns={"none": "id"}), label="y", takes_passes=True)


@pytest.mark.parametrize(
    "wrong", ["number", 1, None, ["id"], {"a": ["b"]}, {"a": "b", "c": 1}, {"a": float("nan")}, {"a": True}]
)
def test_other_answers_are_refused_by_name(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="columns must be an object from column to measurement, id"):
        DataSet("t", tmp_path / "t.csv", "csv", columns={"x": wrong})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        DataSet("t", tmp_path / "t.csv", "csv", columns={"x": "id"}, dates={"x": "DD.MM.YYYY"})


ROW_OF_NUMBERS = [f"{row}.5,{row % 5 + 1},{row % 2}" for row in range(ROWS)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "windows-1252"])
def test_a_file_without_a_header_is_read_by_the_names_that_the_policy_gives(tmp_path: Path, encoding: str) -> None:
    data = "\n".join(ROW_OF_NUMBERS).encode(encoding)
    spec = written(tmp_path, data, encoding=encoding)
    found = survey(spec, Use())
    assert "--names" in finding(found, "header").text and found.draft.features == ()
    with pytest.raises(ConfigurationError, match=r"no names of columns.* Policy key: data_sets\..*\.names"):
        load_table(spec, label="y")
    named = dataclasses.replace(spec, names=("Größe", "k,l", "y"))
    found = survey(named, Use(label="k,l"))
    assert found.is_fine and found.n_rows == ROWS and found.draft.features == ("Größe", "y")
    assert found.draft.label_classes == tuple("12345"), "1 to 5 may be classes, which do not count up from 0"
    assert finding(found, "label_classes").kind == "label_classes"
    for repair in (False, True):
        table = load_table(named, label="y", repair=repair)
        assert table.n_rows == ROWS and table.feature_names == ("Größe", "k,l") and table.features[0, 0] == 0.5
    with pytest.raises(DataRefusal) as refused:
        load_table(dataclasses.replace(spec, names=("a", "y")), label="y")
    assert ".names" in refused.value.reason
    with pytest.raises(ConfigurationError, match="must all be different"):
        dataclasses.replace(spec, names=("a", "a", "y"))


def test_numbers_that_count_columns_are_names(tmp_path: Path) -> None:
    spec = written(tmp_path, lines(numbers(), numbers(), labels(), header="0,1,y"))
    assert survey(spec, Use(label="y")).is_fine and load_table(spec, label="y").feature_names == ("0", "1")
    years = written(tmp_path, lines(numbers(), numbers(), numbers(), labels(), header="1990,2000,2010,y"))
    assert load_table(years, label="y").feature_names == ("1990", "2000", "2010"), "they may be a row, and may be names"
    assert finding(survey(years, Use(label="y")), "header").is_problem


def test_an_archive_is_said_to_be_one_whatever_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for inner, words in (("rows.csv", "a ZIP archive"), ("xl/workbook.xml", "a spreadsheet")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(inner, "x,y\n1,0\n")
        spec = DataSet("rows", path, "csv")
        assert words in finding(survey(spec, Use()), "not_text").text
        with pytest.raises(ConfigurationError, match=words):
            load_table(spec, label="y")


def test_a_category_is_spelt_as_the_policy_says(tmp_path: Path) -> None:
    towns = ["ULM", "Ko\u0308ln", " Ulm"] * (ROWS // 3)
    spec = written(tmp_path, lines(numbers(), towns, labels(), header="x,c,y"))
    found = survey(spec, Use(label="y"))
    assert found.draft.options == {"columns": {"c": {"Ko\u0308ln": "K\u00f6ln"}}}
    spelt = dataclasses.replace(spec, columns={"c": {"ULM": "Ulm", "Ko\u0308ln": "K\u00f6ln"}})
    found = survey(spelt, Use(label="y"))
    assert found.is_fine and set(found.draft.categories["c"]) == {"Ulm", "K\u00f6ln"}
    table = load_table(spelt, label="y", categories={"c": ["K\u00f6ln", "Ulm"]})
    assert table.features[:3, 1].tolist() == [1, 0, 1]
    absent = dataclasses.replace(spec, columns={"c": {"ULM": None, "Ko\u0308ln": "x"}})
    assert load_table(absent, label="y", categories={"c": ["Ulm", "x"]}).n_missing[1] == ROWS // 3


@pytest.mark.parametrize(
    ("ids", "shape"),
    [
        ([f"PAT-{row:06d}" for row in range(ROWS)], IdShape(("A{3}-9{6}",), "PAT-", padded=True)),
        ([str(row + 1) for row in range(ROWS)], IdShape(("9{1-2}",))),
        ([f"p{row}" if row % 2 else f"Q-{row}" for row in range(ROWS)], IdShape(("A-9{1-2}", "a9{1-2}"))),
        ([chr(0xFF11 + row % 9) * 5 for row in range(ROWS)], IdShape(("9{5}",), wide=True)),
        ([f"{7919**9 * (row + 1) % 2**64:016x}" for row in range(ROWS)], IdShape(("x{16}",))),
        ([f"{SECRET} {row}" for row in range(ROWS)], None),
        (["a"] * 9, None),
    ],
)
def test_how_ids_are_written_is_shown_and_no_id(ids: list[str], shape: IdShape | None) -> None:
    found = IdShape.of([None, *ids])
    assert found == shape and not any(one in str(found) for one in ids if len(one) > 4)
