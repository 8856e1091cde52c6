"""The recipe writes a job folder that a person can read, and refuses what no site would accept."""

from __future__ import annotations

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.recipes.recipe import PrivateTreesRecipe

GIVEN = {"data_set": "rows", "label": "y", "epsilon": 0.5, "delta": 1e-6, "feature_bounds": {"x": (0, 1)}}


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
