"""Horizontal training by stock XGBoost beside a mediator: ``engine: xgboost``, for XGBoost 3.2 and 3.3 alone."""
