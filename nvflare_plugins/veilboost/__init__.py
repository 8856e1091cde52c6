"""Federated XGBoost from Python: ``import veilboost as vb``.

fed = vb.simulate({"berlin": frame, "ulm": "ulm.csv", "kiel": vb.read("kiel.txt", separator=";")}, label="died")
run = fed.train(vb.Horizontal(max_depth=3), rounds=20, profile="masks")
run.history, run.best_round, run.model.predict_proba(rows)

jobs/PYTHON.md has the whole program. Nothing is defined here: each name is loaded from its one place when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "veilboost":
    raise ImportError("this package has one name: import veilboost", name="veilboost")

if TYPE_CHECKING:
    from nvflare_plugins.api.federation import Check as Check
    from nvflare_plugins.api.federation import Federation as Federation
    from nvflare_plugins.api.federation import simulate as simulate
    from nvflare_plugins.api.methods import Horizontal as Horizontal
    from nvflare_plugins.api.methods import private as private
    from nvflare_plugins.api.methods import vertical as vertical
    from nvflare_plugins.api.sources import read as read
    from nvflare_plugins.recipes.run import Run as Run
    from nvflare_plugins.recipes.run import SitesRefused as SitesRefused
    from nvflare_plugins.scoring import load_model as load_model

_PLACES = {
    "Check": "nvflare_plugins.api.federation",
    "Federation": "nvflare_plugins.api.federation",
    "Horizontal": "nvflare_plugins.api.methods",
    "Run": "nvflare_plugins.recipes.run",
    "SitesRefused": "nvflare_plugins.recipes.run",
    "load_model": "nvflare_plugins.scoring",
    "private": "nvflare_plugins.api.methods",
    "read": "nvflare_plugins.api.sources",
    "simulate": "nvflare_plugins.api.federation",
    "vertical": "nvflare_plugins.api.methods",
}
__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
