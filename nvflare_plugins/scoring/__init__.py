"""Scoring with a finished model: ``load_model`` returns a classifier or regressor in scikit-learn's form.

from nvflare_plugins.scoring import load_model
model = load_model("veilboost_runs/JOB_ID/model.json")
model.predict(frame)                # columns by name, in any order
"""

from typing import TYPE_CHECKING, Any

from nvflare_plugins.scoring.model import ScoringError

if TYPE_CHECKING:
    from nvflare_plugins.scoring.estimators import (
        VeilBoostClassifier,
        VeilBoostRegressor,
        VeilBoostSurvival,
        load_model,
    )

__all__ = ["ScoringError", "VeilBoostClassifier", "VeilBoostRegressor", "VeilBoostSurvival", "load_model"]


def __getattr__(name: str) -> Any:
    """Import the estimators, and scikit-learn with them, once one is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvflare_plugins.scoring import estimators

    return getattr(estimators, name)
