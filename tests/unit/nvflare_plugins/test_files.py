"""Files are whole or not there, whatever interrupts; results are no formulas in a spreadsheet."""

from __future__ import annotations

import ast
import csv
import io
import os
import stat
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import nvflare_plugins
from dp_components.ledger import make_private
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.files import (
    copy_folder,
    inert_csv,
    make_folder,
    write_atomically,
    write_private_table,
    write_results,
)
from nvflare_plugins.base.formatting import inert
from nvflare_plugins.cli.demo import Split, split, write_sites
from nvflare_plugins.data.declaration import EXTERNAL
from nvflare_plugins.evidence.format import Lines
from nvflare_plugins.evidence.reader import put_aside
from nvflare_plugins.kinds.vertical.model import FeatureImportance, write_importance
from nvflare_plugins.recipes.examples import write_patients
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.xgb.matrices import bins_below, page_files


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


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_folders_are_their_owners_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """What makes folders in the product, each as it is called there; and those above, where they are missing."""
    source = tmp_path / "source"
    (source / "within").mkdir(parents=True)
    (source / "within" / "file").write_text("x")
    source.chmod(0o755)
    top = tmp_path / "made"
    before = os.umask(umask)
    try:
        RunFolder(top / "a" / "runs", "job").create()
        Lines(top / "b" / "logs" / "site-1.jsonl", 0o600).add(b"x")
        Memory(top / "c" / "registry", "site-1")
        make_private(top / "d" / "ledgers" / "heads")
        copy_folder(source, top / "e" / "results" / "job")
        write_patients([top / "f" / "data" / "site-1"])
        write_sites(make_split(), top / "g" / "demo")
        evidence = RunFolder(top / "h", "job").create().evidence
        (evidence / "kept").write_bytes(b"x")
        put_aside(evidence, 2, None)
        with page_files(make_folder(top / "i" / "runs" / "job")) as pages:
            bins_below(pages, "train", SimpleNamespace(memory=EXTERNAL))
            _all_private(top)
    finally:
        os.umask(before)
    assert len(_all_private(top)) > 20


def make_split() -> Split:
    frame = pd.DataFrame({"a": np.arange(300.0), "label": np.arange(300) % 2})
    return split(frame, "label")


def _all_private(top: Path) -> list[Path]:
    found = [top, *(path for path in top.rglob("*") if path.is_dir())]
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in found} == {
        path.name: "0o700" for path in found
    }
    return found


def test_a_folder_that_should_be_new_is_refused_where_something_is(tmp_path: Path) -> None:
    assert make_folder(tmp_path) == tmp_path
    with pytest.raises(FileExistsError):
        make_folder(tmp_path, is_new=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "file/below"):
        with pytest.raises(OSError, match=r"file|link"):
            make_folder(tmp_path / name)


def test_no_other_code_of_the_product_makes_a_folder_or_writes_csv() -> None:
    """One helper makes folders (and that of dp_components, which stands alone); one place writes CSV."""
    root, found = Path(nvflare_plugins.__file__).parents[1], set()
    for place in ("nvflare_plugins", "dp_components", "he_processors", "jobs", "poc_workspace"):
        for path in sorted((root / place).rglob("*.py")):
            text = path.read_text()
            nodes = ast.walk(ast.parse(text)) if any(name in text for name in MAKES) else ()
            for node in nodes:
                if isinstance(node, ast.Attribute) and node.attr in MAKES:
                    found.add((str(path.relative_to(root)), node.attr))
    assert found == {
        ("nvflare_plugins/base/files.py", "mkdir"),
        ("nvflare_plugins/base/files.py", "copytree"),
        ("nvflare_plugins/base/files.py", "writer"),
        ("nvflare_plugins/base/files.py", "to_csv"),
        ("dp_components/ledger.py", "mkdir"),
        ("jobs/example_files.py", "to_csv"),  # invented rows, to be read again
    }


MAKES = {"mkdir", "makedirs", "copytree", "writer", "DictWriter", "to_csv", "write_csv", "to_excel"}
"""Calls that make folders for good, or lines of CSV."""


@pytest.mark.parametrize("seed", range(20))
def test_names_of_other_parties_are_inert_in_every_csv(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    starts = ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"]
    name, party, column = (f"{random.choice(starts)}{random.choice(STEMS)}" for _ in range(3))
    tables = [
        inert_csv([[party, name, -1.5]]),
        write_importance(tmp_path, [FeatureImportance(party, name, 1.0, 2.0, 3.0, 4.0, 5.0)]).read_bytes(),
    ]
    write_results(tmp_path / "results.csv", pd.DataFrame({column: [name, party]}))
    tables.append((tmp_path / "results.csv").read_bytes())
    for content in tables:
        for row in csv.reader(io.StringIO(content.decode(), newline="")):
            assert not [cell for cell in row if cell[:1] in starts and not is_number(cell)], row


STEMS = ["cmd|' /C calc'!A0", 'HYPERLINK("http://x")', "1+1", "SUM(A1:A9)", "x,=y", '"=1"']


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
