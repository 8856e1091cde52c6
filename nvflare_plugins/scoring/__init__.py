"""Scoring with a finished model: ``load_model`` returns a classifier or regressor in scikit-learn's form.

from nvflare_plugins.scoring import load_model
model = load_model("veilboost_runs/JOB_ID/model.json")
model.predict(frame)                # columns by name, in any order
"""

from nvflare_plugins.scoring.estimators import VeilBoostClassifier, VeilBoostRegressor, load_model
from nvflare_plugins.scoring.model import ScoringError

__all__ = ["ScoringError", "VeilBoostClassifier", "VeilBoostRegressor", "load_model"]
