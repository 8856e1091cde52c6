"""The reader's options: what each reads, and that nothing is read by an option that the policy does not give."""

from __future__ import annotations

import datetime
import decimal
import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.declaration import DECIMALS, ENCODINGS, THOUSANDS, DataSet
from nvflare_plugins.data.identity import Relation, identify, overlap_of
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.data.text_values import DatePattern, NumberFormat, fitting_dates, fitting_formats
from nvflare_plugins.site.policy import SitePolicy
from tests.support.refusals import refused

KEY = bytes(32)


def written(tmp_path: Path, data: bytes | str, name: str = "data.csv", **options: object) -> DataSet:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return DataSet("credit", path, "parquet" if name.endswith("parquet") else "csv", **options)  # type: ignore[arg-type]


def columns_of(table: Table) -> dict[str, list[float]]:
    return {name: table.features[:, i].tolist() for i, name in enumerate(table.feature_names)}


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding(tmp_path: Path, encoding: str, repair: bool) -> None:
    letter = "č" if encoding in ("iso-8859-2", "windows-1250") else "ж" if encoding == "windows-1251" else "ü"
    text = f"größe,{letter},y\r\n1,{letter},0\r\n2,x,1\r\n"
    if encoding in ("windows-1251",):
        text = text.replace("größe", "size")
    spec = written(tmp_path, text.encode(encoding), encoding=encoding)
    table = load_table(spec, label="y", categories={letter: ["x", letter]}, repair=repair)
    assert columns_of(table)[letter] == [1, 0] and table.label.tolist() == [0, 1]


@pytest.mark.parametrize("repair", [False, True])
def test_an_undeclared_encoding_is_refused_with_the_key(tmp_path: Path, repair: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"UTF-16\. Policy key: data_sets\.credit\.encoding"):
        load_table(written(tmp_path, "a,y\n1,0\n".encode("utf-16")), label="y", repair=repair)


def test_undeclared_umlauts_are_refused_with_the_key(tmp_path: Path) -> None:
    with refused("encoding utf-8.* data_sets.credit.encoding"):
        load_table(written(tmp_path, "a,c,y\n1,ü,0\n".encode("latin-1")), label="y", categories={"c": ["ü"]})
    with refused("encoding windows-1252.* data_sets.credit.encoding"):  # 0x81 is no character of it
        load_table(written(tmp_path, b"a,y\n1,0\n\x81,1\n", encoding="windows-1252"), label="y")


def test_semicolons_decimal_commas_and_thousands(tmp_path: Path) -> None:
    text = 'betrag;rate;y\n1.234.567,5;"0,25";0\n-12,0;,5;1\n1234;1e3;0\n'
    spec = written(tmp_path, text, separator=";", decimal=",", thousands=".")
    assert columns_of(load_table(spec, label="y")) == {"betrag": [1234567.5, -12, 1234], "rate": [0.25, 0.5, 1000]}
    with refused("numbers with another decimal point, or with thousands apart.*credit.decimal.*credit.thousands"):
        load_table(written(tmp_path, text, separator=";"), label="y")
    with pytest.raises(ConfigurationError, match=r"is ';' its separator\? Policy key: data_sets.credit.separator"):
        load_table(written(tmp_path, text), label="y")
    for wrong in ("12.34,5", "1.2345", "1.23", "1..234", "1,2,3"):
        with refused("column 'x' holds"):
            load_table(
                written(tmp_path, f"x;y\n{wrong};1\n", separator=";", decimal=",", thousands="."),
                label="y",
            )


def test_quoted_separators_and_fast_and_slow_way_agree(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(size=100), 10.0 ** rng.uniform(-37, 37, 100), [1e9, 1e-9]])
    texts = [repr(float(value)) for value in values]
    lines = "".join(f'"{text.replace(".", ",")}",{row % 2}\n' for row, text in enumerate(texts))
    spec = written(tmp_path, "x,y\n" + lines, decimal=",")
    slow = written(tmp_path, "x,b,y\n" + lines.replace('",', '",true,'), "slow.csv", decimal=",")
    for one in (spec, slow):
        np.testing.assert_array_equal(load_table(one, label="y").features[:, 0], values.astype(np.float32))


