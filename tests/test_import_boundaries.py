"""The house: arrows between packages and rooms point downwards (nvflare_plugins/README.md); functions stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "dp_components": {"nvflare", "xgboost", "nvflare_plugins", "jobs", "tests"},
    "he_processors": {"nvflare", "xgboost", "dp_components", "nvflare_plugins", "jobs", "tests"},
    "nvflare_plugins": {"jobs", "tests"},
}
PLUGINS = "nvflare_plugins"
PLACES = (*FORBIDDEN, "jobs", "poc_workspace")
LONGEST_FUNCTION = 60
LEVELS = (
    ("base",),
    ("wire",),
    ("data",),
    ("site",),
    ("evidence",),
    ("xgb",),
    ("pages",),
    ("workers",),
    ("scoring",),
    ("growth",),
    ("attempt",),
    ("pooled",),
    ("kinds",),
    ("conformance",),
    ("flare",),
    ("recipes",),
    ("survey",),
    ("dossier",),
    ("cli", "__main__"),
)
"""Rooms of nvflare_plugins, the lowest first. A room imports from its own level's and lower rooms only."""
BETWEEN_KINDS = {
    "vertical": ("alignment",),
    "vertical_inference": ("alignment", "vertical"),
    # It runs many vertical trainings over the same rows; search, folds and results are those of a tuning.
    "vertical_tuning": ("tuning", "vertical"),
    # It makes parts of a vertical model, over aligned rows, under the vertical rules for XGBoost's parameters.
    "federboost_vertical": ("alignment", "vertical.model", "vertical.model_files", "vertical.job"),
}
"""What one kind of job may take from another; every other kind stands by itself."""


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


def imported_modules(source: str) -> set[str]:
    """Return what a module names in import statements or in calls of import_module, with the names that it takes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    return names


def imported(source: str) -> set[str]:
    """Return the top-level packages that a module imports."""
    return {name.split(".")[0] for name in imported_modules(source)}


def room_of(parts: Sequence[str]) -> str:
    """Return the room that a module below nvflare_plugins is in, or is; of a kind of job, "kinds" and its name."""
    if parts[0] == "kinds" and len(parts) > 2:
        return f"kinds.{parts[1]}"
    return parts[0].removesuffix(".py")


def test_only_the_script_that_starts_a_cluster_imports_dask() -> None:
    """Dask's client loads code from schedulers and workers: the process of a site does without (SECURITY.md)."""
    found = {
        path.relative_to(ROOT).as_posix()
        for package in FORBIDDEN
        for path in (ROOT / package).rglob("*.py")
        if imported(path.read_text()) & {"dask", "distributed", "cloudpickle"}
    }
    assert found == {"nvflare_plugins/recipes/local_workers.py"}


def arrows() -> Iterator[tuple[str, str, str]]:
    """Yield (module's path, its room, what it imports from another room, below nvflare_plugins)."""
    for path in sorted((ROOT / PLUGINS).rglob("*.py")):
        parts = path.relative_to(ROOT / PLUGINS).parts
        for name in imported_modules(path.read_text()):
            package, _, inner = name.partition(".")
            if package == PLUGINS and room_of(inner.split(".")) != room_of(parts):
                yield "/".join(parts), room_of(parts), inner


def is_allowed(room: str, inner: str) -> bool:
    """Tell whether a room may import a module of another one."""
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    other = room_of(inner.split("."))
    kind, _, of_kind = inner.partition(".")[2].partition(".")
    if room.startswith("kinds.") and other.startswith("kinds."):
        taken = f"{kind}.{of_kind}"
        return any(f"{taken}.".startswith(f"{part}.") for part in BETWEEN_KINDS.get(room.partition(".")[2], ()))
    return level[other.partition(".")[0]] <= level[room.partition(".")[0]]


def words_of(source: str) -> set[str]:
    """Return the names that a module uses, whole or as parts of others: of values, attributes, arguments, imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(part for alias in node.names for part in alias.name.split("."))
            names.update((getattr(node, "module", None) or "").split("."))
        names.update(str(getattr(node, field, "")) for field in ("id", "attr", "arg"))
    return names


def test_what_3_4_lacks_is_used_by_those_alone_that_open_a_communicator() -> None:
    paths = [path for package in FORBIDDEN for path in (ROOT / package).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT / PLUGINS)) if path.is_relative_to(ROOT / PLUGINS) else str(path): names
        for path in paths
        if (names := words_of(path.read_text()) & _OF_COMMUNICATORS)
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


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_module_imports_upwards(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert len(modules) > 5
    wrong = {str(m.relative_to(ROOT)): imported(m.read_text()) & FORBIDDEN[package] for m in modules}
    assert not {module: names for module, names in wrong.items() if names}


def test_every_room_has_a_level() -> None:
    rooms = {path.relative_to(ROOT / PLUGINS).parts[0] for path in (ROOT / PLUGINS).rglob("*.py")}
    assert {room.removesuffix(".py") for room in rooms} - {"__init__"} == {room for rooms in LEVELS for room in rooms}


def test_rooms_import_from_lower_ones_only() -> None:
    found = list(arrows())
    assert len(found) > 500
    assert [(module, inner) for module, room, inner in found if not is_allowed(room, inner)] == []


def test_every_exception_between_kinds_is_used() -> None:
    used = {(room, inner) for _, room, inner in arrows()}
    for kind, parts in BETWEEN_KINDS.items():
        for part in parts:
            assert any(f"{room} {inner}.".startswith(f"kinds.{kind} kinds.{part}.") for room, inner in used), (
                kind,
                part,
            )


def test_wrong_arrows_are_noticed() -> None:
    assert not is_allowed("wire", "site.policy.SitePolicy")
    assert not is_allowed("kinds.horizontal", "kinds.vertical.job.VerticalJob")
    assert not is_allowed("kinds.dpboost", "kinds.private_trees.forest.Forest")
    assert not is_allowed("kinds.tuning", "kinds.horizontal.site.run_site")
    assert not is_allowed("pooled", "kinds.horizontal.going_on.Course")
    assert is_allowed("kinds.vertical", "kinds.alignment.result.Alignment") and is_allowed("cli", "flare.kinds.KINDS")


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
    functions = (one for one in ast.walk(ast.parse(source)) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))
    bodies = {one.name: one.body[1:] if ast.get_docstring(one) else one.body for one in functions}
    return [name for name, body in bodies.items() if body and n_lines(body) > LONGEST_FUNCTION]


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
