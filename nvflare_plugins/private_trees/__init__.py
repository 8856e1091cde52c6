"""Differentially private federated trees, trained by stock XGBoost."""
