"""Vertical training: one stock XGBoost at the party with the label, light workers at the parties with more columns."""
