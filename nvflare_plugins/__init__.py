"""FLARE plugins: mediators, controllers, executors and recipes for private federated XGBoost."""
