"""Recipes in the style of FLARE 2.9: what a user calls from Python.

from nvflare_plugins.recipes import HorizontalXGBRecipe
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "AlignmentRecipe",
    "BaggingXGBRecipe",
    "DpBoostRecipe",
    "FederBoostVerticalRecipe",
    "HorizontalXGBRecipe",
    "JobRecipe",
    "PrivateTreesRecipe",
    "ProfileRecipe",
    "SelectionRecipe",
    "TuningRecipe",
    "VerticalInferenceRecipe",
    "VerticalTuningRecipe",
    "VerticalXGBRecipe",
]


def __getattr__(name: str) -> Any:
    if name not in (*__all__, "VeilPocEnv"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'poc_env' if name == 'VeilPocEnv' else 'recipe'}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
