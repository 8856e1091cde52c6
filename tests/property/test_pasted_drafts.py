"""What `check` prints can be pasted: the table loads and means the same, or is refused with a remedy; nothing rare.

Tables are generated with what they mean beside them. The draft is taken from the command's own text.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import datetime
import io
import json
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.cli.main import main, parse
from nvflare_plugins.cli.site_setup import readers
from nvflare_plugins.data.declaration import ANSWERS, DECIMALS, ENCODINGS, THOUSANDS, DataSet
from nvflare_plugins.data.table import load_table
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.survey.columns import SHOWN_FROM, Use
from nvflare_plugins.survey.survey import survey
from tests.support.examples import examples

EPOCH = datetime.date(1970, 1, 1)
DAYS = {
    "DD.MM.YYYY": "%d.%m.%Y",
    "YYYY-MM-DD": "%Y-%m-%d",
    "MM/DD/YYYY": "%m/%d/%Y",
    "YYYYMMDD": "%Y%m%d",
    "DD.MM.YY": "%d.%m.%y",
    "MM/DD/YY": "%m/%d/%y",
    "words": "%d %b %Y",
}
REMEDY = re.compile(r"Policy key|public list of|public category list|`veilboost check`")


@dataclass
class Meant:
    """A column: its texts, and what they mean: numbers, words, or days. Attributes: kind: what it was drawn as."""

    kind: str
    texts: list[str]
    values: list[float | str | None]


def number(value: float, decimal: str, thousands: str) -> str:
    return f"{value:,.2f}".translate({ord(","): thousands, ord("."): decimal})


@st.composite
def columns(draw: st.DrawFn, decimal: str, thousands: str, n_rows: int) -> Meant:
    kind = draw(st.sampled_from(["numbers", "limits", "whole", "words", "answers", "days", "mixed days", "texts"]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gaps = random.random(n_rows) < draw(st.sampled_from([0, 0.1]))
    few = draw(st.sampled_from([0, 1, SHOWN_FROM - 1]))
    if kind in ("numbers", "limits"):
        values = np.round(random.lognormal(*draw(st.sampled_from([(0, 1), (8, 2)])), n_rows), 2).tolist()
        texts = [number(value, decimal, thousands) for value in values]
        limit = draw(st.sampled_from([0.5, 0.07, 120.0]))
        for row in np.flatnonzero(random.random(n_rows) < draw(st.sampled_from([0.1, 0.5, 0.9]))):
            if kind == "limits":
                mark = "<" if row % 7 else ">"
                texts[row], values[row] = mark + number(limit, decimal, ""), limit / 2 if mark == "<" else limit
    elif kind == "whole":
        values = random.integers(0, draw(st.sampled_from([3, 10**6])), n_rows).astype(float).tolist()
        texts = [f"{value:.0f}" for value in values]
    elif kind in ("words", "answers"):
        pool = ["Ja", "Nein"] if kind == "answers" else ["Chirurgie", "Innere", "Übrige"]
        values = random.choice(pool, n_rows).tolist()
        values[:few] = ["nur hier"] * few
        texts = values
    elif kind == "texts":  # numbers with something else in many rows
        values = [str(row % 5) if row % draw(st.integers(2, 4)) else f"etwa {row % 3}" for row in range(n_rows)]
        texts = values
    else:
        forms = [draw(st.sampled_from(list(DAYS.values()))) for _ in range(1 + (kind == "mixed days"))]
        ordinals = random.integers(*draw(st.sampled_from([(0, 25), (-7000, 20000)])), n_rows)
        days = [EPOCH + datetime.timedelta(int(one)) for one in ordinals]
        texts = [day.strftime(forms[row % len(forms)]) for row, day in enumerate(days)]
        values = [float((day - EPOCH).days) for day in days]
    absent = np.flatnonzero(gaps)
    return Meant(
        kind,
        ["" if row in absent else text for row, text in enumerate(texts)],
        [None if row in absent else value for row, value in enumerate(values)],
    )


@dataclass
class File:
    data: bytes
    name: str
    columns: dict[str, Meant]


@st.composite
def files(draw: st.DrawFn) -> File:
    decimal, thousands = draw(st.sampled_from([(".", ""), (",", ""), (",", "."), (".", ","), (",", "\u00a0")]))
    n_rows = draw(st.sampled_from([60, 120]))
    names = draw(
        st.lists(st.sampled_from(["Größe", "a b", "x=1", "Wert [mg]", "c", "d"]), min_size=1, max_size=4, unique=True)
    )
    meant = {name: draw(columns(decimal, thousands, n_rows)) for name in names}
    label = [str(row % 2) for row in range(n_rows)]
    out = io.StringIO()
    writer = csv.writer(out, delimiter=draw(st.sampled_from([",", ";", "\t", "|"])), lineterminator="\n")
    writer.writerow([*meant, "y"])
    writer.writerows(zip(*(one.texts for one in meant.values()), label, strict=True))
    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "windows-1252"]))
    return File(out.getvalue().encode(encoding), draw(st.sampled_from(["t.csv", "t.txt", "a=b.csv", "-t.csv"])), meant)


def printed(path: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["check", str(path), "--label", "y"])
    return out.getvalue()


def pasted(text: str, path: Path) -> tuple[dict, dict]:
    """Return the entry of the policy and the arguments of the recipe; a shell's line says the same as the policy's."""
    lines = text.splitlines()
    entry = {"path": str(path), "format": "csv"}
    for at, line in enumerate(lines):
        if line.startswith("For the policy, "):
            entry = json.loads(lines[at + 1])
        if line.startswith("or: veilboost "):
            said = parse(shlex.split(line.removeprefix("or: veilboost ")))
            ((name, place),) = said.data_sets
            read = readers(said)[name]
            if "missing" in read:
                read["missing"] = [*(one for one in entry["missing"] if one not in read["missing"]), *read["missing"]]
            assert {"path": place, **read} == entry
    recipe = {}
    for line in lines:
        if (found := re.fullmatch(r"  (features|categories|label_classes)=(.*),", line)) is not None:
            recipe[found[1]] = ast.literal_eval(found[2])
    return entry, recipe


def wanted(meant: Meant, words: list[str] | None) -> np.ndarray:
    if words is None:
        return np.array([np.nan if value is None else float(value) for value in meant.values], dtype=np.float32)
    places = {word: place for place, word in enumerate(words)}
    return np.array([places.get(str(value), np.nan) for value in meant.values], dtype=np.float32)


LOADED: list[str] = []


@given(files())
def check_that_a_draft_means_the_same(file: File) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file.name
        path.write_bytes(file.data)
        entry, recipe = pasted(printed(path), path)
        tidy = entry.get("rename", {})
        meant = {tidy.get(name, name): one for name, one in file.columns.items()}
        for name, listed in recipe.get("categories", {}).items():
            assert meant[name].kind in ("words", "answers", "texts"), "numbers and days are no categories"
            assert all(meant[name].texts.count(word) >= SHOWN_FROM for word in listed), (
                "rare values are nobody's business"
            )
        features = recipe.get("features", [])
        assert not [name for name in features if "days" in meant[name].kind], "days are no features unless asked for"
        spec = SitePolicy.from_dict({"data_sets": {"t": entry}}, workspace=Path(folder), site="a").data_set("t")
        for name in (*features, *spec.dates):
            words = recipe.get("categories", {}).get(name)
            try:
                table = load_table(spec, label="y", features=[name], categories={name: words} if words else None)
            except ConfigurationError as error:
                why = error.reason if isinstance(error, DataRefusal) else str(error)
                assert REMEDY.search(why), why
                continue
            np.testing.assert_array_equal(table.features[:, 0], wanted(meant[name], words))
            LOADED.append(meant[name].kind)


def test_what_check_prints_can_be_pasted_and_then_means_the_same() -> None:
    LOADED.clear()
    check_that_a_draft_means_the_same()
    assert {"numbers", "limits", "whole", "words", "days"} <= set(LOADED), "each must be among the examples"


# -- tables of any bytes -----------------------------------------------------------------------------------------------


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


@settings(max_examples=examples(500))
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
