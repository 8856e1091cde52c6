"""The command as a whole: its version, and the ways to start it and to import what users call."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import nvflare_plugins.recipes as recipes
from nvflare_plugins.cli.main import main
from nvflare_plugins.recipes.job_recipe import JobRecipe

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
    written = {
        line.removeprefix("class ").partition("(")[0]
        for path in (ROOT / "nvflare_plugins" / "recipes").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("class ") and line.endswith("(JobRecipe):")
    }
    assert set(recipes.__all__) == written <= set(dir(recipes))
    assert all(issubclass(getattr(recipes, name), JobRecipe) for name in recipes.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        _ = recipes.Recipes


def test_type_checkers_find_types_in_every_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("nvflare_plugins", "he_processors", "dp_components"):
        assert (ROOT / package / "py.typed").read_bytes() == b""
        assert "py.typed" in data[package]
