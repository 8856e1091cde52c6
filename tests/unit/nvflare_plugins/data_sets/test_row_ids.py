"""Canonical ids: equal wherever people would call them equal, and refused where a comparison could surprise."""

from __future__ import annotations

import logging
import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet, IdForm
from nvflare_plugins.data.identity import canonical_ids, load_ids, usable_ids
from nvflare_plugins.data.table import are_ids, load_table
from tests.support.refusals import refused_for

SPACES = st.text("\t\n\r \x0b\x0c\u00a0\u2003\u3000", max_size=3)
WORDS = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=8)


def canonical(*ids: object) -> list[bytes]:
    return canonical_ids(pa.array(list(ids)), "people")


@given(st.lists(WORDS, min_size=1, max_size=4), SPACES, SPACES, st.sampled_from(["NFC", "NFD"]))
def test_white_space_and_unicode_forms_do_not_matter(words, before, after, form):
    plain = unicodedata.normalize("NFC", " ".join(words)).encode()
    written = before + unicodedata.normalize(form, " \t".join(words)) + after
    assert canonical(written) == canonical(plain.decode())
    assert canonical(canonical(written)[0].decode()) == canonical(written), "a canonical id is its own canonical form"


def test_known_forms():
    assert canonical(" A  1\t", "é", "\u00a0x\u3000y ", "e\u0301f") == [b"A 1", "é".encode(), b"x y", "éf".encode()]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20, unique=True))
def test_whole_numbers_are_their_digits(numbers):
    assert canonical_ids(pa.array(numbers, pa.int64()), "people") == [str(number).encode() for number in numbers]
    assert canonical_ids(pa.array([str(number) for number in numbers]), "people") == canonical(*numbers)


def test_leading_zeros_case_and_signs_matter():
    assert len(set(canonical("007", "7", "+7", "7.0", "a7", "A7"))) == 6


@pytest.mark.parametrize("kind", [pa.uint8(), pa.int16(), pa.uint64()])
def test_every_width_of_whole_numbers_will_do(kind):
    assert canonical_ids(pa.array([1, 2], kind), "people") == [b"1", b"2"]


def test_dictionaries_and_chunks_will_do():
    chunks = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]).dictionary_encode()])
    assert canonical_ids(chunks, "people") == [b"a", b"b", b"c"]


@pytest.mark.parametrize("values", [[1.0, 2.0], [True, False], [b"x"], [pd.Timestamp(0)]])
def test_other_types_are_refused(values):
    with pytest.raises(ConfigurationError, match="ids are text or whole numbers"):
        canonical(*values)


@pytest.mark.parametrize(
    "text", ["a\u200bb", "\ufeffa", "a\u00adb", "a\x00b", "a\x7f", "\ue000", "a\u0378", "x" * 1025]
)
def test_invisible_unknown_and_endless_ids_are_refused(text):
    with refused_for("invisible or unknown characters, or longer"):
        canonical("fine", text)


@pytest.mark.parametrize("missing", [None, "", "  ", "NA"])
def test_missing_ids_are_refused_by_row_number(missing, caplog):
    with caplog.at_level(logging.INFO), refused_for("lacks ids") as refused:
        canonical_ids(pa.array(["Anna", missing, "Bert"]), "people", ("NA",))
    assert "rows 2 (" in caplog.text
    assert not any(name in caplog.text + str(refused.value) for name in ("Anna", "Bert"))


def test_an_empty_column_type_is_all_missing():
    with refused_for("lacks ids"):
        canonical_ids(pa.nulls(3), "people")


@given(st.lists(WORDS, min_size=1, max_size=6, unique_by=lambda word: unicodedata.normalize("NFC", word)), st.data())
def test_repeated_ids_are_refused_however_they_are_written(words, data):
    again = data.draw(st.sampled_from(words))
    with refused_for("more than once") as refused:
        canonical(*words, f" {unicodedata.normalize('NFD', again)} ")
    assert "rows" in refused.value.reason and refused.value.__cause__ is None


def test_messages_hold_no_id_and_at_most_ten_rows(caplog):
    ids = [f"Person{number}" for number in range(50)] * 2
    with caplog.at_level(logging.INFO), pytest.raises(ConfigurationError) as refused:
        canonical(*ids)
    assert "Person" not in caplog.text + str(refused.value) + refused.value.reason
    assert "rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and others" in caplog.text
    assert not any(character.isdigit() for character in str(refused.value)), "numbers of rows would travel"


def test_files_of_both_formats_give_the_same_ids(tmp_path: Path):
    frame = pd.DataFrame({"id": [3, 1, 200], "x": np.zeros(3)})
    frame.to_parquet(tmp_path / "a.parquet")
    frame.assign(id=["3", " 1", "200 "]).to_csv(tmp_path / "a.csv", index=False)
    loaded = [load_ids(DataSet("a", tmp_path / f"a.{kind}", kind, id="id")) for kind in ("parquet", "csv")]
    assert loaded[0] == loaded[1] == [b"3", b"1", b"200"]


def test_no_id_column(tmp_path: Path):
    pd.DataFrame({"x": [1]}).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(ConfigurationError, match=r"Policy key: data_sets.a.id"):
        load_ids(DataSet("a", tmp_path / "a.csv", "csv"))
    with pytest.raises(ConfigurationError, match="lacks its id column"):
        load_ids(DataSet("a", tmp_path / "a.csv", "csv", id="person"))


def test_ids_are_equal_where_the_policy_says_what_makes_them_so() -> None:
    written = ["PAT-007", "pat-07", "7", "\uff17", "000", "NA"]
    said = IdForm(nfkc=True, ignore_case=True, prefix="PAT-", ignore_padding=True)
    people = DataSet("people", Path("p.csv"), "csv", id="i", id_form=said)
    assert usable_ids(pa.array(written), people) == ["7", "7", "7", "7", "0", None]
    steps = {"nfkc": "\uff17", "ignore_case": "A7", "prefix": "PAT-7", "ignore_padding": "0007"}
    equal = {"nfkc": "7", "ignore_case": "a7", "prefix": "7", "ignore_padding": "7"}
    for step, text in steps.items():
        form = IdForm(**{step: "PAT-" if step == "prefix" else True})
        assert canonical_ids(pa.array([text]), "people", (), form) == [equal[step].encode()] != canonical(text)
    with pytest.raises(DataRefusal) as refused:
        canonical_ids(pa.array(["7", "07"]), "people", (), said)
    assert "more than once" in refused.value.reason
    with pytest.raises(DataRefusal):
        canonical_ids(pa.array(["PAT-"]), "people", (), said)


# -- what is taken for an id -------------------------------------------------------------------------------------------


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
