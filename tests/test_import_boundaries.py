"""The arrows between the packages point downwards only (nvflare_plugins/README.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "dp_components": {"nvflare", "xgboost", "he_processors", "nvflare_plugins", "jobs", "tests"},
    "he_processors": {"nvflare", "xgboost", "dp_components", "nvflare_plugins", "jobs", "tests"},
    "nvflare_plugins": {"jobs", "tests"},
}


def imported(source: str) -> set[str]:
    """Return the top-level packages that a module names in import statements or in calls of import_module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_module_imports_upwards(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert len(modules) > 5
    wrong = {str(m.relative_to(ROOT)): imported(m.read_text()) & FORBIDDEN[package] for m in modules}
    assert not {module: names for module, names in wrong.items() if names}


def test_every_way_of_importing_is_noticed() -> None:
    ways = ["import xgboost.core", "def f():\n from xgboost import train", "import_module('xgboost')"]
    assert all(imported(way) == {"xgboost"} for way in ways)
    assert imported("from . import xgboost") == set()


def test_private_components_load_nothing_from_above() -> None:
    """What the statements cannot show: modules that come in through a third one."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "dp_components").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print({name.split('.')[0] for name in sys.modules} & {'nvflare', 'xgboost', 'he_processors'})"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"