@pytest.mark.parametrize("decimal_point", DECIMALS)
@pytest.mark.parametrize("thousands", THOUSANDS)
def test_groups_of_thousands(decimal_point: str, thousands: str) -> None:
    if decimal_point == thousands:
        return
    form = NumberFormat(decimal_point, thousands)
    assert form.number(f"-12{thousands}345{thousands}678{decimal_point}5") == -12345678.5
    assert form.number(f"1234{decimal_point}25e-2") == 12.3425 and form.number(f"{decimal_point}5") == 0.5
    assert form.number("INF") == np.inf and np.isnan(form.number("NaN"))
    for text in (
        "",
        "x",
        "1_0",
        "\u0663",
        "0x1",
        "--1",
        "1 2 3",
        f"12{decimal_point}5{decimal_point}1",
        "e5",
        "infinit",
    ):
        assert form.number(text) is None
    if thousands:
        for text in (f"12{thousands}34", f"1{thousands}2345", f"{thousands}123", f"0{decimal_point}123{thousands}456"):
            assert form.number(text) is None


def test_texts_that_mean_missing(tmp_path: Path) -> None:
    text = "x,c,y\n?,a,0\n2,?,1\n-,-,1\n"
    spec = written(tmp_path, text, missing=("?", "-"))
    table = load_table(spec, label="y", categories={"c": ["a"]})
    assert table.n_missing == (2, 2)
    with refused(r"no number.*data_sets\.credit\.missing"):
        load_table(written(tmp_path, text), label="y", categories={"c": ["a", "?", "-"]})


@pytest.mark.parametrize(
    ("pattern", "text", "days"),
    [
        ("YYYY-MM-DD", "1970-01-01", 0),
        ("DD.MM.YYYY", "29.02.2024", 19782),
        ("D.M.YYYY", "1.3.1969", -306),
        ("MM/DD/YYYY", "12/31/1999", 10956),
        ("YYYYMMDD", "20000301", 11017),
        ("YYYY-MM-DDThh:mm:ss", "1970-01-02T12:00:00", 1.5),
        ("YYYY-MM-DD hh:mm", "1970-01-01 18:00", 0.75),
    ],
)
def test_dates_count_days(pattern: str, text: str, days: float) -> None:
    assert DatePattern.of(pattern).days(text) == days
    expected = (
        pd.Timestamp(text) if pattern[0] == "Y" else pd.to_datetime(text, dayfirst=pattern[0] == "D")
    ).timestamp()
    assert days == expected / 86400


def test_what_is_no_date_or_no_pattern() -> None:
    for text in (
        "31.02.2024",
        "1.1.2024",
        "01.01.24",
        "01.01.2024 ",
        "\u0660\u0661.01.2024",
        "2024-01-01",
        "00.01.2024",
    ):
        assert DatePattern.of("DD.MM.YYYY").days(text) is None
    for pattern in (
        "",
        "YYYY",
        "YY-MM-DD",
        "YYYY-MM-DD-DD",
        "YYYY-MM-MM",
        "YYYY-M-DD mm",
        "YYYY-MM-DD ss",
        "%Y",
        "DMYx",
    ):
        assert DatePattern.of(pattern) is None
    assert DatePattern.of("YYYY-MM-DD hh:mm").days("2024-01-01 24:00") is None
    assert fitting_dates(["01/02/2024"]) == ["MM/DD/YYYY", "DD/MM/YYYY"] and fitting_dates(["13/02/2024"]) == [
        "DD/MM/YYYY"
    ]
    assert fitting_formats(["1,5", "2"]) == [NumberFormat(",", group) for group in THOUSANDS if group != ","]


def test_dates_of_files(tmp_path: Path) -> None:
    text = "when,y\n02.01.1970,0\nNA,1\n,1\n"
    spec = written(tmp_path, text, dates={"when": "DD.MM.YYYY"})
    table = load_table(spec, label="y")
    np.testing.assert_array_equal(table.features[:, 0], np.array([1, np.nan, np.nan], np.float32))
    with refused("looks like dates.*Policy key: data_sets.credit.dates"):
        load_table(written(tmp_path, text), label="y")
    wrong = written(tmp_path, text.replace("02.01", "31.02"), dates={"when": "DD.MM.YYYY"})
    with refused("no date of its pattern"):
        load_table(wrong, label="y")
    assert np.isnan(load_table(wrong, label="y", repair=True).features).all()
    with pytest.raises(ConfigurationError, match="holds as a date"):
        load_table(spec, label="y", categories={"when": ["a"]})
    with pytest.raises(ConfigurationError, match=r"Policy key: data_sets.credit.dates") as caught:
        load_table(written(tmp_path, text, dates={"secret": "DD.MM.YYYY"}), label="y")
    assert "secret" not in str(caught.value), "a party without the label does not tell names of columns"


