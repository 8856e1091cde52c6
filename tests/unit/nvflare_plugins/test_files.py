"""Files are whole or not there, whatever interrupts; results are no formulas in a spreadsheet."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pandas as pd
import pytest

from nvflare_plugins.files import write_atomically, write_private_table, write_results
from nvflare_plugins.formatting import inert


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError, OSError])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_nothing_of_a_write_that_is_interrupted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException], step: str
) -> None:
    path = tmp_path / "scores.csv"
    path.write_bytes(b"before")

    def interrupted(*_: object) -> None:
        raise interruption

    monkeypatch.setattr(os, step, interrupted)
    with pytest.raises(interruption):
        write_atomically(path, b"after")
    assert [one.name for one in tmp_path.iterdir()] == ["scores.csv"] and path.read_bytes() == b"before"


def test_no_link_is_followed_that_others_laid_where_the_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write into the folder guesses the name, and would get the content, or destroy a file of the owner."""
    theirs = tmp_path / "theirs"
    opened: list[Path] = []
    theirs.write_bytes(b"untouched")
    really_open = os.open

    def watched(path: Path, flags: int, mode: int = 0o777) -> int:
        if not opened:
            opened.append(path)
            os.symlink(theirs, path)
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", watched)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "scores.csv", b"secret", 0o600)
    assert opened and theirs.read_bytes() == b"untouched"
    monkeypatch.undo()
    assert opened[0].is_symlink()  # one that lies there already is taken away
    write_atomically(tmp_path / "scores.csv", b"secret", 0o600)
    assert theirs.read_bytes() == b"untouched" and (tmp_path / "scores.csv").read_bytes() == b"secret"
    assert stat.S_IMODE((tmp_path / "scores.csv").stat().st_mode) == 0o600


FORMULAS = ("=1+1", "+49 30 1234", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1+1", "-", "=")
PLAIN = ("", "ok", "a=1", "-5", "+5", "-0.5", "+1,5", "-1e-7", "-.5", "Größe", "'=1", " x")


def test_texts_that_a_spreadsheet_would_compute_are_marked_as_text() -> None:
    assert [inert(text) for text in FORMULAS] == [f"'{text}" for text in FORMULAS]
    assert [inert(text) for text in PLAIN] == list(PLAIN)


@pytest.mark.parametrize("kind", [object, "string", "category", "string[pyarrow]"])
def test_results_in_csv_hold_no_formula(tmp_path: Path, kind: object) -> None:
    texts = [*FORMULAS, *PLAIN, None]
    frame = pd.DataFrame({"=id": pd.Series(texts, dtype=kind), "score": [-0.5] * len(texts)})
    before = frame.copy()
    assert write_results(tmp_path / "out.csv", frame) == len(FORMULAS) + 1
    pd.testing.assert_frame_equal(frame, before)
    table = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    assert table.columns.tolist() == ["'=id", "score"] and (table["score"] == -0.5).all()
    assert table["'=id"].tolist() == [f"'{text}" for text in FORMULAS] + [*PLAIN, ""]
    assert write_results(tmp_path / "out.parquet", frame) == 0
    assert pd.read_parquet(tmp_path / "out.parquet")["=id"].tolist()[:-1] == texts[:-1]


def test_numbers_are_written_as_they_are(tmp_path: Path) -> None:
    ids = pd.array([-(2**60) - 1, None, 3], dtype="Int64")
    assert write_results(tmp_path / "out.csv", pd.DataFrame({"id": ids, "score": [-1.5, 2.0, -3.0]})) == 0
    assert (tmp_path / "out.csv").read_text() == f"id,score\n{-(2**60) - 1},-1.5\n,2.0\n3,-3.0\n"


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_line_ends_within_a_text_end_no_row(tmp_path: Path, end: str) -> None:
    frame = pd.DataFrame({"id": [f"a{end}=1", "b"], "score": [0.25, 0.75]})
    write_private_table(tmp_path / "out.csv", frame)
    with (tmp_path / "out.csv").open(newline="") as file:
        pd.testing.assert_frame_equal(pd.read_csv(file), frame)
