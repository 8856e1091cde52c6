"""The job folders that are kept are what their recipes export."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvflare.recipe.spec import Recipe

from jobs import examples
from nvflare_plugins.flare.kinds import KINDS

KEPT = Path(examples.__file__).parent


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    # FLARE leaves its signatures in a folder that was submitted.
    return {str(path.relative_to(folder)): path.read_text() for path in files if ".__nvfl_" not in path.name}


RECIPES = [*map(examples.recipe, examples.EXAMPLES)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_kept_folder_is_what_its_recipe_exports(recipe: Recipe, tmp_path: Path) -> None:
    recipe.export(str(tmp_path))
    exported = contents(tmp_path / recipe.name)
    assert exported and contents(KEPT / recipe.name) == exported


def test_no_other_folder_is_kept_and_every_kind_has_one() -> None:
    assert {path.parent.name for path in KEPT.glob("*/meta.json")} == {recipe.name for recipe in RECIPES}
    assert {recipe.kind for recipe in RECIPES} == set(KINDS)
