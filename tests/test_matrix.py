"""The matrix of Pythons, XGBoosts and FLAREs: only what the package takes, and red where nothing could be tried."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
MATRIX = ROOT / ".ci" / "matrix"


def test_every_combination_is_one_that_the_package_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = {re.split(r"[<>=~!]", line)[0]: line for line in project["dependencies"]}
    pythons = SpecifierSet(project["requires-python"])
    found = re.findall(r'^  "(\S+) xgboost==(\S+)\.\* nvflare==(\S+)"$', MATRIX.read_text(), re.MULTILINE)
    assert len(found) == 8
    for python, xgboost, nvflare in found:
        assert f"{python}.0" in pythons
        for name, version in (("xgboost", f"{xgboost}.0"), ("nvflare", nvflare)):
            allowed = SpecifierSet(needs[name].removeprefix(name).partition(";")[0])
            assert allowed.contains(version, prereleases=True), (name, version)


def test_a_matrix_that_tried_nothing_fails(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONS": "no-such-python", "MATRIX_FOLDER": str(tmp_path)}
    done = subprocess.run([str(MATRIX)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("SKIPPED") == 8 and "nothing could be tried" in done.stdout
