"""What imports bring in beyond the arrows that pyproject.toml states, and how long functions may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dp_components", "he_processors", "nvflare_plugins")
PLUGINS = "nvflare_plugins"
PLACES = (*PACKAGES, "jobs", "poc_workspace")
LONGEST_FUNCTION = 60

_OF_COMMUNICATORS = {
    "DataSplitMode",
    "data_split_mode",
    "collective",
    "run_federated_server",
    "Federated",
    "installed_release",
}
COMMUNICATE = {
    "pooled/preparation.py": {"installed_release"},
    "pooled/mediated/communicator.py": {"installed_release", "collective"},
    "pooled/mediated/training.py": {"installed_release", "Federated"},
}
"""Modules that have to do with XGBoost's communicator, and what they take of it; on 3.4 and later nobody has one."""


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imported(source: str) -> set[str]:
    """Return the packages that a module names in import statements or in calls of import_module."""
    names: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    return {name.split(".")[0] for name in names}


DASK = {"dask", "distributed", "cloudpickle"}


def test_only_the_script_that_starts_a_cluster_imports_dask() -> None:
    """Dask's client loads code from schedulers and workers: the process of a site does without (SECURITY.md)."""
    found = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(name in (text := path.read_text()) for name in DASK) and imported(text) & DASK
    }
    assert found == {"nvflare_plugins/recipes/examples.py"}


def words_of(source: str) -> set[str]:
    """Return the names that a module uses, whole or as parts of others: of values, attributes, arguments, imports."""
    names: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(part for alias in node.names for part in alias.name.split("."))
            names.update((getattr(node, "module", None) or "").split("."))
        names.update(str(getattr(node, field, "")) for field in ("id", "attr", "arg"))
    return names


def test_what_3_4_lacks_is_used_by_those_alone_that_open_a_communicator() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT / PLUGINS)) if path.is_relative_to(ROOT / PLUGINS) else str(path): names
        for path in paths
        if any(name in (text := path.read_text()) for name in _OF_COMMUNICATORS)  # parsing takes long
        and (names := words_of(text) & _OF_COMMUNICATORS)
    }
    assert found == COMMUNICATE


def test_every_module_imports_where_xgboost_lacks_a_communicator() -> None:
    code = """
import importlib, pkgutil, xgboost.core, xgboost.data
for module in (xgboost.core, xgboost.data):
    vars(module).pop("DataSplitMode", None)
for package in ("he_processors", "dp_components", "nvflare_plugins"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except ImportError as error:  # of what no extra has brought
                if (error.name or package).startswith(("xgboost", package)):
                    print(found.name, error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_every_way_of_importing_is_noticed() -> None:
    ways = ["import xgboost.core", "def f():\n from xgboost import train", "import_module('xgboost')"]
    assert all(imported(way) == {"xgboost"} for way in ways)
    assert imported("from . import xgboost") == set()


def test_private_components_load_nothing_from_above() -> None:
    """What the statements cannot show: modules that come in through a third one. Randomness alone is shared."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "dp_components").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(*sorted({n for n in sys.modules if n.split('.')[0] in ('nvflare', 'xgboost', 'he_processors')}))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["he_processors", "he_processors.randomness"]


def too_long(source: str) -> list[str]:
    """Return the functions of a module that are longer than they may be; what follows the docstring counts."""
    functions = (
        one for one in statements(ast.parse(source)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    bodies = {one.name: one.body[1:] if ast.get_docstring(one) else one.body for one in functions}
    return [name for name, body in bodies.items() if body and n_lines(body) > LONGEST_FUNCTION]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a module or a block consists of, at any depth, but for expressions: those take long."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for one in getattr(node, name, ()):
            yield one
            yield from statements(one)


def n_lines(body: list[ast.stmt]) -> int:
    """Return over how many lines statements stretch."""
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


@pytest.mark.parametrize("place", PLACES)
def test_functions_are_short(place: str) -> None:
    found = {str(path.relative_to(ROOT)): too_long(path.read_text()) for path in (ROOT / place).rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}, "cut these by subject"


def test_a_long_function_is_noticed() -> None:
    head, line = 'class A:\n  def f(self):\n    """Say\n    much."""\n', "    x = 1\n"
    assert too_long(head + line * LONGEST_FUNCTION) == [] and too_long(head + line * (LONGEST_FUNCTION + 1)) == ["f"]
