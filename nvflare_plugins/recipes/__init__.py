"""Recipes in the style of FLARE 2.9: what a user calls from Python.

from nvflare_plugins.recipes import HorizontalXGBRecipe
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvflare_plugins.recipes.alignment import AlignmentRecipe
    from nvflare_plugins.recipes.bagging import BaggingXGBRecipe
    from nvflare_plugins.recipes.dpboost import DpBoostRecipe
    from nvflare_plugins.recipes.federboost_vertical import FederBoostVerticalRecipe
    from nvflare_plugins.recipes.horizontal import HorizontalXGBRecipe
    from nvflare_plugins.recipes.inference import VerticalInferenceRecipe
    from nvflare_plugins.recipes.poc_env import VeilPocEnv as VeilPocEnv  # where recipes run, and none itself
    from nvflare_plugins.recipes.private_trees import PrivateTreesRecipe
    from nvflare_plugins.recipes.profile import ProfileRecipe
    from nvflare_plugins.recipes.tuning import TuningRecipe
    from nvflare_plugins.recipes.vertical import VerticalXGBRecipe
    from nvflare_plugins.recipes.vertical_tuning import VerticalTuningRecipe

__all__ = [
    "AlignmentRecipe",
    "BaggingXGBRecipe",
    "DpBoostRecipe",
    "FederBoostVerticalRecipe",
    "HorizontalXGBRecipe",
    "PrivateTreesRecipe",
    "ProfileRecipe",
    "TuningRecipe",
    "VerticalInferenceRecipe",
    "VerticalTuningRecipe",
    "VerticalXGBRecipe",
]
# Each is imported when it is asked for: a site that trains one kind of job has no use for the others.
_MODULES = {
    "AlignmentRecipe": "alignment",
    "BaggingXGBRecipe": "bagging",
    "DpBoostRecipe": "dpboost",
    "FederBoostVerticalRecipe": "federboost_vertical",
    "HorizontalXGBRecipe": "horizontal",
    "PrivateTreesRecipe": "private_trees",
    "ProfileRecipe": "profile",
    "TuningRecipe": "tuning",
    "VerticalInferenceRecipe": "inference",
    "VerticalTuningRecipe": "vertical_tuning",
    "VerticalXGBRecipe": "vertical",
    "VeilPocEnv": "poc_env",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
