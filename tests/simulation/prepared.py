"""What is alike for all seeds of a job, made once a process: its sites' data and policies, and its exported folder."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.site.setup import set_up
from tests.simulation.cases import JOBS
from tests.support.federation import Parties
from tests.support.flare_job import descriptions


@dataclass(frozen=True)
class _Tree:
    """What a folder holds: names of folders, and mode and content of each file."""

    folders: tuple[str, ...]
    files: dict[str, tuple[int, bytes]]

    @classmethod
    def of(cls, root: Path) -> _Tree:
        paths = sorted(root.rglob("*"))
        files = {
            str(path.relative_to(root)): (path.stat().st_mode, path.read_bytes()) for path in paths if path.is_file()
        }
        return cls(tuple(str(path.relative_to(root)) for path in paths if path.is_dir()), files)

    def write(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        for name in self.folders:
            os.mkdir(os.path.join(root, name))
        for name, (mode, content) in self.files.items():
            place = os.open(os.path.join(root, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o777)
            with open(place, "wb") as file:
                file.write(content)
                os.fchmod(place, mode & 0o777)


@functools.cache
def _given(kind: str) -> tuple[_Tree, int]:
    with tempfile.TemporaryDirectory() as folder:
        parties = JOBS[kind].case.give(Path(folder))
        for site in parties.sites:
            set_up(parties.workspace(site))
        return _Tree.of(Path(folder)), parties.n_sites


def give(kind: str, folder: Path) -> Parties:
    """Make the sites of a job below an empty folder, each set up, with data and policy."""
    tree, n_sites = _given(kind)
    tree.write(folder)
    return Parties(folder, n_sites)


@functools.cache
def _recipe(kind: str, name: str, fields: str) -> JobRecipe:
    return JOBS[kind].case.recipe(name, **json.loads(fields))


def recipe(kind: str, name: str, **fields: Any) -> JobRecipe:
    """Return a job's recipe."""
    return _recipe(kind, name, json.dumps(fields, sort_keys=True))


@functools.cache
def _described(recipe: JobRecipe) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        server, executor = descriptions(recipe, Path(folder))
        return json.dumps(server), json.dumps(executor)


def described(recipe: JobRecipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the job folder of a recipe says of controller and executor."""
    server, executor = _described(recipe)
    return json.loads(server), json.loads(executor)