def test_parquet_with_dates_decimals_and_dictionaries(tmp_path: Path) -> None:
    day, noon = datetime.date(1970, 1, 3), datetime.datetime(1970, 1, 2, 12)
    zone = datetime.timezone(datetime.timedelta(hours=6))
    columns = {
        "date": pa.array([day, None]),
        "time": pa.array([noon, None], pa.timestamp("ns")),
        "zoned": pa.array([noon.replace(tzinfo=zone), None], pa.timestamp("ms", tz="+06:00")),
        "number": pa.array([19700102, None], pa.int64()),
        "money": pa.array([decimal.Decimal("12.50"), None], pa.decimal128(9, 2)),
        "level": pa.array(["a", "b"]).dictionary_encode(),
        "size": pa.array(["1,5", "?"]).dictionary_encode(),
        "yes": pa.array([True, None]),
        "none": pa.nulls(2),
        "y": pa.array([0, 1]),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    dates = dict.fromkeys(("date", "time", "zoned", "none"), "YYYY-MM-DD") | {"number": "YYYYMMDD"}
    more = {"dates": dates, "decimal": ",", "missing": ("?",)}
    spec = DataSet("credit", tmp_path / "t.parquet", "parquet", **more)
    for repair in (False, True):
        table = load_table(spec, label="y", categories={"level": ["a", "b"]}, repair=repair)
        first, second = table.features.tolist()
        assert first[:8] == [2, 1.5, 1.25, 1, 12.5, 0, 1.5, 1] and np.isnan(first[8])
        assert second[5] == 1 and np.isnan(np.delete(second, 5)).all()
    with refused(r"'date' holds date32.*Policy key: data_sets\.credit\.dates"):
        load_table(DataSet("credit", tmp_path / "t.parquet", "parquet"), label="y", features=["date"])


def test_renamed_columns(tmp_path: Path) -> None:
    spec = written(
        tmp_path,
        "Größe[cm],👩\u200d🔬,,y\n180,1,7,0\n170,2,8,1\n",
        rename={"Größe[cm]": "height", "👩\u200d🔬": "job", "": "n"},
    )
    assert columns_of(load_table(spec, label="y")) == {"height": [180, 170], "job": [1, 2], "n": [7, 8]}
    with pytest.raises(ConfigurationError, match=r"Policy key: data_sets.credit.rename"):
        load_table(DataSet("credit", spec.path, "csv"), label="y")
    frame = pd.DataFrame({"a": [1, 2], "y": [0, 1]})
    frame.to_parquet(tmp_path / "t.parquet")
    swapped = DataSet("credit", tmp_path / "t.parquet", "parquet", rename={"a": "y", "y": "a"})
    assert columns_of(load_table(swapped, label="y")) == {"a": [0, 1]}
    with pytest.raises(ConfigurationError, match="more than one column named 'y'"):
        load_table(DataSet("credit", tmp_path / "t.parquet", "parquet", rename={"a": "y"}), label="y")
    with pytest.raises(ConfigurationError, match=r"Policy key: data_sets.credit.rename") as caught:
        load_table(DataSet("credit", tmp_path / "t.parquet", "parquet", rename={"secret": "b"}), label="y")
    assert "secret" not in str(caught.value)


def test_long_names_and_emoji_are_names(tmp_path: Path) -> None:
    name = "n" * 200
    assert columns_of(load_table(written(tmp_path, f"{name},🫀,y\n1,2,0\n"), label="y")) == {name: [1], "🫀": [2]}


def test_rows_without_a_label_are_left_out_where_the_policy_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "a,id,y\n1,p,0\n2,q,\n3,r,NA\n4,s,1\n"
    spec = written(tmp_path, text, drop_unlabelled=True, id="id")
    table = load_table(spec, label="y", may_lack_rows=True, with_ids=True)
    assert table.features[:, 0].tolist() == [1, 4] and table.ids.to_pylist() == ["p", "s"]
    assert "without a label: 2 of 4" in caplog.text
    for one, more in ((spec, {}), (written(tmp_path, text, id="id"), {"may_lack_rows": True})):
        with refused("lacks values"):  # rows of a vertical job mean something by their place
            load_table(one, label="y", **more)
    with refused(r"Policy key: data_sets\.credit\.drop_unlabelled"):
        load_table(written(tmp_path, text), label="y", features=["a"])
    with refused("public list"):  # an unknown label is not a missing one
        load_table(spec, label="y", features=["a"], label_classes=[0], may_lack_rows=True)


def test_compressed_files_and_marks_of_byte_order(tmp_path: Path) -> None:
    text = "\ufeffa,y\r\n1,0\r\n"
    for encoding in ("utf-8", "utf-16"):
        spec = written(tmp_path, gzip.compress(text.encode(encoding)), "data.csv.gz", encoding=encoding)
        assert columns_of(load_table(spec, label="y")) == {"a": [1]}
    for data in (text.encode("utf-16-be"), text[1:].encode("utf-16-le")):  # with a mark of the other order, and none
        assert columns_of(load_table(written(tmp_path, data, encoding="utf-16"), label="y")) == {"a": [1]}


def test_the_sites_log_tells_of_rows_that_a_quotation_mark_swallows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = 'a,c,y\n1,"x, x",0\n2,"open,1\n3,z,0\n4,z",1\n5,z,0\n'
    table = load_table(written(tmp_path, text), label="y", features=["a"])
    assert table.n_rows == 3 and "2 lines have a quotation mark" in caplog.text and "open" not in caplog.text.split()
    caplog.clear()
    load_table(written(tmp_path, text.replace('"open', "open").replace('z",1', "z,1")), label="y", features=["a"])
    load_table(written(tmp_path, text), label="y", features=["a"], repair=True)
    assert caplog.text == ""


# -- identity ---------------------------------------------------------------------------------------------------------


def relation(first: tuple[DataSet, Table], second: tuple[DataSet, Table]) -> Relation:
    (record, rows), (other, others) = (identify(table, spec, KEY) for spec, table in (first, second))
    has_same_columns = set(record.columns) == set(other.columns) and record.fingerprint != other.fingerprint
    return other.relation(record, overlap_of(rows, others) if has_same_columns else 0)


def test_an_option_that_changes_values_makes_changed_rows_and_no_other_does(tmp_path: Path) -> None:
    text = "a;when;b;y\n1,234;1970-01-02;1;0\n2,5;1970-01-03;?;1\n"
    options = {"separator": ";", "decimal": ",", "dates": {"when": "YYYY-MM-DD"}, "missing": ("?",)}
    usual = written(tmp_path, text, **options)
    first = usual, load_table(usual, label="y")
    same = written(tmp_path, text.encode("utf-16"), "data.csv", **options, encoding="utf-16")
    assert relation(first, (same, load_table(same, label="y"))) is Relation.SAME
    thousands = {**options, "decimal": ".", "thousands": ","}
    changed = written(tmp_path, text.replace("2,5", "2"), **thousands)
    assert relation(first, (changed, load_table(changed, label="y"))) is Relation.CHANGED
    days = written(tmp_path, text, **{**options, "dates": {"when": "YYYY-DD-MM"}})
    assert relation(first, (days, load_table(days, label="y"))) is Relation.CHANGED
    filled = written(tmp_path, text.replace("?", "-9"), **{**options, "missing": ()})
    assert relation(first, (filled, load_table(filled, label="y"))) is Relation.CHANGED
    renamed = written(tmp_path, text, **{**options, "rename": {"a": "b", "b": "a"}})
    assert relation(first, (renamed, load_table(renamed, label="y"))) is Relation.CHANGED
    less = written(tmp_path, text.replace(";1\n", ";\n"), **options, drop_unlabelled=True)
    assert relation(first, (less, load_table(less, label="y", may_lack_rows=True))) is Relation.CHANGED


def test_renamed_columns_of_a_copy_are_known_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows = "".join(f"{a},{b},{row % 2}\n" for row, (a, b) in enumerate(rng.normal(size=(200, 2))))
    first = written(tmp_path, "a,b,y\n" + rows)
    copy = written(tmp_path, "a,b,y\n" + rows, "copy.csv", rename={"a": "c", "b": "d", "y": "z"})
    second = DataSet("other", copy.path, "csv", rename=copy.rename)
    found = relation((first, load_table(first, label="y")), (second, load_table(second, label="z")))
    assert found is Relation.CHANGED


# -- private jobs -----------------------------------------------------------------------------------------------------

PRIVATE = {"decimal": ",", "thousands": ".", "separator": ";", "dates": {"when": "DD.MM.YYYY"}, "missing": ("?", "-9")}
USUAL = ("1.234,5;02.01.1970;1", "?;;0", "-9;03.01.1970;1", "7;?;0")
STRANGE = (
    "1,234.5;02.01.1970;1",
    "0;2.1.1970;1",
    "0;1970-01-02;1",
    "0;31.02.1970;1",
    "1.5;?;1",
    "0;02.01.1970;",
    "true;02.01.1970;1",
    '0;"02.01.1970;1',
    "0;02.01.1970;1;1",
    "0;02.01.1970\x00;1",
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1", "windows-1252"])
@pytest.mark.parametrize("strange", [*STRANGE, "0;\x81;1"])
def test_under_every_option_a_row_changes_nothing_about_the_others(tmp_path: Path, encoding: str, strange: str) -> None:
    options = {**PRIVATE, "encoding": encoding, "drop_unlabelled": True}

    def read(rows: tuple[str, ...]) -> Table:
        text = "\n".join(("a;when;y", *rows, ""))
        data = text.encode(encoding, "surrogateescape") if "\x81" not in text else text.encode("latin-1")
        if encoding == "utf-16" and "\x81" in text:
            data = text.replace("\x81", "\ud800").encode("utf-16", "surrogatepass")  # half a character
        return load_table(written(tmp_path, data, **options), label="y", repair=True)

    usual = read(USUAL)
    assert usual.features[:, 0].tolist()[0] == 1234.5 and usual.n_missing == (2, 2)
    for place in (0, 2, len(USUAL)):
        found = read((*USUAL[:place], strange, *USUAL[place:]))
        extra = found.n_rows - usual.n_rows
        assert extra in (0, 1)
        keep = np.delete(np.arange(found.n_rows), place) if extra else np.arange(found.n_rows)
        np.testing.assert_array_equal(found.features[keep], usual.features)
        np.testing.assert_array_equal(found.label[keep], usual.label)


# -- the policy -------------------------------------------------------------------------------------------------------


def policy_of(tmp_path: Path, **options: object) -> DataSet:
    document = {"data_sets": {"d": {"path": "d.csv", **options}}}
    return SitePolicy.from_dict(document, workspace=tmp_path, site="a").data_set("d")


def test_the_policy_reads_every_option(tmp_path: Path) -> None:
    options = {
        "encoding": "latin-1",
        "separator": "\t",
        "decimal": ",",
        "thousands": ".",
        "missing": ["?"],
        "dates": {"when": "DD.MM.YYYY"},
        "rename": {"a": "b"},
        "drop_unlabelled": True,
    }
    spec = policy_of(tmp_path, **options)
    assert {name: getattr(spec, name) for name in options} == {**options, "missing": ("?",)}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("encoding", "utf-7"),
        ("encoding", "rot13"),
        ("encoding", 8),
        ("separator", "ü"),
        ("separator", '"'),
        ("separator", ";;"),
        ("separator", "\n"),
        ("decimal", ";"),
        ("thousands", "."),
        ("thousands", "0"),
        ("dates", {"a": "YYYY"}),
        ("dates", {"a": 1}),
        ("dates", ["a"]),
        ("rename", {"a": ""}),
        ("rename", {"a": "c", "b": "c"}),
        ("rename", {"a": 1}),
        ("drop_unlabelled", 1),
    ],
)
def test_the_policy_refuses_by_the_key(tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"data_sets\.d\.{option} must be"):
        policy_of(tmp_path, **{option: value})
