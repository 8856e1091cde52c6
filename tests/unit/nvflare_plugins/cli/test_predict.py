"""``veilboost predict``: files in, files out, and nothing written where something does not fit."""

from __future__ import annotations

import hashlib
import json
import stat
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.pages.run_record import LeafNoise, RunRecord
from nvflare_plugins.scoring import ScoringError, load_model
from nvflare_plugins.scoring.export import strip_sum_hessian
from tests.support.scoring import CLASSES, ID, NAMES, Trained, changed, frame, train

BINARY = {"objective": "binary:logistic"}


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    model = train(tmp_path, BINARY, classes=CLASSES)
    model.rows.assign(**{ID: [f"{i:04d}" for i in range(300)]}).to_csv(tmp_path / "rows.csv", index=False)
    return model


def predict(folder: Path, *options: str, data: str = "rows.csv", out: str = "out.csv") -> int:
    return main(["predict", str(folder / "model.json"), str(folder / data), "--out", str(folder / out), *options])


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *options: str, **files: str) -> str:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert predict(folder, *options, **files) == 1
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "nothing was written"
    return capsys.readouterr().err


def test_csv_in_csv_out(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(tmp_path, "--id", ID) == 0
    table = pd.read_csv(tmp_path / "out.csv", dtype={ID: str})
    assert list(table) == [ID, "class", "probability.nein", "probability.ja"]
    assert table[ID].tolist() == [f"{i:04d}" for i in range(300)], "leading zeros are kept"
    scores = trained.booster.predict(trained.matrix)
    assert np.array_equal(table["probability.ja"].to_numpy(np.float32), scores)
    assert table["class"].tolist() == np.where(scores > 0.5, "ja", "nein").tolist()
    assert stat.S_IMODE((tmp_path / "out.csv").stat().st_mode) == 0o600
    assert "300 rows scored with binary:logistic, 6 rounds, 6 features, classes nein, ja" in capsys.readouterr().out


@pytest.mark.parametrize("pattern", ["", "*.parquet"])
def test_a_folder_of_files_is_scored_some_rows_at_a_time(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvflare_plugins.scoring.rows.BLOCK_VALUES", 240)
    (tmp_path / "parts").mkdir()
    rows = trained.rows.assign(**{ID: [f"{i:04d}" for i in range(300)]})
    for number, part in enumerate(np.array_split(np.arange(300), 4)):
        rows.iloc[part].to_parquet(tmp_path / "parts" / f"{number}.parquet", index=False)
    assert predict(tmp_path, "--id", ID, data=f"parts/{pattern}", out="many.csv") == 0
    assert predict(tmp_path, "--id", ID, out="one.csv") == 0
    assert (tmp_path / "many.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
    for kind in ("csv", "parquet"):
        assert predict(tmp_path, "--id", ID, "--explain", data=f"parts/{pattern}", out=f"many.{kind}") == 0
        assert predict(tmp_path, "--id", ID, "--explain", out=f"one.{kind}") == 0
    assert (tmp_path / "many.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
    many = pq.ParquetFile(tmp_path / "many.parquet")
    assert many.metadata.num_row_groups > 4
    pd.testing.assert_frame_equal(many.read().to_pandas(), pd.read_parquet(tmp_path / "one.parquet"), check_dtype=False)
    assert (tmp_path / "many.svg").read_bytes() == (tmp_path / "one.svg").read_bytes()
    rows.assign(more=1).to_parquet(tmp_path / "parts" / "4.parquet", index=False)
    capsys.readouterr()
    assert predict(tmp_path, "--id", ID, data=f"parts/{pattern}", out="no.csv") == 1
    assert "other names" in capsys.readouterr().err and not (tmp_path / "no.csv").exists()
    (tmp_path / "empty").mkdir()
    assert predict(tmp_path, data="empty", out="no.csv") == 1 and "without a file" in capsys.readouterr().err


def test_texts_of_others_are_no_formulas_in_a_spreadsheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids and names of classes: who opens the file would run what somebody wrote into one of them."""
    formula = "=cmd|' /C calc'!A0"
    model = train(tmp_path, BINARY, classes=["@SUM(A1)", "ja"])
    model.rows.assign(**{ID: [formula, "-5", "+49 30", *map(str, range(297))]}).to_csv(
        tmp_path / "rows.csv", index=False
    )
    assert predict(tmp_path, "--id", ID) == 0
    table = pd.read_csv(tmp_path / "out.csv", dtype={ID: str})
    assert table[ID].tolist()[:4] == [f"'{formula}", "-5", "'+49 30", "0"]
    assert set(table["class"]) == {"'@SUM(A1)", "ja"} and "probability.@SUM(A1)" in table
    n_first = int((table["class"] == "'@SUM(A1)").sum())
    assert f"{2 + n_first} texts that a spreadsheet would compute got an apostrophe" in capsys.readouterr().out
    assert predict(tmp_path, "--id", ID, out="out.parquet") == 0
    assert pd.read_parquet(tmp_path / "out.parquet")[ID].tolist()[:3] == [formula, "-5", "+49 30"]
    assert "apostrophe" not in capsys.readouterr().out


def test_a_picture_that_cannot_be_written_leaves_no_table(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.svg").mkdir()
    assert predict(tmp_path, "--explain", "--ignore", ID) == 1
    assert "the name of a folder" in capsys.readouterr().err and not (tmp_path / "out.csv").exists()


def test_parquet_keeps_the_type_of_the_id(trained: Trained, tmp_path: Path) -> None:
    ids = pd.array([2**60 + i if i % 3 else None for i in range(300)], dtype="Int64")
    trained.rows.assign(**{ID: ids}).to_parquet(tmp_path / "rows.parquet")
    for out in ("out.parquet", "out.csv"):
        assert predict(tmp_path, "--id", ID, data="rows.parquet", out=out) == 0
    table = pd.read_parquet(tmp_path / "out.parquet", dtype_backend="pyarrow")
    assert str(table.dtypes[ID]) == "int64[pyarrow]"
    assert table[ID].tolist() == list(ids)
    written = pd.read_csv(tmp_path / "out.csv", dtype={ID: "Int64"})
    assert written[ID].tolist() == list(ids)


def test_ids_that_are_categories_can_be_read_again_from_parquet(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    rows = trained.rows.assign(**{ID: [f"{i:04d}" for i in range(300)]}).astype({ID: "category"})
    for number, part in enumerate(np.array_split(np.arange(300), 2)):
        rows.iloc[part].to_parquet(tmp_path / "parts" / f"{number}.parquet", index=False)
    assert predict(tmp_path, "--id", ID, data="parts", out="out.parquet") == 0
    assert pd.read_parquet(tmp_path / "out.parquet")[ID].tolist() == rows[ID].tolist()


def test_a_threshold_moves_classes_and_not_probabilities(trained: Trained, tmp_path: Path) -> None:
    assert predict(tmp_path, "--ignore", ID, "--threshold", "0.8") == 0
    table = pd.read_csv(tmp_path / "out.csv")
    assert (table["class"] == np.where(table["probability.ja"] > 0.8, "ja", "nein")).all()
    assert 0 < (table["class"] == "ja").sum() < (table["probability.ja"] > 0.5).sum()
    for threshold in ("1", "-0.1", "nan"):
        assert predict(tmp_path, "--ignore", ID, "--threshold", threshold) == 1


def test_a_threshold_needs_two_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for params in ({"objective": "multi:softprob", "num_class": 3}, {"objective": "count:poisson"}):
        train(tmp_path, params).rows.to_csv(tmp_path / "rows.csv", index=False)
        assert "no probability of the second" in refused(tmp_path, capsys, "--threshold", "0.5")


def test_explanations_add_up_and_are_drawn(trained: Trained, tmp_path: Path) -> None:
    assert predict(tmp_path, "--id", ID, "--explain") == 0
    table = pd.read_csv(tmp_path / "out.csv", dtype={ID: str})
    shap = table[[*(f"shap.{name}" for name in NAMES), "shap_bias"]].to_numpy(np.float32)
    assert np.array_equal(shap, trained.booster.predict(trained.matrix, pred_contribs=True))
    picture = (tmp_path / "out.svg").read_text()
    texts = ["".join(node.itertext()) for node in ElementTree.fromstring(picture).iter()]
    assert any("Mean |SHAP value| of the margin over 300 rows" in text for text in texts)
    strength = dict(zip(NAMES, np.abs(shap[:, :-1].astype(float)).mean(axis=0), strict=True))
    drawn = [name for text in texts for name in NAMES if text == name]
    assert drawn == sorted((name for name in NAMES if strength[name]), key=lambda name: -strength[name])
    assert "var(" not in picture, "viewers that know no names of colours draw it too"
    assert stat.S_IMODE((tmp_path / "out.svg").stat().st_mode) == 0o600


def test_classes_have_explanations_of_their_own(tmp_path: Path) -> None:
    model = train(tmp_path, {"objective": "multi:softprob", "num_class": 3}, classes=["a", "b", "c"])
    model.rows.to_csv(tmp_path / "rows.csv", index=False)
    assert predict(tmp_path, "--explain") == 0
    table = pd.read_csv(tmp_path / "out.csv")
    wanted = model.booster.predict(model.matrix, pred_contribs=True)
    for place, name in enumerate("abc"):
        columns = [*(f"shap.{name}.{feature}" for feature in NAMES), f"shap_bias.{name}"]
        assert np.array_equal(table[columns].to_numpy(np.float32), wanted[:, place])


def test_an_exported_copy_is_scored_and_not_explained(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.path.write_bytes(strip_sum_hessian(trained.path.read_bytes()))
    assert "cannot be explained: in 6 of 6 trees" in refused(tmp_path, capsys, "--id", ID, "--explain")
    assert predict(tmp_path, "--id", ID) == 0


def note_noise(trained: Trained, folder: Path, update: str = "newton") -> None:
    """Write the record of a private run beside its model."""
    model = hashlib.sha256(trained.path.read_bytes()).hexdigest()
    noise = LeafNoise(model, update, "clipped", 3.0, 1.5, 5.0, 2.0, 0.3)
    RunRecord("job", "a", "s", ("s",), "dp_distributed", model="model.json", leaf_noise=noise).write(folder)


def test_a_private_models_scores_have_the_noise_and_no_shap_values(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_noise(trained, tmp_path)
    assert predict(tmp_path, "--id", ID, "--explain") == 0
    table = pd.read_csv(tmp_path / "out.csv")
    assert list(table)[4:] == ["noise_std", "noise_low", "noise_high"] and not (tmp_path / "out.svg").exists()
    assert (table.noise_low < table["probability.ja"]).all() and (table["probability.ja"] < table.noise_high).all()
    assert (table.noise_std > 0).all() and table.noise_std.nunique() > 2
    odds = np.log(table.noise_high / (1 - table.noise_high)) - np.log(table.noise_low / (1 - table.noise_low))
    assert odds.to_numpy() == pytest.approx(2 * 1.96 * table.noise_std.to_numpy(), rel=1e-3)
    assert "the noise alone: sampling and the model's own error come on top" in capsys.readouterr().out


def test_python_gives_the_intervals_that_explain_writes(trained: Trained, tmp_path: Path) -> None:
    model = load_model(trained.path)
    with pytest.raises(ScoringError, match=r"tells no noise of .*model\.json: name the folder of its own run"):
        model.noise_interval(trained.rows, tmp_path)
    note_noise(trained, tmp_path)
    predict(tmp_path, "--id", ID, "--explain")
    rows = trained.rows.set_index(np.arange(300)[::-1])
    found, written = model.noise_interval(rows, tmp_path), pd.read_csv(tmp_path / "out.csv")
    assert found.index.equals(rows.index)
    assert np.array_equal(found.to_numpy(), written[list(found)].to_numpy(np.float32))


def test_a_record_of_another_model_says_nothing(trained: Trained, tmp_path: Path) -> None:
    note_noise(trained, tmp_path)
    trained.path.write_bytes(trained.path.read_bytes() + b"\n")
    assert predict(tmp_path, "--id", ID, "--explain") == 0
    assert "shap_bias" in pd.read_csv(tmp_path / "out.csv")


def test_leaves_of_an_unknown_making_are_refused(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_noise(trained, tmp_path, "averaging")
    assert "leaves that are not known here: averaging" in refused(tmp_path, capsys, "--id", ID, "--explain")


def test_a_file_without_rows_gives_one_without_rows(trained: Trained, tmp_path: Path) -> None:
    trained.rows.iloc[:0].to_csv(tmp_path / "rows.csv", index=False)
    assert predict(tmp_path, "--explain") == 0
    assert len(pd.read_csv(tmp_path / "out.csv")) == 0
    assert not (tmp_path / "out.svg").exists()


@pytest.mark.parametrize("change", ["byte order mark", "Windows", "semicolons", "gzip", "columns in another order"])
def test_files_as_other_programs_write_them(trained: Trained, tmp_path: Path, change: str) -> None:
    rows, options, data = trained.rows, [], "rows.csv"
    text = rows.to_csv(index=False)
    if change == "byte order mark":
        (tmp_path / data).write_bytes(b"\xef\xbb\xbf" + text.encode())
    elif change == "Windows":
        (tmp_path / data).write_bytes(text.replace("\n", "\r\n").encode())
    elif change == "semicolons":
        rows.to_csv(tmp_path / data, index=False, sep=";")
        options = ["--separator", ";"]
    elif change == "gzip":
        data = "rows.csv.gz"
        rows.to_csv(tmp_path / data, index=False)
    else:
        rows.iloc[:, ::-1].to_csv(tmp_path / data, index=False)
    assert predict(tmp_path, *options, data=data) == 0
    found = pd.read_csv(tmp_path / "out.csv")["probability.ja"].to_numpy(np.float32)
    assert np.array_equal(found, trained.booster.predict(trained.matrix))


def test_texts_that_mean_missing_are_named(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.rows.to_csv(tmp_path / "rows.csv", index=False, na_rep="?")
    text = refused(tmp_path, capsys)
    assert "rows.csv column '身長': 43 of 300 values are text that is no number" in text
    assert "column 'colour': 28 of 300 values are none of the model's 3 categories" in text
    assert "--missing TEXT" in text
    assert "--unknown-is-missing" in text
    assert predict(tmp_path, "--missing", "?") == 0
    found = pd.read_csv(tmp_path / "out.csv")["probability.ja"].to_numpy(np.float32)
    assert np.array_equal(found, trained.booster.predict(trained.matrix))


def test_unknown_categories_count_as_missing_if_asked(trained: Trained, tmp_path: Path) -> None:
    trained.rows.assign(colour="lila").to_csv(tmp_path / "rows.csv", index=False)
    assert predict(tmp_path) == 1
    assert predict(tmp_path, "--unknown-is-missing") == 0
    wanted = load_model(trained.path).predict_proba(trained.rows.assign(colour=None))[:, 0]
    assert np.array_equal(pd.read_csv(tmp_path / "out.csv")["probability.ja"].to_numpy(np.float32), wanted)


WRONG_FILES: dict[str, tuple[Any, str]] = {
    "extra": (lambda rows: rows.assign(y=1), r"has 1 column that the model lacks ('y'): name what is no feature with"),
    "lacking": (lambda rows: rows.drop(columns="flag"), "lacks 1 of the model's 6 columns ('flag')"),
    "large": (lambda rows: rows.assign(**{NAMES[0]: 1e39}), "300 of 300 values are infinite or beyond float32"),
    "infinite": (lambda rows: rows.assign(flag=np.inf), "column 'flag': 300 of 300 values are infinite"),
    "text": (lambda rows: rows.assign(flag=["x", *rows.flag[1:]]), "column 'flag': 1 of 300 values are text"),
    "unknown": (lambda rows: rows.assign(colour="lila"), "300 of 300 values are none of the model's 3 categories"),
}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("case", WRONG_FILES)
def test_one_error_names_file_column_count_and_remedy(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, suffix: str
) -> None:
    change, words = WRONG_FILES[case]
    table, data = change(frame()), f"wrong.{suffix}"
    table = table.astype({"flag": str}) if case == "text" else table
    table.to_csv(tmp_path / data, index=False) if suffix == "csv" else table.to_parquet(tmp_path / data)
    text = refused(tmp_path, capsys, data=data)
    assert words in text
    assert data in text
    assert "lila" not in text


def test_files_that_are_no_tables(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = trained.rows.to_csv(index=False).encode().splitlines()[0]
    contents = {
        "empty.csv": (b"", "is empty: it needs at least a header"),
        "ragged.csv": (header + b"\n1,2\n", "ragged.csv cannot be read as csv"),
        "utf16.csv": (trained.rows.to_csv(index=False).encode("utf-16"), "--encoding"),
        "broken.parquet": (b"PAR1 and no more", "broken.parquet cannot be read as parquet"),
        "rows.xlsx": (b"PK\x03\x04", "is a ZIP archive, whatever its name says: unpack it"),
        "twice.csv": (header + b",flag\n", "more than one column named 'flag'"),
    }
    for name, (content, words) in contents.items():
        (tmp_path / name).write_bytes(content)
        assert words in refused(tmp_path, capsys, data=name), name
    assert "is no file" in refused(tmp_path, capsys, data="absent.csv")


def test_rows_without_a_header_and_under_any_name_are_scored_alike(trained: Trained, tmp_path: Path) -> None:
    rows = pd.read_csv(tmp_path / "rows.csv", dtype={ID: str})
    rows.to_csv(tmp_path / "rows.dat", index=False, header=False)
    rows.to_parquet(tmp_path / "rows.data")
    assert predict(tmp_path, "--id", ID) == 0
    assert predict(tmp_path, "--id", ID, "--names", ",".join(rows), data="rows.dat", out="named.csv") == 0
    assert predict(tmp_path, "--id", ID, data="rows.data", out="other.csv") == 0
    written = {(tmp_path / name).read_bytes() for name in ("out.csv", "named.csv", "other.csv")}
    assert len(written) == 1


def test_options_that_cannot_be_meant(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (("--id", "flag"), "--id 'flag' is a feature of the model"),
        (("--id", "absent"), "has no such column"),
        (("--ignore", "absent"), "has no such column"),
        (("--id", ID, "--separator", ";;"), "--separator must be one character"),
        (("--id", ID, "--rounds", "best"), "without early stopping"),
    ):
        assert words in refused(tmp_path, capsys, *options)
    trained.rows.assign(**{"class": 1}).to_csv(tmp_path / "rows.csv", index=False)
    assert "two columns of the result would be called 'class': rename the id column" in refused(
        tmp_path, capsys, "--id", "class"
    )


def test_outputs_that_cannot_be_written(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out, words in (
        ("out.xlsx", "must end in .csv or .parquet"),
        ("absent/out.csv", "a folder that is not there"),
        ("rows.csv", "would overwrite"),
        ("./rows.csv", "would overwrite"),
    ):
        assert words in refused(tmp_path, capsys, "--id", ID, out=out)
    assert predict(tmp_path, "--id", ID) == 0
    assert predict(tmp_path, "--id", ID) == 0, "scores of an earlier time are replaced"


def test_a_truncated_model_writes_nothing(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained.path.write_bytes(trained.path.read_bytes()[:1000])
    assert "model.json is not whole JSON, cut off or damaged" in refused(tmp_path, capsys, "--id", ID)


def test_the_best_round_is_pointed_out(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(trained.path, lambda document: document["learner"]["attributes"].update(best_iteration="2"))
    assert predict(tmp_path, "--id", ID) == 0
    assert "early stopping found round 3 best: --rounds best ends there" in capsys.readouterr().out
    assert predict(tmp_path, "--id", ID, "--rounds", "best") == 0
    assert "3 rounds" in capsys.readouterr().out
    wanted = trained.booster.predict(trained.matrix, iteration_range=(0, 3))
    assert np.array_equal(pd.read_csv(tmp_path / "out.csv")["probability.ja"].to_numpy(np.float32), wanted)


def test_numbers_are_predictions(tmp_path: Path) -> None:
    model = train(tmp_path, {"objective": "reg:squarederror"})
    model.rows.to_csv(tmp_path / "rows.csv", index=False)
    assert predict(tmp_path) == 0
    table = pd.read_csv(tmp_path / "out.csv")
    assert list(table) == ["prediction"]
    assert np.array_equal(table.prediction.to_numpy(np.float32), model.booster.predict(model.matrix))
    assert json.loads(model.path.read_text())["learner"]["objective"]["name"] == "reg:squarederror"


def test_a_file_is_read_as_the_policy_reads_a_data_set(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, third = NAMES[0], NAMES[2]
    rows = trained.rows.assign(**{first: trained.rows[first].round(3), third: np.arange(300) - 150})
    days = (pd.Timestamp("1970-01-01") + pd.to_timedelta(rows[third], unit="D")).dt.strftime("%d.%m.%Y")
    written = rows.rename(columns={"flag": "Schalter"}).assign(**{third: days, ID: range(300)})
    written.to_csv(tmp_path / "rows.csv", index=False, sep=";", decimal=",", na_rep="?", encoding="utf-8-sig")
    declared = {"path": "elsewhere.parquet", "separator": ";", "decimal": ",", "missing": ["?"], "id": ID}
    declared |= {
        "rename": {"Schalter": "flag", "Ergebnis": "label"},
        "dates": {third: "DD.MM.YYYY", "Tag": "YYYY-MM-DD"},
    }
    (tmp_path / "site-1" / "local").mkdir(parents=True)
    (tmp_path / "site-1" / "local" / "veilboost.json").write_text(json.dumps({"data_sets": {"kunden": declared}}))
    as_declared = ("--workspace", str(tmp_path / "site-1"), "--site", "site-1", "--data-set", "kunden")
    assert predict(tmp_path, "--separator", ";", "--ignore", ID) == 1
    assert predict(tmp_path, *as_declared) == 0
    wanted = load_model(trained.path).predict_proba(rows)[:, 0]
    assert np.array_equal(pd.read_csv(tmp_path / "out.csv")["probability.ja"].to_numpy(np.float32), wanted)
    capsys.readouterr()
    assert predict(tmp_path, *as_declared[:4]) == 1
    assert "belong together" in capsys.readouterr().err
    written.assign(**{third: "yesterday"}).to_csv(tmp_path / "rows.csv", index=False, sep=";", decimal=",", na_rep="?")
    assert predict(tmp_path, *as_declared) == 1
    assert "no date of its pattern" in capsys.readouterr().err


def test_text_of_another_encoding_is_read_if_it_is_named(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {NAMES[1]: "laenge", NAMES[2]: "fuchs"}
    changed(trained.path, lambda document: document["learner"].update(feature_names=[names.get(n, n) for n in NAMES]))
    trained.rows.rename(columns=names).to_csv(tmp_path / "rows.csv", index=False, encoding="cp1252")
    assert "rows.csv cannot be read as csv (UnicodeDecodeError). --separator and --encoding" in refused(
        tmp_path, capsys
    )
    assert predict(tmp_path, "--encoding", "windows-1252") == 0
    found = pd.read_csv(tmp_path / "out.csv")["probability.ja"].to_numpy(np.float32)
    assert np.array_equal(found, trained.booster.predict(trained.matrix))
