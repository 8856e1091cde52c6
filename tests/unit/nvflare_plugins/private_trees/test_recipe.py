"""The recipe writes a job folder that a person can read, and refuses what no site would accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.recipes.private_trees import PrivateTreesRecipe

GIVEN = {"data_set": "rows", "label": "y", "epsilon": 0.5, "delta": 1e-6, "feature_bounds": {"x": (0, 1)}}


def test_the_job_folder_says_what_differs_from_the_defaults(tmp_path: Path) -> None:
    recipe = PrivateTreesRecipe("private", **GIVEN, components={"depth": 3}, colluders=2, sites=["b", "a", "c"])
    recipe.export(str(tmp_path))
    server = json.loads(next(tmp_path.rglob("config_fed_server.json")).read_text())
    job = server["workflows"][0]["args"]["job"]
    assert job["components"] == {"depth": 3} and job["colluders"] == 2 and job["trust"] == "distributed"
    assert "rows_per_person" not in job
    assert PrivateTreesJob.from_dict(job) == PrivateTreesJob.from_dict(recipe.job.to_dict())


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("early_stopping_rounds is refused", {"early_stopping_rounds": 5}),
        ("feature_bounds is empty", {"feature_bounds": {}}),
        ("cannot tolerate", {"colluders": 3, "sites": ["a", "b", "c"]}),
        ("unknown components", {"components": {"eta": 1}}),
    ],
)
def test_refusals(match: str, changes: dict) -> None:
    with pytest.raises(ConfigurationError, match=match):
        PrivateTreesRecipe("private", **{**GIVEN, **changes})
