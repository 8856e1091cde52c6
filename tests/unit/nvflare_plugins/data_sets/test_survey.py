"""A survey finds all problems at once, shows no value of a row, and drafts what then can be loaded."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shlex
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.parquet_parts import ParquetParts
from nvflare_plugins.data_sets.survey.columns import rounded_bounds
from nvflare_plugins.data_sets.survey.findings import Finding, Use
from nvflare_plugins.data_sets.survey.survey import Survey, survey
from nvflare_plugins.data_sets.table import Table, load_table
from nvflare_plugins.recipes.bagging import BaggingXGBRecipe
from nvflare_plugins.recipes.horizontal import HorizontalXGBRecipe
from nvflare_plugins.site.policy.policy import SitePolicy

REAL = Path(os.environ.get("VEILBOOST_DATA", Path(__file__).parents[5] / "shared" / "data"))
ROWS = 60
SECRET = "8675309"


def test_numbers_of_any_length_are_looked_at(tmp_path: Path) -> None:
    """Python reads no whole number of more than 4,300 digits, and XGBoost reads none of them as it stands."""
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{'9' * n},{n}\n" for n in (16, 17, 400, 5000)))
    found = survey(DataSet("t", tmp_path / "t.csv", "csv"), Use())
    [finding] = [one for one in found.findings if one.kind == "large_integers"]
    assert (finding.column, finding.count, finding.first_row) == ("a", 4, 1)
    assert str(2**53) not in finding.text and "999" not in finding.text


def written(tmp_path: Path, data: bytes | str, name: str = "table.csv", **options: object) -> DataSet:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return DataSet("table", path, "parquet" if name.endswith("parquet") else "csv", **options)  # type: ignore[arg-type]


def lines(*columns: list[str], header: str, separator: str = ",", end: str = "\n") -> str:
    return end.join([header, *(separator.join(row) for row in zip(*columns, strict=True)), ""])


def numbers(seed: int = 0, digits: int = 2) -> list[str]:
    return [f"{value:.{digits}f}" for value in np.random.default_rng(seed).normal(100, 20, ROWS)]


def labels() -> list[str]:
    return [str(row % 2) for row in range(ROWS)]


def kinds(found: Survey, problems_only: bool = True) -> list[str]:
    return [finding.kind for finding in found.findings if finding.is_problem or not problems_only]


def finding(found: Survey, kind: str, column: str | None = None) -> Finding:
    (one,) = [one for one in found.findings if one.kind == kind and column in (None, one.column)]
    return one


def as_drafted(spec: DataSet, found: Survey, label: str = "y") -> Table:
    """Load the data set as the draft says, through a policy as it would be written."""
    entry = {"path": str(spec.path), "format": spec.format, **json.loads(json.dumps(dict(found.draft.options)))}
    policy = SitePolicy.from_dict({"data_sets": {"table": entry}}, workspace=spec.path.parent, site="a")
    draft = found.draft
    return load_table(
        policy.data_set("table"),
        label=label,
        features=draft.features,
        categories=draft.categories,
        label_classes=draft.label_classes,
        may_lack_rows=True,
    )


def test_a_good_file_is_fine(tmp_path: Path) -> None:
    text = lines(numbers(), ["red", "green"] * (ROWS // 2), labels(), header="x,c,y", end="\r\n")
    for data in (text, "\ufeff" + text):
        spec = written(tmp_path, data)
        found = survey(spec, Use(label="y"))
        assert found.findings == () and found.is_fine and found.n_rows == ROWS
        assert found.draft.features == ("x", "c") and set(found.draft.categories["c"]) == {"red", "green"}
        assert found.draft.label_classes is None and found.draft.options == {}
        assert as_drafted(spec, found).n_rows == ROWS


def hospital() -> str:
    """One problem of every kind that a reader's option mends."""
    amounts = [f"{1 + row % 9}.{100 + row},{row:02d}" for row in range(ROWS)]
    columns = [
        [str(700_000 + 13 * row) for row in range(ROWS)],
        [number.replace(".", ",") for number in numbers()],
        amounts,
        [f"{1 + row % 28:02d}.03.{1950 + row}" for row in range(ROWS)],
        ["?" if row % 20 == 7 else number.replace(".", ",") for row, number in enumerate(numbers(1))],
        ["männlich" if row % 3 else "weiblich" for row in range(ROWS)],
        ["" if row == 4 else "krank" if row % 2 else "gesund" for row in range(ROWS)],
    ]
    return lines(*columns, header="Fall-Nr;Größe;Betrag;geb.;Wert [mg];Geschlecht;y", separator=";")


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
        "missing": [*DataSet("a", spec.path, "csv").missing, "?"],
        "rename": {"Wert [mg]": "Wert _mg_"},
        "drop_unlabelled": True,
    }
    missing = finding(found, "missing")
    assert (missing.column, missing.count, missing.first_row) == ("Wert _mg_", 3, 8)
    assert finding(found, "label_missing").first_row == 5
    assert finding(found, "id").column == "Fall-Nr" and not finding(found, "id").is_problem
    assert found.draft.features == ("Größe", "Betrag", "geb.", "Wert _mg_", "Geschlecht")
    assert found.draft.label_classes == ("gesund", "krank")
    table = as_drafted(spec, found)
    assert table.n_rows == ROWS - 1 and table.n_missing == (0, 0, 0, 3, 0)
    assert table.features[0, 1] == 1100 and table.features[0, 2] == -7246
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
    assert found.draft.features == ("s", "b") and found.draft.feature_bounds["b"] == (0.0, 2.0)


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
    assert [(one.kind, one.count) for one in found.findings] == [("category", ROWS // 2), ("weight", ROWS // 2)]
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
    assert found.draft.features == ("day", "money", "level", "flag", "comma")
    assert as_drafted(spec, found).n_rows == n


@pytest.mark.parametrize("low", [0.0, 0.3, 17.0, -3.2, -1e9, 1e-9, 123456.0])
@pytest.mark.parametrize("width", [0.0, 1e-9, 0.7, 1.0, 82.0, 1e12])
def test_bounds_are_round_and_hold_all_values(low: float, width: float) -> None:
    below, above = rounded_bounds(np.array([low, low + width, np.nan]))
    assert below <= low and low + width < above and (below < low or below == 0)
    assert rounded_bounds(np.array([np.nan])) is None


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


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_reports_and_drafts_and_its_own_line_sets_a_site_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = written(tmp_path, hospital().encode("latin-1"))
    assert main(["check", str(spec.path), "--label", "y"]) == 1
    text = capsys.readouterr().out
    assert "7 problems" in text and "first in row 8" in text and "NOT for private jobs" in text
    (line,) = [line for line in text.splitlines() if line.startswith("or: veilboost ")]
    words = shlex.split(line.removeprefix("or: veilboost "))
    assert main([str(tmp_path / "ws") if word == "DIR" else word for word in words]) == 0
    capsys.readouterr()
    workspace = ["check", str(tmp_path / "ws"), "--site", "site-1", "--data-set", "table"]
    assert main([*workspace, "--label", "y", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert (
        document["is_fine"] and document["rows"] == ROWS and document["draft"]["label_classes"] == ["gesund", "krank"]
    )
    assert document["draft"]["feature_bounds"]["for_private_jobs"] is False
    assert main([*workspace, "--label", "x"]) == 1


def test_the_command_shows_no_value_of_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"{SECRET}{row}" if row % 2 else "9" * 40 for row in range(ROWS)]
    values = [f"{SECRET}.{row}" for row in range(ROWS)]
    odd = [SECRET if row == 3 else str(row / 7) for row in range(ROWS)]
    text = lines(texts, values, odd, [SECRET, *labels()[1:]], header="t,v,o,y") + f'{SECRET},"{SECRET},1,1\n{SECRET}\n'
    for options in (["--label", "y"], ["--label", "t", "--json"], []):
        assert main(["check", str(written(tmp_path, text).path), *options]) == 1
        assert SECRET not in capsys.readouterr().out


def test_the_command_checks_a_job_and_the_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = written(
        tmp_path, lines([str(row) for row in range(ROWS)], numbers(), [*labels()[:-1], "3"], header="nr,x,y")
    )
    assert main(["site-setup", str(tmp_path / "ws"), "--data-set", f"table={spec.path}"]) == 0
    logistic = {"objective": "binary:logistic"}
    for recipe, expected in (
        (HorizontalXGBRecipe("h", data_set="table", label="y", params=logistic), ["id", "label_value"]),
        (
            BaggingXGBRecipe("b", data_set="table", label="y", params=logistic, features=["x"]),
            ["label_value", "few_rows"],
        ),
    ):
        recipe.export(str(tmp_path / "jobs"))
        capsys.readouterr()
        arguments = ["check", str(tmp_path / "ws"), "--site", "site-1", "--job", str(tmp_path / "jobs" / recipe.name)]
        assert main([*arguments, "--json"]) == 1
        (document,) = json.loads(capsys.readouterr().out)
        assert [one["kind"] for one in document["findings"] if one["is_problem"]] == expected
        assert any(one["kind"] == "few_rows" for one in document["findings"])


def test_wrong_usage_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ws").mkdir()
    for arguments, said in (
        ([str(tmp_path / "ws")], "--site NAME"),
        ([str(tmp_path / "none.csv"), "--site", "a"], "belong to a workspace"),
        ([str(tmp_path / "ws"), "--site", "site-1"], "no site policy"),
    ):
        assert main(["check", *arguments]) == 1
        assert said in capsys.readouterr().err


def test_site_setup_refuses_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site-1.csv").touch()
    for path, code in (("none.csv", 1), ("site-1.csv", 0), ("{site}.csv", 0), ("{site}.parquet", 1)):
        assert main(["site-setup", str(tmp_path / "ws"), "--data-set", f"a={tmp_path / path}"]) == code
        assert ("there is no file" in capsys.readouterr().err) == bool(code)


def test_site_setup_adds_the_readers_options_to_what_is_there(tmp_path: Path) -> None:
    spec = written(tmp_path, "a\n1\n")
    base = ["site-setup", str(tmp_path / "ws"), "--data-set", f"t={spec.path}"]
    assert main([*base, "--date", "t=a=YYYY-MM-DD", "--missing", "t=?", "--rename", "t=x=y=z"]) == 0
    assert main([*base, "--date", "t=b=DD.MM.YYYY", "--missing", "t=-", "--drop-unlabelled", "t"]) == 0
    found = SitePolicy.load(tmp_path / "ws", "site-1").data_set("t")
    assert found.dates == {"a": "YYYY-MM-DD", "b": "DD.MM.YYYY"} and found.rename == {"x=y": "z"}
    assert found.missing == (*DataSet("a", spec.path, "csv").missing, "?", "-") and found.drop_unlabelled
    assert main([*base, "--decimal", "t=;"]) == 1


# -- read in passes ---------------------------------------------------------------------------------------------------


def of_every_kind(n_rows: int) -> pa.Table:
    """Return columns with something to find in nearly each."""
    rng, rows = np.random.default_rng(3), np.arange(n_rows)
    towns = np.array(["Köln", "Gänserndorf", "Zürich ", "unbekannt", ""])[rng.integers(0, 5, n_rows)]
    gaps = [None if row % 7 == 0 else float(row) / 3 for row in rows]
    moments = pa.array((rows * 86_400_000_000).tolist(), pa.timestamp("us"))
    return pa.table(
        {
            "Größe": pa.array(gaps, pa.float64()),
            "town": pa.array(towns.tolist(), pa.string()),
            "coded": pa.array(towns.tolist(), pa.string()).dictionary_encode(),
            "admitted": pa.array([f"{row % 28 + 1:02}.03.2026" for row in rows], pa.string()),
            "moment": moments,
            "comma": pa.array([f"{row},5" for row in rows], pa.string()),
            "thousands": pa.array([f"{row + 1000:,}".replace(",", ".") + ",25" for row in rows], pa.string()),
            "mostly": pa.array(["n/a" if row % 9 == 0 else "12" for row in rows], pa.string()),
            "broken": pa.array(["oops" if row == 20 else str(row) for row in rows], pa.string()),
            "large": pa.array([1e39 if row == 40 else 1.0 * row for row in rows], pa.float64()),
            "nothing": pa.nulls(n_rows),
            "emptied": pa.array([None] * n_rows, pa.string()),
            "constant": pa.array([2] * n_rows, pa.int32()),
            "patient_id": pa.array((rows * 17).tolist(), pa.int64()),
            "flag": pa.array([row % 2 == 0 for row in rows], pa.bool_()),
            "list": pa.array([[1.0]] * n_rows, pa.list_(pa.float64())),
            "key": pa.array([None if row == 5 else f"k{row // 2}" for row in rows], pa.string()),
            "y": pa.array(["" if row == 30 else "ja" if row % 2 else "nein" for row in rows], pa.string()),
            "w": pa.array([-1.0 if row == 11 else 1.0 for row in rows], pa.float64()),
        }
    )


USES = {
    "nothing said": Use(),
    "label and weight": Use(label="y", weight="w"),
    "a job's": Use(
        label="y",
        label_classes=("ja",),
        features=("town", "Größe", "gone", "admitted", "comma"),
        categories={"town": ("Köln", "Zürich")},
        is_settled=True,
    ),
}


def both_surveys(spec: DataSet, use: Use, monkeypatch: pytest.MonkeyPatch) -> tuple[Survey, Survey, int]:
    """Return what is found of held rows and in passes, and how many columns a pass has read at most."""
    whole, widths, read = survey(dataclasses.replace(spec, memory="whole"), use), [0], ParquetParts.read

    def counted(self: ParquetParts, columns: list[str], *rows: int) -> pa.Table:
        widths.append(len(columns))
        return read(self, columns, *rows)

    with monkeypatch.context() as context:
        context.setattr(ParquetParts, "read", counted)
        context.setattr("nvflare_plugins.data_sets.survey.raw_file.arrow_parquet", None)  # reads all columns
        return whole, survey(dataclasses.replace(spec, memory="passes"), use), max(widths)


@pytest.mark.parametrize(
    ("n_rows", "use"),
    [*((400, one) for one in USES), *((0, one) for one in USES), (5200, "label and weight")],
)
def test_columns_one_by_one_are_found_to_be_what_they_are_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_rows: int, use: str
) -> None:
    table = of_every_kind(n_rows)
    pq.write_table(table, tmp_path / "one.parquet")
    options = {"id": "key", "rename": {"w": "weight", "gone": "away"}, "missing": ("",)}
    one = DataSet("t", tmp_path / "one.parquet", "parquet", **options)  # type: ignore[arg-type]
    whole, passes, n_columns = both_surveys(one, USES[use], monkeypatch)
    assert whole == passes and (n_columns == 1 or not n_rows) and whole.n_rows == n_rows
    assert len(whole.findings) > (8 if n_rows else 1)
    if n_rows:
        (tmp_path / "parts").mkdir()
        for number, first in enumerate(range(0, n_rows, n_rows // 4)):
            part = table.slice(first, n_rows // 4)
            pq.write_table(part, tmp_path / "parts" / f"{number}.parquet", row_group_size=37)
        parts = dataclasses.replace(one, path=tmp_path / "parts", rename={"w": "weight"})
        of_parts, in_passes, n_columns = both_surveys(parts, USES[use], monkeypatch)
        assert of_parts == in_passes and n_columns == 1
        assert of_parts.findings == survey(dataclasses.replace(one, rename={"w": "weight"}), USES[use]).findings


def test_wide_tables_names_that_repeat_and_damage_are_found_in_passes_too(tmp_path: Path, monkeypatch) -> None:
    wide = pa.table({f"f{place}": np.arange(60.0) % (place + 2) for place in range(200)})
    pq.write_table(wide, tmp_path / "wide.parquet")
    whole, passes, n_columns = both_surveys(DataSet("t", tmp_path / "wide.parquet", "parquet"), Use(), monkeypatch)
    assert whole == passes and n_columns == 3
    pq.write_table(pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], ["a", "a"]), tmp_path / "twice.parquet")
    twice = DataSet("t", tmp_path / "twice.parquet", "parquet", memory="passes")
    assert survey(twice, Use()) == survey(dataclasses.replace(twice, memory=None), Use())
    content = bytearray((tmp_path / "wide.parquet").read_bytes())
    content[4:2000] = b"\xff" * 1996
    (tmp_path / "torn.parquet").write_bytes(content)
    torn = DataSet("t", tmp_path / "torn.parquet", "parquet", memory="passes")
    assert kinds(survey(torn, Use())) == kinds(survey(dataclasses.replace(torn, memory=None), Use())) == ["unreadable"]


@pytest.mark.parametrize("memory", ["whole", "passes"])
def test_more_rows_than_allowed_in_many_files_are_found(tmp_path: Path, memory: str) -> None:
    (tmp_path / "parts").mkdir()
    for number in range(2):
        pq.write_table(pa.table({"a": [1.0, 2.0]}), tmp_path / "parts" / f"{number}.parquet")
    found = survey(DataSet("t", tmp_path / "parts", "parquet", max_rows=3, memory=memory), Use())
    assert [(one.kind, one.count) for one in found.findings if one.is_problem] == [("max_rows", 4)]
