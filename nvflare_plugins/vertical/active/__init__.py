"""The active party: it has the label, runs XGBoost and knows the sums."""
