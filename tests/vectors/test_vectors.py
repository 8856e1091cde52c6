"""The vectors are what the product makes today, and a reader that knows the protocol's text alone agrees with all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.wire.envelope import Codec, FrameType, Kind, Operation
from tests.vectors import make, reader
from tests.vectors.form import FOLDER, Vector, files, read

READERS = sorted([*FOLDER.glob("reader*.py"), FOLDER / "form.py"])
MAY_IMPORT = {*sys.stdlib_module_names, "numpy", "cryptography"}
OF_THE_READER = {f"tests.vectors.{path.stem}" for path in READERS}


def all_vectors() -> list[Vector]:
    return [vector for path in files() for vector in read(path)]


@pytest.mark.parametrize("name", make.FILES)
def test_the_product_still_makes_these_vectors(name: str) -> None:
    """A difference is a change of format: a new version of it, or a fault. `python -m tests.vectors.make` writes."""
    about, cases = make.FILES[name]
    written = (FOLDER / f"{name}.json").read_text(encoding="ascii")
    assert make.document(about, make.vectors(cases())) == written


def test_there_is_no_other_file() -> None:
    assert {path.stem for path in files()} == set(make.FILES)


def test_a_reader_of_the_text_alone_agrees() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tests.vectors.reader import main; code = main(); "
            "print(sorted({name.split('.')[0] for name in sys.modules})); sys.exit(code)",
        ],
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[1],
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    loaded = set(ast.literal_eval(run.stdout.splitlines()[-1]))
    assert not loaded & {"he_processors", "dp_components", "nvflare_plugins", "nvflare", "xgboost", "gmpy2", "tenseal"}


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.stem)
def test_the_reader_imports_nothing_of_the_product(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level
            is_package = node.module == "tests.vectors"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if is_package else [node.module]
        for name in names:
            assert name.split(".")[0] in MAY_IMPORT or name in OF_THE_READER, name


def test_the_vectors_cover_every_message_and_every_refusal() -> None:
    vectors = all_vectors()
    assert len(vectors) >= 200
    names = [(vector["format"], vector["name"]) for vector in vectors]
    assert len(set(names)) == len(names)
    frames = [vector["gives"] for vector in vectors if vector["format"] == "frame" and "gives" in vector]
    assert {frame["kind"] for frame in frames} == {kind.name for kind in Kind}
    assert {frame["codec"] for frame in frames} == {codec.name for codec in Codec}
    assert {frame["type"] for frame in frames} == {type_.name for type_ in FrameType}
    assert {frame["operation"] for frame in frames} == {operation.name for operation in Operation}
    told = {
        vector["gives"]["message"] for vector in vectors if vector["format"] == "vertical message" and "gives" in vector
    }
    assert told == {type_.__name__ for type_ in messages._TYPES.values()}
    assert {vector["format"] for vector in vectors if "gives" in vector} == set(make.FORMATS)
    assert {vector.get("refuses") for vector in vectors} == {None, "malformed", "forged", "damaged"}


def test_a_reader_that_errs_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(reader.PHASES, 2, "training")
    monkeypatch.setattr(reader, "files", lambda: [FOLDER / "frames.json"])
    assert reader.main() == 1
    assert "kind HISTOGRAM" in capsys.readouterr().err
