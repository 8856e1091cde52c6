"""Differential-privacy components. Imports neither nvflare, xgboost nor he_processors."""
