"""The command as a whole: its version, and the ways to start it and to import what users call."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import nvflare_plugins.recipes as recipes
from nvflare_plugins.cli import plan as command
from nvflare_plugins.cli.main import main
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.recipes.recipe import JobRecipe

ROOT = Path(__file__).resolve().parents[4]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"veilboost {version('veilboost')}\n"


def test_the_package_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "nvflare_plugins", "--version"], cwd=ROOT, capture_output=True)
    assert (run.returncode, run.stdout.decode()) == (0, f"veilboost {version('veilboost')}\n")


def test_every_recipe_is_imported_from_the_package() -> None:
    named = [getattr(recipes, name) for name in recipes.__all__ if name != "JobRecipe"]
    assert {recipe.kind for recipe in named} == set(KINDS) and len(named) == len(KINDS)
    assert all(issubclass(recipe, JobRecipe) for recipe in named) and set(recipes.__all__) <= set(dir(recipes))
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        _ = recipes.Recipes


def test_type_checkers_find_types_in_every_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("nvflare_plugins", "he_processors", "dp_components"):
        assert (ROOT / package / "py.typed").read_bytes() == b""
        assert "py.typed" in data[package]


def test_names_beyond_a_terminals_letters_are_spelt_out(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\N{SYRINGE},y\n" + "1,0\n2,1\n" * 20, encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "nvflare_plugins", "check", str(tmp_path / "t.csv"), "--label", "y"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment)
    assert run.returncode == 0 and b"\\U0001f489" in run.stdout and run.stderr == b""


def test_paths_that_python_would_take_for_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert main(["check", "/none/Übung.csv"]) == 1 and "PYTHONUTF8=1" in capsys.readouterr().err
    assert main(["check", "/none/file.csv"]) == 1 and "PYTHONUTF8" not in capsys.readouterr().err


def policy_with(folder: Path, document: dict[str, object]) -> list[str]:
    """Write a policy, and return the arguments of a command that reads it."""
    (folder / "local").mkdir(exist_ok=True)
    (folder / "local" / "veilboost.json").write_text(json.dumps(document), encoding="utf-8")
    return ["models", "--workspace", str(folder), "--site", "site-1"]


@pytest.mark.parametrize(
    ("key", "document"),
    [
        ("runs", {"runs": "/none/Läufe"}),
        ("data_sets.d.path", {"data_sets": {"d": {"path": "/none/Übung.csv"}}}),
        ("snapshots.s.folder", {"snapshots": {"s": {"url": "sqlite://", "query": "SELECT 1", "folder": "Übung"}}}),
        ("cluster.security.ca", {"cluster": {"address": "tls://a:1", "security": {"ca": "/none/Übung"}}}),
    ],
)
def test_so_are_those_of_the_policy_by_their_keys(
    key: str,
    document: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = policy_with(tmp_path, document)
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert f"veilboost.json: {key} has letters beyond ASCII" in said and "PYTHONUTF8=1" in said


def test_a_policy_with_umlauts_gives_no_traceback_in_the_locale_c(tmp_path: Path) -> None:
    arguments = policy_with(tmp_path, {"data_sets": {"d": {"path": "/none/Übung.csv"}}})
    places = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = started(*arguments, env={**os.environ, **places})
    said = run.communicate()[1]
    assert (run.returncode, "Traceback" in said) == (1, False) and "PYTHONUTF8=1" in said


def started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nvflare_plugins", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, **options)


def test_what_cannot_be_printed_is_no_success() -> None:
    with Path("/dev/full").open("w") as full:
        run = started("plan", "--rows", "1000", "--features", "4", stdout=full)
        said = run.communicate()[1]
    assert (run.returncode, "Traceback" in said) == (1, False) and "the disk is full" in said


def test_a_reader_that_has_read_enough_gets_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    run = started("plan", "--rows", "1000", "--features", "4", stdout=write)
    os.close(write)
    assert run.communicate()[1] == "" and run.returncode == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "not enough memory"),
        (OSError(errno.ENOSPC, "x", "/data/\x1b[31m"), 1, "/data/?[31m: the disk is full"),
        (PermissionError(errno.EACCES, "x", b"/data/x"), 1, "/data/x: a file or folder may not be used"),
    ],
)
def test_the_machine_and_the_operator_end_a_command_in_a_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(options: object) -> int:
        raise error

    monkeypatch.setattr(command, "run", fails)
    assert main(["plan"]) == code
    text = capsys.readouterr().err
    assert text.startswith("veilboost plan: ") and said in text and text.count("\n") == 1
