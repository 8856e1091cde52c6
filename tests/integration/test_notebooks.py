"""The notebooks: kept without outputs, named where people look for them, and run from first cell to last."""

from __future__ import annotations

import ast
import inspect
import json
import os
from pathlib import Path

import pytest
import veilboost as vb

from tests.test_documents import ROOT

NOTEBOOKS = sorted((ROOT / "jobs").glob("*.ipynb"))
TIMEOUT_S = 900  # a cell


def cells_of(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def test_there_are_three() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"own_data", "ids_to_score", "budget_to_model"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    cells = cells_of(path, "code")
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    assert json.loads(path.read_text())["metadata"].keys() == {"kernelspec", "language_info"}
    assert "display(SVG(" in "".join(cells[-1]["source"]), "it ends with pictures"
    assert "import veilboost as vb" in "".join("".join(cell["source"]) for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_give_the_interface_arguments_that_it_has(path: Path) -> None:
    places = {"vb": vb, "fed": vb.Federation}
    trees = [ast.parse("".join(cell["source"])) for cell in cells_of(path, "code")]
    checked = set()
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(call.func, ast.Attribute) and isinstance(of, ast.Name) and of.id in places:
            known = inspect.signature(getattr(places[of.id], call.func.attr)).parameters
            assert {one.arg for one in call.keywords} - {None} <= set(known), ast.unparse(call)
            checked.add(of.id)
    assert checked == set(places)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks_lead_somewhere(path: Path) -> None:
    text = "".join("".join(cell["source"]) for cell in cells_of(path, "markdown"))
    links = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert links and all((path.parent / link).is_file() for link in links)
    assert path.name in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(needed, reason='pip install -e ".[notebooks]"')
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=where).execute()
    last = [output for output in notebook.cells[-1].outputs if "image/svg+xml" in output.get("data", {})]
    assert last and all("<svg" in output["data"]["image/svg+xml"] for output in last)
    assert not [
        output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "error"
    ]
